"""Ranks that compute each micro-batch together are one rank: log-probs, values, losses, gradients and weights.

Rows of 12 to 178 tokens, which share prompts and more, so cuts lie in the midst of rows and of what they share. Numbers
are float32 and of the same terms; ranks add them up in another order, so they agree to 1e-5 of weights and losses that
are about 1 (as with other micro-batches, tests/engines/training/test_updates.py). The control is an attention that sees
the own share alone.

Left out: GPUs, where NCCL takes the place of gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.algorithms.correction import Correction
from penstock.base.ragged import Ragged
from penstock.engines.batches.packing import Rows
from penstock.engines.batches.shares import ALONE, RankSet
from penstock.engines.commands.message import encode
from penstock.engines.ranks.models import RankModels
from penstock.engines.training.state_images import image_paths
from tests.engines.rows import LOSS, SPLIT, branched_rows, gathered, random_rows, with_columns, write_rows
from tests.engines.shared_ranks import Ranks, Shape
from tests.engines.unpacked import STEADY, UNCLIPPED

SHAPE = Shape("qwen3", tied=True, intermediate=1024)  # DeepSpeed shards nothing below 100,000 elements at stage 3
RATE, CLOSE = 0.02, 1e-5
FULL_LOSS = {**LOSS, "entropy_coefficient": 0.01, "kl_estimator": "k3", "kl_coefficient": 0.1, "temperature": 0.9}
BY_SEQUENCE = {**FULL_LOSS, "policy_loss": "gspo", "settings": {"clip_low": 0.2, "clip_high": 0.3}}
FolderOf = Callable[[Shape], Path]


def _trainer(together: int, stage: int, **more: Any) -> dict[str, Any]:
    optimizer = {**STEADY, "max_grad_norm": UNCLIPPED}
    return {"zero_stage": stage, "optimizer": optimizer, "sequence_parallel": together, **more}


def _logprobs(ranks: Ranks, rows: Rows, path: str, budget: int) -> np.ndarray:
    return gathered(rows, ranks.ask("logprobs", path=path, role="actor", temperature=0.9, budget=budget))


def _update(ranks: Ranks, path: str, budget: int, loss: dict[str, Any] = FULL_LOSS) -> dict[str, float]:
    split = {**SPLIT, "epochs": 2, "micro_batch_tokens": budget, "aggregation": "seq-mean-token-mean"}
    replies = ranks.ask("update_actor", path=path, version=-1, split=split, loss=loss, learning_rate=RATE)
    assert all(reply == replies[0] for reply in replies)
    figures: dict[str, float] = replies[0]
    return figures


def _with_old(rows: Rows, logprobs_T: np.ndarray) -> Rows:
    """Old and reference log-probs around the starting model's, so that ratios are clipped here and there."""
    random = np.random.default_rng(1)
    near = {name: logprobs_T + random.normal(scale=0.3, size=len(logprobs_T)) for name in ("old", "reference")}
    columns = {f"logprobs_{name}": values.astype(np.float32) for name, values in near.items()}
    return with_columns(rows, {**columns, "values": np.zeros(len(logprobs_T), np.float32)})


def _assert_alike(one: dict[str, float], several: dict[str, float]) -> None:
    """Every figure but how many micro-batches a rank had, and so how many tokens are computed once."""
    differing = {"micro_batches", "computed_share", "branched_share"}
    assert one.keys() == several.keys()
    for name in one.keys() - differing:
        assert several[name] == pytest.approx(one[name], rel=CLOSE, abs=CLOSE), name


def _assert_close(one: dict[str, torch.Tensor], several: dict[str, torch.Tensor]) -> None:
    for name, value in one.items():
        torch.testing.assert_close(several[name], value, rtol=0, atol=CLOSE)


def _moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    return max(float((after[name] - before[name]).abs().max()) for name in before)


