"""Weight gradients of linear layers, added to DeepSpeed's float32 sums by the matrix products that make them.

DeepSpeed's way is a product with bfloat16 output, its conversion to float32 and an addition, for every weight and
micro-batch. On a GPU one product can do all three, and it keeps float32 to the end: the sums are more exact, and the
conversions and additions are spared (benchmarks/LOG.md). Autograd sees no gradient of such a weight (`.grad` stays
None). The language head adds chunk by chunk (penstock/engines/kernels/lm_head.py). Queries, keys and values, whose
weights and sums lie side by side (penstock/engines/weights/layout.py), are one product. Outputs and input gradients
may be products in FP8 (fp8_linear.py).

Suffixes: `_NI` tokens x in, `_NO` tokens x out, `_OI` out x in, `_O` out.
Left out: other parameters, which go DeepSpeed's way into the same sums; adapters (penstock/engines/weights/lora.py: too
small to matter); every other optimizer of DeepSpeed (ZeRO 2 and 3, float32), which has no sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.engines.kernels.fp8_linear import fp8_input_gradient, fp8_output
from penstock.engines.weights.layout import blocks, family_in, fused_view


class SummedLinear(nn.Linear):
    """A linear layer whose weight's gradient goes to a sum of ours; weight and bias are those of another layer.

    Args:
        base: the layer; its parameters are taken over, not copied.
        sum_OI: float32; no parameter and no buffer, so that no checkpoint holds it. None: autograd gets the gradient.

    Attributes:
        fp8: its weight in FP8 (`Fp8Weight.tensors`), if it computes with that; neither parameters nor buffers.
    """

    def __init__(self, base: nn.Linear, sum_OI: Tensor | None) -> None:
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.sum_OI = sum_OI
        self.fp8: tuple[Tensor, ...] = ()
        self.joint: JointProduct | None = None  # with layers of the same input
        self.place = 0  # among them

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output."""
        if self.joint is not None:
            return self.joint.output(self.place, input)
        output: Tensor = _SummedProduct.apply(input, self.weight, self.bias, self.sum_OI, None, *self.fp8)
        return output


class JointProduct:
    """Layers that a model calls one by one with the same input, computed as one when the first is called.

    Keys and values have so few heads that products of their own leave most of a GPU idle.

    Args:
        layers: all with a bias or all without.
        weight_OI: their weights as one tensor, in the same order; a view of them.
        sum_OI: their sums, likewise.

    Attributes:
        fp8: as of `SummedLinear`.
    """

    def __init__(self, layers: list[SummedLinear], weight_OI: Tensor, sum_OI: Tensor) -> None:
        self.layers, self.weight_OI, self.sum_OI = layers, weight_OI, sum_OI
        self.fp8: tuple[Tensor, ...] = ()
        self.input: Tensor | None = None  # of the outputs that wait to be asked for
        self.waiting: dict[int, Tensor] = {}  # by place
        for place, layer in enumerate(layers):
            layer.joint, layer.place = self, place

    def output(self, place: int, input: Tensor) -> Tensor:
        """Return what the layer at `place` makes of the input: columns of the joint output."""
        if self.input is not input or place not in self.waiting:
            outputs = self._product(input).split([layer.out_features for layer in self.layers], -1)
            self.input, self.waiting = input, dict(enumerate(outputs))
        output = self.waiting.pop(place)
        if not self.waiting:  # nothing is held from one call of the model to the next
            self.input = None
        return output

    def _product(self, input: Tensor) -> Tensor:
        bias_O = None if self.layers[0].bias is None else torch.cat([layer.bias for layer in self.layers])
        rest = (self.sum_OI, self.layers[0].weight, *self.fp8)
        output: Tensor = _SummedProduct.apply(input, self.weight_OI, bias_O, *rest)
        return output


