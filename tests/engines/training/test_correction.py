"""Rollout correction on real ranks: log-probs of what was drawn, and an update's loss under weights and rejection.

The papers' side is plain loops (`tests.algorithms.losses`, `tests.algorithms.test_correction`), fed with the log-probs
that the ranks themselves report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.algorithms.aggregation import AGGREGATIONS
from penstock.algorithms.correction import Correction
from penstock.algorithms.policy_losses import POLICY_LOSSES
from penstock.base.ragged import Ragged
from penstock.engines.batches.packing import Rows
from tests.algorithms import losses as papers
from tests.algorithms.losses import Sequence, counted, objective
from tests.algorithms.test_correction import is_kept, weight_of
from tests.engines.rows import LOSS, SPLIT, gathered, take_rows, with_columns, write_rows
from tests.engines.shared_ranks import Ranks, Shape
from tests.engines.training.test_update_losses import CHOICE_SETTINGS, SHAPE, experience, sequences

FolderOf = Callable[[Shape], Path]
# One for each policy loss in turn.
CORRECTIONS: list[dict[str, Any]] = [
    {"weights": "token", "cap": 1.2},
    {"weights": "token", "band": (0.8, 1.4), "reject": {"seq_max_k2": 0.2}},
    {"weights": "sequence", "cap": 2.0, "normalize": True},
    {"reject": {"token_k1": 0.4, "seq_mean_k3": 0.08}},
    {"weights": "token", "cap": 2.0, "normalize": True, "reject": {"seq_sum_k1": 0.9}},
]
PROMPTS = Ragged.of([np.arange(4, 4 + length) for length in (1, 7, 3, 12, 5, 2, 9, 4)], np.int32)


def update(ranks: Ranks, path: Path, name: str, correction: dict[str, Any], **changes: Any) -> dict[str, float]:
    """One update without a step of the weights, `changes` among the fields of its split."""
    split = {**SPLIT, "max_response_tokens": papers.MAX_TOKENS, **changes}
    loss = {**LOSS, "policy_loss": name, "settings": {}, "choice_settings": CHOICE_SETTINGS.get(name, {})}
    replies = ranks.ask(
        "update_actor",
        path=str(path),
        version=-1,
        split=split,
        loss={**loss, "correction": asdict(Correction(**correction))},
        learning_rate=0.0,
    )
    assert all(reply == replies[0] for reply in replies)
    return replies[0]


def corrected_loss(rows: list[Sequence], rollout: list[list[float]], name: str, correction: Correction) -> Any:
    """The paper's loss of a token, times its weight where no measure rejects it."""
    factors: dict[int, dict[int, float]] = {}
    kept_weights = []
    for row, drawn in zip(rows, rollout, strict=True):
        # Every row starts from its old log-probs; where the ratio is to the rollout, from the current ones.
        start = row.old if correction.proximal == "recomputed" else row.logprobs
        places = counted(row)
        pairs = [(start[t], drawn[t]) for t in places]
        factors[id(row)] = {}
        for number, t in enumerate(places):
            weight = 1.0 if correction.weights is None else weight_of(pairs, number, correction)
            kept = is_kept(pairs, number, dict(correction.reject))
            factors[id(row)][t] = weight * kept
            kept_weights += [weight] * kept
    scale = np.mean(kept_weights) if correction.normalize else 1.0

    def loss(row: Sequence, now: list[float], still: list[float], t: int) -> float:
        value: float = getattr(papers, name)(row, now, still, t)
        return value * factors[id(row)][t] / scale

    return loss


def drawn_rows(ranks: Ranks, folder: Path, path: Path) -> tuple[Rows, np.ndarray, list[list[float]]]:
    """Experience with the rollout's log-probs around the old ones; the model's own, flat; the rollout's by rows."""
    rows, now_T = experience(ranks, folder, path)
    noise_T = np.random.default_rng(2).normal(scale=0.25, size=len(now_T))
    rollout_T = (rows.columns["logprobs_old"].values_T + noise_T).astype(np.float32)
    split = np.split(rollout_T.astype(np.float64), rows.responses.offsets_B1[1:-1])
    return with_columns(rows, {"logprobs_rollout": rollout_T}), now_T, [row.tolist() for row in split]


