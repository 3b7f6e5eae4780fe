"""Every policy loss on real ranks: the update's loss is the paper's, whatever the micro-batches and ranks.

The learning rate is 0, so that one model serves all updates. The papers' side is `tests.algorithms.losses`, fed with
the log-probs that the ranks themselves report.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.algorithms.aggregation import AGGREGATIONS
from penstock.algorithms.policy_losses import CHOICES, POLICY_LOSSES
from penstock.algorithms.policy_losses.types import PolicyLossOutputs
from penstock.base.errors import UserError
from penstock.engines.batches.packing import Rows
from penstock.engines.training.updates import _check_gradient, _check_outputs
from tests.algorithms import losses as papers
from tests.algorithms.losses import Sequence, objective
from tests.engines.rows import LOSS, SPLIT, gathered, random_rows, with_columns, write_rows
from tests.engines.shared_ranks import Ranks, Shape

SHAPE = Shape("qwen2", tied=True)
SHARE = {"covariance_share": 0.1}
CHOICE_SETTINGS: dict[str, dict[str, Any]] = {"kl_cov": SHARE, "clip_cov": {**SHARE, "covariance_low": 0.1}}


def experience(ranks: Ranks, folder: Path, path: Path) -> tuple[Rows, np.ndarray]:
    """Twelve ragged rows of one advantage each, old log-probs around the model's; and the model's own, flat."""
    bare = random_rows(12)
    asked = {"path": write_rows(path, bare), "role": "actor", "temperature": 1.0, "budget": 10_000}
    now_T = gathered(bare, ranks.ask("logprobs", **asked))
    random = np.random.default_rng(1)
    columns = {
        "logprobs_old": now_T + random.normal(scale=0.3, size=len(now_T)),
        "advantages": np.repeat(random.normal(size=len(bare)), bare.responses.lengths_B),
    }
    return with_columns(bare, columns), now_T


def chosen_of(rows: Rows, name: str) -> np.ndarray:
    """1 for what the loss chooses among the counted tokens of one mini-batch of all rows."""
    mask_T = rows.mask.values_T > 0
    chosen_T = np.zeros(len(mask_T))
    if name in CHOICES:
        columns = (rows.columns[column].values_T[mask_T] for column in ("advantages", "logprobs_old"))
        chosen_T[mask_T] = CHOICES[name](*columns, **CHOICE_SETTINGS[name])
    return chosen_T


def sequences(rows: Rows, now_T: np.ndarray, name: str) -> list[Sequence]:
    """The rows as the papers' losses take them."""
    flat = [now_T, *(rows.columns[column].values_T for column in ("logprobs_old", "advantages")), rows.mask.values_T]
    cuts = rows.responses.offsets_B1[1:-1]
    parts = zip(*(np.split(values_T, cuts) for values_T in (*flat, chosen_of(rows, name))), strict=True)
    return [Sequence(*(values.tolist() for values in row)) for row in parts]


def update(ranks: Ranks, path: Path, name: str, budget: int, **split: Any) -> dict[str, float]:
    arguments = {
        "path": str(path),
        "version": -1,
        "split": {**SPLIT, "micro_batch_tokens": budget, "max_response_tokens": papers.MAX_TOKENS, **split},
        "loss": {**LOSS, "policy_loss": name, "settings": {}, "choice_settings": CHOICE_SETTINGS.get(name, {})},
        "learning_rate": 0.0,
    }
    replies = ranks.ask("update_actor", **arguments)
    assert all(reply == replies[0] for reply in replies)
    return replies[0]


