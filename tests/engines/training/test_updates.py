"""An update is the plain training loop, whatever the micro-batches, the ranks and the ZeRO stage.

The oracle is `tests.engines.unpacked`: the loss written out again, row by row, plain autograd, plain AdamW. Two steps
each, so that the second sees what the first left behind. Combinations are spread, not multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.base.ragged import Ragged
from penstock.engines.batches.micro_batches import plan_micro_batches
from penstock.engines.batches.packing import Rows
from penstock.engines.training.updates import Split, mini_batch_rows
from penstock.state.experience import add_columns
from tests.engines.rows import (
    LOSS,
    SPLIT,
    branched_rows,
    gathered,
    planned,
    random_rows,
    take_rows,
    with_columns,
    write_rows,
)
from tests.engines.shared_ranks import Ranks, Shape
from tests.engines.unpacked import STEADY, UNCLIPPED, load_unpacked, plain_steps, row_logprobs, row_values

SHAPE = Shape("qwen2", tied=True)
RATE = 0.02
FULL_LOSS = {**LOSS, "entropy_coefficient": 0.01, "kl_estimator": "k3", "kl_coefficient": 0.1, "temperature": 0.9}
FolderOf = Callable[[Shape], Path]


@pytest.fixture(scope="module")
def rows(folder_of: FolderOf) -> Rows:
    """Twelve ragged rows that have been trained on before."""
    return _with_old(random_rows(12, samples=2), folder_of(SHAPE))


def _with_old(bare: Rows, folder: Path) -> Rows:
    """Rows whose old and reference log-probs lie around the starting model's, and old values around 0."""
    lm = load_unpacked(folder)
    with torch.no_grad():
        now_T = torch.cat([row_logprobs(lm, bare, row, 0.9)[0] for row in range(len(bare))]).numpy()
    random = np.random.default_rng(1)
    return with_columns(
        bare,
        {
            "logprobs_old": now_T + random.normal(scale=0.3, size=len(now_T)),
            "logprobs_reference": now_T + random.normal(scale=0.3, size=len(now_T)),
            "values": random.normal(scale=0.3, size=len(now_T)),
        },
    )


@dataclass(frozen=True)
class Expected:
    """Two steps of the plain loop."""

    loss: float  # mean of both
    grad_norm: float
    parameters: dict[str, torch.Tensor]


def _column(rows: Rows, name: str, row: int) -> torch.Tensor:
    return torch.from_numpy(rows.columns[name].row(row).copy())


def _aggregated(rows: Rows, loss_of_row: Callable[[int], torch.Tensor], aggregation: str) -> torch.Tensor:
    """Token losses to one loss, by the definitions; only rows with a counted token take part."""
    masks = [torch.from_numpy(rows.mask.row(row).astype(np.float32)) for row in range(len(rows))]
    sums = {row: (loss_of_row(row) * mask).sum() for row, mask in enumerate(masks) if mask.any()}
    total = torch.stack(list(sums.values()))
    match aggregation:
        case "token-mean":
            return total.sum() / sum(mask.sum() for mask in masks)
        case "seq-mean-token-mean":
            return (total / torch.stack([masks[row].sum() for row in sums])).mean()
        case "seq-mean-token-sum-norm":
            return total.mean() / SPLIT["max_response_tokens"]
    raise AssertionError(aggregation)


def _plain_actor(folder: Path, rows: Rows, aggregation: str = "token-mean") -> Expected:
    lm = load_unpacked(folder)

    def loss_of_row(row: int) -> torch.Tensor:
        logprobs_T, entropies_T = row_logprobs(lm, rows, row, FULL_LOSS["temperature"])
        advantages_T = _column(rows, "advantages", row)
        ratio_T = (logprobs_T - _column(rows, "logprobs_old", row)).exp()
        surrogate_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.3) * advantages_T)
        x_T = _column(rows, "logprobs_reference", row) - logprobs_T
        return -surrogate_T - 0.01 * entropies_T + 0.1 * (x_T.exp() - 1 - x_T)

    return _expected(lm, list(lm.parameters()), lambda: _aggregated(rows, loss_of_row, aggregation))


