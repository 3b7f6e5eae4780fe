"""A gradient that comes in portions is that of the whole batch, at every ZeRO stage.

Invariants: the step is the one on the whole batch, up to the order in which numbers are added; the same portions give
the same weights to the last bit; what was summed and not stepped on is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.algorithms.correction import Correction
from penstock.engines.batches.micro_batches import plan_micro_batches
from penstock.engines.batches.packing import Rows
from penstock.engines.commands.message import encode
from penstock.engines.training.portions import Portions, take_step
from penstock.state.experience import add_columns
from tests.engines.rows import LOSS, SPLIT, planned, random_rows, take_rows, with_columns, write_rows
from tests.engines.shared_ranks import Ranks, Shape
from tests.engines.unpacked import STEADY

SHAPE = Shape("qwen3", tied=True, intermediate=1024)  # DeepSpeed shards nothing below 100,000 elements at stage 3
RATE, CLIP = 0.2, 0.5
PORTIONS = ((4, 1), (0, 5), (3,), (2,))  # groups, in the order in which they are complete
FolderOf = Callable[[Shape], Path]


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Six groups of two ragged rows, with log-probs of the rollout."""
    bare = random_rows(12, samples=2)
    random = np.random.default_rng(1)
    return with_columns(bare, {"logprobs_rollout": -random.exponential(size=len(bare.mask.values_T))})


def _build(ranks: Ranks, folder: Path, stage: int, dtype: str = "float32") -> None:
    trainer = {"zero_stage": stage, "optimizer": {**STEADY, "max_grad_norm": CLIP}}
    ranks.build(folder, actor=trainer, model={"dtype": dtype})


def _split(aggregation: str) -> dict[str, Any]:
    return {**SPLIT, "micro_batch_tokens": 48, "aggregation": aggregation}


def _whole(ranks: Ranks, path: str, aggregation: str, loss: dict[str, Any] = LOSS) -> dict[str, float]:
    update = {"version": -1, "split": _split(aggregation), "loss": loss, "learning_rate": RATE}
    figures: dict[str, float] = ranks.ask("update_actor", path=path, **update)[0]
    return figures


def _sum(
    ranks: Ranks, path: str, aggregation: str, number: int, groups: Sequence[int] | None, loss: dict[str, Any] = LOSS
) -> None:
    ranks.ask(
        "sum_gradient",
        path=path,
        version=-1,
        split=_split(aggregation),
        loss=loss,
        first=number == 0,
        last=number == len(PORTIONS) - 1,
        groups=groups,
    )


def _step(ranks: Ranks, aggregation: str) -> dict[str, float]:
    limit = SPLIT["max_response_tokens"]
    replies = ranks.ask("step_actor", aggregation=aggregation, max_response_tokens=limit, learning_rate=RATE)
    assert all(reply == replies[0] for reply in replies)
    figures: dict[str, float] = replies[0]
    return figures


def _in_portions(ranks: Ranks, path: str, aggregation: str, loss: dict[str, Any] = LOSS) -> dict[str, float]:
    for number, groups in enumerate(PORTIONS):
        _sum(ranks, path, aggregation, number, list(groups), loss)
    return _step(ranks, aggregation)


@pytest.mark.parametrize(
    ("count", "stage", "dtype", "aggregation"),
    [
        (1, 0, "float32", "token-mean"),
        (1, 1, "float32", "seq-mean-token-mean"),
        (1, 2, "float32", "seq-mean-token-sum-norm"),
        (1, 3, "float32", "token-mean"),
        (1, 1, "bfloat16", "token-mean"),
        (2, 0, "float32", "seq-mean-token-sum"),
        (2, 1, "float32", "token-mean"),
        (2, 2, "float32", "token-mean"),
        (2, 3, "float32", "token-sum"),
        (2, 1, "bfloat16", "seq-mean-token-mean"),
    ],
)
def test_the_step_on_portions_is_that_on_the_whole_batch(
    count: int,
    stage: int,
    dtype: str,
    aggregation: str,
    rows: Rows,
    ranks_of: Callable[[int], Ranks],
    folder_of: FolderOf,
    tmp_path: Path,
) -> None:
    """Two steps, with clipping. From files of their own the portions give the same bits, also after one left undone.

    Controls: the weights move; a batch that lacks a portion gives others.
    """
    ranks, folder = ranks_of(count), folder_of(SHAPE)
    path = write_rows(tmp_path / "rows.parquet", rows)
    _build(ranks, folder, stage, dtype)
    before = ranks.parameters()
    whole = [_whole(ranks, path, aggregation) for _ in range(2)]
    expected = ranks.parameters()

    _build(ranks, folder, stage, dtype)
    figures = [_in_portions(ranks, path, aggregation) for _ in range(2)]
    found = ranks.parameters()
    exact = dtype == "float32"
    for one, other in zip(figures, whole, strict=True):
        assert one.keys() == other.keys()
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6 if exact else 1e-2)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5 if exact else 2e-2)
        assert one["entropy"] == pytest.approx(other["entropy"], rel=1e-6 if exact else 1e-2)
    assert whole[0]["grad_norm"] > CLIP or aggregation == "seq-mean-token-sum-norm"
    moved = max(float((expected[name] - before[name]).abs().max()) for name in before)
    apart = max(float((expected[name] - found[name]).abs().max()) for name in before)
    assert moved > 1e-3 and apart < moved * (1e-3 if exact else 0.5)

    _build(ranks, folder, stage, dtype)
    _sum(ranks, path, aggregation, 0, [3])
    for number, groups in enumerate(PORTIONS):
        index = [2 * group + sample for group in groups for sample in (0, 1)]
        alone = write_rows(tmp_path / f"portion-{number}.parquet", take_rows(rows, index))
        _sum(ranks, alone, aggregation, number, None)
    again = [_step(ranks, aggregation), _in_portions(ranks, path, aggregation)]
    assert again == figures
    assert all(torch.equal(value, found[name]) for name, value in ranks.parameters().items())

    _build(ranks, folder, stage, dtype)
    for number in (0, 1, 3):
        _sum(ranks, path, aggregation, number, list(PORTIONS[number]))
    assert _step(ranks, aggregation)["loss"] != figures[0]["loss"]


