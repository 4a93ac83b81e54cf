"""Norm and rotary angles of queries and keys: the kernel against its reference and float64."""

import pytest
import torch

pytest.importorskip("triton")

import triton

from solgen.kernels.fused import qk_norm_rope
from solgen.kernels.fused.qk_norm_rope import HEADS, REGISTERS, TILE, _norm_rope_kernel
from tests.kernels.fused.cases import ROWS_AT_ONCE, judge, leave_poison, poisoned


def projections(rows, heads, device, dtype, *, width=128, pad=8):
    """Query and key [rows, heads, width] as views of one packed QKV, rows `pad` elements further apart than it is."""
    packed = poisoned(rows, 3 * heads * width, device, dtype, seed=3, stride=3 * heads * width + pad, offset=pad)
    query, key, value = packed.unflatten(1, (3, heads, width)).unbind(1)
    value.fill_(float("nan"))
    return query, key


def angles(rows, device, rotary=96):
    turns = torch.rand(rows, rotary // 2, generator=torch.Generator(device).manual_seed(5), device=device) * 6.3
    both = torch.cat([turns, turns], 1)
    return both.cos(), both.sin()


def check(query, key, cos, sin):
    device, dtype = query.device, query.dtype
    weights = poisoned(2, query.shape[2], device, dtype, seed=2)
    leave_poison(device, 2 * query.numel())
    fixed = {"query_weight": weights[0], "key_weight": weights[1]}
    return judge(qk_norm_rope, {"query": query, "key": key, "cos": cos, "sin": sin}, fixed, eps=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "heads"), [(1, 56), (63, 2), (65, 1), (3, 7)])
def test_every_type(device, every_dtype, rows, heads):
    check(*projections(rows, heads, device, every_dtype), *angles(rows, device))


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "rotary"), [(128, 128), (64, 32), (32, 32)])
def test_other_shares_of_rotated_channels(device, narrow, width, rotary):
    check(*projections(5, 3, device, narrow, width=width), *angles(5, device, rotary))


@pytest.mark.gpu
def test_odd_strides_and_heads_that_do_not_follow_one_another(device, narrow):
    query, key = projections(9, 4, device, narrow, pad=3)
    cos, sin = (torch.cat([table, table], 1)[:, 1:97] for table in angles(9, device))
    check(query[:, ::2], key[:, 1::2], cos, sin)


@pytest.mark.gpu
def test_no_rows(device):
    assert check(*projections(0, 2, device, torch.bfloat16), *angles(0, device))[0].shape == (0, 2, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [63, 1001, 110_000])
def test_full_width(large, rows):
    """From 99,865 rows on, offsets into the packed projections pass 2^31."""
    assert rows < ROWS_AT_ONCE or rows * 3 * 56 * 128 > 2**31
    check(*projections(rows, 56, large, torch.bfloat16, pad=0), *angles(rows, large))


def test_in_the_interpreter(run_in_interpreter):
    run_in_interpreter()


def test_the_reference_is_the_formula():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 1, 32, generator=generator, dtype=torch.float64)
    cos, sin = (torch.randn(2, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.arange(1.0, 33.0, dtype=torch.float64)
    got = qk_norm_rope(x, 2 * x, weight, weight, cos, sin, eps=0.0)
    for n in range(2):
        u = [float(v) * float(w) for v, w in zip(x[n, 0] / x[n, 0].square().mean().sqrt(), weight, strict=True)]
        expected = [u[d] * cos[n, d] - u[d + 16] * sin[n, d] for d in range(16)]
        expected += [u[d] * cos[n, d] + u[d - 16] * sin[n, d] for d in range(16, 32)]
        torch.testing.assert_close(got[0][n, 0], torch.stack(expected), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(got[1], got[0], rtol=1e-13, atol=1e-13)  # the norm takes the factor out


def test_what_it_refuses():
    x, weight, table = torch.ones(4, 2, 128), torch.ones(128), torch.ones(4, 96)
    good = {"query": x, "key": x, "query_weight": weight, "key_weight": weight, "cos": table, "sin": table}
    for change, message in (
        ({"key": x[:, :1]}, "expected equal shapes"),
        ({"key": x.transpose(1, 2).contiguous().transpose(1, 2)}, "unit stride along the channels"),
        ({"cos": table[:, :40], "sin": table[:, :40]}, "40 of 128 channels are rotated"),
        ({"sin": table[:3]}, r"sin has shape \(3, 96\)"),
        ({"key_weight": weight[:96]}, r"key_weight is \(96,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            qk_norm_rope(**(good | change), eps=1e-5)


def test_machine_code(compile_sm90, monkeypatch):
    compile_any, limit = triton.compile, {"maxnreg": REGISTERS}
    monkeypatch.setattr(
        triton, "compile", lambda *args, options, **more: compile_any(*args, options=options | limit, **more)
    )
    types = {"p_x": "*bf16", "p_weight": "*bf16", "p_cos": "*fp32", "p_sin": "*fp32", "p_out": "*bf16", "eps": "fp32"}
    constants = {"ROTARY": 96, "D": 128, "HEADS": HEADS, "TILE": TILE}
    code = compile_sm90(_norm_rope_kernel, types, constants, num_warps=4)
    assert code.stack_bytes == 0
    assert (code.count("LDG"), code.count("LDG.E.128")) == (40, 40)  # 8 of heads, 8 of weights, 12 of each angle
    assert code.count("STG.E.128") == 8
    assert code.count("STS") == 0
    assert code.count("SHFL") == 1  # the sum of squares
