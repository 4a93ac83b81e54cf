"""`prepare` of queries and keys that still lack their norm and rotary angles, read where the projections left them.

    u = x / sqrt(mean(x^2) + eps) * weight
    y_d = u_d cos_nd - u_(d + R/2) sin_nd     for d < R/2
    y_d = u_d cos_n(d - R/2) + u_(d - R/2) sin_n(d - R/2)     for R/2 <= d < R
    y_d = u_d                                 for d >= R
    k_mean = mean over rows of y        codes = E4M3((y - mean) / scale)        units = RN_fp16(mean of 8 rows of y)

y is rounded to the type of x, as `qk_norm_rope` writes it, and goes to `quantize_block` from registers: the operands
of 16-bit inputs are bit for bit those that `prepare` makes of that op's output, but no 16-bit y is written or read.
Keys are read twice, the first time for their mean; without smoothing once.

Heads are read as two halves (`kernels.fused.halves`). Programs take several heads of the same rows: their angles come
from registers or L1. Row strides are compiled in, so that the tokens of a unit share one address.

Legend: as in `prepare`; R rotated channels (96 of 128). Angles are [N, R / 2], one a pair of channels.
"""

import torch
import triton
import triton.language as tl

from solgen.kernels.fused.halves import half_channels, load_rows, load_weights, norm_rope
from solgen.kernels.sol_attn2.config import BLOCK, HEAD_DIM, UNIT, SolAttn2Config
from solgen.kernels.sol_attn2.norm_rope import NormRope
from solgen.kernels.sol_attn2.triton.e4m3 import interpreted
from solgen.kernels.sol_attn2.triton.operands import Operands
from solgen.kernels.sol_attn2.triton.prepare import QuantizedRows, quantize_block, with_values
from solgen.kernels.sol_attn2.triton.statistics import CHUNK, join_chunks, sum_rows

MEAN_HEADS, HEADS = 2, 4
"""Heads of a program of the first reading and of the second."""

REGISTERS = 128
"""Of a thread, so that four programs share a multiprocessor."""

ROUND_PAIR = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
"""Two FP32 to bf16, in one instruction and in its place: moved to its uses, what it reads would fill the registers."""


