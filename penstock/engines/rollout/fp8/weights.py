"""Lets the linear layers of vLLM's blocks compute with copies of eight bits, which each reshard makes and compares.

The parameters that vLLM has anyway stay where and what they are: views of the trainer's memory, or copies that a
reshard has compared with it. Beside each lies a copy in FP8 with a scale for each row (kernels/fp8_linear.py), made on
the device from the parameter itself. So whatever brings the weights, the copies follow. What then lies where vLLM's
graphs read it is compared, bit by bit, with what the arithmetic makes of the actor's weights.

Embeddings, language head, norms and biases stay as they are. Left out: which models and devices can do so
(engines/families/fp8.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from penstock.engines.families.table import Family
from penstock.engines.kernels.fp8_linear import FP8, fp8_output, scaled
from penstock.engines.weights.checksum import differs
from penstock.engines.weights.copies import Differences, refuse, wrong_names

AT_ONCE = 1 << 24  # numbers of a weight that are float32 at a time, on their way to eight bits


class Fp8Products:
    """In place of vLLM's own method of a linear layer."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the layer's output; vLLM calls it by these names."""
        return fp8_output(x, (layer.weight_fp8, layer.weight_scales), bias)


def serve_in_fp8(vllm_model: nn.Module, family: Family) -> tuple[str, ...]:
    """Give the linear layers of vLLM's blocks copies of zeros, with which they compute from now on; return their names.

    Their parameters have their storage already, and vLLM has compiled nothing yet.
    """
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    named, found = family.block_names, []
    for name, module in vllm_model.named_modules():
        layer: Any = module
        linear_of_block = isinstance(layer, LinearBase) and name.rpartition(".")[2] in named
        if linear_of_block and type(layer.quant_method) is UnquantizedLinearMethod:
            rows, device = layer.weight.shape[0], layer.weight.device
            layer.weight_fp8 = _parameter(torch.zeros(layer.weight.shape, dtype=FP8, device=device))
            layer.weight_scales = _parameter(torch.zeros(rows, dtype=torch.float32, device=device))
            layer.quant_method = Fp8Products()
            found.append(name)
    return tuple(found)


def _parameter(values: torch.Tensor) -> nn.Parameter:
    """No buffer: vLLM copies all of those to the host whenever its engine falls asleep."""
    return nn.Parameter(values, requires_grad=False)


class Fp8Copies:
    """The copies of a model's weights, none unless `serve_in_fp8` has made some."""

    def __init__(self, vllm_model: nn.Module) -> None:
        named: dict[str, Any] = dict(vllm_model.named_modules())
        self.layers = {name: layer for name, layer in named.items() if _computes_in_fp8(layer)}

    @torch.no_grad()
    def __call__(self) -> int:
        """Make all copies anew of the weights; return the bytes written.

        Raises:
            RuntimeError: a copy is not what the arithmetic makes of its weight.
        """
        found = [part for name, layer in self.layers.items() for part in _renewed(name, layer)]
        refuse(wrong_names(found))
        return sum(part.bytes for part in found)


def _computes_in_fp8(layer: nn.Module) -> bool:
    return isinstance(vars(layer).get("quant_method"), Fp8Products)


def _renewed(name: str, layer: Any) -> Iterator[Differences]:
    """Make the copy of a layer's weight, some rows at a time."""
    rows, names = max(1, AT_ONCE // layer.weight.shape[1]), ("weight_fp8", "weight_scales")
    places = [getattr(layer, own).data.split(rows) for own in names]
    for weight_OI, *views in zip(layer.weight.data.split(rows), *places, strict=True):
        made = scaled(weight_OI)
        for view, values in zip(views, made, strict=True):
            view.copy_(values)
        yield Differences(
            names=[f"{name}.{own}" for own in names],
            flags=[differs(view, values) for view, values in zip(views, made, strict=True)],
            bytes=sum(values.numel() * values.element_size() for values in made),
        )
