"""Operands of raw projections against the two steps they replace, norm and rotation, then `prepare`: bit for bit."""

import pytest
import torch

pytest.importorskip("triton")

import triton

from solgen.kernels.fused import qk_norm_rope
from solgen.kernels.sol_attn2.config import SolAttn2Config
from solgen.kernels.sol_attn2.norm_rope import NormRope
from solgen.kernels.sol_attn2.triton import forward
from solgen.kernels.sol_attn2.triton import norm_prepare as kernels
from solgen.kernels.sol_attn2.triton.forward import sol_attn2_forward
from solgen.kernels.sol_attn2.triton.norm_prepare import norm_prepare
from solgen.kernels.sol_attn2.triton.prepare import prepare
from tests.kernels.fused.cases import leave_poison


def make_norm(rows, device, dtype, pairs=48):
    """Weights of both signs and random angles, with NaN around them."""
    generator = torch.Generator(device).manual_seed(rows)

    def among_nan(count, width, values, dtype):
        buffer = torch.full((count + 2, width + 16), float("nan"), dtype=dtype, device=device)
        view = buffer[1:-1, :width]
        view.copy_(values)
        return view

    weights = torch.randn(2, 128, generator=generator, device=device)
    turns = torch.rand(rows, pairs, generator=generator, device=device) * 6.3
    turns[::3] = 0.0  # sines of zero, whose products have a sign
    weights = among_nan(2, 128, weights, dtype)
    cos, sin = (among_nan(rows, pairs, table, torch.float32) for table in (turns.cos(), turns.sin()))
    return NormRope(weights[0], weights[1], cos, sin, eps=1e-5)


def normed_before(query, key, norm):
    """Query and key as `qk_norm_rope` writes them, [B, H, N, 128]."""
    cos, sin = (torch.cat([table, table], dim=1) for table in (norm.cos, norm.sin))
    normed = [
        qk_norm_rope(
            query[b].transpose(0, 1),
            key[b].transpose(0, 1),
            norm.query_weight,
            norm.key_weight,
            cos,
            sin,
            eps=norm.eps,
            impl="triton",
        )
        for b in range(len(query))
    ]
    return tuple(torch.stack([x.transpose(0, 1) for x in pair]) for pair in zip(*normed, strict=True))


def check(query, key, value, norm, config):
    """Every operand, bit for bit; -0 and 0 differ."""
    leave_poison(query.device, query.numel())
    operands = norm_prepare(query, key, value, norm=norm, config=config)
    for name, expected in vars(prepare(*normed_before(query, key, norm), value, config=config)).items():
        got = getattr(operands, name)
        if torch.is_tensor(expected):
            assert got.dtype == expected.dtype, name
            assert got.is_contiguous(), name
            assert got.float().isfinite().all(), name
            got, expected = got.view(torch.uint8), expected.view(torch.uint8)
            assert torch.equal(got, expected), name
        else:
            assert got == expected, name


@pytest.mark.gpu
@pytest.mark.parametrize("smooth", [True, False], ids=["smooth", "plain"])
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (63, 2), (65, 1), (201, 2)])
def test_operands_are_those_of_the_two_steps(device, packed_qkv, rows, heads, smooth):
    config = SolAttn2Config(smooth_key=smooth, smooth_value=smooth)
    check(*packed_qkv(rows, heads, device), make_norm(rows, device, torch.bfloat16), config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_types(device, packed_qkv, dtype):
    """Nothing is rounded behind the norm of FP32 inputs: a GPU may fuse its last product with the sums."""
    if dtype == torch.float32 and device.type == "cuda":
        pytest.skip("bits are promised of 16-bit inputs")
    check(*packed_qkv(70, 1, device, dtype), make_norm(70, device, dtype), SolAttn2Config())


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [32, 64])
def test_other_shares_of_rotated_channels(device, packed_qkv, pairs):
    check(*packed_qkv(66, 1, device), make_norm(66, device, torch.bfloat16, pairs), SolAttn2Config())


@pytest.mark.gpu
def test_heads_that_fill_no_program(device, packed_qkv):
    """Programs take several heads, the last one fewer."""
    assert 5 % kernels.HEADS
    assert 5 % kernels.MEAN_HEADS
    check(*packed_qkv(10, 5, device), make_norm(10, device, torch.bfloat16), SolAttn2Config())


@pytest.mark.gpu
def test_the_mean_of_several_chunks(device, packed_qkv):
    check(*packed_qkv(1030, 1, device), make_norm(1030, device, torch.bfloat16), SolAttn2Config())