@pytest.mark.parametrize("count", [1, 2])
def test_the_loss_of_a_corrected_update_is_the_papers_times_the_weights(
    count: int, request: pytest.FixtureRequest, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Every policy loss under a correction, whatever the micro-batches, the ranks and the order of prompts.

    A rejected token counts in what divides. Control: without the correction the loss is another.
    """
    ranks: Ranks = request.getfixturevalue("one_rank" if count == 1 else "two_ranks")
    ranks.build(folder_of(SHAPE), actor={"zero_stage": 2})
    path, shuffled = tmp_path / "rows.parquet", tmp_path / "shuffled.parquet"
    rows, now_T, rollout = drawn_rows(ranks, folder_of(SHAPE), path)
    write_rows(path, rows)
    write_rows(shuffled, take_rows(rows, [6, 7, 2, 3, 10, 11, 0, 1, 8, 9, 4, 5]))
    for number, name in enumerate(POLICY_LOSSES):
        settings, mode = CORRECTIONS[number % len(CORRECTIONS)], AGGREGATIONS[number % len(AGGREGATIONS)]
        row_list = sequences(rows, now_T, name)
        loss = corrected_loss(row_list, rollout, name, Correction(**settings))
        now = [row.logprobs for row in row_list]
        expected = objective(loss, row_list, now, mode, {})
        assert expected != pytest.approx(objective(getattr(papers, name), row_list, now, mode, {}), rel=1e-2)
        seen = [
            update(ranks, path, name, settings, micro_batch_tokens=budget, aggregation=mode) for budget in (9999, 32)
        ]
        if number == 0:
            seen.append(update(ranks, shuffled, name, settings, micro_batch_tokens=32, aggregation=mode))
        for metrics in seen:
            assert metrics["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-5), (name, mode)
            assert metrics["grad_norm"] == pytest.approx(seen[0]["grad_norm"], rel=1e-4), (name, mode)
            for figure in (figure for figure in metrics if figure.startswith("mismatch/")):
                assert metrics[figure] == pytest.approx(seen[0][figure], rel=1e-4, abs=1e-6), figure
        assert seen[0]["grad_norm"] > 1e-3
        assert 0.02 < seen[0]["mismatch/kl_k3"] < 0.05  # half the variance of the noise is 0.03


def test_without_a_pass_of_old_log_probs(one_rank: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """On-policy the weight is current over rollout; with the rollout's as the old ones the ratio is.

    There rejection measures from the current policy, too. Control: the noise of the old log-probs is not in it.
    """
    one_rank.build(folder_of(SHAPE), actor={"zero_stage": 2})
    path = tmp_path / "rows.parquet"
    rows, now_T, rollout = drawn_rows(one_rank, folder_of(SHAPE), path)
    flat_T = np.concatenate(rollout)
    bare = Rows(rows.prompts, rows.responses, rows.mask, {"advantages": rows.columns["advantages"]})
    for proximal, old_T in (("recomputed", now_T), ("rollout", flat_T)):
        columns = {"logprobs_rollout": flat_T} | ({"logprobs_old": flat_T} if proximal == "rollout" else {})
        write_rows(path, with_columns(bare, columns))
        settings = {"proximal": proximal, "reject": {"seq_mean_k1": 0.1}}
        settings |= {"weights": "token", "cap": 1.5} if proximal == "recomputed" else {}
        row_list = sequences(with_columns(bare, {"logprobs_old": old_T}), now_T, "ppo_clip")
        loss = corrected_loss(row_list, rollout, "ppo_clip", Correction(**settings))
        expected = objective(loss, row_list, [row.logprobs for row in row_list], "token-mean", {})
        metrics = update(one_rank, path, "ppo_clip", settings, micro_batch_tokens=32)
        assert metrics["loss"] == pytest.approx(expected, rel=1e-4)
        assert (metrics["ratio"] == 1.0) == (proximal == "recomputed")
        assert 0 < metrics["mismatch/rejected_share"] < 1
        far_T = np.exp(now_T.astype(np.float64)) - np.exp(flat_T)
        largest = np.abs(far_T[rows.mask.values_T > 0]).max()
        assert metrics["mismatch/probability_difference_max"] == pytest.approx(largest, rel=1e-4)


def test_vllms_log_probs_are_the_trainers_until_the_weights_move(
    one_rank: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Of the distribution at the temperature that was drawn from, one per token, in the order of the tokens.

    Controls: those at another temperature are far off, and so is the trainer after an update without a reshard.
    """
    folder = folder_of(Shape("qwen3", tied=False))
    one_rank.build(folder, ("actor", "rollout"), algorithm={"correction": {}})
    sampling = {"samples": 2, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_tokens": 20, "ignore_eos": False}
    asked = {"prompts": PROMPTS, "tokenizer": str(folder)}
    (reply,) = one_rank.ask("generate", sampling={**sampling, "seed": [7, 0, 0], "logprobs": True}, **asked)
    (silent,) = one_rank.ask("generate", sampling={**sampling, "seed": [7, 0, 0]}, **asked)
    assert silent.logprobs_T is None
    np.testing.assert_array_equal(silent.responses.values_T, reply.responses.values_T)

    drawn_T, responses = reply.logprobs_T, reply.responses
    assert drawn_T.dtype == np.float32
    assert len(set(responses.lengths_B.tolist())) >= 3
    ones = Ragged(np.ones(len(drawn_T), np.uint8), responses.offsets_B1)
    rows = Rows(PROMPTS.take(np.repeat(reply.positions_P, 2)), responses, ones, {})
    random = np.random.default_rng(0)
    rows = with_columns(rows, {"advantages": random.normal(size=len(drawn_T)), "logprobs_rollout": drawn_T})
    path = write_rows(tmp_path / "rows.parquet", rows)
    scored = {"path": path, "role": "actor", "budget": 10_000}
    at_07, at_1 = (gathered(rows, one_rank.ask("logprobs", temperature=value, **scored)) for value in (0.7, 1.0))
    np.testing.assert_allclose(drawn_T, at_07, rtol=0, atol=1e-4)
    assert np.abs(drawn_T - at_1).mean() > 0.05

    loss = {**LOSS, "temperature": 0.7, "correction": asdict(Correction(weights="token", cap=2.0))}
    step = {"path": path, "version": 0, "split": SPLIT, "loss": loss, "learning_rate": 1e-3}
    same, moved = (one_rank.ask("update_actor", **step)[0] for _ in range(2))
    assert same["mismatch/probability_difference_max"] < 1e-4
    assert same["mismatch/effective_sample_share"] == pytest.approx(1.0, abs=1e-6)
    assert same["mismatch/perplexity_ratio"] == pytest.approx(1.0, abs=1e-4)
    for name in ("kl_k3", "chi2", "probability_difference_mean", "probability_difference_max"):
        assert moved[f"mismatch/{name}"] > 10 * abs(same[f"mismatch/{name}"]), name
    assert moved["mismatch/effective_sample_share"] < 0.999
    assert moved["mismatch/probability_correlation"] < same["mismatch/probability_correlation"]