def _plain_critic(folder: Path, rows: Rows) -> Expected:
    lm = load_unpacked(folder)
    head = nn.Linear(lm.config.hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)

    def loss_of_row(row: int) -> torch.Tensor:
        values_T = row_values(lm, head, rows, row)
        old_T, returns_T = _column(rows, "values", row), _column(rows, "returns", row)
        near_T = old_T + (values_T - old_T).clamp(-0.2, 0.2)
        return 0.5 * torch.maximum((values_T - returns_T) ** 2, (near_T - returns_T) ** 2)

    both = nn.ModuleDict({"backbone": lm.base_model, "head": head})
    return _expected(both, list(both.parameters()), lambda: _aggregated(rows, loss_of_row, "token-mean"))


def _expected(module: nn.Module, parameters: list[nn.Parameter], loss: Callable[[], torch.Tensor]) -> Expected:
    steps = plain_steps(parameters, [loss, loss], [RATE, RATE], UNCLIPPED)
    after = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return Expected(float(np.mean([step.loss for step in steps])), float(np.mean([s.grad_norm for s in steps])), after)


def _assert_same(metrics: dict[str, Any], parameters: dict[str, torch.Tensor], expected: Expected) -> None:
    assert metrics["loss"] == pytest.approx(expected.loss, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-5)
    assert {name.removeprefix("lm.") for name in parameters} == expected.parameters.keys()
    for name, value in parameters.items():
        torch.testing.assert_close(value, expected.parameters[name.removeprefix("lm.")], rtol=0, atol=1e-5)


