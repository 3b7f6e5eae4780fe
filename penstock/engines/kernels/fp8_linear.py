"""Products of linear layers in FP8, as Hopper's tensor cores compute them: twice the peak of bfloat16's.

Each row of what is multiplied has a scale of its own, so that its largest number is the largest of e4m3: activations
and gradients by token, weights by output for the forward pass and by input for the backward pass ("rowwise" of
torchao's float8 training). Rollouts compute outputs by the same functions (engines/rollout/fp8/weights.py), so that
trainer and vLLM round the same numbers alike. Gradients are e4m3, too: within a row its
three bits of mantissa are worth more than e5m2's range (tests/engines/kernels/test_fp8_linear.py measures both).

Weights are scaled and rounded once per optimizer step, not with every micro-batch. That, and weight gradients that go
to sums of ours (weight_gradients.py), is why torchao is not used: its `Float8Linear` rounds its weight with each call
and leaves the gradient to autograd. Its recipe "rowwise_with_gw_hp" has weights' gradients in high precision, too.

Suffixes: `_NK` rows x what is summed over, `_N` a scale for each row, `_OI` out x in, `_IO` in x out.
Left out: weight gradients, which stay bfloat16 products: their sums run over the tokens, along which scales by token
cannot be taken out; which layers compute so (fp8_blocks.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
SMALLEST = 2.0**-100  # of a row's largest numbers: a row of zeros has a scale, too

Scaled = tuple[Tensor, Tensor]  # rows in FP8, and the float32 scale of each


def scaled(rows_NK: Tensor, dtype: torch.dtype = FP8) -> Scaled:
    """Return rows in FP8 and their scales_N, by which they have to be multiplied; NaN and infinity become NaN."""
    scale_N = rows_NK.abs().amax(-1).float().clamp_min(SMALLEST) / torch.finfo(dtype).max
    return (rows_NK.float() / scale_N.unsqueeze(1)).to(dtype), scale_N


def scaled_together(first_NK: Tensor, second_NK: Tensor) -> Scaled:
    """Return `scaled` of both side by side; where the compiler makes them it can do so in the same kernel."""
    largest_N = torch.maximum(first_NK.abs().amax(-1), second_NK.abs().amax(-1)).float()
    scale_N = largest_N.clamp_min(SMALLEST) / torch.finfo(FP8).max
    both = ((part_NK.float() / scale_N.unsqueeze(1)).to(FP8) for part_NK in (first_NK, second_NK))
    return torch.cat(tuple(both), -1), scale_N


def fp8_product(left: Scaled, right: Scaled, dtype: torch.dtype, bias_O: Tensor | None = None) -> Tensor:
    """Return left @ right.T + bias, rounded to `dtype` once.

    Both lie by rows of what is summed over, as the tensor cores read them.
    """
    (left_NK, left_N), (right_OK, right_O) = left, right
    # The scales become a column and a row here: of a column that it made the compiler would choose the strides itself.
    scales = left_N.unsqueeze(1), right_O.unsqueeze(0)
    product: Tensor = torch._scaled_mm(
        left_NK.contiguous(), right_OK.t(), *scales, bias=bias_O, out_dtype=dtype, use_fast_accum=True
    )
    return product


class Fp8Weight:
    """A weight in FP8 for both passes, as it was when it was last renewed.

    Args:
        weight_OI: a parameter, or a view of several.

    Attributes:
        tensors: rows_OI and scales for the output, rows_IO and scales for the input's gradient; they keep their places
            in memory.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        self._weight_OI = weight_OI
        outputs, inputs = weight_OI.shape
        self.tensors = (
            *_empty(weight_OI, outputs, inputs),
            *_empty(weight_OI, inputs, outputs),
        )
        for tensor in self.tensors:  # only the number of tokens varies
            torch._dynamo.mark_static(tensor)
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        """Scale and round the weight anew, since it has changed."""
        weight_OI = self._weight_OI.data
        for place, value in zip(self.tensors, (*scaled(weight_OI), *scaled(weight_OI.t().contiguous())), strict=True):
            place.copy_(value)


def _empty(like: Tensor, rows: int, columns: int) -> Scaled:
    return like.new_empty(rows, columns, dtype=FP8), like.new_empty(rows, dtype=torch.float32)


def fp8_output(input: Tensor, weight: tuple[Tensor, ...], bias_O: Tensor | None = None) -> Tensor:
    """Return a linear layer's output.

    Args:
        input: [..., in].
        weight: `Fp8Weight.tensors`, or the first two of them.
    """
    output_NO = fp8_product(scaled(input.flatten(0, -2)), (weight[0], weight[1]), input.dtype, bias_O)
    return output_NO.view(*input.shape[:-1], output_NO.shape[1])


def fp8_input_gradient(grad: Tensor, weight: tuple[Tensor, ...]) -> Tensor:
    """Return the gradient of its input; arguments as of `fp8_output`, `grad` is the output's."""
    return fp8_product(scaled(grad.flatten(0, -2)), (weight[2], weight[3]), grad.dtype).unflatten(0, grad.shape[:-1])
