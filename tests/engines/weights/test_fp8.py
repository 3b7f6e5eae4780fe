"""vLLM computes in FP8 with what each reshard makes of the actor's weights, however these come to it.

Real engines on the CPU, in float32, with the processor's products in FP8. What is seen there is which numbers are
multiplied; kernels, graphs and speed are a GPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.base.ragged import Ragged
from penstock.engines.kernels.fp8_linear import FP8, fp8_output, scaled
from penstock.engines.rollout.fp8 import weights
from penstock.engines.rollout.fp8.weights import Fp8Copies, Fp8Products
from tests.engines.rows import LOSS, SPLIT, random_rows, write_rows
from tests.engines.shared_ranks import SMALL, Ranks, Shape

ROLES = ("actor", "rollout")
LAYERS = 2 * 4  # q, k and v together, o, gate and up together, down
BYTES = 2 * (128 * (256 + 128 + 192 + 96) + 4 * (256 + 128 + 192 + 128))  # of matrices and of scales


EQUAL = 1e-5  # mean difference of log-probs in float32
ROUNDED = 0.05  # what eight bits do to them at least, with weights so wide; seen 0.13 to 0.22


def _gap(ranks: Ranks, in_fp8: bool = False) -> float:
    """Mean difference between vLLM's and the trainer's log-probs; `in_fp8`: the trainer's with the same arithmetic."""
    asked = Ragged.of([np.arange(3, 3 + length) % 61 + 3 for length in (1, 4, 7, 2)], np.int32)
    rows = {"prompts": asked.values_T, "offsets": asked.offsets_B1}
    (reply,) = ranks.ask("rollout_logprobs", **rows, tokens=12, in_fp8=in_fp8)
    return float(np.abs(reply["vllm"] - reply["trainer"]).mean())


def _step(ranks: Ranks, folder: Path, version: int) -> None:
    path = write_rows(folder / f"{version}.parquet", random_rows(8, seed=version))
    split = {**SPLIT, "mini_batches": 2, "micro_batch_tokens": 32}
    ranks.ask("update_actor", path=path, version=version, split=split, loss=LOSS, learning_rate=1e-2)


class Layer(nn.Module):
    """A linear layer that computes as vLLM's do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 64, generator=torch.Generator().manual_seed(0)))
        self.weight_fp8 = nn.Parameter(torch.zeros(48, 64, dtype=FP8), requires_grad=False)
        self.weight_scales = nn.Parameter(torch.zeros(48), requires_grad=False)
        self.quant_method = Fp8Products()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As vLLM's layers call it."""
        return self.quant_method.apply(self, input)


@torch.no_grad()
def test_code_that_was_compiled_once_reads_what_later_reshards_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one graph for all numbers of tokens, as vLLM compiles it; copies are made some rows at a time.

    Control: before the reshard it computes with the older copy.
    """
    monkeypatch.setattr(weights, "AT_ONCE", 64 * 10)
    layer, input = Layer(), torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    copies = Fp8Copies(nn.ModuleList([layer]))
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for factor in (1.0, 2.0):
        layer.weight *= factor
        wanted = fp8_output(input, scaled(layer.weight))
        assert not torch.equal(compiled(input), wanted)
        assert copies() == 48 * 64 + 48 * 4
        assert torch.equal(compiled(input), wanted)
        torch.testing.assert_close(compiled(input[:3]), wanted[:3])


@pytest.mark.parametrize(
    ("shape", "actor"),
    [
        pytest.param(Shape("qwen2", tied=True), {"zero_stage": 1, "fp8": True}, marks=pytest.mark.slow),
        pytest.param(Shape("qwen3", tied=False), {"zero_stage": 3}, marks=pytest.mark.exhaustive),
    ],
    ids=["shared", "gathered"],
)
def test_vllm_computes_with_what_a_reshard_makes_of_the_actors_weights(
    shape: Shape, actor: dict[str, Any], one_rank: Ranks, folder_of: Callable[[Shape], Path], tmp_path: Path
) -> None:
    """Copies are made bit for bit, and vLLM's log-probs are those of a trainer with the same arithmetic.

    That is `actor.fp8` where all is shared: both have one scale for a row and one for a token, and biases are added
    before the sum is rounded. Controls: where only one of them computes so they differ by rounding; copies are stale
    in between; one with a wrong bit is refused.
    """
    built = one_rank.build(folder_of(shape), ROLES, actor=actor, rollout={**SMALL["rollout"], "weights": "fp8"})
    own = one_rank.ask("mismatches")[0]["of"] - 2 * LAYERS
    shared = built.strategy == "shared"
    assert (built.parameters_shared, built.parameters_copied) == ((own, LAYERS) if shared else (0, own + LAYERS))
    for version in range(2):
        assert one_rank.ask("copies_in_fp8") == [{"stale": [], "of": LAYERS, "bytes": BYTES}]
        assert _gap(one_rank, in_fp8=not shared) < EQUAL
        assert shared or _gap(one_rank) > ROUNDED
        _step(one_rank, tmp_path, version)
        assert len(one_rank.ask("copies_in_fp8")[0]["stale"]) == LAYERS
        assert _gap(one_rank, in_fp8=not shared) > ROUNDED
        (reply,) = one_rank.ask("reshard", version=version + 1)
        assert reply.bytes - (0 if shared else 4 * built.parameters) == BYTES
    look = "penstock.engines.rollout.fp8.weights.differs"
    (damaged,) = one_rank.ask("spoiled_refusal", arguments={"version": 3}, look=look, rank=0)
    assert "1 rollout parameters are not the actor's: model.layers.0.self_attn.qkv_proj.weight_fp8" in damaged["error"]
    if shared:
        built = one_rank.build(folder_of(shape), ROLES, actor=actor)
        assert (built.parameters_shared, built.parameters_copied) == (own, 0)
        assert _gap(one_rank) > ROUNDED


def test_copies_are_made_of_merged_adapters(
    one_rank: Ranks, folder_of: Callable[[Shape], Path], tmp_path: Path
) -> None:
    """Of the sum of base and adapters that vLLM has for them. Control: they are stale until the reshard."""
    one_rank.build(
        folder_of(Shape("llama", tied=False)),
        ROLES,
        actor={"lora": {"rank": 4}},
        rollout={**SMALL["rollout"], "weights": "fp8"},
    )
    assert _gap(one_rank, in_fp8=True) < EQUAL  # adapters begin at zero
    _step(one_rank, tmp_path, 0)
    assert len(one_rank.ask("copies_in_fp8")[0]["stale"]) == LAYERS
    one_rank.ask("reshard", version=1)
    assert one_rank.ask("copies_in_fp8") == [{"stale": [], "of": LAYERS, "bytes": BYTES}]
