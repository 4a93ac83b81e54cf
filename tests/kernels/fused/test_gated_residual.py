"""Gated residual, alone and with the next norm: the kernels against their references and float64."""

import pytest
import torch

pytest.importorskip("triton")

from solgen.kernels.fused import gated_residual, gated_residual_norm, rms_norm_modulate
from solgen.kernels.fused.gated_residual import _gated_residual_kernel
from tests.kernels.fused.cases import judge, leave_poison, poisoned, table_rows, tables


def check(rows, width, device, dtype=torch.bfloat16, *, stride=None, offset=0):
    """Both ops on the same inputs; they agree bit for bit on the residual stream."""
    gate, scale, shift = tables(3, width, device, dtype, seed=1)
    weight = poisoned(1, width, device, dtype, seed=2)[0]
    residual = poisoned(rows, width, device, dtype, seed=3, stride=stride, offset=offset)
    branch = poisoned(rows, width, device, dtype, seed=4, stride=stride and stride + 16, offset=offset)
    rowwise = {"residual": residual, "branch": branch, "index": table_rows(rows, device)}
    leave_poison(device, 2 * rows * width)
    fixed = {"gate": gate, "weight": weight, "scale": scale, "shift": shift}
    hidden, normed = judge(gated_residual_norm, rowwise, fixed, eps=1e-5)
    leave_poison(device, 2 * rows * width)
    (alone,) = judge(gated_residual, rowwise, {"gate": gate})
    assert torch.equal(alone, hidden)
    return hidden, normed


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(1, 5376), (63, 128), (65, 100), (3, 1), (5, 1023)])
def test_every_type_and_width(device, every_dtype, rows, width):
    check(rows, width, device, every_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("stride", "offset"), [(5376 + 8, 8), (5377, 3)], ids=["aligned", "odd"])
def test_strided_rows(device, narrow, stride, offset):
    check(5, 5376, device, narrow, stride=stride, offset=offset)


@pytest.mark.gpu
def test_no_rows(device):
    hidden, normed = check(0, 128, device)
    assert hidden.shape == normed.shape == (0, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [63, 1001, 110_000])
def test_full_width(large, rows):
    check(rows, 5376, large)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(large):
    check(110_000, 5376, large, stride=21_504)


def test_in_the_interpreter(run_in_interpreter):
    run_in_interpreter()


def test_the_references_are_the_formula_and_the_norm():
    generator = torch.Generator().manual_seed(0)
    residual, branch, gate, scale, shift = (
        torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(5)
    )
    weight, index = residual[0] + 1, torch.tensor([3, 0, 0, 1])
    hidden, normed = gated_residual_norm(residual, branch, gate, weight, scale, shift, index, eps=0.1)
    expected = torch.stack([residual[n] + gate[t] * branch[n] for n, t in enumerate(index.tolist())])
    assert torch.equal(hidden, expected)
    assert torch.equal(hidden, gated_residual(residual, branch, gate, index))
    assert torch.equal(normed, rms_norm_modulate(expected, weight, scale, shift, index, eps=0.1))


def test_the_norm_reads_the_sum_before_it_is_rounded():
    """1 + 2^-9 is 1 in bf16; the norm of (1 + 2^-9, 0.5) tells the two apart in float32."""
    residual, branch = torch.tensor([[1.0, 0.5]]).bfloat16(), torch.tensor([[2.0**-9, 0.0]]).bfloat16()
    one, zero, index = torch.ones(1, 2).bfloat16(), torch.zeros(1, 2).bfloat16(), torch.tensor([0])
    scale = torch.full((1, 2), 255.0).bfloat16()  # spreads the output over finer steps
    hidden, normed = gated_residual_norm(residual, branch, one, one[0], scale, zero, index, eps=0.0)
    assert torch.equal(hidden, residual)
    exact = torch.tensor([[1 + 2.0**-9, 0.5]]).double()
    exact = exact / exact.square().mean().sqrt() * 256
    assert torch.equal(normed, exact.bfloat16())


def test_what_it_refuses():
    x, table, index = torch.ones(4, 8), torch.ones(3, 8), torch.zeros(4, dtype=torch.int64)
    good = {"residual": x, "branch": x, "gate": table, "index": index}
    for change, message in (
        ({"branch": x[:, :7]}, r"branch has shape \(4, 7\)"),
        ({"gate": table[:, ::2]}, r"gate has shape \(3, 4\)"),
        ({"index": index[:1]}, "index is torch.int64"),
    ):
        with pytest.raises(ValueError, match=message):
            gated_residual(**(good | change))
        with pytest.raises(ValueError, match=message):
            gated_residual_norm(**(good | change), weight=x[0], scale=table, shift=table, eps=1e-5)


@pytest.mark.parametrize("norm", [False, True], ids=["alone", "with the norm"])
def test_machine_code(compile_sm90, norm):
    types = {name: "*bf16" for name in _gated_residual_kernel.arg_names if name.startswith("p_")}
    constants = {"NORM": norm, "PIECES": 6, "WIDTH": 5376, "PIECE": 1024}
    code = compile_sm90(_gated_residual_kernel, types | {"p_index": "*i64", "eps": "fp32"}, constants, num_warps=4)
    assert code.stack_bytes == 0
    assert code.count("LDG.E.EF.128") == 6 * 2  # rows
    assert code.count("LDG.E.128") == 6 * (4 if norm else 1)  # weight and tables
    assert code.count("STG.E.128") == 6 * (2 if norm else 1)
    assert code.count("STS") <= 2
