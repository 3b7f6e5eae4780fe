"""An MLP in four products: what the compiler is told of them, a model's gradients, and on a Hopper GPU their numbers.

On a CPU the operators get plain kernels for the length of a test: what is tested there is all that lies around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from penstock.engines.batches.packing import pack
from penstock.engines.groups.machine import HOPPER
from penstock.engines.kernels import gated_mlp
from penstock.engines.kernels.gated_mlp import GatedMlp, gate_in_products
from penstock.engines.kernels.weight_gradients import sum_in_products
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.models import PackedPolicy, compile_blocks
from tests.engines.gated_kernels import KERNELS, gradients, plain_gated_mlp, product
from tests.engines.rows import random_rows
from tests.engines.shared_ranks import Shape
from tests.engines.sums import sums_of

FolderOf = Callable[[Shape], Path]
SHAPES = [Shape("qwen2", tied=True), Shape("qwen3", tied=False)]
ROUNDING = 2.0**-8  # of bfloat16
OPERATORS = tuple(KERNELS)
TOKENS, HIDDEN, INNER = 5, 8, 16


@pytest.fixture
def plain_kernels() -> Iterator[list[str]]:
    with plain_gated_mlp() as calls:
        yield calls


def _arguments(device: str = "cpu", tokens: int = TOKENS, hidden: int = HIDDEN, inner: int = INNER) -> dict[str, Any]:
    torch.manual_seed(0)
    kind = {"device": device, "dtype": torch.bfloat16}
    input_NH, grad_NH = torch.randn(2, tokens, hidden).to(**kind)
    weight_2FH, down_HF = (
        torch.randn(*size).mul(hidden**-0.5).to(**kind) for size in ((2 * inner, hidden), (hidden, inner))
    )
    both_N2F = product(input_NH, weight_2FH)[0]
    grad_N2F = gradients(grad_NH, down_HF, both_N2F)[0]
    return {
        "gated_product": (input_NH, weight_2FH),
        "gated_gradients": (grad_NH, down_HF, both_N2F),
        "gated_input_gradient": (grad_N2F, weight_2FH),
        "add_gated_weight_gradient": (torch.ones(2 * inner, hidden, device=device), grad_N2F, input_NH),
    }


@pytest.mark.parametrize("name", OPERATORS)
def test_what_the_compiler_is_told_is_what_the_operators_do(plain_kernels: list[str], name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.penstock, name).default, _arguments()[name])


def _trained(folder: Path, gated: bool, checkpointing: bool, compiled: bool) -> dict[str, Tensor]:
    """Sums over three micro-batches, and the other parameters' gradients."""
    lm = load_causal_lm(folder, torch.bfloat16, checkpointing)
    policy = PackedPolicy(lm).train()
    optimizer, sums = sums_of(policy)
    sum_in_products(policy, optimizer)
    if gated:
        gate_in_products(policy)
    if compiled:
        compile_blocks(lm)
    return {name: sums[name] + other for name, other in _gradients_of(policy).items()}


def _exact(folder: Path) -> dict[str, Tensor]:
    """The same of the same weights with every number in float32."""
    return _gradients_of(PackedPolicy(load_causal_lm(folder, torch.bfloat16, False).float()).train())


