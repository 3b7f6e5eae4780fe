"""The registry: what it lists can be called as it says, it costs no torch, and a new file is all that it takes.

Invariants: every name resolves; settings are exactly the keyword-only parameters; duplicates are refused.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import algorithms
from algorithms.advantages import ADVANTAGES
from algorithms.discovery import modules
from algorithms.policy_losses import POLICY_LOSSES
from algorithms.registry import ALGORITHMS, Algorithm, collect


def test_ppo_and_grpo_are_there() -> None:
    ppo, grpo = ALGORITHMS["ppo"], ALGORITHMS["grpo"]
    assert (ppo.advantage, ppo.policy_loss, ppo.critic) == ("gae", "ppo_clip", True)
    assert (grpo.advantage, grpo.policy_loss, grpo.critic) == ("grpo", "ppo_clip", False)
    assert ppo.advantage_settings == ("gamma", "gae_lambda", "whiten")
    assert grpo.advantage_settings == ("normalize_by_std",)
    assert ppo.loss_settings == grpo.loss_settings == ("clip_low", "clip_high", "dual_clip")


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda algorithm: algorithm.name)
def test_every_algorithm_runs_on_its_defaults_and_describes_itself(algorithm: Algorithm) -> None:
    """Each setting has a default, so that a config has to name none; one positional argument takes the inputs."""
    assert algorithm.description
    for function in (ADVANTAGES[algorithm.advantage], POLICY_LOSSES[algorithm.policy_loss]):
        positional, *keywords = inspect.signature(function).parameters.values()
        assert positional.default is positional.empty
        assert all(keyword.kind is keyword.KEYWORD_ONLY for keyword in keywords)
        assert all(keyword.default is not keyword.empty for keyword in keywords)


def test_no_file_of_the_room_imports_torch() -> None:
    """In a fresh process; negative control: the same probe sees torch once something has imported it."""
    room = Path(algorithms.__file__).parent
    names = sorted(".".join(path.relative_to(room.parent).with_suffix("").parts) for path in room.rglob("*.py"))
    assert "algorithms.policy_losses.ppo_clip" in names
    imports = "\n".join(f"import {name.removesuffix('.__init__')}" for name in names)
    probe = "import sys; print('torch' in sys.modules)"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", f"{code}\n{probe}"], cwd=room.parent, capture_output=True, text=True, check=True
        ).stdout.strip()
        for code in (imports, "import torch")
    ]
    assert outputs == ["False", "True"]


def test_a_new_file_is_found_and_its_algorithm_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "novel_estimators"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "types.py").write_text("raise RuntimeError('types.py holds no estimator')")
    (package / "novel.py").write_text(
        "from algorithms.algorithm import Algorithm\n"
        "ALGORITHM = Algorithm('novel', advantage='grpo', policy_loss='ppo_clip', description='A test.')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = modules("novel_estimators", [str(package)])
    assert list(found) == ["novel"]
    assert collect(found.values())["novel"].advantage_settings == ("normalize_by_std",)


def declaring(name: str, advantage: str = "grpo") -> ModuleType:
    module = ModuleType(f"file_of_{name}")
    module.ALGORITHM = Algorithm(name, advantage=advantage, policy_loss="ppo_clip", description="A test.")
    return module


def test_a_name_declared_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="file_of_twin declares algorithm 'twin'"):
        collect([declaring("twin"), declaring("twin")])
    assert list(collect([declaring("one"), declaring("other")])) == ["one", "other"]


def test_an_unknown_component_is_refused() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        collect([declaring("lost", advantage="nowhere")])
