"""Numbers of eight bits with a scale for each row, and the outputs of linear layers whose weights are kept so.

A row is divided by its scale, the largest size in it / 448, so that its largest number becomes the largest of e4m3.
Each number keeps four binary digits, so at most a sixteenth of its size is lost; those below 2^-6 of a scale get
coarser. A row of a weight makes one number of the output, a row of the input is a token: so both scales come out of the
sum, and kernels for Hopper GPUs multiply eight bits by eight and the sums by both scales.

Where there is no GPU, a product is that of the numbers that are meant: for tests, and slow. Suffixes: _N rows, _K
what is summed over, _N1 a scale for each row, _OI outputs x inputs. Left out: which layers compute so
(engines/rollout/fp8/weights.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
SMALLEST = 2.0**-100  # of a row's largest numbers: a row of zeros has a scale, too

Scaled = tuple[torch.Tensor, torch.Tensor]  # rows of eight bits, and the float32 scale of each
Product = Callable[[Scaled, Scaled, torch.dtype, torch.Tensor | None], torch.Tensor]


def scaled(rows_NK: torch.Tensor) -> Scaled:
    """Return rows of eight bits and their scales, by which they have to be multiplied; infinity and NaN become NaN."""
    largest_N1 = rows_NK.abs().amax(-1, keepdim=True).float()
    scale_N1 = largest_N1.clamp_min(SMALLEST) / LARGEST
    return (rows_NK.float() / scale_N1).to(FP8), scale_N1


def meant(scaled_NK: Scaled) -> torch.Tensor:
    """Return the numbers that rows of eight bits and their scales stand for, in float32."""
    return scaled_NK[0].float() * scaled_NK[1]


def product_of_meant(left: Scaled, right: Scaled, dtype: torch.dtype, bias_O: torch.Tensor | None) -> torch.Tensor:
    """Return left_NK @ right_OK.T + bias_O in `dtype`, computed in float32 of the numbers that are meant."""
    bias = None if bias_O is None else bias_O.float()
    return functional.linear(meant(left), meant(right), bias).to(dtype)


def product_on(device: torch.device) -> Product:
    """Return what multiplies on a device: on a GPU vLLM's kernel, in bfloat16, of sizes that are multiples of 16."""
    if device.type != "cuda":
        return product_of_meant
    from vllm import _custom_ops as kernels

    def product(left: Scaled, right: Scaled, dtype: torch.dtype, bias_O: torch.Tensor | None) -> torch.Tensor:
        return kernels.cutlass_scaled_mm(left[0], right[0].t(), left[1], right[1], dtype, bias_O)

    return product


def output_in_fp8(
    input: torch.Tensor, weight_OI: Scaled, bias_O: torch.Tensor | None = None, product: Product = product_of_meant
) -> torch.Tensor:
    """Return a linear layer's output, [..., out], of the input's dtype.

    Args:
        input: [..., in]; each token gets its scale here.
    """
    output_NO = product(scaled(input.reshape(-1, input.shape[-1])), weight_OI, input.dtype, bias_O)
    return output_NO.view(*input.shape[:-1], weight_OI[0].shape[0])