@pytest.mark.gpu
def test_batch_entries_share_the_angles(device, packed_qkv):
    pairs = zip(packed_qkv(70, 2, device, seed=1), packed_qkv(70, 2, device, seed=2), strict=True)
    check(*(torch.cat(pair) for pair in pairs), make_norm(70, device, torch.bfloat16), SolAttn2Config())


@pytest.mark.gpu
def test_extreme_rows(device, packed_qkv):
    query, key, value = packed_qkv(130, 2, device)
    query[0, 0, 64:128] = 0.0  # a zero block
    query[0, 1, :, ::3] = -0.0
    key[0, 0] = 0.0  # a zero head
    key[0, 1, 5] *= 1e15
    key[0, 1, 6] *= 1e-15
    check(query, key, value, make_norm(130, device, torch.bfloat16), SolAttn2Config(smooth_key=False))


@pytest.mark.gpu
def test_a_whole_call_in_groups_of_heads(device, packed_qkv, monkeypatch):
    query, key, value = packed_qkv(70, 2, device)
    norm = make_norm(70, device, torch.bfloat16)
    options = {"video_rows": None, "scale": None, "impl": "triton", "details": False}
    expected = sol_attn2_forward(*normed_before(query, key, norm), value, config=SolAttn2Config(), **options)
    monkeypatch.setattr(forward, "GROUP_BYTES", forward.head_bytes(2))
    assert torch.equal(sol_attn2_forward(query, key, value, config=SolAttn2Config(), norm=norm, **options), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("smooth", [True, False], ids=["smooth", "plain"])
@pytest.mark.parametrize("rows", [1001, 110_000, 219_524])
def test_long_sequences(large, rows, smooth):
    """The last heads of a packed QKV, whose offsets pass 2^31 at 99,865 rows."""
    generator = torch.Generator(large).manual_seed(0)
    packed = torch.empty(rows, 3, 56, 128, dtype=torch.bfloat16, device=large)[:, :, 51:]
    assert rows < 99_865 or packed.stride(0) * rows > 2**31
    for part in packed.split(4096):
        part.copy_(torch.randn(part.shape, generator=generator, device=large) * 2 + 0.25)
    query, key, value = packed.permute(1, 2, 0, 3).unsqueeze(1)
    config = SolAttn2Config(smooth_key=smooth, smooth_value=smooth)
    check(query, key, value, make_norm(rows, large, torch.bfloat16), config)


@pytest.mark.slow
def test_in_the_interpreter(run_in_interpreter):
    run_in_interpreter()


def test_machine_code(compile_sm90, monkeypatch):
    compile_any, limit = triton.compile, {"maxnreg": kernels.REGISTERS}
    monkeypatch.setattr(
        triton, "compile", lambda *args, options, **more: compile_any(*args, options=options | limit, **more)
    )
    types = dict.fromkeys(("p_cos", "p_sin", "p_mean", "p_scale", "p_partial"), "*fp32")
    types |= {"p_x": "*bf16", "p_weight": "*bf16", "p_codes": "*u8", "p_units": "*fp16", "eps": "fp32"}
    types |= {"stride_batch": "i64", "stride_head": "i64"}
    sizes = {"ROW": 7168, "COS_ROW": 96, "SIN_ROW": 96, "ROTARY": 96, "ASM": True, "D": 128}

    mean = compile_sm90(kernels._mean_kernel, types, sizes | {"CHUNK": 1024, "HEADS": kernels.MEAN_HEADS}, num_warps=4)
    assert mean.stack_bytes == 0
    assert mean.count("LDG.E.128") == 10  # 2 a head, 2 a table of angles, 2 of weights
    assert mean.count(r"F2F\.") == 0
    # Nothing but the sums of 16 rows at the end crosses warps.
    assert mean.count("STS") <= 60 * kernels.MEAN_HEADS

    for shift in (False, True):
        quantize = {"SHIFT": shift, "INTEGER": False, "HEADS": kernels.HEADS}
        code = compile_sm90(kernels._quantize_kernel, types, sizes | quantize, num_warps=4)
        assert code.stack_bytes == 0
        assert code.stray_merges() == []
        assert code.count("F2FP.SATFINITE.E4M3") == code.count("F2FP.BF16") == 32
        assert code.count(r"F2F\.") == 0
        assert code.count("LDG.E.64") == 18  # 16 of rows, 2 of weights
        assert code.count("LDG.E.128") == 16 + 2 * shift  # 8 of either table of angles, 2 of the mean
        assert code.count("STS") <= 6  # the largest magnitude of the block
