"""Products in FP8: their numbers, scales and gradients, and when a weight is rounded anew.

Suffixes: `_NI` tokens x in, `_NO` tokens x out, `_OI` out x in.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.engines.groups.machine import HOPPER
from penstock.engines.kernels.fp8_linear import (
    FP8,
    SMALLEST,
    Fp8Weight,
    fp8_input_gradient,
    fp8_output,
    fp8_product,
    scaled,
    scaled_together,
)
from penstock.engines.kernels.weight_gradients import JointProduct, SummedLinear

LARGEST = 448.0  # of e4m3
HALF_STEP = 2.0**-4  # of e4m3's three bits of mantissa
SUBNORMAL = 2.0**-10  # half of e4m3's smallest step
DTYPES = [torch.bfloat16, torch.float32]


def _exact(rows: Tensor, scale: Tensor) -> Tensor:
    return rows.double() * scale.double().unsqueeze(1)


def _apart(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_rounded_by_scales_of_their_own(dtype: torch.dtype) -> None:
    """Numbers of rows that are 2 ** 60 apart keep three bits each; zeros stay zeros, what is not finite stays so.

    Control: with one scale for all rows those of the small ones are lost.
    """
    torch.manual_seed(0)
    values = (torch.randn(50, 64) * 2.0 ** torch.randint(-30, 30, (50, 1))).to(dtype)
    rows, scale = scaled(values)
    assert rows.dtype is FP8 and scale.dtype is torch.float32 and scale.shape == (50,)
    assert torch.equal(scale, values.abs().amax(-1).float() / LARGEST)
    assert float(rows.float().abs().amax(-1).min()) == LARGEST
    error = (_exact(rows, scale) - values.double()).abs()
    bound = torch.maximum(values.double().abs() * HALF_STEP, scale.double().unsqueeze(1) * SUBNORMAL)
    assert (error <= 1.001 * bound).all()
    together = values.abs().max().float() / LARGEST
    assert ((values.float() / together).to(FP8).float().abs().amax(-1) == 0).any()
    rows, scale = scaled(torch.zeros(2, 16, dtype=dtype))
    assert not rows.float().any() and (scale == SMALLEST / LARGEST).all()
    for odd in (torch.inf, torch.nan):
        rows, scale = scaled(torch.tensor([[1.0, odd] + [2.0] * 14], dtype=dtype))
        assert not torch.isfinite(rows.float() * scale).all()


def test_rows_side_by_side_are_scaled_as_one() -> None:
    """Gradients of gate and up, of which either may be the larger. Control: by themselves they have other scales."""
    torch.manual_seed(0)
    parts = [torch.randn(20, 32).bfloat16() * torch.randn(20, 1).exp().bfloat16() for _ in "ab"]
    (rows, scale), (wanted, wanted_scale) = scaled_together(*parts), scaled(torch.cat(parts, -1))
    assert torch.equal(rows.float(), wanted.float()) and torch.equal(scale, wanted_scale)
    for part in parts:
        assert not torch.equal(scaled(part)[1], scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_that_of_the_rounded_numbers(dtype: torch.dtype) -> None:
    """Up to the output's rounding, of any number of tokens. Control: the numbers before rounding are further off."""
    torch.manual_seed(0)
    for tokens in (1, 5, 300):
        left, right = torch.randn(tokens, 64).to(dtype), torch.randn(48, 64).to(dtype)
        product = fp8_product(scaled(left), scaled(right), dtype)
        assert product.dtype is dtype
        rounded = _exact(*scaled(left)) @ _exact(*scaled(right)).t()
        close = 2 * torch.finfo(dtype).eps
        assert _apart(product, rounded) < close
        assert 2 * close < _apart(product, left.double() @ right.double().t()) < 0.06