@pytest.mark.parametrize(
    ("stage", "budget", "loss"),
    [
        (1, 10_000, FULL_LOSS),
        pytest.param(0, 200, FULL_LOSS, marks=pytest.mark.exhaustive),
        pytest.param(2, 200, BY_SEQUENCE, marks=pytest.mark.exhaustive),
        pytest.param(3, 200, BY_SEQUENCE, marks=pytest.mark.exhaustive),
    ],
)
def test_two_ranks_are_one(
    stage: int,
    budget: int,
    loss: dict[str, Any],
    one_rank: Ranks,
    two_ranks: Ranks,
    folder_of: FolderOf,
    tmp_path: Path,
) -> None:
    """Log-probs, figures, gradient norm and weights after two steps, each figure counted once.

    Controls: the weights move further than they differ; attention of the own share alone has other log-probs.
    """
    folder, rows = folder_of(SHAPE), branched_rows()
    path = write_rows(tmp_path / "rows.parquet", rows)
    one_rank.build(folder, actor=_trainer(1, stage))
    two_ranks.build(folder, actor=_trainer(2, stage))
    expected_T, found_T = (_logprobs(ranks, rows, path, budget) for ranks in (one_rank, two_ranks))
    np.testing.assert_allclose(found_T, expected_T, rtol=0, atol=CLOSE)
    two_ranks.ask("attend_alone", wanted=True)
    assert np.abs(_logprobs(two_ranks, rows, path, budget) - expected_T).max() > 0.1
    two_ranks.ask("attend_alone", wanted=False)
    path, before = write_rows(tmp_path / "rows.parquet", _with_old(rows, expected_T)), one_rank.parameters()
    figures = [_update(ranks, path, budget, loss) for ranks in (one_rank, two_ranks)]
    _assert_alike(*figures)
    assert 0 < figures[0]["clip_fraction"] < 1
    assert figures[1]["micro_batches"] == figures[0]["micro_batches"]
    after = one_rank.parameters()
    _assert_close(after, two_ranks.parameters())
    assert _moved(before, after) > 100 * CLOSE


