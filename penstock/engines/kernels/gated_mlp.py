"""A block's MLP on Hopper GPUs: gate, up and their activation as one product, and their gradients as one.

The library's products write gate and up, and another kernel reads them to write their activation; backward it is the
same again. Here the products do it while they have the numbers at hand (benchmarks/LOG.md has what that saves), and
the activation is not kept for the backward pass, which makes it anew in the same product.

The kernels are those of quack, which FlashAttention 4 needs as well (penstock/engines/kernels/flash_attention.py). In
their tensors gate and up alternate; weights and sums stay as vLLM wants them, gate's rows before up's, and are read as
if they did.

Suffixes: `_NH` tokens x hidden, `_NF` tokens x inner, `_N2F` tokens x (gate and up by turns), `_2FH` the rows of gate
and those of up x hidden, `_HF` hidden x inner. Left out: other GPUs, other activations, biases, and weights without
sums (penstock/engines/kernels/weight_gradients.py): their MLPs stay as they are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engines.families.table import Family
from penstock.engines.kernels import flash_attention
from penstock.engines.kernels.weight_gradients import SummedLinear, add_weight_gradient, joint_views
from penstock.engines.weights.layout import blocks, family_in

ALIGNED = 8  # elements of bfloat16: what the kernels load at once

# Rows and columns of a tile, whether two groups of warps take turns, and the tiles that share what they load: the
# fastest for 33,792 tokens of 1,536 x 8,960 on an H200.
ACTIVATED = (128, 160, True, 1, 2)
GRADIENTS = (128, 160, True, 2, 1)
INPUT = (256, 192, False, 1, 2)
WEIGHTS = (128, 192, True, 2, 1)


def usable() -> bool:
    """Whether this process's GPU is one for these kernels, and they are installed."""
    return flash_attention.on_hopper() and obstacle() is None


@functools.cache
def obstacle() -> str | None:
    """Why the kernels cannot be used here: no quack, or one that cannot read weights as they lie. None if they can."""
    try:
        kernels = _kernels()
    except ImportError as error:
        return str(error)
    known = "concat_layout" in inspect.signature(kernels.gemm_gated_tuned.fn).parameters
    return None if known else "this quack knows no weights whose rows do not alternate"


@functools.cache
def _kernels() -> Any:
    """quack's module of products.

    Raises:
        ImportError: it, or what compiles it, is not installed.
    """
    import quack.cache
    from quack import gemm_interface
    from vllm import envs

    # Beside vLLM's own compiled code. The package's default is a folder in /tmp that anyone could have made first.
    quack.cache.CACHE_DIR = str(Path(envs.VLLM_CACHE_ROOT, "quack"))
    return gemm_interface


@functools.cache
def _config(rows: int, columns: int, by_turns: bool, cluster_rows: int, cluster_columns: int) -> Any:
    from quack.gemm_config import GemmConfig

    return GemmConfig(
        tile_m=rows,
        tile_n=columns,
        pingpong=by_turns,
        cluster_m=cluster_rows,
        cluster_n=cluster_columns,
        is_dynamic_persistent=False,
    )


