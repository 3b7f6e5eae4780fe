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

from penstock.benchmarks.workload.families import write_family
from penstock.engines.batches.packing import Rows
from tests.engines.rows import LOSS, SPLIT, gathered, random_rows, write_rows
from tests.engines.shared_ranks import Ranks
from tests.engines.unpacked import STEADY, UNCLIPPED

RATE, CLOSE, CLIPPED = 0.02, 1e-5, 0.01


def _actor(ranks: int, stage: int = 1, norm: float = CLIPPED, **more: Any) -> dict[str, Any]:
    return {"zero_stage": stage, "optimizer": {**STEADY, "max_grad_norm": norm}, "expert_parallel": ranks, **more}


def _logprobs(ranks: Ranks, rows: Rows, path: str) -> np.ndarray:
    return gathered(rows, ranks.ask("logprobs", path=path, role="actor", temperature=0.9, budget=200))


def _update(ranks: Ranks, path: str, budget: int = 200, loss: dict[str, Any] = LOSS) -> dict[str, float]:
    split = {**SPLIT, "epochs": 2, "micro_batch_tokens": budget}
    replies = ranks.ask("update_actor", path=path, version=-1, split=split, loss=loss, learning_rate=RATE)
    assert all(reply == replies[0] for reply in replies)
    figures: dict[str, float] = replies[0]
    return figures


def _assert_alike(one: dict[str, float], several: dict[str, float]) -> None:
    """Every figure but those that are means over micro-batches, which ranks cut in another way."""
    differing = {"micro_batches", "computed_share", "branched_share", "router_loss", "expert_load_max"}
    for name in one.keys() - differing:
        assert several[name] == pytest.approx(one[name], rel=CLOSE, abs=CLOSE), name


def _assert_close(one: dict[str, torch.Tensor], several: dict[str, torch.Tensor]) -> None:
    assert one.keys() == several.keys()
    for name, value in one.items():
        torch.testing.assert_close(several[name], value, rtol=0, atol=CLOSE)


def _moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    return min(float((after[name] - before[name]).abs().max()) for name in before if "experts" in name)


@pytest.mark.parametrize(
    ("family", "stage", "norm"),
    [
        ("Mixtral", 1, CLIPPED),
        ("Qwen 2 MoE", 1, CLIPPED),
        ("Qwen 3 MoE", 2, CLIPPED),
        ("OLMoE", 2, UNCLIPPED),
        ("GLM-4.5", 1, CLIPPED),
        ("EXAONE MoE", 2, CLIPPED),
        ("Trinity", 1, CLIPPED),
        ("Command A+", 2, CLIPPED),
        ("Granite MoE", 1, CLIPPED),
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
    figures = [_update(ranks, path) for ranks in (one_rank, two_ranks)]
    _assert_alike(*figures)
    assert figures[0]["grad_norm"] > 10 * CLIPPED
    after = one_rank.parameters()
    _assert_close(after, two_ranks.parameters())
    assert _moved(before, after) > 10 * CLOSE