class _SummedProduct(torch.autograd.Function):
    """Linear layer; the fifth argument is a parameter where the weight is a view, so that backward comes by for it."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        sum_OI: Tensor | None,
        _: Tensor | None,
        *fp8: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(input, weight_OI, sum_OI, *fp8)
        return fp8_output(input, fp8, bias_O) if fp8 else nn.functional.linear(input, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight_OI, sum_OI, *fp8 = ctx.saved_tensors
        grad_NO, input_NI = grad.flatten(0, -2), input.flatten(0, -2)
        grad_OI = None
        if sum_OI is not None:
            add_weight_gradient(sum_OI, grad_NO, input_NI)
        elif ctx.needs_input_grad[1]:
            grad_OI = grad_NO.t() @ input_NI
        grad_bias_O = grad_NO.sum(0) if ctx.needs_input_grad[2] else None
        grad_input = fp8_input_gradient(grad, tuple(fp8)) if fp8 else grad @ weight_OI
        return grad_input, grad_OI, grad_bias_O, None, None, *[None] * len(fp8)


@torch.library.custom_op("penstock::add_weight_gradient", mutates_args={"sum_OI"})
def add_weight_gradient(sum_OI: Tensor, grad_NO: Tensor, input_NI: Tensor) -> None:
    """Add a linear layer's weight gradient in place; an operator of its own, so that compiled code calls it as it is.

    Args:
        sum_OI: float32.
        grad_NO: gradient of the output; input_NI: the input, both in the weights' dtype.
    """
    if sum_OI.device.type == "cuda":
        torch.addmm(sum_OI, grad_NO.t(), input_NI, out_dtype=sum_OI.dtype, out=sum_OI)
    else:
        sum_OI.addmm_(grad_NO.t().to(sum_OI.dtype), input_NI.to(sum_OI.dtype))


def sum_in_products(module: nn.Module, optimizer: Any) -> None:
    """Let a model's blocks and language head add to the sums of its optimizer, if that is one with sums."""
    if not _has_sums(optimizer):
        return
    groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
    sums = {weight: sum_ for group in groups for weight, sum_ in zip(*group, strict=True)}
    same_input = family_in(module).query_key_value.parts
    for block in blocks(module).values():
        for name, linear in list(block.named_modules()):
            if type(linear) is nn.Linear and linear.weight in sums:
                sum_OI = _alone(sums[linear.weight].view(linear.weight.shape))
                block.set_submodule(name, SummedLinear(linear, sum_OI))
        for attention in block.modules():
            _join([getattr(attention, name, None) for name in same_input])
    for head in module.modules():
        if hasattr(head, "sum_VH") and head.weight in sums:
            head.sum_VH = _alone(sums[head.weight].view(head.weight.shape))


def _join(layers: list[Any]) -> None:
    """Make layers one product if all of them are summed, and weights and sums lie side by side."""
    summed = all(isinstance(layer, SummedLinear) for layer in layers)
    if not summed or len({layer.bias is None for layer in layers}) > 1:
        return
    if (joint := joint_views(layers)) is not None:
        JointProduct(layers, *joint)


def joint_views(layers: list[SummedLinear]) -> tuple[Tensor, Tensor] | None:
    """Return the layers' weights as one tensor, and their sums; None unless each lie side by side."""
    sums = [layer.sum_OI for layer in layers if layer.sum_OI is not None]
    if len(sums) < len(layers):
        return None
    weight_OI, sum_OI = fused_view([layer.weight for layer in layers]), fused_view(sums)
    if weight_OI is None or sum_OI is None:
        return None
    return _alone(weight_OI), _alone(sum_OI)


def _has_sums(optimizer: Any) -> bool:
    return hasattr(optimizer, "fp32_groups_gradients")  # DeepSpeed's BF16_Optimizer


def _alone(view: Tensor) -> Tensor:
    """Return the same memory as a tensor that no other is known to share.

    DeepSpeed's sums are views of one buffer. Autograd would take all of them as overwritten once the backward pass has
    added to one, and the compiler would look at each view's place in the buffer and compile every block anew.
    """
    alone = view.data
    torch._dynamo.mark_static(alone)  # shapes are those of a parameter: only the number of tokens varies
    return alone


def count_sums(optimizer: Any) -> None:
    """Have DeepSpeed count every sum in norm and clipping: it leaves out those that its own hooks have not filled.

    A parameter without a gradient has a sum of zeros.
    """
    if _has_sums(optimizer):
        optimizer.fp32_groups_has_gradients = [[True] * len(group) for group in optimizer.bf16_groups]
