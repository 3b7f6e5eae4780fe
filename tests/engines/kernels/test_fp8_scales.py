"""Eight bits and a scale for each row lose what they are said to lose, and products are those of what is meant."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from penstock.engines.kernels.fp8_scales import FP8, LARGEST, meant, output_in_fp8, scaled

ROUNDING = 1 / 16  # of a number: half of the last of four binary digits
COARSE = 2.0**-10  # of a scale: half the distance of the smallest numbers


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_row_is_rounded_by_its_own_scale(dtype: torch.dtype) -> None:
    """Rows of very different sizes lose the same share. Control: with one scale for all a small row is lost."""
    factors_N1 = torch.tensor([1.0, 1e-6, 3e4, 0.0])[:, None]
    values_NK = (rows(4, 256) * factors_N1).to(dtype)
    narrow_NK, scales_N1 = scaled(values_NK)
    assert (narrow_NK.dtype, scales_N1.dtype, scales_N1.shape) == (FP8, torch.float32, (4, 1))
    largest_N = narrow_NK.float().abs().amax(-1)
    assert largest_N.tolist() == [LARGEST] * 3 + [0.0]
    error_NK = (meant((narrow_NK, scales_N1)) - values_NK.float()).abs()
    assert bool((error_NK <= ROUNDING * values_NK.float().abs() + COARSE * scales_N1).all())
    assert error_NK[:3].amax(-1).gt(0).all()
    together = scaled(values_NK.view(1, -1))
    assert not meant(together).view(4, -1)[1].any()


def test_numbers_of_e4m3_come_back_as_they_were() -> None:
    """Where the largest is a power of two times 448. Control: one number that it does not have."""
    all_256 = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    exact_K = all_256[all_256.isfinite()]
    for factor in (1.0, 2.0**-20, 2.0**9):
        assert torch.equal(meant(scaled(exact_K[None] * factor))[0], exact_K * factor)
    exact_K[exact_K == 17 * 2.0] = 35.0
    exact_K[3] = 0.3
    assert not torch.equal(meant(scaled(exact_K[None]))[0], exact_K)


def test_what_is_no_number_is_not_hidden() -> None:
    """A row with infinity or NaN, which would otherwise become 448. Control: the row beside it."""
    values_NK = rows(3, 16)
    values_NK[0, 3], values_NK[1, 5] = torch.inf, torch.nan
    output_NO = output_in_fp8(values_NK, scaled(rows(32, 16, seed=1)))
    assert output_NO.isnan().all(-1).tolist() == [True, True, False]


@pytest.mark.parametrize("bias", [True, False], ids=["with bias", "without"])
def test_a_linear_layers_output_is_that_of_the_numbers_meant(bias: bool) -> None:
    """In the dtype and shape of the input, 3 to 4 % of it lost. Control: the scales of another weight."""
    input, weight_OI = rows(2, 5, 128), rows(48, 128, seed=1) * rows(48, 1, seed=2).exp()
    bias_O = rows(48, seed=3) if bias else None
    narrow = scaled(weight_OI)
    output = output_in_fp8(input, narrow, bias_O)
    wanted = functional.linear(meant(scaled(input)), meant(narrow), bias_O)
    torch.testing.assert_close(output, wanted)
    assert output.shape == (2, 5, 48)
    assert output_in_fp8(input.bfloat16(), narrow).dtype == torch.bfloat16

    def lost(output: torch.Tensor) -> float:
        whole = functional.linear(input, weight_OI, bias_O)
        return float((output - whole).norm() / whole.norm())

    assert 0.01 < lost(output) < 0.05
    assert lost(output_in_fp8(input, (narrow[0], narrow[1].flip(0)), bias_O)) > 0.5
