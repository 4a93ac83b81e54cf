"""Rows in E4M3: the kernel against its reference bit for bit, the reference against the format's own error."""

import pytest
import torch

pytest.importorskip("triton")

from solgen.kernels.fp8_linear.quantise import _quantise_rows_kernel, quantise_rows
from solgen.kernels.sol_attn2.config import SCALE_FLOOR


def rows_of(rows: int, width: int, device: torch.device, dtype: torch.dtype, *, stride: int, offset: int):
    """Normal rows of very different size as a view of memory that is NaN elsewhere."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows + width))
    x *= 10.0 ** (torch.arange(rows) % 9 - 4)[:, None]
    memory = torch.full((rows + 1, stride), float("nan"), dtype=dtype, device=device)
    view = memory[:rows, offset : offset + width]
    view.copy_(x)
    return view


def check(x: torch.Tensor) -> None:
    # The reference runs on the CPU: torch divides by 448 on a GPU by multiplying with its rounded inverse.
    leave = torch.full((x.numel() + 64,), float("nan"), device=x.device)
    del leave
    expected_codes, expected_scales = quantise_rows(x.cpu(), impl="reference")
    codes, scales = quantise_rows(x, impl="triton")
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(codes.float().cpu(), expected_codes.float())  # the sign of a zero may differ


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "width", "stride", "offset"), [(1, 1, 1, 0), (65, 384, 400, 16), (63, 1001, 1007, 3)])
def test_codes_and_scales(device, dtype, rows, width, stride, offset):
    check(rows_of(rows, width, device, dtype, stride=stride, offset=offset))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [5376, 7168, 14_336])
def test_widths_of_the_model(device, width):
    check(rows_of(5, width, device, torch.bfloat16, stride=width, offset=0))


@pytest.mark.gpu
def test_many_rows(large):
    """Offsets pass 2^31."""
    x = torch.zeros(150_001, 14_336, dtype=torch.bfloat16, device=large)
    x[-1].normal_()
    codes, scales = quantise_rows(x)
    expected_codes, expected_scales = quantise_rows(x[-2:].cpu())
    assert torch.equal(codes[-2:].float().cpu(), expected_codes.float())
    assert torch.equal(scales[-2:].cpu(), expected_scales)


@pytest.mark.gpu
def test_zeros_infinities_and_nan(device):
    x = torch.zeros(4, 32, device=device)
    x[1, 3], x[2, 3], x[3] = float("inf"), float("nan"), 1e-30
    codes, scales = quantise_rows(x, impl="triton")
    values = codes.float().cpu() * scales.cpu()[:, None]
    assert scales[0] == SCALE_FLOOR
    assert torch.equal(values[0], torch.zeros(32))
    assert values[1].isnan().any()
    assert values[2].isnan().any()
    assert torch.equal(values[3], torch.zeros(32))  # far below the smallest scale's step


@pytest.mark.gpu
def test_no_rows(device):
    codes, scales = quantise_rows(torch.empty(0, 64, device=device), impl="triton")
    assert codes.shape == (0, 64)
    assert scales.shape == (0,)


def test_in_the_interpreter(run_in_interpreter):
    run_in_interpreter()


def test_the_reference_errs_by_half_a_step():
    x = torch.randn(64, 777, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) ** 3
    codes, scales = quantise_rows(x)
    error = (codes.double() * scales.double()[:, None] - x).abs()
    # Half a step: 2^-4 of a normal number, 2^-10 of the scale below; the scale itself is rounded to FP32.
    assert (error <= (2**-4 * x.abs()).maximum(2**-10 * scales.double()[:, None]) * (1 + 2**-20)).all()
    assert (codes.float().abs().amax(1) == 448).all()


def test_machine_code_reads_once_and_does_not_spill(compile_sm90):
    constants = {"INTEGER": False, "K": 14_336, "BLOCK": 16_384}
    types = {"p_x": "*bf16", "p_codes": "*u8", "p_scales": "*fp32"}
    code = compile_sm90(_quantise_rows_kernel, types, constants, num_warps=16)
    assert code.stack_bytes == 0
    assert code.stray_merges() == []
    assert 0 < code.count("LDG.E.128") == code.count("LDG")


@pytest.mark.parametrize(
    ("x", "impl", "message"),
    [
        (torch.ones(4), None, "expected rows"),
        (torch.ones(4, 4, dtype=torch.int32), None, "expected rows"),
        (torch.ones(4, 4).t()[:, :2], None, "expected rows"),
        (torch.ones(4, 0), None, "expected rows"),
        (torch.ones(4, 4), "cutlass", "expected None, reference or triton"),
        (torch.ones(4, 4, dtype=torch.float64), "triton", "expected at most 32 bits"),
    ],
)
def test_what_it_refuses(x, impl, message):
    with pytest.raises(ValueError, match=message):
        quantise_rows(x, impl=impl)
