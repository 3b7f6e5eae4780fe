"""Weight gradients that matrix products add to sums: the sums, what is compiled, what DeepSpeed makes of them.

Suffixes: `_NI` tokens x in, `_NO` tokens x out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import compilation_time_metrics, counters
from torch._inductor.utils import fresh_cache

from penstock.configs.sections.trainer import LoraConfig
from penstock.engines.batches.packing import pack
from penstock.engines.kernels import lm_head as logprobs
from penstock.engines.kernels.weight_gradients import (
    JointProduct,
    SummedLinear,
    _SummedProduct,
    add_weight_gradient,
    sum_in_products,
)
from penstock.engines.models import models
from penstock.engines.models.compile import prepare_compiler
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.models import PackedPolicy, compile_blocks
from penstock.engines.weights.lora import attach
from tests.engines.rows import LOSS, SPLIT, random_rows, write_rows
from tests.engines.shared_ranks import Ranks, Shape
from tests.engines.sums import sums_of

FolderOf = Callable[[Shape], Path]
SHAPES = [Shape("qwen2", tied=True), Shape("qwen3", tied=False)]
LINEARS = 7 * 2  # of both blocks
ROUNDING = 2.0**-8  # of bfloat16
CPU = torch.device("cpu")
EMBEDDING = "lm.model.embed_tokens.weight"


def _trained(
    folder: Path, summed: bool, checkpointing: bool, compiled: bool, beside: bool = False
) -> tuple[dict[str, Tensor], set[str]]:
    """Sums over three micro-batches, and the names of the parameters of which autograd saw a gradient."""
    lm = load_causal_lm(folder, torch.bfloat16, checkpointing)
    policy = PackedPolicy(lm).train()
    optimizer, sums = sums_of(policy, beside)
    if summed:
        sum_in_products(policy, optimizer)
    if compiled:
        compile_blocks(lm)
    rows, seen = random_rows(12, samples=2), set()
    for index in ([0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11]):
        batch = pack(rows, index, CPU)
        (policy(batch, 1.0)[0] * batch.columns["advantages"]).sum().backward()
        for name, parameter in policy.named_parameters():
            if parameter.grad is not None:
                sums[name] += parameter.grad.float().flatten()
                parameter.grad = None
                seen.add(name)
    return sums, seen


def _apart(sums: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((sums[name] - other).norm() / other.norm()) for name, other in others.items()}


@pytest.mark.parametrize(
    ("shape", "checkpointing", "compiled"),
    [
        (SHAPES[0], False, False),
        (SHAPES[1], True, False),
        pytest.param(SHAPES[0], False, True, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param(SHAPES[1], True, True, marks=pytest.mark.slow),
    ],
)
def test_sums_are_those_of_the_usual_way_up_to_rounding(
    shape: Shape, compiled: bool, checkpointing: bool, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a block is recomputed; its biases and norms and an untied embedding go the usual way, bit for bit.

    Compiled, a block is one graph, and both blocks share it for the same batches as in the usual way.
    """
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager", fullgraph=True))
    ways, graphs = [], []
    for summed in (False, True):
        torch._dynamo.reset()
        counters.clear()
        ways.append(_trained(folder_of(shape), summed, checkpointing, compiled))
        graphs.append(counters["stats"]["unique_graphs"])
    (usual, seen), (sums, still_seen) = ways
    assert graphs[0] == graphs[1] and (graphs[1] > 0) is compiled
    apart = _apart(sums, usual)
    summed = {name for name, distance in apart.items() if distance}
    assert len(summed) == LINEARS + 1  # and the head
    assert all(apart[name] < ROUNDING for name in summed)
    assert seen - still_seen == summed - ({EMBEDDING} if shape.tied else set())  # it has its own gradient as well


