"""FP8 products: within what the format allows of float64, on a CPU and on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from solgen.kernels.fp8_linear.linear import fp8_linear, multiply_rows, multiply_rows_reference
from solgen.kernels.fp8_linear.quantise import quantise_rows


def inputs(rows: int, width: int, channels: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator) * torch.logspace(-2, 2, rows)[:, None]
    weight = torch.randn(channels, width, generator=generator) / width**0.5
    return x.to(dtype), weight.to(dtype)


@pytest.mark.parametrize(("rows", "width", "channels"), [(1, 16, 16), (65, 384, 128), (63, 1001, 7)])
def test_error_is_that_of_the_format(rows: int, width: int, channels: int) -> None:
    x, weight = inputs(rows, width, channels, torch.float32)
    exact = x.double() @ weight.double().t()
    output = fp8_linear(x, *quantise_rows(weight))
    # Every factor errs by 2^-4 of itself, or by 2^-10 of its scale: 448 scales are the largest of its row.
    step_x = (2**-4 * x.abs()).maximum(2**-10 / 448 * x.abs().amax(1, keepdim=True)).double()
    step_w = (2**-4 * weight.abs()).maximum(2**-10 / 448 * weight.abs().amax(1, keepdim=True)).double()
    bound = (x.abs() + step_x) @ (weight.abs() + step_w).t() - x.abs().double() @ weight.abs().double().t()
    assert output.dtype == torch.float32
    assert ((output - exact).abs() <= 1.001 * bound).all()
    # Errors of both factors add up in squares: 2^-4 / sqrt(3) each at most, no less than a fifth of that.
    if width > 100:
        error = (output - exact).norm() / exact.norm()
        assert 0.2 * 2**-4 * (2 / 3) ** 0.5 < error < 2**-4 * (2 / 3) ** 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("rows", "width", "channels"), [(1, 16, 16), (63, 384, 128), (1001, 5376, 7168), (0, 64, 64)])
def test_gpu_products_are_those_of_the_reference(large, rows, width, channels, fast) -> None:
    x, weight = inputs(rows, width, channels, torch.bfloat16)
    operands = [part.to(large) for part in (*quantise_rows(x), *quantise_rows(weight))]
    output = multiply_rows(*operands, fast=fast)
    exact = multiply_rows_reference(*operands)
    # bf16 rounding; every sum of 32 products loses 2^-13 of the magnitude in the tensor cores' own accumulators, which
    # are emptied into FP32 every fourth time at the latest, or never.
    magnitude = multiply_rows_reference(
        operands[0].float().abs(), *operands[1:2], operands[2].float().abs(), operands[3]
    )
    loss = 2**-13 * (1 + width / 32 if fast else 5)
    assert output.dtype == torch.bfloat16
    assert ((output.double() - exact).abs() <= 2**-8 * exact.abs() + loss * magnitude).all()


@pytest.mark.gpu
def test_a_gpu_wants_multiples_of_16(large) -> None:
    codes, scales = quantise_rows(torch.ones(4, 24, dtype=torch.bfloat16, device=large))
    with pytest.raises(ValueError, match="expected multiples of 16"):
        multiply_rows(codes, scales, codes, scales)
