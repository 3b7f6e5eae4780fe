"""Which layers of a model compute with FP8 weights, and a block's MLP as a whole (`actor.fp8`).

These are the linear layers of attention and of dense MLPs in the blocks; norms, embeddings and the language head stay
as they are. The weights themselves stay bfloat16: DeepSpeed steps on them, vLLM reads them, and their FP8 copies are
renewed when they have changed. Forward passes without gradients compute with the same copies, so log-probs of old and
new policies are of one kind.

The MLP is one function where its weights and sums lie side by side: gate and up are one product, and its activation is
made anew in the backward pass, as in gated_mlp.py. What lies between its products the compiler makes kernels of, with
scales and rounding.

Suffixes as in gated_mlp.py, but gate's columns lie before up's (`_N2F`). Left out: the arithmetic (fp8_linear.py);
adapters, experts and shards of ZeRO-3, whose products are others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engines.families.table import Family
from penstock.engines.kernels.fp8_linear import Fp8Weight, fp8_input_gradient, fp8_output, fp8_product, scaled_together
from penstock.engines.kernels.gated_mlp import fitting_layers
from penstock.engines.kernels.weight_gradients import JointProduct, SummedLinear, add_weight_gradient, joint_views
from penstock.engines.weights.layout import blocks, family_in


class Fp8Blocks:
    """All FP8 weights of a model."""

    def __init__(self, weights: list[Fp8Weight]) -> None:
        self.weights = weights

    def renew(self) -> None:
        """Make all of them anew, since the model's weights have changed."""
        for weight in self.weights:
            weight.renew()


def compute_in_fp8(module: nn.Module) -> Fp8Blocks:
    """Let the linear layers of a model's blocks compute with FP8 weights; after `sum_in_products`, before compiling.

    Parameters keep names and places in memory.
    """
    family, found = family_in(module), list[Fp8Weight]()
    for block in blocks(module).values():
        for name, mlp in list(block.named_modules()):
            if type(mlp).__name__ in family.gated_mlps and (whole := _whole_mlp(mlp, family)) is not None:
                block.set_submodule(name, whole)
                found += whole.weights
        done = {layer for mlp in block.modules() if isinstance(mlp, Fp8Mlp) for layer in mlp.children()}
        for name, layer in list(block.named_modules()):
            if (
                name.rpartition(".")[2] in family.block_names
                and layer not in done
                and type(layer) in (nn.Linear, SummedLinear)
            ):
                summed = layer if isinstance(layer, SummedLinear) else SummedLinear(layer, None)
                block.set_submodule(name, summed)
                found += _give(summed)
    return Fp8Blocks(found)


def _give(layer: SummedLinear) -> list[Fp8Weight]:
    """Let a layer, or the joint product that it is a part of, compute with an FP8 weight; return that if it is new."""
    product: SummedLinear | JointProduct = layer if layer.joint is None else layer.joint
    if product.fp8:
        return []
    weight = Fp8Weight(product.weight if isinstance(product, SummedLinear) else product.weight_OI)
    product.fp8 = weight.tensors
    return [weight]


def _whole_mlp(mlp: Any, family: Family) -> Fp8Mlp | None:
    layers = fitting_layers(mlp, family)
    if layers is None:
        return None
    *same_input, _ = layers.values()
    joint = joint_views(same_input)
    return None if joint is None else Fp8Mlp(layers, *joint)


class Fp8Mlp(nn.Module):
    """The MLP of a block; it takes over the layers of another, and so their parameters' names.

    Args:
        layers: gate, up and down by their names in that MLP.
        weight_2FH: the weights of gate and up as one tensor, a view of them.
        sum_2FH: their sums, likewise.

    Attributes:
        weights: those of gate and up, and of down.
    """

    def __init__(self, layers: Mapping[str, SummedLinear], weight_2FH: Tensor, sum_2FH: Tensor) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        *_, self._down = layers
        self.sum_2FH = sum_2FH
        self.weights = Fp8Weight(weight_2FH), Fp8Weight(layers[self._down].weight)
        self.gate_up_fp8, self.down_fp8 = (weight.tensors for weight in self.weights)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output."""
        down: Any = getattr(self, self._down)
        sums = self.sum_2FH, down.sum_OI
        output: Tensor = _Fp8Mlp.apply(x, down.weight, *sums, *self.gate_up_fp8, *self.down_fp8)
        return output


class _Fp8Mlp(torch.autograd.Function):
    """The down weight is a parameter, so that backward comes by where the input needs no gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, down_HF: Tensor, sum_2FH: Tensor, sum_HF: Tensor, *fp8: Tensor) -> Tensor:
        input_NH = input.flatten(0, -2)
        both_N2F = fp8_output(input_NH, fp8[:4])
        ctx.save_for_backward(input, both_N2F, sum_2FH, sum_HF, *fp8)
        gate_NF, up_NF = both_N2F.chunk(2, -1)
        return fp8_output(nn.functional.silu(gate_NF) * up_NF, fp8[4:]).view(input.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, both_N2F, sum_2FH, sum_HF, *fp8 = ctx.saved_tensors
        grad_NH, input_NH = grad.flatten(0, -2), input.flatten(0, -2)
        grad_NF = fp8_input_gradient(grad_NH, tuple(fp8[4:]))
        *grads_NF, activated_NF = _through_activation(grad_NF, both_N2F)
        add_weight_gradient(sum_HF, grad_NH, activated_NF)
        add_weight_gradient(sum_2FH, torch.cat(grads_NF, -1), input_NH)
        grad_input_NH = fp8_product(scaled_together(*grads_NF), (fp8[2], fp8[3]), grad.dtype)
        return grad_input_NH.view(input.shape), *[None] * (3 + len(fp8))


def _through_activation(grad_NF: Tensor, both_N2F: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and of up, and silu(gate) * up again."""
    gate_NF, up_NF = (half.float() for half in both_N2F.chunk(2, -1))
    opened_NF = gate_NF.sigmoid()
    silu_NF = gate_NF * opened_NF
    grad_gate_NF = grad_NF * up_NF * (opened_NF + silu_NF * (1 - opened_NF))
    kind = both_N2F.dtype
    return grad_gate_NF.to(kind), (grad_NF * silu_NF).to(kind), (silu_NF * up_NF).to(kind)