@torch.library.custom_op("penstock::gated_product", mutates_args=(), device_types="cuda")
def gated_product(input_NH: Tensor, weight_2FH: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up by turns, and silu(gate) * up."""
    both_N2F, activated_NF = _empty_product(input_NH, weight_2FH)
    _kernels().gemm_gated_tuned.fn(
        input_NH.contiguous(),
        weight_2FH.t(),
        both_N2F,
        activated_NF,
        activation="swiglu",
        config=_config(*ACTIVATED),
        concat_layout=("B",),
    )
    return both_N2F, activated_NF


@gated_product.register_fake
def _empty_product(input_NH: Tensor, weight_2FH: Tensor) -> tuple[Tensor, Tensor]:
    # Nothing here asks for len(): a graph for any number of tokens would become one for this number.
    tokens, both = input_NH.shape[0], weight_2FH.shape[0]
    return input_NH.new_empty(tokens, both), input_NH.new_empty(tokens, both // 2)


@torch.library.custom_op("penstock::gated_gradients", mutates_args=(), device_types="cuda")
def gated_gradients(grad_NH: Tensor, down_HF: Tensor, both_N2F: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up by turns, and silu(gate) * up again.

    Args:
        grad_NH: gradient of what the down product makes of the activation.
    """
    grad_N2F, activated_NF = _empty_gradients(grad_NH, down_HF, both_N2F)
    _kernels().gemm_dgated_tuned.fn(
        grad_NH.contiguous(),
        down_HF,
        both_N2F,
        grad_N2F,
        activated_NF,
        activation="swiglu",
        dynamic_scheduler=False,
        config=_config(*GRADIENTS),
    )
    return grad_N2F, activated_NF


@gated_gradients.register_fake
def _empty_gradients(grad_NH: Tensor, down_HF: Tensor, both_N2F: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(both_N2F), both_N2F.new_empty(both_N2F.shape[0], down_HF.shape[1])


@torch.library.custom_op("penstock::gated_input_gradient", mutates_args=(), device_types="cuda")
def gated_input_gradient(grad_N2F: Tensor, weight_2FH: Tensor) -> Tensor:
    """Return the gradient of the input of gate and up; rounded once, where two products and a sum round three times."""
    grad_NH = _empty_input_gradient(grad_N2F, weight_2FH)
    _kernels().gemm_tuned.fn(grad_N2F, weight_2FH, grad_NH, config=_config(*INPUT), concat_layout=("B",))
    return grad_NH


@gated_input_gradient.register_fake
def _empty_input_gradient(grad_N2F: Tensor, weight_2FH: Tensor) -> Tensor:
    return grad_N2F.new_empty(grad_N2F.shape[0], weight_2FH.shape[1])


@torch.library.custom_op("penstock::add_gated_weight_gradient", mutates_args={"sum_2FH"}, device_types="cuda")
def add_gated_weight_gradient(sum_2FH: Tensor, grad_N2F: Tensor, input_NH: Tensor) -> None:
    """Add the gradient of gate's and up's weights in place.

    Args:
        sum_2FH: float32.
    """
    options = {"config": _config(*WEIGHTS), "concat_layout": ("out",), "add_to_output": True}
    _kernels().gemm_tuned.fn(grad_N2F.t(), input_NH.contiguous(), sum_2FH, **options)


class GatedMlp(nn.Module):
    """The MLP of a block in four products; it takes over the layers of another, and so their parameters' names.

    Args:
        layers: gate, up and down by their names in that MLP.
        weight_2FH: the weights of gate and up as one tensor, a view of them.
        sum_2FH: their sums, likewise.
    """

    def __init__(self, layers: Mapping[str, SummedLinear], weight_2FH: Tensor, sum_2FH: Tensor) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        *_, self._down = layers
        self.weight_2FH, self.sum_2FH = weight_2FH, sum_2FH

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output."""
        down: Any = getattr(self, self._down)
        output: Tensor = _GatedMlp.apply(x, self.weight_2FH, down.weight, self.sum_2FH, down.sum_OI)
        return output


class _GatedMlp(torch.autograd.Function):
    """The down weight is a parameter, so that backward comes by where the input needs no gradient."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight_2FH: Tensor, down_HF: Tensor, sum_2FH: Tensor, sum_HF: Tensor
    ) -> Tensor:
        input_NH = input.flatten(0, -2)
        both_N2F, activated_NF = gated_product(input_NH, weight_2FH)
        ctx.save_for_backward(input, both_N2F, weight_2FH, down_HF, sum_2FH, sum_HF)
        return (activated_NF @ down_HF.t()).view(input.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, both_N2F, weight_2FH, down_HF, sum_2FH, sum_HF = ctx.saved_tensors
        grad_NH, input_NH = grad.flatten(0, -2), input.flatten(0, -2)
        grad_N2F, activated_NF = gated_gradients(grad_NH, down_HF, both_N2F)
        add_weight_gradient(sum_HF, grad_NH, activated_NF)
        add_gated_weight_gradient(sum_2FH, grad_N2F, input_NH)
        return gated_input_gradient(grad_N2F, weight_2FH).view(input.shape), None, None, None, None


def gate_in_products(module: nn.Module) -> None:
    """Replace the MLPs of a model's blocks for which that is the same; after `sum_in_products`."""
    family = family_in(module)
    for block in blocks(module).values():
        for name, mlp in list(block.named_modules()):
            if type(mlp).__name__ in family.gated_mlps and (gated := _gated(mlp, family)) is not None:
                block.set_submodule(name, gated)


def _gated(mlp: Any, family: Family) -> GatedMlp | None:
    layers = fitting_layers(mlp, family)
    if layers is None:
        return None
    *same_input, down = layers.values()
    if down.weight.dtype != torch.bfloat16 or any(size % ALIGNED for size in down.weight.shape):
        return None
    joint = joint_views(same_input)
    return None if joint is None else GatedMlp(layers, *joint)


def fitting_layers(mlp: Any, family: Family) -> dict[str, SummedLinear] | None:
    """Return gate, up and down by their names if they have sums, no biases, and this activation between them."""
    layers = {name: getattr(mlp, name) for name in (*family.gate_up.parts, *family.down.parts)}
    if not all(isinstance(layer, SummedLinear) and layer.bias is None for layer in layers.values()):
        return None
    silu = float(mlp.act_fn(torch.ones(()))) == float(nn.functional.silu(torch.ones(())))
    return layers if silu else None
