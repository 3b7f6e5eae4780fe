"""Updates of a mixture of experts: the figures of its routers, and the loss that has its experts used evenly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.algorithms.expert_balance import expert_balance
from penstock.benchmarks.workload.families import write_family
from penstock.engines.batches.packing import Rows
from tests.engines.rows import LOSS, SPLIT, random_rows, write_rows
from tests.engines.shared_ranks import Ranks, Shape

FAMILIES = ["Mixtral", "OLMoE", "Qwen 3 MoE", "Command A+", "Granite MoE"]


def update(ranks: Ranks, path: str, rate: float, coefficient: float = 0.0, budget: int = 10_000) -> dict[str, float]:
    loss = {**LOSS, "router_loss_coefficient": coefficient}
    split: dict[str, Any] = {**SPLIT, "micro_batch_tokens": budget}
    reply: dict[str, float] = ranks.ask(
        "update_actor", path=path, version=-1, split=split, loss=loss, learning_rate=rate
    )[0]
    return reply


def balance_by_the_library(folder: Path, rows: Rows) -> tuple[float, float]:
    """Loss and load of all tokens of rows, each computed by itself; means over the layers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits: list[list[torch.Tensor]] = []
    for row in range(len(rows)):
        tokens = torch.tensor([*rows.prompts.row(row), *rows.responses.row(row)])[None].long()
        logits.append(list(model(tokens, output_router_logits=True).router_logits))
    layers = [expert_balance(torch.cat(layer), model.config.num_experts_per_tok) for layer in zip(*logits, strict=True)]
    losses, loads = (torch.stack(values).mean() for values in zip(*layers, strict=True))
    return losses.item(), loads.item()


@pytest.mark.parametrize(("family", "recomputed"), [*((family, False) for family in FAMILIES), ("Mixtral", True)])
def test_figures_are_of_every_token_that_the_update_computes(
    one_rank: Ranks, family: str, recomputed: bool, tmp_path: Path
) -> None:
    """One micro-batch of rows without a common prompt, beside the library's routers row by row.

    Blocks that are computed again for the backward pass are not counted again.
    """
    folder = write_family(family, tmp_path / "model")
    one_rank.build(folder, actor={"gradient_checkpointing": recomputed})
    rows = random_rows(8)
    figures = update(one_rank, write_rows(tmp_path / "rows.parquet", rows), 0.0)
    assert (figures["router_loss"], figures["expert_load_max"]) == pytest.approx(
        balance_by_the_library(folder, rows), rel=1e-5
    )


def test_the_loss_has_experts_used_evenly(one_rank: Ranks, tmp_path: Path) -> None:
    """Twenty steps in several micro-batches each. Control: the same steps without it."""
    folder, path = write_family("Qwen 3 MoE", tmp_path / "model"), tmp_path / "rows.parquet"
    write_rows(path, random_rows(24))
    ends = {}
    for coefficient in (0.0, 1.0):
        one_rank.build(folder)
        for _ in range(20):
            figures = update(one_rank, str(path), 3e-3, coefficient, budget=150)
        assert figures["micro_batches"] > 2
        ends[coefficient] = update(one_rank, str(path), 0.0)
    assert ends[1.0]["router_loss"] < 2.02 < 2.05 < ends[0.0]["router_loss"]
    assert ends[1.0]["expert_load_max"] < ends[0.0]["expert_load_max"]


def test_routers_whose_logits_do_not_tell_have_no_such_figures(one_rank: Ranks, tmp_path: Path) -> None:
    """GLM-4.5 corrects the choice: by its logits others would be chosen, and by them some are. No step changes that."""
    one_rank.build(write_family("GLM-4.5", tmp_path / "model"))
    before = one_rank.parameters()
    figures = update(one_rank, write_rows(tmp_path / "rows.parquet", random_rows(8)), 1e-2)
    assert not figures.keys() & {"router_loss", "expert_load_max"}
    moved = {name for name, value in one_rank.parameters().items() if not torch.equal(value, before[name])}
    assert before.keys() - moved == {"lm.model.layers.1.mlp.gate.e_score_correction_bias"}


def test_a_dense_model_has_no_such_figures(one_rank: Ranks, folder_of: Callable[[Shape], Path], tmp_path: Path) -> None:
    one_rank.build(folder_of(Shape("qwen3", tied=True)))
    figures = update(one_rank, write_rows(tmp_path / "rows.parquet", random_rows(8)), 0.0)
    assert not figures.keys() & {"router_loss", "expert_load_max"}