@pytest.mark.parametrize(
    ("shape", "checkpointing", "compiled"),
    [
        (SHAPES[0], False, False),
        (SHAPES[0], True, False),
        (SHAPES[1], False, False),
        pytest.param(SHAPES[0], False, True, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param(SHAPES[0], True, True, marks=pytest.mark.slow),
        pytest.param(SHAPES[1], False, True, marks=pytest.mark.slow),
    ],
)
def test_layers_of_the_same_input_are_one_product_and_their_gradients_the_same_up_to_rounding(
    shape: Shape, compiled: bool, checkpointing: bool, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases and without, recomputed or not; compiled, a block is one graph that both share.

    Control: with sums that do not lie side by side every layer has a product of its own.
    """
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager", fullgraph=True))
    widths: list[int] = []

    def counted(input: Tensor, weight_OI: Tensor, *rest: Tensor) -> Tensor:
        widths.append(len(weight_OI))
        return linear(input, weight_OI, *rest)

    linear = nn.functional.linear
    ways: dict[bool, tuple[dict[str, Tensor], int]] = {}
    for beside in (False, True):
        torch._dynamo.reset()
        counters.clear()
        sums, _ = _trained(folder_of(shape), True, checkpointing, compiled, beside)
        ways[beside] = sums, counters["stats"]["unique_graphs"]
    assert ways[True][1] == ways[False][1] and (ways[True][1] > 0) is compiled
    together, alone = (torch.cat([sums[name] for name in ways[True][0]]) for sums, _ in ways.values())
    assert 0 < float((together - alone).norm() / alone.norm()) < 2 * ROUNDING
    for beside, products in ((False, LINEARS), (True, LINEARS - 2 * 2)):
        policy = PackedPolicy(load_causal_lm(folder_of(shape), torch.bfloat16, False))
        sum_in_products(policy, sums_of(policy, beside)[0])
        widths.clear()
        with monkeypatch.context() as patched, torch.no_grad():
            patched.setattr(nn.functional, "linear", counted)
            policy(pack(random_rows(2, samples=2), [0, 1], CPU), 1.0)
        assert len(widths) == products


@pytest.mark.slow
def test_a_block_is_compiled_in_one_go(folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: as the compiler is by itself, it begins anew once it has seen that a norm's epsilon never changes."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager", fullgraph=True))
    anew = []
    for prepared in (True, False):
        torch._dynamo.reset()
        compilation_time_metrics.clear()
        with monkeypatch.context() as patched, torch._dynamo.config.patch(specialize_float=False):
            if not prepared:
                patched.setattr(models, "prepare_compiler", lambda: None)
            lm = load_causal_lm(folder_of(SHAPES[0]), torch.bfloat16, False)
            compile_blocks(lm)
            PackedPolicy(lm)(pack(random_rows(2, samples=2), [0, 1], CPU), 1.0)
        anew.append("compile_attempt_1" in compilation_time_metrics)
    assert anew == [False, True]


@pytest.mark.slow
def test_compiled_products_are_found_on_disk_and_by_their_own_code_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process compiled serves; not where a gradient is computed otherwise. Control: the compiler's way."""

    def doubled(ctx: Any, grad: Tensor) -> Any:
        input, weight_OI, sum_OI = ctx.saved_tensors
        for _ in range(2):  # no arithmetic that needs a C++ compiler
            add_weight_gradient(sum_OI, grad, input)
        return grad @ weight_OI, None, None, None, None

    def compiled() -> tuple[int, float]:
        torch._dynamo.reset()
        counters.clear()
        sum_OI = torch.zeros(16, 24)
        layer = torch.compile(SummedLinear(nn.Linear(24, 16, bias=False), sum_OI), dynamic=True)
        layer(torch.ones(4, 24, requires_grad=True)).sum().backward()
        return counters["aot_autograd"]["autograd_cache_hit"], float(sum_OI.mean())

    setting = "autograd_cache_allow_custom_autograd_functions"
    with fresh_cache(), torch._functorch.config.patch({setting: False}):
        assert [compiled(), compiled()] == [(0, 4.0), (0, 4.0)]
        prepare_compiler()
        assert [compiled(), compiled()] == [(0, 4.0), (1, 4.0)]
        monkeypatch.setattr(_SummedProduct, "backward", staticmethod(doubled))
        assert [compiled(), compiled()] == [(0, 8.0), (1, 8.0)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_joint_product_is_its_layers_and_its_input_gradient_is_rounded_once(backend: str) -> None:
    """Called in any order, twice, or with another input: each layer answers for the input that it got.

    Control: layer by layer the input's gradient is rounded after each product and each addition.
    """
    torch.manual_seed(0)
    layers = [SummedLinear(nn.Linear(24, width, dtype=torch.bfloat16), torch.zeros(width, 24)) for width in (16, 8, 8)]
    weights = [layer.weight.detach() for layer in layers]
    sum_OI = torch.zeros(32, 24)
    joint = JointProduct(layers, torch.cat(weights), sum_OI)

    @torch.compile(backend=backend, dynamic=True, fullgraph=True)
    def outputs(input: Tensor, other: Tensor) -> list[Tensor]:
        first, second = layers[0](input), layers[1](input)
        return [first, second, layers[2](input), layers[2](other), layers[0](other), layers[0](other)]

    input_NI, other_NI = (torch.randn(40, 24).bfloat16().requires_grad_() for _ in "ab")
    made = outputs(input_NI, other_NI)
    for place, output, given in zip((0, 1, 2, 2, 0, 0), made, [input_NI] * 3 + [other_NI] * 3, strict=True):
        assert torch.equal(output, nn.functional.linear(given, weights[place], layers[place].bias))
    del made
    joint.input, joint.waiting = None, {}
    grads = [torch.randn(40, width).bfloat16() for width in (16, 8, 8)]
    torch.autograd.backward([layer(input_NI) for layer in layers], grads)
    assert joint.input is None and not joint.waiting
    exact_NI = sum(grad.double() @ weight.double() for grad, weight in zip(grads, weights, strict=True))
    usual_NI = sum(grad @ weight for grad, weight in zip(grads, weights, strict=True))
    assert input_NI.grad is not None and isinstance(exact_NI, Tensor) and isinstance(usual_NI, Tensor)
    ours, usual = (float((grad_NI - exact_NI).norm() / exact_NI.norm()) for grad_NI in (input_NI.grad, usual_NI))
    assert ours < 0.8 * usual
    exact_OI = torch.cat(grads, -1).double().t() @ input_NI.detach().double()
    assert float((sum_OI - exact_OI).norm() / exact_OI.norm()) < 1e-6


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_layers_sum_is_exact_and_gradients_of_input_and_bias_are_torchs_own(backend: str) -> None:
    """Control: the usual way rounds a micro-batch's gradient to bfloat16."""
    base, exact, usual = nn.Linear(24, 16, dtype=torch.bfloat16), torch.zeros(16, 24).double(), torch.zeros(16, 24)
    layer = SummedLinear(base, torch.zeros(16, 24))
    layer.compile(backend=backend, dynamic=True, fullgraph=True)
    for tokens in (5, 300, 17):
        grad_NO = torch.randn(1, tokens, 16).bfloat16()
        ours_NI = torch.randn(1, tokens, 24).bfloat16().requires_grad_()
        torchs_NI = ours_NI.detach().clone().requires_grad_()
        wanted = torch.autograd.grad(base(torchs_NI), (torchs_NI, base.bias, base.weight), grad_NO)
        layer(ours_NI).backward(grad_NO)
        assert ours_NI.grad is not None and layer.bias.grad is not None and layer.weight.grad is None
        assert torch.equal(ours_NI.grad, wanted[0]) and torch.equal(layer.bias.grad, wanted[1])
        layer.bias.grad = None
        exact += grad_NO[0].double().t() @ ours_NI[0].detach().double()
        usual += wanted[2].float()
    assert float((layer.sum_OI - exact).norm() / exact.norm()) < 1e-6
    assert float((usual - exact).norm() / exact.norm()) > 1e-3


def test_a_heads_sum_is_exact_over_chunks_and_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its logits are kept or not. Control: the usual way rounds after each chunk and each micro-batch."""
    monkeypatch.setattr(logprobs, "LOGITS_CHUNK_BYTES", 2 * 50 * 40)
    torch.manual_seed(0)
    head_VH = torch.randn(50, 16).bfloat16().requires_grad_()
    exact_VH, usual_VH, sums = torch.zeros(50, 16).double(), torch.zeros(50, 16), [torch.zeros(50, 16) for _ in "ab"]
    for tokens in (100, 7, 300):
        hidden_TH, targets_T = torch.randn(tokens, 16).bfloat16(), torch.randint(50, (tokens,))
        weights_T = torch.randn(tokens)

        def loss(head_VH: Tensor, **options: Any) -> Tensor:
            chosen_T, _ = logprobs.selected_logprobs(hidden_TH, head_VH, targets_T, 1.0, **options)  # noqa: B023
            return (chosen_T * weights_T).sum()  # noqa: B023

        for keep_logits, sum_VH in zip((False, True), sums, strict=True):
            loss(head_VH, keep_logits=keep_logits, sum_VH=sum_VH).backward()
            assert head_VH.grad is None
        usual_VH += torch.autograd.grad(loss(head_VH), head_VH)[0].float()
        logits_TV = hidden_TH @ head_VH.detach().t()  # bfloat16, as the products make them
        onehot_TV = torch.nn.functional.one_hot(targets_T, 50)
        slope_TV = weights_T.unsqueeze(1) * (onehot_TV - logits_TV.float().softmax(-1))
        exact_VH += slope_TV.bfloat16().double().t() @ hidden_TH.double()
    assert torch.equal(sums[0], sums[1])
    assert float((sums[0] - exact_VH).norm() / exact_VH.norm()) < 1e-4
    assert float((usual_VH - exact_VH).norm() / exact_VH.norm()) > 1e-3


def test_adapters_frozen_layers_and_other_optimizers_keep_the_usual_way(folder_of: FolderOf) -> None:
    """Control: the same model without adapters has its layers replaced, under the names and storage that they had."""

    def summed(policy: nn.Module, optimizer: Any) -> int:
        named = {name: value.data_ptr() for name, value in policy.named_parameters()}
        sum_in_products(policy, optimizer)
        assert {name: value.data_ptr() for name, value in policy.named_parameters()} == named
        return sum(isinstance(module, SummedLinear) for module in policy.modules())

    adapted = load_causal_lm(folder_of(SHAPES[0]), torch.bfloat16, False)
    attach(adapted, LoraConfig(rank=2, targets=["q_proj"]), seed=0)
    assert summed(PackedPolicy(adapted), sums_of(PackedPolicy(adapted))[0]) == 0
    policy = PackedPolicy(load_causal_lm(folder_of(SHAPES[0]), torch.bfloat16, False))
    assert summed(policy, torch.optim.AdamW(policy.parameters())) == 0
    assert summed(policy, sums_of(policy)[0]) == LINEARS


@pytest.mark.parametrize(
    ("count", "clip"),
    [
        (1, 0.05),
        pytest.param(1, 1e9, marks=pytest.mark.slow),
        pytest.param(2, 0.05, marks=pytest.mark.slow),
        pytest.param(2, 1e9, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_deepspeed_reduces_measures_clips_and_clears_the_sums(
    count: int, clip: float, request: pytest.FixtureRequest, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Three steps of several micro-batches against DeepSpeed's own way; AdamW's first moment is the clipped gradient.

    Where query, key and value are one product, their input's gradient is rounded less often, and differs by more than
    where each has its own. Control: left uncounted, the sums are missing in the norm, which then clips too little.
    """
    ranks: Ranks = request.getfixturevalue("one_rank" if count == 1 else "two_ranks")
    optimizer = {"betas": (0.0, 0.95), "eps": 1.0, "max_grad_norm": clip}
    update = {
        "path": write_rows(tmp_path / "rows.parquet", random_rows(8, samples=2)),
        "version": -1,
        "split": {**SPLIT, "micro_batch_tokens": 32},
        "loss": LOSS,
        "learning_rate": 1e-2,
    }
    steps: dict[str, list[tuple[float, float, np.ndarray]]] = {}
    for way in ("usual", "joint", "alone", "uncounted"):
        ranks.build(folder_of(SHAPES[0]), actor={"zero_stage": 1, "optimizer": optimizer}, model={"dtype": "bfloat16"})
        replaced = ranks.ask("summed_linears", role="actor", keep=way != "usual", joint=way != "alone")
        assert [reply["count"] for reply in replaced] == [LINEARS] * count
        steps[way] = []
        for _ in range(3):
            asked = ("uncounted_sums", {"arguments": update}) if way == "uncounted" else ("update_actor", update)
            reply = ranks.ask(asked[0], **asked[1])[0]
            moments = [part["moments"] for part in ranks.ask("first_moments", role="actor")]
            steps[way].append((reply["loss"], reply["grad_norm"], np.concatenate(moments)))
    for way, norm, moment in (("alone", 1e-4, ROUNDING), ("joint", 1e-3, 2 * ROUNDING)):
        for usual, ours, uncounted in zip(steps["usual"], steps[way], steps["uncounted"], strict=True):
            first = usual is steps["usual"][0]  # from then on the weights are no longer the same
            assert ours[0] == pytest.approx(usual[0], abs=1e-5 if first else 1e-2)
            assert ours[1] == pytest.approx(usual[1], rel=norm if first else 1e-2)
            assert float(np.linalg.norm(ours[2])) == pytest.approx(min(clip, ours[1]), rel=1e-4)
            apart = float(np.linalg.norm(ours[2] - usual[2]) / np.linalg.norm(usual[2]))
            assert 0 < apart < (moment if first else 0.05)
            assert uncounted[1] < 0.9 * ours[1]