def test_a_critic_of_two_ranks_is_one_ranks(
    one_rank: Ranks, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Values after an update, and the update. Control: the first values are 0, these are not."""
    rows, replies, found = random_rows(8, samples=2), [], []
    none_T = np.zeros(len(rows.responses.values_T), np.float32)
    path = write_rows(tmp_path / "rows.parquet", with_columns(rows, {"values": none_T}))
    for together, ranks in ((1, one_rank), (2, two_ranks)):
        ranks.build(folder_of(SHAPE), roles=("critic",), algorithm={"name": "ppo"}, critic=_trainer(together, 1))
        update = {"path": path, "agents": [], "split": SPLIT, "clip": None, "learning_rate": RATE}
        replies.append(ranks.ask("update_critic", **update)[0])
        found.append(gathered(rows, ranks.ask("values", path=path, budget=64, agents=[])))
    _assert_alike(*replies)
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=CLOSE)
    assert np.abs(found[0]).max() > 100 * CLOSE


def test_a_reference_beside_an_actor_follows_it_and_each_critic_has_its_ranks() -> None:
    """Controls: what is in another group, and what has no such key, is computed by each rank alone."""
    actors, critics = RankSet(2, 1, None), RankSet(4, 3, None)
    models = RankModels(3, 4, torch.device("cpu"))
    assert models.ranks_of("reference") == ALONE
    trainers: Any = {"actor": SimpleNamespace(ranks=actors), "critic/left": SimpleNamespace(ranks=critics)}
    models.trainers.update(trainers)
    found = {role: models.ranks_of(role) for role in ("actor", "reference", "critic", "preference")}
    assert found == {"actor": actors, "reference": actors, "critic": critics, "preference": ALONE}


def test_a_state_goes_on_with_another_number_of_ranks_together(
    one_rank: Ranks, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Saved by two ranks together, it goes on on two apart, on two together and on one: the same next step."""
    folder, rows = folder_of(SHAPE), branched_rows()
    path, saved = write_rows(tmp_path / "rows.parquet", _with_old(rows, _zeros(rows))), tmp_path / "saved"
    saved.mkdir()
    two_ranks.build(folder, actor=_trainer(2, 1))
    _update(two_ranks, path, 200, LOSS)
    two_ranks.ask("save", folder=str(saved))
    assert len(image_paths(saved)) == 2
    figures, weights = [], []
    for together, ranks in ((2, two_ranks), (1, two_ranks), (1, one_rank)):
        ranks.build(folder, actor=_trainer(together, 1))
        ranks.ask("load", folder=str(saved), version=0)
        figures.append(_update(ranks, path, 200, LOSS))
        weights.append(ranks.parameters())
    for other in (1, 2):
        _assert_alike(figures[other], figures[0])
        _assert_close(weights[other], weights[0])


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_adapters_of_two_ranks_are_one_ranks(
    checkpointing: bool, one_rank: Ranks, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """With activations that are recomputed as well, exchanges and all; a reference beside the actor follows it."""
    folder, rows, given = folder_of(SHAPE), branched_rows(), {"gradient_checkpointing": checkpointing}
    path = write_rows(tmp_path / "rows.parquet", _with_old(rows, _zeros(rows)))
    figures, weights, references = [], [], []
    for together, ranks in ((1, one_rank), (2, two_ranks)):
        actor = _trainer(together, 1, lora={"rank": 8}, **given)
        ranks.build(folder, roles=("actor", "reference"), algorithm={"kl": {}}, actor=actor)
        figures.append(_update(ranks, path, 200))
        reply = ranks.ask("logprobs", path=path, role="reference", temperature=1.0, budget=200)
        references.append(gathered(rows, reply))
        weights.append(ranks.parameters())
    _assert_alike(*figures)
    _assert_close(*weights)
    np.testing.assert_allclose(references[1], references[0], rtol=0, atol=CLOSE)


def test_a_gradient_in_portions_is_summed_alike(
    one_rank: Ranks, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """As `rollout.stream` sums it, with weights of a correction and their figures."""
    rows, figures, weights = random_rows(8, samples=2), [], []
    sampled_T = -4 - np.random.default_rng(1).exponential(size=len(rows.responses.values_T))
    path = write_rows(tmp_path / "rows.parquet", with_columns(rows, {"logprobs_rollout": sampled_T}))
    loss = {**LOSS, "correction": encode(Correction(weights="token", cap=2.0))}
    for together, ranks in ((1, one_rank), (2, two_ranks)):
        ranks.build(folder_of(SHAPE), actor=_trainer(together, 2))
        for groups in ([0, 3], [1, 2]):
            portion = {"split": {**SPLIT, "micro_batch_tokens": 48}, "loss": loss, "groups": groups}
            first, last = groups[0] == 0, groups[0] == 1
            ranks.ask("sum_gradient", path=path, version=-1, first=first, last=last, **portion)
        step = {"aggregation": "token-mean", "max_response_tokens": 20, "learning_rate": RATE}
        figures.append(ranks.ask("step_actor", **step)[0])
        weights.append(ranks.parameters())
    _assert_alike(*figures)
    _assert_close(*weights)
    assert any(name.startswith("mismatch/") for name in figures[0])


@pytest.mark.slow
@pytest.mark.parametrize("together", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_four_ranks_are_two_sets_or_one(
    together: int, one_rank: Ranks, folder_of: FolderOf, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two sets of two share the micro-batches out, of which one may have none; four have fewer key heads than ranks.

    Also of a run of two tokens, fewer than the ranks.
    """
    folder, rows = folder_of(SHAPE), branched_rows()
    two = Ragged.of([[5]] * 2, np.int32), Ragged.of([[7]] * 2, np.int32), Ragged.of([[1]] * 2, np.uint8)
    short = with_columns(Rows(*two, {}), {"advantages": np.ones(2, np.float32)})
    paths = [
        write_rows(tmp_path / f"{number}.parquet", _with_old(some, _zeros(some)))
        for number, some in enumerate((rows, short))
    ]
    one_rank.build(folder, actor=_trainer(1, 1))
    before = one_rank.parameters()
    expected, after = [_update(one_rank, path, 10_000) for path in paths], one_rank.parameters()
    ranks = Ranks.start(4, tmp_path_factory.mktemp("four-ranks"))
    try:
        ranks.build(folder, actor=_trainer(together, 2))
        for path, figures in zip(paths, expected, strict=True):
            _assert_alike(figures, _update(ranks, path, 10_000))
        _assert_close(after, ranks.parameters())
    finally:
        ranks.group.close(grace_s=1.0)
    assert _moved(before, after) > 100 * CLOSE


def _zeros(rows: Rows) -> np.ndarray:
    return np.zeros(len(rows.responses.values_T), np.float32)
