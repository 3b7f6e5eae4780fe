"""A trained state is the same state on another number of ranks and at another ZeRO stage, bit for bit.

What a next step makes of it is as equal as the sums of its gradients are: to rounding, which the order of sums decides.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.base.errors import UserError
from penstock.engines.training.optimizers import ADAMW_STATES, STEP
from penstock.engines.training.state_images import (
    SavedState,
    SavedStates,
    StateImage,
    image_paths,
    saved_actor,
    write_image,
)
from penstock.engines.training.trained_state import MASTER, ParameterSlice, Share
from tests.engines.rows import LOSS, SPLIT, random_rows, write_rows
from tests.engines.shared_ranks import Ranks, Shape

SHAPE = Shape("qwen3", tied=True, intermediate=1024)  # at stage 3 some parameters are whole on each rank, others cut
CHANGES = [  # ranks and stage before, and after
    ((2, 1), (1, 1), "float32"),
    ((1, 2), (2, 3), "float32"),
    ((1, 1), (1, 3), "float32"),
    ((2, 3), (1, 0), "float32"),
    ((2, 0), (2, 2), "float32"),
    ((1, 0), (2, 0), "float32"),
    ((2, 1), (1, 2), "bfloat16"),
    ((1, 3), (2, 1), "bfloat16"),
]
MOMENTS = tuple(name for name in ADAMW_STATES if name != STEP)


def _whole(state: SavedState) -> dict[str, torch.Tensor]:
    """Every parameter's master and moments, and AdamW's steps on it."""
    found = {}
    for name, shape in state.parameters.items():
        part = ParameterSlice(name, 0, int(np.prod(shape)), 0)
        for kind in (MASTER, *MOMENTS):
            found[f"{name}/{kind}"] = torch.full((part.count,), torch.nan)
            state.copy(kind, [part], found[f"{name}/{kind}"])
        found[f"{name}/steps"] = torch.tensor(state.optimizer_steps(Share(torch.empty(0), (part,), {})))
    return found


@pytest.mark.parametrize(("before", "after", "dtype"), CHANGES)
def test_a_state_goes_on_at_another_stage_and_on_another_number_of_ranks(
    before: tuple[int, int],
    after: tuple[int, int],
    dtype: str,
    request: pytest.FixtureRequest,
    folder_of: Callable[[Shape], Path],
    tmp_path: Path,
) -> None:
    """Saved anew from the other layout it is the same, and the next step has the same loss and norm.

    Control: the state after one more step is another.
    """
    path = write_rows(tmp_path / "rows.parquet", random_rows(8))
    states, replies = [], []
    for number, (count, stage) in enumerate((before, after)):
        ranks: Ranks = request.getfixturevalue("one_rank" if count == 1 else "two_ranks")
        folder = tmp_path / f"{number}"
        folder.mkdir()
        ranks.build(folder_of(SHAPE), actor={"zero_stage": stage}, model={"dtype": dtype})
        if number == 0:
            _update(ranks, path)
        else:
            ranks.ask("load", folder=str(tmp_path / "0"), version=0)
        ranks.ask("save", folder=str(folder))
        states.append(_whole(saved_actor(folder)))
        replies.append(_update(ranks, path))
    assert len(image_paths(tmp_path / "0")) == before[0]
    assert len(image_paths(tmp_path / "1")) == after[0]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert {float(value) for name, value in states[0].items() if name.endswith("/steps")} == {1.0}
    close = 1e-5 if dtype == "float32" else 2e-2
    for name in ("loss", "grad_norm"):
        assert replies[1][name] == pytest.approx(replies[0][name], rel=close, abs=1e-6)
    ranks.ask("save", folder=str(tmp_path / "1"))
    moved = _whole(saved_actor(tmp_path / "1"))
    assert not any(torch.equal(value, moved[name]) for name, value in states[1].items() if name.endswith(MASTER))


def _update(ranks: Ranks, path: str) -> dict[str, Any]:
    split = {**SPLIT, "micro_batch_tokens": 64}
    reply: dict[str, Any] = ranks.ask(
        "update_actor", path=path, version=-1, split=split, loss=LOSS, learning_rate=1e-2
    )[0]
    return reply


def test_a_state_that_is_replicated_is_written_once(
    two_ranks: Ranks, folder_of: Callable[[Shape], Path], tmp_path: Path
) -> None:
    """Each rank writes its part. Control: on ranks of stage 1 the files are as large together.

    Also where vLLM has told the ranks that each is alone.
    """
    sizes = {}
    two_ranks.build(folder_of(SHAPE), roles=("actor", "rollout"))
    for stage in (0, 1):
        folder = tmp_path / f"{stage}"
        folder.mkdir()
        two_ranks.build(folder_of(SHAPE), actor={"zero_stage": stage})
        two_ranks.ask("save", folder=str(folder))
        sizes[stage] = sum(path.stat().st_size for path in image_paths(folder))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


def _image(parameters: dict[str, int], share: list[tuple[str, int, int, int]]) -> StateImage:
    values = {"steps": 1, "frozen_sum": 0, "parameters": {name: [size] for name, size in parameters.items()}}
    values |= {"tied": {}, "dtype": "float32", "shares": {"0": share}}
    flat = torch.arange(sum(count for _, _, count, _ in share), dtype=torch.float32)
    tensors = {f"actor/0/{name}": flat for name in (MASTER, *MOMENTS)} | {"actor/0/step": torch.ones(())}
    return StateImage(tensors, {"group": "main", "rank": 0, "trained": {"actor": values}, "generators": {}})


def test_a_part_that_no_file_holds_is_missed(tmp_path: Path) -> None:
    """Never filled with what was there before. Control: with the other file it is whole."""
    write_image(_image({"lm.w": 6}, [("lm.w", 0, 4, 0)]), tmp_path / "state-main-0.safetensors")
    with pytest.raises(UserError, match=r"lacks a part of lm\.w"):
        saved_actor(tmp_path).weights()
    write_image(_image({"lm.w": 6}, [("lm.w", 4, 2, 0)]), tmp_path / "state-main-1.safetensors")
    assert saved_actor(tmp_path).weights()["lm.w"].tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("damage", [b"", b"\0" * 8, b"\xff" * 8, b"\x10" + b"\0" * 7 + b"{}"])
def test_a_file_that_is_no_finished_image_is_refused(tmp_path: Path, damage: bytes) -> None:
    """Also a safetensors file of others. Control: the image before it was damaged."""
    path = tmp_path / "state-main-0.safetensors"
    write_image(_image({"lm.w": 2}, [("lm.w", 0, 2, 0)]), path)
    whole = path.read_bytes()
    assert SavedStates([path]).trained("actor").steps == 1
    path.write_bytes(damage + whole[len(damage) :] if damage else b"")
    with pytest.raises(UserError):
        SavedStates([path])
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match="lies outside"):
        SavedStates([path])
