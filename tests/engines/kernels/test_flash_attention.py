"""FlashAttention 4's operators: what the compiler is told of them, their gradients, and on a Hopper GPU their numbers.

On a CPU the operators get plain kernels for the length of a test: what is tested there is all that lies around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from penstock.base.errors import UserError
from penstock.engines.batches.packing import pack
from penstock.engines.commands.build import Kernels
from penstock.engines.groups.machine import HOPPER
from penstock.engines.kernels import attention_kernel, flash_attention, gated_mlp
from penstock.engines.kernels.attention_kernel import choose_attention, kernels_on
from penstock.engines.kernels.flash_attention import flash_attention as attend
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.models import PackedPolicy, compile_blocks
from tests.engines.rows import random_rows
from tests.engines.shared_ranks import Shape

QUERIES, KEYS, HEADS, KEY_HEADS, SIZE = (3, 1, 4), (5, 1, 4), 4, 2, 8
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Bounds = tuple[torch.Tensor, torch.Tensor, int, int]
WINDOWS = pytest.mark.parametrize("window", [None, 1])


def _bounds(times: int = 1, device: str = "cpu") -> Bounds:
    queries, keys = (torch.tensor([0, *lengths]).mul(times).cumsum(0).int().to(device) for lengths in (QUERIES, KEYS))
    return queries, keys, times * max(QUERIES), times * max(KEYS)


def _inputs(bounds: Bounds, dtype: torch.dtype, size: int = SIZE) -> Three:
    generator = torch.Generator().manual_seed(0)

    def normal(ends_S1: torch.Tensor, heads: int) -> torch.Tensor:
        values = torch.randn(heads, int(ends_S1[-1]), size, generator=generator).to(ends_S1.device, dtype)
        return values.transpose(0, 1).requires_grad_()  # not contiguous, as a model's are not

    return normal(bounds[0], HEADS), normal(bounds[1], KEY_HEADS), normal(bounds[1], KEY_HEADS)


def _sequences(inputs: Three, bounds: Bounds, window: int | None) -> Iterator[tuple[torch.Tensor, ...]]:
    """Queries, keys and values of each sequence with heads in front, keys repeated; and its attention scores."""
    for number in range(len(bounds[0]) - 1):
        queries, keys = (slice(int(ends[number]), int(ends[number + 1])) for ends in bounds[:2])
        q, k, v = (tensor[rows].transpose(0, 1) for tensor, rows in zip(inputs, (queries, keys, keys), strict=True))
        k, v = (tensor.repeat_interleave(HEADS // KEY_HEADS, 0) for tensor in (k, v))
        at = torch.arange(k.shape[1], device=q.device)
        distance = at[-q.shape[1] :].unsqueeze(1) - at
        seen = (distance >= 0) & (distance <= (k.shape[1] if window is None else window))
        yield q, k, v, (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))


def _attention(inputs: Three, bounds: Bounds, window: int | None) -> torch.Tensor:
    parts = [(scores.softmax(-1) @ v).transpose(0, 1) for _, _, v, scores in _sequences(inputs, bounds, window)]
    return torch.cat(parts)


def _gradients(out_N: torch.Tensor, inputs: Three) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out_N.square().sum(), inputs)


@pytest.fixture
def plain_kernels() -> Iterator[list[str]]:
    """The operators on a CPU, where torch's autograd does not see inside of them; yields what was called."""
    calls: list[str] = []

    def forward(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        calls.append("forward")
        *bounds, _, window = rest
        sums = [scores.logsumexp(-1).float() for *_, scores in _sequences((q, k, v), bounds, window)]  # type: ignore[arg-type]
        return _attention((q, k, v), bounds, window), torch.cat(sums, 1)  # type: ignore[arg-type]

    def backward(grad_N: Any, q: Any, k: Any, v: Any, out_N: Any, sums_HN: Any, *rest: Any) -> Any:
        calls.append("backward")
        *bounds, scale, window = rest
        parts = []
        for number, (q_s, k_s, v_s, scores) in enumerate(_sequences((q, k, v), bounds, window)):  # type: ignore[arg-type]
            own = slice(int(bounds[0][number]), int(bounds[0][number + 1]))
            weights = (scores - sums_HN[:, own].unsqueeze(-1)).exp()
            grad, out = (tensor[own].transpose(0, 1) for tensor in (grad_N, out_N))
            slope = weights * (grad @ v_s.transpose(1, 2) - (grad * out).sum(-1, keepdim=True)) * scale
            of_keys = (slope.transpose(1, 2) @ q_s, weights.transpose(1, 2) @ grad)
            added = [tensor.unflatten(0, (KEY_HEADS, -1)).sum(1) for tensor in of_keys]
            parts.append([tensor.transpose(0, 1) for tensor in (slope @ k_s, *added)])
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    with torch.library._scoped_library("penstock", "FRAGMENT") as library:
        library.impl("flash_attention", forward, "CPU")
        library.impl("flash_attention_backward", backward, "CPU")
        yield calls


@WINDOWS
def test_what_the_compiler_is_told_is_what_the_operators_do(plain_kernels: list[str], window: int | None) -> None:
    bounds = _bounds()
    inputs, rest = [tensor.detach() for tensor in _inputs(bounds, torch.float64)], (*bounds, SIZE**-0.5, window)
    torch.library.opcheck(torch.ops.penstock.flash_attention.default, (*inputs, *rest))
    out_N, logsumexp_HN = torch.ops.penstock.flash_attention(*inputs, *rest)
    arguments = (torch.ones_like(out_N), *inputs, out_N, logsumexp_HN, *rest)
    torch.library.opcheck(torch.ops.penstock.flash_attention_backward.default, arguments)


@WINDOWS
def test_gradients_go_to_queries_keys_and_values(plain_kernels: list[str], window: int | None) -> None:
    bounds = _bounds()
    inputs = _inputs(bounds, torch.float64)
    wanted = _gradients(_attention(inputs, bounds, window), inputs)
    for function in (attend, torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")):
        grads = _gradients(function(*inputs, bounds, SIZE**-0.5, window), inputs)
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(grads, wanted, strict=True))
    elsewhere = _gradients(_attention(inputs, bounds, 0), inputs)
    assert not any(torch.allclose(one, other, atol=1e-2) for one, other in zip(elsewhere, wanted, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_models_blocks_are_one_graph_each_with_it(
    plain_kernels: list[str], compiled: bool, folder_of: Callable[[Shape], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, responses that share prompts. Control: the layout for a CPU, whose kernel is another.

    A block that is cut where the kernel is asked for would compile everything that is imported there, too.
    """
    monkeypatch.setattr(flash_attention, "on_hopper", lambda: True)
    monkeypatch.setattr(flash_attention, "obstacle", lambda: None)
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    rows = random_rows(6, samples=2)
    spread = pack(rows, list(range(6)), torch.device("cpu"))
    ways = []
    for layout in (spread.layout, replace(spread.layout, slots_K=None)):
        lm = load_causal_lm(folder_of(Shape("qwen2", tied=True)), torch.float32, False)
        if compiled:
            compile_blocks(lm)
        logprobs_T, _ = PackedPolicy(lm).train()(replace(spread, layout=layout), 1.0)
        logprobs_T.square().sum().backward()
        assert plain_kernels == ([] if layout.slots_K is not None else ["forward"] * 2 + ["backward"] * 2)  # two blocks
        ways.append([logprobs_T, *(parameter.grad for parameter in lm.parameters())])
    for one, other in zip(*ways, strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()


def _compile(dynamic: bool, original: Callable[..., None] = nn.Module.compile) -> Callable[..., None]:
    return lambda module, **_: original(module, backend="aot_eager", fullgraph=True, dynamic=dynamic)


@pytest.mark.slow
def test_a_micro_batch_of_another_size_is_not_compiled_anew(
    plain_kernels: list[str], folder_of: Callable[[Shape], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: where the number of tokens is a constant, each size has a graph of its own."""
    monkeypatch.setattr(flash_attention, "on_hopper", lambda: True)
    monkeypatch.setattr(flash_attention, "obstacle", lambda: None)
    rows = random_rows(6, samples=2)
    for dynamic in (True, False):
        monkeypatch.setattr(nn.Module, "compile", _compile(dynamic))
        torch._dynamo.reset()
        lm = load_causal_lm(folder_of(Shape("qwen2", tied=True)), torch.float32, False)
        compile_blocks(lm)
        graphs = []
        for index in ([0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]):
            counters.clear()
            batch = pack(rows, index, torch.device("cpu"))
            without_slots = replace(batch, layout=replace(batch.layout, slots_K=None))
            PackedPolicy(lm).train()(without_slots, 1.0)[0].sum().backward()
            graphs.append(counters["stats"]["unique_graphs"])
        assert graphs[0] > 0 and (graphs[1:] == [0, 0]) is dynamic


def test_another_gpu_and_another_vllm_have_no_such_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a training says of it names what cannot be imported."""

    def missing() -> Any:
        raise ImportError("No module named 'cutlass.cutlass_dsl'")

    past_the_cache = flash_attention.obstacle.__wrapped__
    for capability, kernels, expected, attention, slower in (
        (HOPPER, int, True, "FlashAttention 4", []),
        ((8, 0), missing, False, "FlashAttention 2", []),
        (HOPPER, missing, False, "FlashAttention 2", ["no FlashAttention 4: No module named 'cutlass.cutlass_dsl'"]),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        monkeypatch.setattr(flash_attention, "_kernels", kernels)
        monkeypatch.setattr(flash_attention, "obstacle", past_the_cache)
        monkeypatch.setattr(gated_mlp, "obstacle", lambda: None)
        assert (flash_attention.usable(), kernels_on("cuda")) == (expected, Kernels(attention, slower))
    assert "FlashAttention" not in kernels_on("cpu").attention


def test_a_rank_has_the_kernel_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or says why not, before a model is loaded. Control: `auto` takes the fastest that there is."""
    monkeypatch.setattr(attention_kernel, "_chosen", ["auto"])
    monkeypatch.setattr(gated_mlp, "obstacle", lambda: None)
    choose_attention("sdpa", "cpu")
    for kernel, device, said in (
        ("sdpa", "cuda", "sdpa is for ranks on a CPU"),
        ("flash_attention_2", "cpu", "needs a GPU"),
        ("flash_attention_4", "cpu", "needs a GPU"),
    ):
        with pytest.raises(UserError, match=said):
            choose_attention(kernel, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    monkeypatch.setattr(flash_attention, "obstacle", lambda: None)
    for kernel, name in (("auto", "4"), ("flash_attention_2", "2"), ("flash_attention_4", "4")):
        choose_attention(kernel, "cuda")
        assert kernels_on("cuda") == Kernels(f"FlashAttention {name}", [])
    monkeypatch.setattr(flash_attention, "obstacle", lambda: "No module named 'quack'")
    with pytest.raises(UserError, match="flash_attention_4: No module named 'quack'"):
        choose_attention("flash_attention_4", "cuda")
    choose_attention("flash_attention_2", "cuda")
    assert kernels_on("cuda") == Kernels("FlashAttention 2", [])  # and no warning: it was chosen
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(UserError, match="no Hopper GPU"):
        choose_attention("flash_attention_4", "cuda")


def test_what_is_chosen_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU for both, each call goes to the chosen kernel. Control: `auto` goes to the other one."""
    called: list[str] = []

    def of(name: str) -> Any:
        def kernel(query_N: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            called.append(name)
            return query_N

        return kernel

    monkeypatch.setattr(attention_kernel, "_chosen", ["auto"])
    monkeypatch.setattr(flash_attention, "usable", lambda: True)
    monkeypatch.setattr(flash_attention, "flash_attention", of("4"))
    monkeypatch.setattr(attention_kernel.varlen, "varlen_attn", of("2"))
    bounds_S1 = torch.tensor([0, 3], dtype=torch.int32)
    layout: Any = SimpleNamespace(cu_queries_S1=bounds_S1, cu_keys_S1=bounds_S1, max_queries=3, max_keys=3)
    tensor_N = torch.zeros(3, 2, 8)
    for kernel in ("auto", "flash_attention_2", "flash_attention_4"):
        choose_attention(kernel, "cuda")
        attention_kernel.causal_varlen_attention(tensor_N, tensor_N, tensor_N, layout, None)
    assert called == ["4", "2", "4"]


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("window", [None, 100])
def test_the_kernels_compute_attention(window: int | None) -> None:
    assert flash_attention.usable()
    bounds = _bounds(times=70, device="cuda")
    inputs = _inputs(bounds, torch.bfloat16, size=128)
    exact_inputs: Any = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    exact_N = _attention(exact_inputs, bounds, window)
    wanted = (exact_N, *_gradients(exact_N, exact_inputs))
    for function in (attend, torch.compile(attend, fullgraph=True, dynamic=True)):
        out_N = function(*inputs, bounds, 128**-0.5, window)
        for one, other in zip((out_N, *_gradients(out_N, inputs)), wanted, strict=True):
            assert (one.double() - other).norm() < 0.01 * other.norm()
