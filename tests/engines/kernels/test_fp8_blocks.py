"""A model whose blocks compute in FP8: which layers do, its gradients, and updates, log-probs, references of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from penstock.engines.batches.packing import pack
from penstock.engines.kernels import fp8_blocks
from penstock.engines.kernels.fp8_blocks import Fp8Mlp, compute_in_fp8
from penstock.engines.kernels.weight_gradients import SummedLinear, sum_in_products
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.models import PackedPolicy, compile_blocks
from tests.engines.rows import LOSS, SPLIT, gathered, random_rows, write_rows
from tests.engines.shared_ranks import Ranks, Shape
from tests.engines.sums import sums_of

FolderOf = Callable[[Shape], Path]
SHAPES = [Shape("qwen2", tied=True), Shape("qwen3", tied=False)]
BLOCKS = 2
MICRO_BATCHES = [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11]]  # rows


def _policy(folder: Path, summed: bool, checkpointing: bool = False) -> tuple[PackedPolicy, dict[str, Tensor]]:
    policy = PackedPolicy(load_causal_lm(folder, torch.bfloat16, checkpointing)).train()
    optimizer, sums = sums_of(policy)
    if summed:
        sum_in_products(policy, optimizer)
    return policy, sums


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.architecture)
@pytest.mark.parametrize("summed", [True, False])
def test_the_linear_layers_of_blocks_compute_so_and_nothing_else(
    summed: bool, shape: Shape, folder_of: FolderOf
) -> None:
    """Under the names and in the storage that parameters had; with sums q, k and v are one product, and so is the MLP.

    Weights stay bfloat16 and in no checkpoint is anything else. Control: what is not a family's linear layer of a block
    is left out: the head has no copy.
    """
    policy, _ = _policy(folder_of(shape), summed)
    named = {name: value.data_ptr() for name, value in policy.named_parameters()}
    found = compute_in_fp8(policy)
    assert len(found.weights) == BLOCKS * (4 if summed else 7)
    assert {name: value.data_ptr() for name, value in policy.named_parameters()} == named
    assert {value.dtype for value in policy.state_dict().values()} == {torch.bfloat16}
    assert sum(isinstance(module, Fp8Mlp) for module in policy.modules()) == (BLOCKS if summed else 0)
    assert sum(isinstance(module, SummedLinear) for module in policy.modules()) == BLOCKS * 7
    assert type(policy.lm.lm_head) is nn.Linear
    assert not any(parameter.data_ptr() == policy.head.weight.data_ptr() for parameter in _rounded(found))


def test_layers_that_come_stacked_compute_so_too(folder_of: FolderOf) -> None:
    """Queries, keys and values as one, gate and up as one. Control: the head does not."""
    policy, _ = _policy(folder_of(Shape("phi3", tied=False)), True)
    assert len(compute_in_fp8(policy).weights) == BLOCKS * 4
    without = [name for name, module in policy.named_modules() if type(module) is nn.Linear]
    assert without == ["lm.lm_head"]


def _rounded(found: fp8_blocks.Fp8Blocks) -> list[Tensor]:
    return [weight._weight_OI for weight in found.weights]


def _trained(
    policy: PackedPolicy, sums: dict[str, Tensor], micro_batches: list[list[int]] = MICRO_BATCHES
) -> dict[str, Tensor]:
    """Gradients over micro-batches, wherever they are summed."""
    rows, found = random_rows(12, samples=2), {}
    for name, parameter in policy.named_parameters():
        found[name] = torch.zeros(parameter.numel())
    for index in micro_batches:
        batch = pack(rows, index, torch.device("cpu"))
        (policy(batch, 1.0)[0] * batch.columns["advantages"]).sum().backward()
        for name, parameter in policy.named_parameters():
            if parameter.grad is not None:
                found[name] += parameter.grad.float().flatten()
                parameter.grad = None
    return {name: value + sums.get(name, 0) for name, value in found.items()}


@pytest.mark.parametrize(
    ("summed", "compiled"),
    [
        (True, False),
        (False, False),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(False, True, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_a_models_gradients_point_where_float32s_do(
    summed: bool, compiled: bool, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled, in as many graphs as without, so a micro-batch of another length is not compiled anew.

    Control: those in bfloat16 are several times nearer; FP8 is there.
    """
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager", fullgraph=True))
    folder, ways, graphs = folder_of(SHAPES[1]), [], []
    exact = _trained(PackedPolicy(load_causal_lm(folder, torch.bfloat16, False).float()).train(), {})
    for fp8 in (False, True):
        torch._dynamo.reset()
        counters.clear()
        policy, sums = _policy(folder, summed)
        if fp8:
            compute_in_fp8(policy)
        if compiled:
            compile_blocks(policy.lm)
        made = _trained(policy, sums if summed else {})
        graphs.append(counters["stats"]["unique_graphs"])
        both = [torch.cat([values[name] for name in exact]) for values in (made, exact)]
        ways.append(float(torch.cosine_similarity(*both, dim=0)))
    assert graphs[0] == graphs[1] and (graphs[1] > 0) is compiled
    usual, ours = (1 - cosine for cosine in ways)
    assert 3 * usual < ours < 0.05


