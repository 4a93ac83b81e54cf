"""SwiGLU of a packed projection: the kernel against its reference and float64."""

import math

import pytest
import torch

pytest.importorskip("triton")

from solgen.kernels.fused import swiglu
from solgen.kernels.fused.swiglu import _swiglu_kernel
from tests.kernels.fused.cases import judge, leave_poison, poisoned


def check(rows, width, device, dtype=torch.bfloat16, *, stride=None, offset=0):
    x = poisoned(rows, 2 * width, device, dtype, seed=3, stride=stride, offset=offset)
    leave_poison(device, rows * width)
    return judge(swiglu, {"x": x})[0]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(1, 14_336), (63, 384), (65, 100), (3, 1), (5, 2049)])
def test_every_type_and_width(device, every_dtype, rows, width):
    check(rows, width, device, every_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("stride", "offset"), [(776, 8), (771, 3)], ids=["aligned", "odd"])
def test_strided_rows(device, narrow, stride, offset):
    check(5, 384, device, narrow, stride=stride, offset=offset)


@pytest.mark.gpu
def test_no_rows(device):
    assert check(0, 384, device).shape == (0, 384)


@pytest.mark.gpu
def test_extreme_gates(device):
    gate = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, math.nan]], device=device)
    got = swiglu(torch.cat([torch.ones_like(gate), gate], 1), impl="triton")
    expected = gate.double() * torch.sigmoid(gate.double())
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-36, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [63, 1001, 110_000])
def test_full_width(large, rows):
    """From 74,899 rows on, offsets pass 2^31."""
    check(rows, 14_336, large)


def test_in_the_interpreter(run_in_interpreter):
    run_in_interpreter()


def test_the_reference_is_the_formula():
    x = torch.linspace(-4, 5, 12, dtype=torch.float64).reshape(2, 6)
    for row, got in zip(x.tolist(), swiglu(x).tolist(), strict=True):
        expected = [value * gate / (1 + math.exp(-gate)) for value, gate in zip(row[:3], row[3:], strict=True)]
        assert got == pytest.approx(expected, rel=1e-14)


def test_what_it_refuses():
    with pytest.raises(ValueError, match="expected value and gate, an even number"):
        swiglu(torch.ones(2, 7))
    with pytest.raises(ValueError, match="x has strides"):
        swiglu(torch.ones(8, 2).t())


def test_a_kernel_asked_for_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match='impl "triton" got tensors on cpu; expected CUDA'):
        swiglu(torch.ones(2, 8), impl="triton")


def test_machine_code(compile_sm90):
    types = {"p_x": "*bf16", "p_out": "*bf16"}
    code = compile_sm90(_swiglu_kernel, types, {"PIECES": 7, "WIDTH": 14_336, "PIECE": 2048}, num_warps=4)
    assert code.stack_bytes == 0
    assert (code.count("LDG"), code.count("LDG.E.128")) == (4, 4)
    assert code.count("STG.E.128") == 2
