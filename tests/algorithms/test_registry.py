"""The registry: what it lists can be called as it says, it costs no torch, and a new file is all that it takes.

Invariants: every name resolves; settings are exactly the keyword-only parameters; duplicates are refused.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

from penstock import algorithms
from penstock.algorithms import advantages, policy_losses
from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.aggregation import AGGREGATIONS
from penstock.algorithms.declarations.algorithm import Need
from penstock.algorithms.declarations.discovery import modules
from penstock.algorithms.declarations.settings import REQUIRED
from penstock.algorithms.policy_losses import POLICY_LOSSES
from penstock.algorithms.registry import ALGORITHMS, Algorithm, collect, needs, settings_of
from penstock.base.errors import UserError

MODULES = [*advantages.MODULES.values(), *policy_losses.MODULES.values()]


def defaults_of(advantage: str, policy_loss: str) -> dict[str, Any]:
    return {name: setting.default for name, setting in settings_of(advantage, policy_loss).items()}


def test_ppo_and_grpo_are_there() -> None:
    ppo, grpo = ALGORITHMS["ppo"], ALGORITHMS["grpo"]
    assert (ppo.advantage, ppo.policy_loss, needs("gae", "ppo_clip")) == ("gae", "ppo_clip", {"critic"})
    assert (grpo.advantage, grpo.policy_loss, needs("grpo", "ppo_clip")) == ("grpo", "ppo_clip", {"group"})
    clips = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert defaults_of("gae", "ppo_clip") == {"gamma": 1.0, "gae_lambda": 0.95, "whiten": True, **clips}
    assert defaults_of("grpo", "ppo_clip") == {"normalize_by_std": True, **clips}


def test_a_choice_of_tokens_brings_settings_and_needs_too() -> None:
    assert {"clip_low", "covariance_share", "covariance_high"} <= set(settings_of("grpo", "clip_cov"))
    assert needs("grpo", "clip_cov") == {"group", "old_logprobs"}


def test_every_estimator_and_every_loss_has_a_name_to_be_called_by() -> None:
    """Nothing is there that no algorithm uses."""
    assert {algorithm.advantage for algorithm in ALGORITHMS.values()} == set(ADVANTAGES)
    assert {algorithm.policy_loss for algorithm in ALGORITHMS.values()} == set(POLICY_LOSSES)
    assert {algorithm.aggregation for algorithm in ALGORITHMS.values()} <= set(AGGREGATIONS)
    assert all(set(getattr(module, "NEEDS", ())) <= set(get_args(Need)) for module in MODULES)


def test_a_setting_of_both_has_one_default() -> None:
    """Else neither default holds, and a recipe would have to give one."""
    for advantage, loss in itertools.product(ADVANTAGES, POLICY_LOSSES):
        assert REQUIRED not in defaults_of(advantage, loss).values()


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
    names = sorted(".".join(path.relative_to(room.parents[1]).with_suffix("").parts) for path in room.rglob("*.py"))
    assert "penstock.algorithms.policy_losses.ppo_clip" in names
    imports = "\n".join(f"import {name.removesuffix('.__init__')}" for name in names)
    probe = "import sys; print('torch' in sys.modules)"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", f"{code}\n{probe}"], cwd=room.parents[1], capture_output=True, text=True, check=True
        ).stdout.strip()
        for code in (imports, "import torch")
    ]
    assert outputs == ["False", "True"]


def test_a_new_file_is_found_and_its_algorithm_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "novel_estimators"
    (package / "room").mkdir(parents=True)
    for folder in (package, package / "room"):
        (folder / "__init__.py").touch()
    (package / "types.py").write_text("raise RuntimeError('types.py holds no estimator')")
    (package / "novel.py").write_text(
        "from penstock.algorithms.declarations.algorithm import Algorithm\n"
        "ALGORITHMS = (Algorithm('novel', advantage='grpo', policy_loss='ppo_clip', description='A test.'),)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (package / "room" / "inner.py").touch()
    found = modules("novel_estimators", [str(package)])
    assert list(found) == ["inner", "novel"], "a sub-room's files are found likewise, and all are in the names' order"
    assert collect(found.values())["novel"].advantage == "grpo"


def test_one_name_in_two_rooms_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them would be lost without a word. Control: a name that is there once."""
    package = tmp_path / "twin_estimators"
    for folder in (package / "one", package / "other", package):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    (package / "one" / "twin.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(modules("twin_estimators", [str(package)])) == ["twin"]
    (package / "other" / "twin.py").touch()
    importlib.invalidate_caches()
    with pytest.raises(UserError, match=r"one/twin.py and .*other/twin.py have one name"):
        modules("twin_estimators", [str(package)])


def declaring(name: str, advantage: str = "grpo", **more: Any) -> ModuleType:
    module = ModuleType(f"file_of_{name}")
    module.ALGORITHMS = (Algorithm(name, advantage, "ppo_clip", "A test.", **more),)
    return module


def test_a_name_declared_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="file_of_twin declares algorithm 'twin'"):
        collect([declaring("twin"), declaring("twin")])
    assert list(collect([declaring("one"), declaring("other")])) == ["one", "other"]


def test_an_unknown_component_is_refused() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        collect([declaring("lost", advantage="nowhere")])


def test_a_default_of_no_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="'odd' has no setting colour"):
        collect([declaring("odd", defaults={"colour": 1, "clip_high": 0.3})])
    assert collect([declaring("even", defaults={"clip_high": 0.3})])