def test_recomputed_blocks_have_the_same_gradients(folder_of: FolderOf) -> None:
    """To the bit. Control: in bfloat16 they are others."""
    found = []
    for checkpointing, fp8 in ((False, True), (True, True), (True, False)):
        policy, sums = _policy(folder_of(SHAPES[0]), True, checkpointing)
        if fp8:
            compute_in_fp8(policy)
        made = _trained(policy, sums, MICRO_BATCHES[1:2])
        found.append(torch.cat(list(made.values())))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_the_gradient_through_the_activation_is_autograds() -> None:
    """Of gate and up, in float32; and the activation is what the forward pass made. Control: of relu it is another."""
    torch.manual_seed(0)
    both_N2F = torch.randn(9, 32).requires_grad_()
    grad_NF = torch.randn(9, 16)
    *grads_NF, activated_NF = fp8_blocks._through_activation(grad_NF, both_N2F.detach())
    for function, same in ((nn.functional.silu, True), (torch.relu, False)):
        gate_NF, up_NF = both_N2F.chunk(2, -1)
        output = function(gate_NF) * up_NF
        (wanted,) = torch.autograd.grad(output, both_N2F, grad_NF)
        assert torch.allclose(torch.cat(grads_NF, -1), wanted, atol=1e-5) is same
        assert torch.allclose(activated_NF, output, atol=1e-5) is same


def _update(tmp_path: Path, rows: Any) -> dict[str, Any]:
    return {
        "path": write_rows(tmp_path / "rows.parquet", rows),
        "version": -1,
        "split": {**SPLIT, "micro_batch_tokens": 64},
        "loss": LOSS,
        "learning_rate": 1e-2,
    }


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_updates_train_alike_and_passes_go_with_the_weights(
    zero_stage: int, one_rank: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """The first update's norm is near bfloat16's. A refreshed reference has the stepped actor's log-probs, to the bit.

    So both compute with the weights as they are after the step; and the actor, after going back, with those before it.
    Control: weights that change unsaid leave their copies outdated.
    """
    rows = random_rows(8, samples=2)
    update, norms, kl = _update(tmp_path, rows), {}, {"estimator": "k3", "refresh_every": 1}
    for fp8 in (False, True):
        one_rank.build(
            folder_of(SHAPES[0]),
            ("actor", "reference"),
            actor={"zero_stage": zero_stage, "fp8": fp8},
            model={"dtype": "bfloat16"},
            algorithm={"kl": kl},
        )

        def logprobs(role: str) -> np.ndarray:
            return gathered(rows, one_rank.ask("logprobs", path=update["path"], role=role, budget=64, temperature=1.0))

        begun = logprobs("actor")
        assert np.array_equal(begun, logprobs("reference"))
        saved = tmp_path / f"saved-{fp8}"
        saved.mkdir()
        one_rank.ask("save", folder=str(saved))
        norms[fp8] = one_rank.ask("update_actor", **update)[0]
        stepped = logprobs("actor")
        assert not np.array_equal(begun, stepped) and np.array_equal(begun, logprobs("reference"))
        if fp8:
            layers = 7 if zero_stage == 2 else 4
            assert one_rank.ask("outdated_fp8")[0] == {"actor": 0, "disturbed": BLOCKS * layers}
        one_rank.ask("refresh_reference")
        assert np.array_equal(stepped, logprobs("reference"))
        one_rank.ask("load", folder=str(saved), version=-1)
        assert np.array_equal(begun, logprobs("actor"))
    assert norms[True]["grad_norm"] != norms[False]["grad_norm"]
    assert norms[True]["grad_norm"] == pytest.approx(norms[False]["grad_norm"], rel=0.1)