def _gradients_of(policy: PackedPolicy) -> dict[str, Tensor]:
    """What autograd sees, over three micro-batches; zeros for a parameter of which it sees nothing."""
    rows, grads = random_rows(12, samples=2), {}
    for name, parameter in policy.named_parameters():
        grads[name] = torch.zeros(parameter.numel())
    for index in ([0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11]):
        batch = pack(rows, index, torch.device("cpu"))
        (policy(batch, 1.0)[0] * batch.columns["advantages"]).sum().backward()
        for name, parameter in policy.named_parameters():
            if parameter.grad is not None:
                grads[name] += parameter.grad.float().flatten()
                parameter.grad = None
    return grads


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("shape", "checkpointing"), [(SHAPES[0], False), (SHAPES[1], True)])
def test_a_models_gradients_are_the_same_up_to_rounding(
    plain_kernels: list[str],
    shape: Shape,
    checkpointing: bool,
    compiled: bool,
    folder_of: FolderOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the names that the parameters had, no further from float32's; compiled, in as many graphs as without.

    So a micro-batch with another number of tokens is not compiled anew.
    Control: where the MLPs stay as they are no operator is asked.
    """
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager", fullgraph=True))
    ways, graphs, exact = [], [], _exact(folder_of(shape))
    for gated in (False, True):
        torch._dynamo.reset()
        counters.clear()
        plain_kernels.clear()
        sums = _trained(folder_of(shape), gated, checkpointing, compiled)
        counts = [plain_kernels.count(name) for name in OPERATORS]
        per_block = [1 + checkpointing, 1, 1, 1] if gated else [0, 0, 0, 0]
        assert counts == [2 * 3 * count for count in per_block]  # two blocks, three micro-batches
        assert sums.keys() == exact.keys()
        graphs.append(counters["stats"]["unique_graphs"])
        ways.append(torch.stack([(sums[name] - other).norm() / other.norm() for name, other in exact.items()]))
    assert graphs[0] == graphs[1] and (graphs[1] > 0) is compiled
    assert not torch.equal(*ways)
    assert (ways[1] < 1.5 * ways[0]).all() and ways[1].mean() < ways[0].mean()


def test_an_mlp_that_is_another_stays_as_it_is(plain_kernels: list[str], folder_of: FolderOf) -> None:
    """Sums apart, another activation, a module of another name. Control: as it comes it is replaced."""

    def gated(change: Callable[[Any], None], beside: bool = True) -> int:
        policy = PackedPolicy(load_causal_lm(folder_of(SHAPES[0]), torch.bfloat16, False))
        for layer in policy.lm.model.layers:
            change(layer.mlp)
        sum_in_products(policy, sums_of(policy, beside)[0])
        gate_in_products(policy)
        return sum(isinstance(module, GatedMlp) for module in policy.modules())

    assert gated(lambda mlp: None) == 2
    assert gated(lambda mlp: None, beside=False) == 0
    assert gated(lambda mlp: setattr(mlp, "act_fn", nn.GELU())) == 0
    assert gated(lambda mlp: setattr(mlp, "__class__", type("OtherMLP", (type(mlp),), {}))) == 0


def test_other_gpus_and_an_older_quack_have_no_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ImportError("No module named 'quack'")

    def kernels(product: Callable[..., None]) -> Callable[[], Any]:
        return lambda: type("Kernels", (), {"gemm_gated_tuned": type("Tuned", (), {"fn": staticmethod(product)})})

    def new(a: Any, b: Any, concat_layout: Any) -> None: ...
    def old(a: Any, b: Any) -> None: ...

    past_the_cache = gated_mlp.obstacle.__wrapped__
    monkeypatch.setattr(gated_mlp, "obstacle", past_the_cache)
    for capability, found, expected in (
        (HOPPER, kernels(new), True),
        (HOPPER, kernels(old), False),
        (HOPPER, missing, False),
        ((10, 0), kernels(new), False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        monkeypatch.setattr(gated_mlp, "_kernels", found)
        assert gated_mlp.usable() is expected


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("tokens", [1, 1000])
def test_the_kernels_compute_the_products(tokens: int) -> None:
    """Any number of tokens, up to rounding. Control: with gate and up changed over they do not."""
    assert gated_mlp.usable()
    for name, arguments in _arguments("cuda", tokens, 64, 192).items():
        (wanted, got), copies = ([], []), [[tensor.clone() for tensor in arguments] for _ in range(2)]
        for results, function, own in (
            (wanted, KERNELS[name], copies[0]),
            (got, getattr(torch.ops.penstock, name), copies[1]),
        ):
            returned = function(*own)
            results += [own[0]] if returned is None else [*returned] if isinstance(returned, tuple) else [returned]
        for one, other in zip(got, wanted, strict=True):
            assert (one - other).float().norm() < ROUNDING * other.float().norm()
        turned = wanted[0].roll(1, -1)
        assert (got[0] - turned).float().norm() > 0.1 * turned.float().norm()
