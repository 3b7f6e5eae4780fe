"""A checkpoint made by someone else runs no code in the ranks, whichever of its files asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.training.checkpoint_weights import read_causal_lm_weights
from engines.training.state_files import read_state
from penstock.base.errors import UserError
from tests.engines.shared_ranks import Ranks, Shape

SHAPE = Shape("qwen3", tied=True)


class _Planted:
    """Is written as a call that makes a file."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return Path.touch, (self.made,)


@pytest.mark.parametrize(  # stage 0 is for float32 weights alone
    ("stage", "dtype"),
    [(0, "float32"), (1, "float32"), (1, "bfloat16"), (3, "float32"), (3, "bfloat16")],
)
def test_code_planted_in_any_file_of_a_checkpoint_is_refused(
    stage: int, dtype: str, one_rank: Ranks, folder_of: Callable[[Shape], Path], tmp_path: Path
) -> None:
    """Controls: without it the checkpoint loads, and torch, left to trust the file, makes what was planted."""
    saved, made = tmp_path / "checkpoint", tmp_path / "made"
    saved.mkdir()
    one_rank.build(folder_of(SHAPE), actor={"zero_stage": stage}, model={"dtype": dtype})
    one_rank.ask("save", folder=str(saved))
    load = {"of": "load", "arguments": {"folder": str(saved), "version": 0}}
    assert one_rank.ask("refusal", **load) == [{"error": ""}]
    files = sorted(saved.rglob("*.pt"))
    assert len(files) == (2 if stage == 0 else 3)  # weights, generators and, from stage 1 on, the optimizer's shard
    for file in files:
        whole = file.read_bytes()
        content = read_state(file)
        torch.save({**content, "planted": _Planted(made)}, file)
        assert f"{file.name} holds objects that are not read" in one_rank.ask("refusal", **load)[0]["error"]
        assert not made.exists()
        torch.load(file, weights_only=False)
        assert made.exists()
        made.unlink()
        file.write_bytes(whole)
    assert one_rank.ask("refusal", **load) == [{"error": ""}]


def test_an_export_runs_none_either(tmp_path: Path) -> None:
    """It reads the same files without an engine."""
    made, state = tmp_path / "made", tmp_path / "actor" / "state"
    state.mkdir(parents=True)
    torch.save({"module": {}, "planted": _Planted(made)}, state / "mp_rank_00_model_states.pt")
    with pytest.raises(UserError, match="do not trust this folder"):
        read_causal_lm_weights(tmp_path / "actor")
    assert not made.exists()