def test_a_step_in_between_starts_anew(one_rank: Ranks, rows: Rows, folder_of: FolderOf, tmp_path: Path) -> None:
    """An update of the whole batch after a portion that was left undone is as if there had been none."""
    path = write_rows(tmp_path / "rows.parquet", rows)
    for stage in (0, 2, 3):
        results = []
        for left in (False, True):
            _build(one_rank, folder_of(SHAPE), stage)
            if left:
                _sum(one_rank, path, "token-mean", 0, [0, 1])
            results.append((_whole(one_rank, path, "token-mean"), one_rank.parameters()))
        (first, alone), (second, after) = results
        assert first == second
        assert all(torch.equal(value, after[name]) for name, value in alone.items())


def test_figures_of_the_rollouts_policy_are_those_of_the_whole_batch(
    two_ranks: Ranks, rows: Rows, folder_of: FolderOf, tmp_path: Path
) -> None:
    """With weights of single tokens. Control: without a correction there are none."""
    path = write_rows(tmp_path / "rows.parquet", rows)
    loss = {**LOSS, "correction": encode(Correction(weights="token", cap=2.0))}
    _build(two_ranks, folder_of(SHAPE), 2)
    whole = _whole(two_ranks, path, "token-mean", loss)
    _build(two_ranks, folder_of(SHAPE), 2)
    figures = _in_portions(two_ranks, path, "token-mean", loss)
    assert figures.keys() == whole.keys() and any(name.startswith("mismatch/") for name in whole)
    of_packing = ("micro_batches", "computed_share", "branched_share")
    for name in figures.keys() - {*of_packing}:
        assert figures[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6)
    assert not any(name.startswith("mismatch/") for name in _in_portions(two_ranks, path, "token-mean"))


def test_what_portions_compute_is_counted_over_portions_and_ranks(
    two_ranks: Ranks, rows: Rows, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Against packing their plans. Control: one rank's part of it is less."""
    _build(two_ranks, folder_of(SHAPE), 2)
    figures = _in_portions(two_ranks, write_rows(tmp_path / "rows.parquet", rows), "token-mean")
    indices = (np.arange(12).reshape(-1, 2)[list(groups)].reshape(-1) for groups in PORTIONS)
    plans = [plan_micro_batches(rows, 2, 48, index_B) for index_B in indices]
    computed = sum(planned(rows, plan)[0] for plan in plans)
    assert figures["computed_share"] == computed / rows.lengths_B.sum()
    assert sum(planned(rows, plan[:1])[0] for plan in plans) < computed


def test_portions_in_which_nothing_counts_are_in_no_term(
    two_ranks: Ranks, rows: Rows, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Also if it is the last one, in step with the other ranks. Where nothing counts at all no step is taken."""
    path = tmp_path / "rows.parquet"
    write_rows(path, rows)
    accepted_G = np.asarray([False, True, False, False, True, False])  # the first portion's alone
    for accepted, steps in ((accepted_G, 1.0), (np.zeros(6, bool), 0.0)):
        add_columns(path, {"accepted": np.repeat(accepted, 2).astype(np.uint8)})
        _build(two_ranks, folder_of(SHAPE), 2)
        whole, expected = _whole(two_ranks, str(path), "token-mean"), two_ranks.parameters()
        _build(two_ranks, folder_of(SHAPE), 2)
        figures, found = _in_portions(two_ranks, str(path), "token-mean"), two_ranks.parameters()
        assert figures["steps"] == whole["steps"] == steps
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


def test_a_step_on_nothing_is_refused() -> None:
    """A process that is new has summed no gradient, whatever another had."""
    with pytest.raises(RuntimeError, match="this process has not summed it"):
        take_step(Portions(), SimpleNamespace(), "token-mean", 20, RATE)  # type: ignore[arg-type]
