"""Ranks that share out the experts of a mixture are one rank: log-probs, figures, gradient norm, weights after steps.

Numbers are float32 and of the same terms; ranks add them up in another order, so they agree to 1e-5 of weights and
losses that are about 1. The controls are experts that change places and tokens that do not come back.

Left out: GPUs, where NCCL takes the place of gloo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.base.ragged import Ragged
from penstock.benchmarks.workload.families import write_family
from penstock.engines.batches.packing import Rows
from penstock.state.experience import ROUTES, add_columns
from tests.engines.rows import LOSS, SPLIT, gathered, random_rows, write_rows
from tests.engines.shared_ranks import Ranks
from tests.engines.unpacked import STEADY, UNCLIPPED

CLOSE, CLIPPED = 1e-5, 0.1
RATES = {CLIPPED: 1.0, UNCLIPPED: 0.02}  # of clipped gradients so high that weights move by far more than rounding


def _actor(ranks: int, stage: int = 1, norm: float = CLIPPED, **more: Any) -> dict[str, Any]:
    return {"zero_stage": stage, "optimizer": {**STEADY, "max_grad_norm": norm}, "expert_parallel": ranks, **more}


def _logprobs(ranks: Ranks, rows: Rows, path: str, role: str = "actor", **more: Any) -> np.ndarray:
    return gathered(rows, ranks.ask("logprobs", path=path, role=role, temperature=0.9, budget=200, **more))


def _update(ranks: Ranks, path: str, rate: float = RATES[CLIPPED]) -> dict[str, float]:
    split = {**SPLIT, "epochs": 2, "micro_batch_tokens": 200}
    replies = ranks.ask("update_actor", path=path, version=-1, split=split, loss=LOSS, learning_rate=rate)
    assert all(reply == replies[0] for reply in replies)
    figures: dict[str, float] = replies[0]
    return figures


def _assert_alike(one: dict[str, float], several: dict[str, float]) -> None:
    """Every figure but those that are means over micro-batches, which ranks cut in another way."""
    differing = {
        "micro_batches",
        "computed_share",
        "branched_share",
        "routing_mismatch",
        "router_loss",
        "expert_load_max",
    }
    for name in one.keys() - differing:
        assert several[name] == pytest.approx(one[name], rel=CLOSE, abs=CLOSE), name


def _assert_close(one: dict[str, torch.Tensor], several: dict[str, torch.Tensor]) -> None:
    assert one.keys() == several.keys()
    for name, value in one.items():
        torch.testing.assert_close(several[name], value, rtol=0, atol=CLOSE)


def _learnt(before: torch.Tensor, after: torch.Tensor, rate: float = RATES[CLIPPED]) -> float:
    """How far a weight has moved in two steps, besides by its decay."""
    return float((after - before * (1 - rate * STEADY["weight_decay"]) ** 2).abs().max())


def _least(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], rate: float = RATES[CLIPPED]) -> float:
    """How far the parameter of experts has moved that moved least."""
    return min(_learnt(before[name], after[name], rate) for name in before if ".experts." in name)


@pytest.mark.parametrize(
    ("family", "stage", "norm"),
    [
        ("Mixtral", 1, CLIPPED),
        ("Qwen 3 MoE", 2, CLIPPED),
        ("OLMoE", 2, UNCLIPPED),
        ("GLM-4.5", 1, CLIPPED),
        *(
            pytest.param(family, stage, CLIPPED, marks=pytest.mark.exhaustive)
            for family, stage in (
                ("Qwen 2 MoE", 1),
                ("EXAONE MoE", 2),
                ("Trinity", 1),
                ("Command A+", 2),
                ("Granite MoE", 1),
            )
        ),
    ],
)
def test_two_ranks_are_one(
    family: str, stage: int, norm: float, one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    """Log-probs, figures, gradient norm and all weights after two steps, each rank with half of the experts.

    Controls: every expert moves further than they differ; lost tokens and experts in each other's places show.
    """
    folder, rows = write_family(family, tmp_path / "model"), random_rows(16)
    path = write_rows(tmp_path / "rows.parquet", rows)
    one_rank.build(folder, actor=_actor(1, stage, norm))
    built = two_ranks.build(folder, actor=_actor(2, stage, norm))
    held = [sum(reply["count"] for reply in ranks.ask("numbers_held", role="actor")) for ranks in (one_rank, two_ranks)]
    before = one_rank.parameters()
    experts = sum(value.numel() for name, value in before.items() if ".experts." in name)
    assert built.parameters == held[0]
    assert held[1] == 2 * held[0] - experts
    expected_T, found_T = (_logprobs(ranks, rows, path) for ranks in (one_rank, two_ranks))
    np.testing.assert_allclose(found_T, expected_T, rtol=0, atol=CLOSE)
    for how in ("lost", "swapped"):
        two_ranks.ask("experts_astray", how=how)
        assert np.abs(_logprobs(two_ranks, rows, path) - expected_T).max() > 0.1, how
    two_ranks.ask("experts_astray", how="")
    figures = [_update(ranks, path, RATES[norm]) for ranks in (one_rank, two_ranks)]
    _assert_alike(*figures)
    assert figures[0]["grad_norm"] > 2 * CLIPPED
    after = one_rank.parameters()
    _assert_close(after, two_ranks.parameters())
    assert _least(before, after, RATES[norm]) > 10 * CLOSE
    moments = [reply["elements"] for reply in two_ranks.ask("moments", role="actor")]
    assert moments == [pytest.approx(held[0] / 2, rel=0.01)] * 2


def test_ranks_to_whose_experts_no_token_goes_come_along(one_rank: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    """All tokens take the first rank's experts, also in what the backward pass computes again.

    Controls: the experts of the second rank get no gradient, and the others do; with the router's own they do, too.
    """
    folder, rows = write_family("Mixtral", tmp_path / "model"), random_rows(8)
    path = write_rows(tmp_path / "rows.parquet", rows)
    lengths_B = rows.prompts.lengths_B + rows.responses.lengths_B
    taken = [np.tile(np.array([0, 1], np.uint8), 2 * length) for length in lengths_B]  # of both layers
    add_columns(tmp_path / "rows.parquet", {ROUTES: Ragged.of(taken, np.uint8)})
    learnt = []
    for routing in ("replay", "own"):
        found, replayed = [], routing == "replay"
        for count, ranks in ((1, one_rank), (2, two_ranks)):
            ranks.build(folder, actor=_actor(count, routing=routing, gradient_checkpointing=True))
            before = ranks.parameters()
            logprobs_T = _logprobs(ranks, rows, path, replayed=replayed)
            found.append((logprobs_T, _update(ranks, path), ranks.parameters()))
        np.testing.assert_allclose(found[1][0], found[0][0], rtol=0, atol=CLOSE)
        _assert_alike(found[0][1], found[1][1])
        _assert_close(found[0][2], found[1][2])
        (name,) = [name for name in before if name.endswith("layers.0.mlp.experts.down_proj")]
        halves = zip(before[name].chunk(2), found[1][2][name].chunk(2), strict=True)
        learnt.append([_learnt(*half) > 10 * CLOSE for half in halves])
    assert learnt == [[True, False], [True, True]]


def test_a_state_goes_on_with_its_experts_on_other_ranks(one_rank: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    """Saved by two ranks with half of the experts each: there it goes on bit by bit, elsewhere to rounding.

    Control: without the saved state the next step ends elsewhere.
    """
    folder, saved = write_family("Qwen 3 MoE", tmp_path / "model"), tmp_path / "saved"
    path = write_rows(tmp_path / "rows.parquet", random_rows(8))
    saved.mkdir()
    two_ranks.build(folder, actor=_actor(2, 2))
    _update(two_ranks, path)
    two_ranks.ask("save", folder=str(saved))
    figures, weights = [_update(two_ranks, path)], [two_ranks.parameters()]
    for count, stage, ranks in ((2, 2, two_ranks), (2, 1, two_ranks), (1, 1, two_ranks), (1, 2, one_rank)):
        ranks.build(folder, actor=_actor(count, stage))
        ranks.ask("load", folder=str(saved), version=0)
        figures.append(_update(ranks, path))
        weights.append(ranks.parameters())
    assert figures[1] == figures[0]
    assert all(torch.equal(value, weights[0][name]) for name, value in weights[1].items())
    for other in (2, 3, 4):
        _assert_alike(figures[0], figures[other])
        _assert_close(weights[0], weights[other])
    one_rank.build(folder, actor=_actor(1, 2))
    _update(one_rank, path)
    assert _least(one_rank.parameters(), weights[0]) > 10 * CLOSE


def test_a_reference_becomes_the_actor_whole(two_ranks: Ranks, tmp_path: Path) -> None:
    """Both sides report the same digest, and tokens get the same log-probs. Control: before they do not."""
    folder, rows = write_family("OLMoE", tmp_path / "model"), random_rows(8)
    path = write_rows(tmp_path / "rows.parquet", rows)
    two_ranks.build(folder, ("actor", "reference"), algorithm={"kl": {"refresh_every": 1}}, actor=_actor(2))
    _update(two_ranks, path)

    def gap() -> float:
        actor_T, reference_T = (_logprobs(two_ranks, rows, path, role) for role in ("actor", "reference"))
        return float(np.abs(actor_T - reference_T).max())

    assert gap() > 100 * CLOSE
    digests = [reply.digests for reply in two_ranks.ask("refresh_reference")]
    assert len({each for both in digests for each in both}) == 1
    assert gap() < CLOSE


@pytest.mark.slow
@pytest.mark.exhaustive
def test_sets_of_ranks_with_the_same_experts_add_up_what_they_learn(
    one_rank: Ranks, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Four ranks in two sets. A state goes on with all experts on each rank."""
    folder, saved = write_family("Mixtral", tmp_path / "model"), tmp_path / "saved"
    path = write_rows(tmp_path / "rows.parquet", random_rows(16))
    saved.mkdir()
    ranks = Ranks.start(4, tmp_path_factory.mktemp("four-ranks"))
    try:
        for stage in (1, 2):
            one_rank.build(folder, actor=_actor(1, stage))
            before, expected = one_rank.parameters(), _update(one_rank, path)
            ranks.build(folder, actor=_actor(2, stage))
            _assert_alike(expected, _update(ranks, path))
            after = one_rank.parameters()
            _assert_close(after, ranks.parameters())
            assert _least(before, after) > 10 * CLOSE
        ranks.ask("save", folder=str(saved))
    finally:
        ranks.group.close(grace_s=1.0)
    one_rank.build(folder, actor=_actor(1, 2))
    one_rank.ask("load", folder=str(saved), version=0)
    _assert_close(after, one_rank.parameters())


def test_in_bfloat16_ranks_clip_alike(one_rank: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    """DeepSpeed's other optimizer, with sums in float32: norms and moments to the rounding of bfloat16 gradients."""
    folder = write_family("Qwen 3 MoE", tmp_path / "model")
    path = write_rows(tmp_path / "rows.parquet", random_rows(16))
    found = []
    for count, ranks in ((1, one_rank), (2, two_ranks)):
        ranks.build(folder, model={"path": str(folder), "dtype": "bfloat16"}, actor=_actor(count))
        before = ranks.parameters()
        found.append((_update(ranks, path), ranks.parameters()))
    assert found[1][0]["grad_norm"] == pytest.approx(found[0][0]["grad_norm"], rel=0.02)
    moved = [torch.cat([(after[name] - before[name]).flatten() for name in before]) for _, after in found]
    assert torch.nn.functional.cosine_similarity(*moved, dim=0) > 0.95