@triton.jit
def _head(p_x, i_g, num_heads, stride_batch, stride_head):
    """First row of a head."""
    return p_x + (i_g // num_heads).to(tl.int64) * stride_batch + (i_g % num_heads).to(tl.int64) * stride_head


@triton.jit
def _norm_rope(b_row, b_weights, b_cos, b_sin, m_turned, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Halves of what `load_rows` returns, normed, rotated and rounded, as fp32 [R, 64]."""
    b_y = norm_rope(b_row, b_weights, b_cos, b_sin, m_turned)
    return _round(b_y[0], DTYPE, ASM), _round(b_y[1], DTYPE, ASM)


@triton.jit
def _round(b_x, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """fp32 rounded to a type, as fp32; ASM is for bf16 alone."""
    if ASM:
        b_x = tl.inline_asm_elementwise(ROUND_PAIR, "=r,r,r", [b_x], dtype=tl.bfloat16, is_pure=False, pack=2)
    return b_x.to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_groups", "num_chunks"])
def _mean_kernel(
    p_x,
    p_weight,  # [D]
    p_cos,  # [N, R / 2] fp32
    p_sin,
    p_partial,  # [G, C, 3, D] fp32, of which the sums are written
    num_rows,
    num_heads,
    num_groups,
    num_chunks,
    stride_batch,
    stride_head,
    eps,
    ROW: tl.constexpr,
    COS_ROW: tl.constexpr,
    SIN_ROW: tl.constexpr,
    ROTARY: tl.constexpr,
    ASM: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
):
    """Sums of CHUNK rows in the order of `_chunk_kernel`."""
    first, i_c = tl.program_id(0) * HEADS, tl.program_id(1)
    o_first, o_second = half_channels(ROTARY)
    m_turned = (o_first < ROTARY // 2)[None, :]
    b_weights = load_weights(p_weight, o_first, o_second)
    b_sums: tl.tuple = ()
    for _ in tl.static_range(2 * HEADS):
        b_sums += (tl.zeros([16, 64], tl.float32),)
    for i_r in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, num_rows), 16):
        o_r = (i_r + tl.arange(0, 16)).to(tl.int64)[:, None]
        m_r = o_r < num_rows
        b_rows: tl.tuple = ()
        for h in tl.static_range(HEADS):
            i_g = tl.minimum(first + h, num_groups - 1)
            p_row = _head(p_x, i_g, num_heads, stride_batch, stride_head) + o_r * ROW
            b_rows += (load_rows(p_row + o_first[None, :], p_row + o_second[None, :], m_r, eps),)
        b_cos = tl.load(p_cos + o_r * COS_ROW + o_first[None, :], mask=m_r & m_turned, other=0.0)
        b_sin = tl.load(p_sin + o_r * SIN_ROW + o_first[None, :], mask=m_r & m_turned, other=0.0)
        b_more: tl.tuple = ()
        for h in tl.static_range(HEADS):
            b_y = _norm_rope(b_rows[h], b_weights, b_cos, b_sin, m_turned, p_x.dtype.element_ty, ASM)
            b_more += (b_sums[2 * h] + b_y[0], b_sums[2 * h + 1] + b_y[1])
        b_sums = b_more
    for h in tl.static_range(HEADS):
        p_out = p_partial + ((first + h) * num_chunks + i_c).to(tl.int64) * (3 * D)
        tl.store(p_out + o_first, sum_rows(b_sums[2 * h], 64), mask=first + h < num_groups)
        tl.store(p_out + o_second, sum_rows(b_sums[2 * h + 1], 64), mask=first + h < num_groups)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_groups", "num_blocks"])
def _quantize_kernel(
    p_x,
    p_weight,  # [D]
    p_cos,  # [N, R / 2] fp32
    p_sin,
    p_mean,  # [G, D] fp32, read with SHIFT
    p_codes,  # [G, NB * 64, D] uint8
    p_scale,  # [G, NB] fp32
    p_units,  # [G, NB * 8, D] fp16
    num_rows,
    num_heads,
    num_groups,
    num_blocks,
    stride_batch,
    stride_head,
    eps,
    ROW: tl.constexpr,
    COS_ROW: tl.constexpr,
    SIN_ROW: tl.constexpr,
    SHIFT: tl.constexpr,
    INTEGER: tl.constexpr,
    ROTARY: tl.constexpr,
    ASM: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
):
    first, i_b = tl.program_id(0) * HEADS, tl.program_id(1)
    o_first, o_second = half_channels(ROTARY)
    m_turned = (o_first < ROTARY // 2)[None, :]
    b_weights = load_weights(p_weight, o_first, o_second)
    o_r = i_b * 64 + tl.arange(0, 8)[:, None] * 8
    p_cos += o_r.to(tl.int64) * COS_ROW + o_first[None, :]
    p_sin += o_r.to(tl.int64) * SIN_ROW + o_first[None, :]
    for i_g in range(first, min(first + HEADS, num_groups)):
        p_row = _head(p_x, i_g, num_heads, stride_batch, stride_head) + o_r.to(tl.int64) * ROW
        p_first, p_second = p_row + o_first[None, :], p_row + o_second[None, :]
        b_rows: tl.tuple = ()
        for t in tl.static_range(8):  # tokens t of the 8 units
            b_rows += (load_rows(p_first + t * ROW, p_second + t * ROW, o_r + t < num_rows, eps),)
        b_firsts: tl.tuple = ()
        b_seconds: tl.tuple = ()
        for t in tl.static_range(8):
            m_angle = (o_r + t < num_rows) & m_turned
            b_cos = tl.load(p_cos + t * COS_ROW, mask=m_angle, other=0.0)
            b_sin = tl.load(p_sin + t * SIN_ROW, mask=m_angle, other=0.0)
            b_y = _norm_rope(b_rows[t], b_weights, b_cos, b_sin, m_turned, p_x.dtype.element_ty, ASM)
            b_firsts += (b_y[0],)
            b_seconds += (b_y[1],)
        b_parts, channels = (b_firsts, b_seconds), (o_first, o_second)
        quantize_block(
            b_parts, channels, i_g, i_b, num_rows, num_blocks, p_mean, p_codes, p_scale, p_units, SHIFT, INTEGER, D
        )


def norm_mean(x: torch.Tensor, weight: torch.Tensor, norm: NormRope) -> torch.Tensor:
    """Mean of every head of a [B, H, N, D] view after its norm and rotation, [B * H, D] fp32: `key_mean`'s bits."""
    batch, heads, rows, _ = x.shape
    groups, chunks = batch * heads, triton.cdiv(rows, CHUNK)
    partial = torch.empty(groups, chunks, 3, HEAD_DIM, dtype=torch.float32, device=x.device)
    _mean_kernel[(triton.cdiv(groups, MEAN_HEADS), chunks)](
        x,
        weight,
        norm.cos,
        norm.sin,
        partial,
        rows,
        heads,
        groups,
        chunks,
        *x.stride()[:2],
        norm.eps,
        ROW=x.stride(2),
        COS_ROW=norm.cos.stride(0),
        SIN_ROW=norm.sin.stride(0),
        ROTARY=2 * norm.cos.shape[1],
        ASM=x.dtype == torch.bfloat16 and not interpreted(),
        CHUNK=CHUNK,
        HEADS=MEAN_HEADS,
        D=HEAD_DIM,
        num_warps=4,
        maxnreg=REGISTERS,
    )
    return join_chunks(partial, rows, smooth=True, extremes=False)[0]


def norm_quantize(x: torch.Tensor, weight: torch.Tensor, norm: NormRope, mean: torch.Tensor | None) -> QuantizedRows:
    """What `quantize_rows` returns for a [B, H, N, D] view after its norm and rotation."""
    batch, heads, rows, _ = x.shape
    groups, blocks = batch * heads, triton.cdiv(rows, BLOCK)
    codes = torch.empty(groups, blocks * BLOCK, HEAD_DIM, dtype=torch.uint8, device=x.device)
    scale = torch.empty(groups, blocks, dtype=torch.float32, device=x.device)
    units = torch.empty(groups, blocks * UNIT, HEAD_DIM, dtype=torch.float16, device=x.device)
    _quantize_kernel[(triton.cdiv(groups, HEADS), blocks)](
        x,
        weight,
        norm.cos,
        norm.sin,
        mean,
        codes,
        scale,
        units,
        rows,
        heads,
        groups,
        blocks,
        *x.stride()[:2],
        norm.eps,
        ROW=x.stride(2),
        COS_ROW=norm.cos.stride(0),
        SIN_ROW=norm.sin.stride(0),
        SHIFT=mean is not None,
        INTEGER=interpreted(),
        ROTARY=2 * norm.cos.shape[1],
        ASM=x.dtype == torch.bfloat16 and not interpreted(),
        HEADS=HEADS,
        D=HEAD_DIM,
        num_warps=4,
        maxnreg=REGISTERS,
    )
    return codes.view(torch.float8_e4m3fn), scale, units


def norm_prepare(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, norm: NormRope, config: SolAttn2Config
) -> Operands:
    """Norm, rotate, quantise and pool one head group.

    Args:
        query, key, value: As the projections return them, [B, H, N, D] views with unit stride along D; bf16, fp16
            or fp32.
        norm: What queries and keys lack.
        config: Only the smoothing switches are read.

    Returns:
        Operands of the B * H heads. No host synchronisation.
    """
    mean = norm_mean(key, norm.key_weight, norm) if config.smooth_key else None
    queries = norm_quantize(query, norm.query_weight, norm, None)
    keys = norm_quantize(key, norm.key_weight, norm, mean)
    k_mean = key.new_zeros(key.shape[0] * key.shape[1], HEAD_DIM, dtype=torch.float32) if mean is None else mean
    return with_values(queries, keys, k_mean, value, smooth=config.smooth_value)
