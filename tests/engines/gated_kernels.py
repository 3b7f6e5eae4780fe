"""Plain kernels for the operators of penstock/engines/kernels/gated_mlp.py, on a CPU and for the length of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def _by_turns(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack([gate, up], -1).flatten(-2)


def product(input_NH: Tensor, weight_2FH: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = (input_NH.float() @ weight_2FH.float().t()).chunk(2, -1)
    return _by_turns(gate, up).to(input_NH.dtype), (silu(gate) * up).to(input_NH.dtype)


def gradients(grad_NH: Tensor, down_HF: Tensor, both_N2F: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = both_N2F.float().unflatten(-1, (-1, 2)).unbind(-1)
    grad = grad_NH.float() @ down_HF.float()
    slope = gate.sigmoid() * (1 + gate * (1 - gate.sigmoid()))
    return _by_turns(grad * up * slope, grad * silu(gate)).to(both_N2F.dtype), (silu(gate) * up).to(both_N2F.dtype)


def _one_after_the_other(both_N2F: Tensor) -> Tensor:
    return torch.cat(both_N2F.float().unflatten(-1, (-1, 2)).unbind(-1), -1)


def input_gradient(grad_N2F: Tensor, weight_2FH: Tensor) -> Tensor:
    return (_one_after_the_other(grad_N2F) @ weight_2FH.float()).to(grad_N2F.dtype)


def add(sum_2FH: Tensor, grad_N2F: Tensor, input_NH: Tensor) -> None:
    sum_2FH.addmm_(_one_after_the_other(grad_N2F).t(), input_NH.float())


KERNELS: dict[str, Callable[..., Any]] = {
    "gated_product": product,
    "gated_gradients": gradients,
    "gated_input_gradient": input_gradient,
    "add_gated_weight_gradient": add,
}


@contextmanager
def plain_gated_mlp() -> Iterator[list[str]]:
    """The operators on a CPU; yields what was called."""
    calls: list[str] = []

    def noted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(name)
            return kernel(*arguments)

        return call

    with torch.library._scoped_library("penstock", "FRAGMENT") as library:
        for name, kernel in KERNELS.items():
            library.impl(name, noted(name, kernel), "CPU")
        yield calls