def _trainer(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_stage": stage, "optimizer": {**STEADY, "max_grad_norm": UNCLIPPED}, **more}


def _update_actor(path: str, budget: int, aggregation: str = "token-mean", samples: int = 2) -> dict[str, Any]:
    """Arguments of two optimizer steps over the whole file; no rollout engine, so no policy version is verified."""
    split = {
        **SPLIT,
        "epochs": 2,
        "together": samples,
        "micro_batch_tokens": budget,
        "aggregation": aggregation,
    }
    return {"path": path, "version": -1, "split": split, "loss": FULL_LOSS, "learning_rate": RATE}


def test_figures_are_of_the_steps_that_were_taken(one_rank: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """One skipped step hides no other's loss and norm. Controls: the other step alone, and a skipped one alone."""
    rows = random_rows(8, samples=2)
    first, second = (index.tolist() for index in mini_batch_rows(8, Split(**{**SPLIT, "mini_batches": 2})))
    odd_B = np.isin(np.arange(8), second)
    advantages_T = np.where(np.repeat(odd_B, rows.responses.lengths_B), np.nan, rows.columns["advantages"].values_T)
    both = with_columns(rows, {"advantages": advantages_T})
    replies = []
    for name, some, steps in (
        ("both", both, 2),
        ("good", take_rows(both, first), 1),
        ("odd", take_rows(both, second), 1),
    ):
        one_rank.build(folder_of(SHAPE), actor=_trainer(1))
        update = {"version": -1, "split": {**SPLIT, "mini_batches": steps}, "loss": LOSS, "learning_rate": RATE}
        path = write_rows(tmp_path / f"{name}.parquet", some)
        replies.append(one_rank.ask("update_actor", path=path, **update)[0])
    mixed, good, odd = replies
    assert (mixed["steps"], mixed["skipped_steps"]) == (2.0, 1.0)
    for figure in ("loss", "grad_norm", "entropy"):
        assert mixed[figure] == good[figure]
    assert odd["skipped_steps"] == 1.0
    assert not np.isfinite(odd["grad_norm"])


# ---- equal to the plain loop ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "stage", "budget", "aggregation"),
    [
        (1, 2, 10_000, "token-mean"),
        (1, 1, 32, "token-mean"),
        (1, 0, 48, "seq-mean-token-mean"),
        (1, 3, 32, "seq-mean-token-sum-norm"),
        (2, 2, 10_000, "token-mean"),
        (2, 2, 32, "seq-mean-token-mean"),
        (2, 0, 32, "token-mean"),
        (2, 1, 1, "seq-mean-token-sum-norm"),
        (2, 3, 24, "token-mean"),
    ],
)
def test_the_actors_update_is_the_plain_loop(
    count: int,
    stage: int,
    budget: int,
    aggregation: str,
    rows: Rows,
    ranks_of: Callable[[int], Ranks],
    folder_of: FolderOf,
    tmp_path: Path,
) -> None:
    """Loss, gradient norm and parameters with ratio, clip, KL and entropy in the loss."""
    ranks, folder = ranks_of(count), folder_of(SHAPE)
    ranks.build(folder, actor=_trainer(stage))
    before = ranks.parameters()
    path = write_rows(tmp_path / "rows.parquet", rows)
    replies = ranks.ask("update_actor", **_update_actor(path, budget, aggregation))
    assert all(reply == replies[0] for reply in replies)
    assert 0 < replies[0]["clip_fraction"] < 1
    after = ranks.parameters()
    _assert_same(replies[0], after, _plain_actor(folder, rows, aggregation))
    assert max(float((after[name] - before[name]).abs().max()) for name in after) > 1e-3


def test_an_update_on_a_tree_is_the_plain_loop_over_its_paths(
    two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """What paths share is computed once, and trained on for each; what that spares is told, of all ranks.

    Controls: in micro-batches of one row there is nothing to spare, and the step is the same; one rank computes less.
    """
    folder = folder_of(SHAPE)
    rows = _with_old(branched_rows(), folder)
    expected = _plain_actor(folder, rows)
    path = write_rows(tmp_path / "rows.parquet", rows)
    for budget in (10_000, 1):
        two_ranks.build(folder, actor=_trainer(2))
        figures = two_ranks.ask("update_actor", **_update_actor(path, budget))[0]
        _assert_same(figures, two_ranks.parameters(), expected)
        plan, length = plan_micro_batches(rows, 2, budget), rows.lengths_B.sum()
        computed, branched = planned(rows, plan)
        assert (figures["computed_share"], figures["branched_share"]) == (computed / length, branched / length)
        assert planned(rows, plan[:1])[0] < computed
        if budget == 1:
            assert (computed, branched) == (length, 0)
        else:
            assert figures["branched_share"] > 0.4
            assert figures["computed_share"] + figures["branched_share"] < 1.0  # equal prompts are shared as well


def test_rows_that_are_not_accepted_are_in_no_term_and_no_pass(
    rows: Rows, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """The plain loop over the accepted rows alone, divisor, KL and entropy included; without any no step is taken."""
    ranks, folder = ranks_of(2), folder_of(SHAPE)
    ranks.build(folder, actor=_trainer(2))
    path = tmp_path / "rows.parquet"
    accepted_B = np.arange(12) % 5 < 2
    masked_T = rows.mask.values_T * np.repeat(accepted_B, rows.mask.lengths_B)
    alone = replace(rows, mask=Ragged(masked_T, rows.mask.offsets_B1))
    write_rows(path, rows)
    before = ranks.parameters()
    add_columns(path, {"accepted": np.zeros(12, np.uint8)})
    assert ranks.ask("update_actor", **_update_actor(str(path), 32))[0]["steps"] == 0
    assert all(torch.equal(value, before[name]) for name, value in ranks.parameters().items())
    add_columns(path, {"accepted": accepted_B.astype(np.uint8)})
    metrics = ranks.ask("update_actor", **_update_actor(str(path), 32))[0]
    _assert_same(metrics, ranks.parameters(), _plain_actor(folder, alone))
    with pytest.raises(AssertionError):
        _assert_same(metrics, ranks.parameters(), _plain_actor(folder, rows))


@pytest.mark.parametrize(("count", "stage", "budget"), [(1, 2, 32), (2, 2, 10_000), (2, 0, 1), (2, 3, 32)])
def test_the_critics_update_is_the_plain_loop(
    count: int,
    stage: int,
    budget: int,
    rows: Rows,
    ranks_of: Callable[[int], Ranks],
    folder_of: FolderOf,
    tmp_path: Path,
) -> None:
    """The head moves in the first step, the backbone through it in the second; values are clipped on some tokens."""
    ranks, folder = ranks_of(count), folder_of(SHAPE)
    ranks.build(folder, ("critic",), algorithm={"name": "ppo"}, critic=_trainer(stage))
    before = ranks.parameters("critic")
    path = write_rows(tmp_path / "rows.parquet", rows)
    split = {**SPLIT, "epochs": 2, "micro_batch_tokens": budget}
    metrics = ranks.ask("update_critic", path=path, split=split, clip=0.2, learning_rate=RATE)[0]
    assert 0 < metrics["clip_fraction"] < 1
    after = ranks.parameters("critic")
    _assert_same(metrics, after, _plain_critic(folder, rows))
    assert (after["backbone.norm.weight"] - before["backbone.norm.weight"]).abs().max() > 1e-4


@pytest.mark.parametrize(("count", "stage", "index"), [(2, 2, [0, 2, 4]), (2, 3, [4]), (2, 0, [4]), (1, 2, [4])])
def test_micro_batches_without_a_row_change_nothing(
    count: int,
    stage: int,
    index: list[int],
    rows: Rows,
    ranks_of: Callable[[int], Ranks],
    folder_of: FolderOf,
    tmp_path: Path,
) -> None:
    """Fewer rows than places: a rank without a row still runs, reduces, steps, and adds nothing."""
    few, ranks, folder = take_rows(rows, index), ranks_of(count), folder_of(SHAPE)
    plan = plan_micro_batches(few, count, 1)
    assert any(not micro for micro_batches in plan for micro in micro_batches) == (count == 2)
    ranks.build(folder, actor=_trainer(stage))
    path = write_rows(tmp_path / "rows.parquet", few)
    metrics = ranks.ask("update_actor", **_update_actor(path, 1, samples=1))[0]
    assert metrics["micro_batches"] == len(plan[0])
    _assert_same(metrics, ranks.parameters(), _plain_actor(folder, few))


def test_recomputed_activations_change_nothing(
    one_rank: Ranks, rows: Rows, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Gradient checkpointing saves memory and is otherwise not there."""
    one_rank.build(folder_of(SHAPE), actor=_trainer(2, gradient_checkpointing=True))
    path = write_rows(tmp_path / "rows.parquet", rows)
    metrics = one_rank.ask("update_actor", **_update_actor(path, 64))[0]
    _assert_same(metrics, one_rank.parameters(), _plain_actor(folder_of(SHAPE), rows))


def test_a_mean_within_each_micro_batch_is_another_loss(
    one_rank: Ranks, rows: Rows, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Negative control: the usual mistake moves loss and parameters far beyond the tolerance of the tests above."""
    one_rank.build(folder_of(SHAPE), actor=_trainer(2))
    path = write_rows(tmp_path / "rows.parquet", rows)
    wrong = one_rank.ask(
        "with_micro_batch_means",
        of="update_actor",
        arguments=_update_actor(path, 32),
        micro_batches=len(plan_micro_batches(rows, 1, 32)[0]),
    )[0]
    expected = _plain_actor(folder_of(SHAPE), rows)
    assert abs(wrong["loss"] - expected.loss) > 1e-3
    with pytest.raises(AssertionError, match="not close"):
        _assert_same({"loss": expected.loss, "grad_norm": expected.grad_norm}, one_rank.parameters(), expected)


# ---- the first step ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_at_the_first_step_the_ratio_is_one_and_the_divergence_zero_exactly(
    count: int, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """Old and reference log-probs recomputed by the same forward pass: bit for bit, not nearly. Then both move."""
    ranks, bare = ranks_of(count), random_rows(12, samples=2)
    ranks.build(folder_of(SHAPE), ("actor", "reference"), algorithm={"kl": {}}, actor={"zero_stage": 2})
    path = write_rows(tmp_path / "rows.parquet", bare)
    asked = {"path": path, "temperature": 1.0, "budget": 64}
    old_T = gathered(bare, ranks.ask("logprobs", role="actor", **asked))
    reference_T = gathered(bare, ranks.ask("logprobs", role="reference", **asked))
    whole_T = gathered(bare, ranks.ask("logprobs", role="actor", path=path, temperature=1.0, budget=10_000))
    np.testing.assert_array_equal(old_T, reference_T)
    np.testing.assert_allclose(old_T, whole_T, rtol=0, atol=1e-5)

    columns = {"logprobs_old": old_T, "logprobs_reference": reference_T}
    write_rows(tmp_path / "rows.parquet", with_columns(bare, columns))
    loss = {**LOSS, "kl_estimator": "k3", "kl_coefficient": 0.1}
    update = {"path": path, "version": -1, "split": {**SPLIT, "micro_batch_tokens": 64}, "loss": loss}
    first = ranks.ask("update_actor", learning_rate=1e-3, **update)[0]
    assert (first["ratio"], first["approx_kl"], first["kl"], first["clip_fraction"]) == (1.0, 0.0, 0.0, 0.0)
    second = ranks.ask("update_actor", learning_rate=1e-3, **update)[0]
    assert abs(second["ratio"] - 1.0) > 1e-3
    assert second["approx_kl"] > 1e-4
    assert second["kl"] > 1e-4


def test_without_old_log_probs_every_step_is_on_policy(one_rank: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """One step per iteration needs no old pass: the ratio is 1 by construction, also after the policy has moved."""
    one_rank.build(folder_of(SHAPE), actor={"zero_stage": 2})
    path = write_rows(tmp_path / "rows.parquet", random_rows(12, samples=2))
    for _ in range(2):
        metrics = one_rank.ask("update_actor", path=path, version=-1, split=SPLIT, loss=LOSS, learning_rate=1e-2)[0]
        assert (metrics["ratio"], metrics["approx_kl"], metrics["grad_norm"] > 0) == (1.0, 0.0, True)


# ---- what is trained on --------------------------------------------------------------------------------------------


def test_experience_of_an_unverified_policy_version_is_refused(
    one_rank: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Nothing of it reaches the weights. Control: the verified version goes through, and the next after its reshard."""
    one_rank.build(folder_of(SHAPE), ("actor", "rollout"))
    path = write_rows(tmp_path / "rows.parquet", random_rows(4))
    update = {"path": path, "split": SPLIT, "loss": LOSS, "learning_rate": 1e-3}
    before = one_rank.parameters()

    def refused(version: int) -> str:
        error: str = one_rank.ask("refusal", of="update_actor", arguments={**update, "version": version})[0]["error"]
        return error

    assert "policy version 1; verified is 0" in refused(1)
    assert all(torch.equal(value, before[name]) for name, value in one_rank.parameters().items())
    assert refused(0) == ""
    assert not torch.equal(one_rank.parameters()["lm.model.norm.weight"], before["lm.model.norm.weight"])
    one_rank.ask("reshard", version=1)
    assert "policy version 0; verified is 1" in refused(0)
    assert refused(1) == ""


def test_experience_in_which_no_token_counts_takes_no_step(
    two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """There is no mean over nothing: the mini-batch is left out on every rank alike."""
    two_ranks.build(folder_of(SHAPE), actor={"zero_stage": 2})
    before = two_ranks.parameters()
    path = write_rows(tmp_path / "rows.parquet", take_rows(random_rows(4), [3, 3]))
    replies = two_ranks.ask("update_actor", path=path, version=-1, split=SPLIT, loss=LOSS, learning_rate=1.0)
    assert replies == [{"steps": 0.0, "skipped_steps": 0.0}] * 2
    assert all(torch.equal(value, before[name]) for name, value in two_ranks.parameters().items())


@pytest.mark.parametrize("together", [1, 2])
def test_mini_batches_hold_all_rows_in_a_new_seeded_order_every_epoch(one_rank: Ranks, together: int) -> None:
    """A prompt's samples stay together where that is asked for; the same seed gives the same order on every rank."""
    split = {**SPLIT, "mini_batches": 4, "epochs": 2, "together": together}
    steps = one_rank.ask("mini_batches", count=16, split=split)[0]["rows"]
    assert [len(rows) for rows in steps] == [4] * 8
    for epoch in (steps[:4], steps[4:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(16))
    assert all({row ^ 1 for row in rows} == set(rows) for rows in steps) == (together == 2)
    assert steps[:4] != steps[4:]
    assert one_rank.ask("mini_batches", count=16, split=split)[0]["rows"] == steps
    assert one_rank.ask("mini_batches", count=16, split={**split, "seed": 1})[0]["rows"] != steps