@pytest.mark.parametrize("count", [1, 2])
def test_the_loss_of_an_update_is_the_papers(
    count: int, request: pytest.FixtureRequest, folder_of: Callable[[Shape], Path], tmp_path: Path
) -> None:
    """Each loss with its settings' defaults and an aggregation, in one micro-batch and in many."""
    ranks: Ranks = request.getfixturevalue("one_rank" if count == 1 else "two_ranks")
    ranks.build(folder_of(SHAPE), actor={"zero_stage": 2})
    path = tmp_path / "rows.parquet"
    rows, now_T = experience(ranks, folder_of(SHAPE), path)
    write_rows(path, rows)
    for number, name in enumerate(POLICY_LOSSES):
        mode = AGGREGATIONS[number % len(AGGREGATIONS)]
        row_list = sequences(rows, now_T, name)
        expected = objective(getattr(papers, name), row_list, [row.logprobs for row in row_list], mode, {})
        seen = [update(ranks, path, name, budget, aggregation=mode) for budget in (10_000, 32)]
        for metrics in seen:
            assert metrics["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-5), (name, mode)
            assert metrics["grad_norm"] == pytest.approx(seen[0]["grad_norm"], rel=1e-4), (name, mode)
            if name in CHOICES:
                assert metrics["chosen"] == pytest.approx(chosen_of(rows, name).sum() / (rows.mask.values_T > 0).sum())
        assert seen[0]["grad_norm"] > 1e-3


@pytest.mark.parametrize("name", CHOICES)
def test_tokens_are_chosen_in_each_mini_batch_by_itself(
    name: str, one_rank: Ranks, two_ranks: Ranks, folder_of: Callable[[Shape], Path], tmp_path: Path
) -> None:
    """Three mini-batches: the same choice on one rank and on two. Control: it is not that of one mini-batch."""
    path = tmp_path / "rows.parquet"
    shares = []
    for ranks in (one_rank, two_ranks):
        ranks.build(folder_of(SHAPE), actor={"zero_stage": 2})
        if ranks is one_rank:
            write_rows(path, experience(ranks, folder_of(SHAPE), path)[0])
        parts = [update(ranks, path, name, budget, mini_batches=3) for budget in (10_000, 16)]
        assert parts[0]["loss"] == pytest.approx(parts[1]["loss"], rel=1e-5)
        shares.append((parts[0]["loss"], parts[0]["chosen"]))
        assert abs(parts[0]["chosen"] - update(ranks, path, name, 10_000)["chosen"]) > 1e-4
    assert shares[0] == pytest.approx(shares[1], rel=1e-5)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (torch.zeros(()), "returned Tensor, not penstock"),
        (None, "returned NoneType, not penstock"),
        (PolicyLossOutputs(torch.zeros(()), {}), r"loss_T of shape \(\), not \(3,\)"),
        (PolicyLossOutputs(0.5, {}), "returned loss_T of type float, no tensor"),  # type: ignore[arg-type]
        (PolicyLossOutputs(torch.zeros(3), {"share": 0.5}), "returned share of type float"),  # type: ignore[dict-item]
    ],
)
def test_what_a_loss_of_a_users_returns_is_checked(returned: object, words: str) -> None:
    """Before anything is learnt from it. Control: a loss for each token, and a figure for each or for all."""
    logprobs_T = torch.zeros(3)
    figures = {"share": logprobs_T, "scale": torch.ones(())}
    _check_outputs("my_loss:mean", PolicyLossOutputs(logprobs_T, figures), logprobs_T)
    with pytest.raises(UserError, match=words):
        _check_outputs("my_loss:mean", returned, logprobs_T)


def test_a_loss_without_a_gradient_is_refused() -> None:
    """In a sentence instead of DeepSpeed's assertion. Control: one with a gradient, and a pass that takes none."""
    logprobs_T = torch.zeros(3, requires_grad=True)
    _check_gradient("my_loss:detached", -logprobs_T, logprobs_T)
    _check_gradient("my_loss:detached", torch.zeros(3), logprobs_T.detach())
    with pytest.raises(UserError, match="'my_loss:detached' has no gradient"):
        _check_gradient("my_loss:detached", -logprobs_T.detach(), logprobs_T)
