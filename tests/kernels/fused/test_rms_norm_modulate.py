"""RMSNorm with modulation: the kernel against its reference and float64, and the reference against the formula."""

import pytest
import torch

pytest.importorskip("triton")

from solgen.kernels.fused import rms_norm_modulate
from solgen.kernels.fused.rms_norm_modulate import _rms_norm_modulate_kernel
from tests.kernels.fused.cases import judge, leave_poison, poisoned, table_rows, tables


def check(rows, width, device, dtype=torch.bfloat16, *, stride=None, offset=0, index_type=torch.int64):
    scale, shift = tables(2, width, device, dtype, seed=1)
    weight = poisoned(1, width, device, dtype, seed=2)[0]
    x = poisoned(rows, width, device, dtype, seed=3, stride=stride, offset=offset)
    leave_poison(device, rows * width)
    fixed = {"weight": weight, "scale": scale, "shift": shift}
    return judge(rms_norm_modulate, {"x": x, "index": table_rows(rows, device, index_type)}, fixed, eps=1e-5)[0]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(1, 5376), (63, 128), (65, 100), (3, 1), (5, 1023)])
def test_every_type_and_width(device, every_dtype, rows, width):
    check(rows, width, device, every_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("stride", "offset"), [(5376 + 8, 8), (5377, 3)], ids=["aligned", "odd"])
def test_strided_rows(device, narrow, stride, offset):
    check(5, 5376, device, narrow, stride=stride, offset=offset, index_type=torch.int32)


@pytest.mark.gpu
def test_no_rows(device):
    assert check(0, 128, device).shape == (0, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [63, 1001, 110_000])
def test_full_width(large, rows):
    check(rows, 5376, large)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(large):
    check(110_000, 5376, large, stride=21_504)
    row = poisoned(1, 5376, large, torch.bfloat16, seed=3)
    scale, shift = tables(2, 5376, large, torch.bfloat16, seed=1)
    index = torch.zeros(400_000, dtype=torch.int64, device=large)
    leave_poison(large, 5376 * 200_000)
    out = rms_norm_modulate(row.expand(400_000, -1), row[0], scale, shift, index, eps=1e-5)
    assert torch.equal(out[-1], out[0])
    assert (out[390_000:] == out[0]).all()


def test_in_the_interpreter(run_in_interpreter):
    run_in_interpreter()


def test_the_reference_is_the_formula():
    generator = torch.Generator().manual_seed(0)
    x, scale, shift = (torch.randn(3, 7, generator=generator, dtype=torch.float64) for _ in range(3))
    weight = torch.randn(7, generator=generator, dtype=torch.float64)
    index = torch.tensor([2, 0, 2])
    got = rms_norm_modulate(x, weight, scale, shift, index, eps=0.1)
    for n, t in enumerate(index.tolist()):
        rms = (sum(float(value) ** 2 for value in x[n]) / 7 + 0.1) ** 0.5
        expected = [
            float(x[n, c]) / rms * float(weight[c]) * (1 + float(scale[t, c])) + float(shift[t, c]) for c in range(7)
        ]
        torch.testing.assert_close(got[n], torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-14)


def test_what_it_refuses():
    x, table, index = torch.ones(4, 8), torch.ones(3, 8), torch.zeros(4, dtype=torch.int64)
    good = {"x": x, "weight": x[0], "scale": table, "shift": table, "index": index, "eps": 1e-5}
    for change, message in (
        ({"x": torch.ones(8, 4).t()}, "x has strides"),
        ({"weight": torch.ones(7)}, r"weight is \(7,\)"),
        ({"x": torch.ones(4)}, "expected rows and channels"),
        ({"scale": torch.ones(2, 8)}, r"shift has shape \(3, 8\); expected \(2, 8\)"),
        ({"shift": torch.ones(3, 7)}, r"shift has shape \(3, 7\)"),
        ({"index": index[:3]}, "index is torch.int64"),
        ({"index": index.float()}, "index is torch.float32"),
        ({"impl": "cuda"}, "impl is 'cuda'"),
    ):
        with pytest.raises(ValueError, match=message):
            rms_norm_modulate(**(good | change))


def test_machine_code(compile_sm90):
    types = {name: "*bf16" for name in _rms_norm_modulate_kernel.arg_names if name.startswith("p_")}
    constants = {"PIECES": 6, "WIDTH": 5376, "PIECE": 1024}
    code = compile_sm90(_rms_norm_modulate_kernel, types | {"p_index": "*i64", "eps": "fp32"}, constants, num_warps=4)
    assert code.stack_bytes == 0
    assert code.count("LDG.E.EF.128") == 6  # rows
    assert code.count("LDG.E.128") == 3 * 6  # weight and tables
    assert code.count("LDG") == 4 * 6 + 1  # and the index
    assert code.count("STG.E.128") == 6
    assert code.count("STS") <= 2  # the sum crosses warps, nothing else does