def test_gradients_lose_less_in_e4m3_than_in_e5m2() -> None:
    """Also where the tokens' gradients differ by orders of magnitude, and those of a token by as many."""
    torch.manual_seed(0)
    grad = torch.randn(2000, 256) * (3 * torch.randn(2000, 1)).exp() * torch.randn(2000, 256).exp()
    apart = [_apart(_exact(*scaled(grad, dtype)), grad.double()) for dtype in (FP8, torch.float8_e5m2)]
    assert apart[0] < 0.6 * apart[1] and apart[0] < HALF_STEP


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("summed", [True, False])
def test_a_layers_output_and_input_gradient_are_fp8_products_and_nothing_else_changes(
    summed: bool, backend: str
) -> None:
    """Weight and bias get the gradients that they have without, bit for bit, in a sum or by autograd.

    The input's gradient has scales by input: with those by output it would be another product. Control: the output of
    the layer as it was is nearer to the exact one.
    """
    torch.manual_seed(0)
    base = nn.Linear(32, 48, dtype=torch.bfloat16)
    plain, ours = (SummedLinear(base, torch.zeros(48, 32) if summed else None) for _ in "ab")
    weight = Fp8Weight(base.weight)
    ours.fp8 = weight.tensors
    compiled = torch.compile(ours, backend=backend, dynamic=True, fullgraph=True)
    for tokens in (5, 300, 17):
        grad_NO, found = torch.randn(1, tokens, 48).bfloat16(), {}
        input_NI = torch.randn(1, tokens, 32).bfloat16().requires_grad_()
        for layer in (plain, compiled):
            output = layer(input_NI)
            wanted = [input_NI, base.bias] if summed else [input_NI, base.bias, base.weight]
            found[layer] = output.detach(), *torch.autograd.grad(output, wanted, grad_NO)
        (usual, usual_NI, *usual_rest), (made, made_NI, *made_rest) = found.values()
        assert all(torch.equal(one, other) for one, other in zip(usual_rest, made_rest, strict=True))
        assert torch.equal(made, fp8_output(input_NI.detach(), weight.tensors, base.bias.detach()))
        rows_IO = scaled(base.weight.detach().t().contiguous())
        assert torch.equal(made_NI[0], fp8_product(scaled(grad_NO[0]), rows_IO, torch.bfloat16))
        exact = input_NI.detach().double() @ base.weight.detach().double().t() + base.bias.detach().double()
        assert _apart(usual, exact) < 0.005 < _apart(made, exact) < 0.05
        exact_NI = grad_NO.double() @ base.weight.detach().double()
        assert _apart(usual_NI, exact_NI) < 0.005 < _apart(made_NI, exact_NI) < 0.05
    if summed:
        assert torch.equal(plain.sum_OI, ours.sum_OI) and ours.sum_OI.any() and base.weight.grad is None


def test_a_joint_product_is_its_layers_in_fp8() -> None:
    """Rows of a weight have scales of their own, so outputs are the same bits. Control: without, they are others."""
    torch.manual_seed(0)
    layers = [SummedLinear(nn.Linear(32, width, dtype=torch.bfloat16), torch.zeros(width, 32)) for width in (32, 16)]
    joint = JointProduct(layers, torch.cat([layer.weight.detach() for layer in layers]), torch.zeros(48, 32))
    input_NI = torch.randn(20, 32).bfloat16()
    without = [layer(input_NI) for layer in layers]
    joint.fp8 = Fp8Weight(joint.weight_OI).tensors
    for layer, usual in zip(layers, without, strict=True):
        alone = fp8_output(input_NI, Fp8Weight(layer.weight).tensors, layer.bias)
        made = layer(input_NI)
        assert torch.equal(made, alone) and not torch.equal(made, usual)


def test_a_weight_is_rounded_when_it_is_renewed_and_stays_in_its_place() -> None:
    """All micro-batches of a step meet the same numbers. Control: renewed, they meet those of the changed weight."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(48, 32).bfloat16())
    weight, input_NI, grad_NO = Fp8Weight(parameter), torch.randn(7, 32).bfloat16(), torch.randn(7, 48).bfloat16()
    places = [tensor.data_ptr() for tensor in weight.tensors]

    def made() -> list[Tensor]:
        return [fp8_output(input_NI, weight.tensors), fp8_input_gradient(grad_NO, weight.tensors)]

    before = made()
    parameter.data.mul_(-3)
    assert all(map(torch.equal, before, made()))
    weight.renew()
    fresh = Fp8Weight(parameter)
    assert all(
        torch.equal(one.float(), other.float()) for one, other in zip(weight.tensors, fresh.tensors, strict=True)
    )
    assert not any(map(torch.equal, before, made()))
    assert [tensor.data_ptr() for tensor in weight.tensors] == places


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("tokens", [1, 17, 1000])
def test_the_tensor_cores_compute_the_product(tokens: int) -> None:
    """Any number of tokens, compiled or not. Control: with the scales of another row they do not."""
    torch.manual_seed(0)
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    weight, input_NI = Fp8Weight(torch.randn(48, 64, **kind)).tensors, torch.randn(tokens, 64, **kind)
    exact = _exact(*scaled(input_NI)) @ _exact(weight[0], weight[1]).t()
    for run in (fp8_output, torch.compile(fp8_output, dynamic=True, fullgraph=True)):
        assert _apart(run(input_NI, weight), exact) < 0.005
        assert _apart(run(input_NI, (weight[0], weight[1].roll(1))), exact) > 0.05
