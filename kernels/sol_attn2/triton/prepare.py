"""Quantise Q, K and V to E4M3 and pool them to units of 8 tokens (spec sections 1 and 3).

    units = RN_fp16(sum of a unit's real rows / their count)
    codes = E4M3((x - mean) / scale)        one scale a 64-row block of q and k, one a head of v

Every program reads one 64-row block of one head once. Heads are the fastest grid axis, so that programs that run
together read whole rows of a packed QKV. Tiles keep the 8 tokens of a unit (values: the 16 tokens of a 16-byte piece
of stored columns) in one thread, so pooling crosses no lanes.

Sizes are never compiled in as constants: at one row, the rows past the end would be a constant zero to cast, and
ptxas up to 12.9 miscompiles the FP8 cast of a pair of equal constants.

Legend: G heads (batch x heads), N rows, NB = ceil(N / 64) blocks, D = 128. Inputs are [B, H, N, D] views with unit
stride along D; rows past N are never read.
"""

import torch
import triton
import triton.language as tl

from solgen.kernels.sol_attn2.config import BLOCK, HEAD_DIM, UNIT, SolAttn2Config
from solgen.kernels.sol_attn2.triton.e4m3 import divide, encode, interpreted, join_columns, scale_of
from solgen.kernels.sol_attn2.triton.operands import Operands
from solgen.kernels.sol_attn2.triton.statistics import key_mean, value_mean_and_scale

QuantizedRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes, scales and unit means, as `quantize_rows` returns them."""


@triton.jit
def quantize_block(
    b_parts,
    channels,
    i_g,
    i_b,
    num_rows,
    num_blocks,
    p_mean,
    p_codes,
    p_scale,
    p_units,
    SHIFT: tl.constexpr,
    INTEGER: tl.constexpr,
    D: tl.constexpr,
):
    """Write codes, scale and unit means of block i_b of head i_g; for pointers see `_quantize_rows_kernel`.

    b_parts[p][t] holds tokens t of the 8 units, channels[p] of them, as fp32 [8, W]; rows past the end are zero.
    """
    o_u = tl.arange(0, 8)[:, None]
    o_r = i_b * 64 + o_u * 8
    i_block = (i_g * num_blocks + i_b).to(tl.int64)
    b_count = tl.minimum(tl.maximum(num_rows - o_r, 1), 8).to(tl.float32)
    b_inverse = tl.div_rn(tl.full([8, 1], 1.0, tl.float32), b_count)
    b_amax = tl.zeros_like(b_parts[0][0])
    b_shifted: tl.tuple = ()
    for p in tl.static_range(len(b_parts)):
        o_d = channels[p][None, :]
        b_sum = tl.zeros_like(b_amax)
        for t in tl.static_range(8):
            b_sum += b_parts[p][t]
        b_units = divide(b_sum, b_count, b_inverse)
        tl.store(p_units + i_block * (8 * D) + o_u * D + o_d, b_units.to(tl.float16))
        b_mean = tl.zeros([1, 1], tl.float32)
        if SHIFT:
            b_mean = tl.load(p_mean + i_g * D + channels[p])[None, :]
        for t in tl.static_range(8):
            b_token = tl.where(o_r + t < num_rows, b_parts[p][t] - b_mean, 0.0)
            b_amax = tl.maximum(b_amax, tl.abs(b_token))
            b_shifted += (b_token,)
    b_scale = scale_of(tl.max(tl.max(b_amax, 0), 0))
    b_inverse = tl.div_rn(1.0, b_scale)
    tl.store(p_scale + i_block, b_scale)
    for p in tl.static_range(len(b_parts)):
        p_out = p_codes + i_block * (64 * D) + o_u * (8 * D) + channels[p][None, :]
        for t in tl.static_range(8):
            tl.store(p_out + t * D, encode(divide(b_shifted[8 * p + t], b_scale, b_inverse), INTEGER))


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_blocks"])
def _quantize_rows_kernel(
    p_x,
    p_mean,  # [G, D] fp32, read with SHIFT
    p_codes,  # [G, NB * 64, D] uint8
    p_scale,  # [G, NB] fp32
    p_units,  # [G, NB * 8, D] fp16
    num_rows,
    num_heads,
    num_blocks,
    stride_batch,
    stride_head,
    stride_row,
    SHIFT: tl.constexpr,
    INTEGER: tl.constexpr,
    D: tl.constexpr,
):
    i_g, i_b = tl.program_id(0), tl.program_id(1)
    o_u = tl.arange(0, 8)
    o_d = tl.arange(0, D)
    o_r = i_b * 64 + o_u * 8
    p_x += (i_g // num_heads).to(tl.int64) * stride_batch + (i_g % num_heads).to(tl.int64) * stride_head
    p_x += o_r.to(tl.int64)[:, None] * stride_row + o_d[None, :]

    b_x: tl.tuple = ()
    for t in tl.static_range(8):  # 8 tokens of [8 units, D]
        b_x += (tl.load(p_x + t * stride_row, mask=(o_r + t < num_rows)[:, None], other=0.0).to(tl.float32),)
    quantize_block((b_x,), (o_d,), i_g, i_b, num_rows, num_blocks, p_mean, p_codes, p_scale, p_units, SHIFT, INTEGER, D)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_blocks"])
def _quantize_values_kernel(
    p_x,
    p_mean,  # [G, D] fp32, read with SHIFT
    p_scale,  # [G] fp32
    p_codes,  # [G, NB, D, 64] uint8, columns in VALUE_ORDER
    p_units,  # [G, NB * 8, D] fp16
    num_rows,
    num_heads,
    num_blocks,
    stride_batch,
    stride_head,
    stride_row,
    SHIFT: tl.constexpr,
    INTEGER: tl.constexpr,
    D: tl.constexpr,
):
    i_g, i_b = tl.program_id(0), tl.program_id(1)
    o_a = tl.arange(0, 4)
    o_d = tl.arange(0, D)
    o_r = i_b * 64 + o_a * 16
    p_x += (i_g // num_heads).to(tl.int64) * stride_batch + (i_g % num_heads).to(tl.int64) * stride_head
    p_x += o_r.to(tl.int64)[:, None] * stride_row + o_d[None, :]
    i_block = (i_g * num_blocks + i_b).to(tl.int64)
    b_mean = tl.zeros([1, D], tl.float32)
    if SHIFT:
        b_mean = tl.load(p_mean + i_g * D + o_d)[None, :]
    b_scale = tl.load(p_scale + i_g)
    b_inverse = tl.div_rn(1.0, b_scale)

    b_low = tl.zeros([4, D], tl.float32)  # tokens 0 to 7 of the 16
    b_high = tl.zeros([4, D], tl.float32)
    b_codes: tl.tuple = ()
    # Stored column 16 a + c, c = 4 t + 2 h + b, holds token 16 a + 8 h + 2 t + b.
    for c in tl.static_range(16):
        token = (c // 2 % 2) * 8 + c // 4 * 2 + c % 2
        m_r = (o_r + token < num_rows)[:, None]
        b_token = tl.load(p_x + token * stride_row, mask=m_r, other=0.0).to(tl.float32)  # [4, D]
        if c // 2 % 2 == 0:
            b_low += b_token
        else:
            b_high += b_token
        b_token = tl.where(m_r, b_token - b_mean, 0.0)
        b_codes += (encode(divide(b_token, b_scale, b_inverse), INTEGER),)
    o_c = tl.arange(0, 16)
    p_out = p_codes + i_block * (64 * D) + o_d[None, :, None] * 64 + o_a[:, None, None] * 16 + o_c[None, None, :]
    tl.store(p_out, join_columns(b_codes, D))

    for h in tl.static_range(2):
        b_count = tl.minimum(tl.maximum(num_rows - o_r - 8 * h, 1), 8).to(tl.float32)[:, None]
        b_units = b_low if h == 0 else b_high
        b_units = divide(b_units, b_count, tl.div_rn(tl.full([4, 1], 1.0, tl.float32), b_count))
        p_unit = p_units + (i_block * 8 + h + o_a[:, None] * 2) * D + o_d[None, :]
        tl.store(p_unit, b_units.to(tl.float16))


def quantize_rows(x: torch.Tensor, mean: torch.Tensor | None) -> QuantizedRows:
    """Codes [G, NB * 64, D] of a [B, H, N, D] view less its mean [G, D], scales [G, NB], unit means [G, NB * 8, D]."""
    batch, heads, rows, _ = x.shape
    groups, blocks = batch * heads, triton.cdiv(rows, BLOCK)
    codes = torch.empty(groups, blocks * BLOCK, HEAD_DIM, dtype=torch.uint8, device=x.device)
    scale = torch.empty(groups, blocks, dtype=torch.float32, device=x.device)
    units = torch.empty(groups, blocks * UNIT, HEAD_DIM, dtype=torch.float16, device=x.device)
    _quantize_rows_kernel[(groups, blocks)](
        x,
        mean,
        codes,
        scale,
        units,
        rows,
        heads,
        blocks,
        *x.stride()[:3],
        SHIFT=mean is not None,
        INTEGER=interpreted(),
        D=HEAD_DIM,
        num_warps=2,
    )
    return codes.view(torch.float8_e4m3fn), scale, units


def quantize_values(
    x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, shift: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [G, NB, D, 64] of values less `mean` [G, D] under `scale` [G], and unit means [G, NB * 8, D]."""
    batch, heads, rows, _ = x.shape
    groups, blocks = batch * heads, triton.cdiv(rows, BLOCK)
    codes = torch.empty(groups, blocks, HEAD_DIM, BLOCK, dtype=torch.uint8, device=x.device)
    units = torch.empty(groups, blocks * UNIT, HEAD_DIM, dtype=torch.float16, device=x.device)
    _quantize_values_kernel[(groups, blocks)](
        x,
        mean,
        scale,
        codes,
        units,
        rows,
        heads,
        blocks,
        *x.stride()[:3],
        SHIFT=shift,
        INTEGER=interpreted(),
        D=HEAD_DIM,
        num_warps=2,
    )
    return codes.view(torch.float8_e4m3fn), units


def pool_rows(x: torch.Tensor) -> torch.Tensor:
    """Unit means of every head of a [B, H, N, D] view, [B * H, NB * 8, D] fp16."""
    return quantize_rows(x, None)[2]


def prepare(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, config: SolAttn2Config) -> Operands:
    """Quantise and pool one head group.

    Args:
        query, key, value: [B, H, N, D] views with unit stride along D; bf16, fp16 or fp32.
        config: Only the smoothing switches are read.

    Returns:
        Operands of the B * H heads. No host synchronisation.
    """
    k_mean = key_mean(key, smooth=config.smooth_key)
    keys = quantize_rows(key, k_mean if config.smooth_key else None)
    return with_values(quantize_rows(query, None), keys, k_mean, value, smooth=config.smooth_value)


def with_values(
    queries: QuantizedRows, keys: QuantizedRows, k_mean: torch.Tensor, value: torch.Tensor, *, smooth: bool
) -> Operands:
    """Quantise and pool the values of one head group, beside its queries and keys.

    Args:
        queries, keys: What `quantize_rows` returns.
        k_mean: What the keys were lessened by, [B * H, D] fp32.
        value: [B, H, N, D] view with unit stride along D; bf16, fp16 or fp32.
        smooth: Subtract each head's mean value first.

    Returns:
        Operands of the B * H heads.
    """
    (q_codes, q_scale, q_units), (k_codes, k_scale, k_units) = queries, keys
    v_mean, v_scale = value_mean_and_scale(value, smooth=smooth)
    v_codes, v_units = quantize_values(value, v_mean, v_scale, smooth)
    return Operands(
        q_codes=q_codes,
        q_scale=q_scale,
        k_codes=k_codes,
        k_scale=k_scale,
        v_codes=v_codes,
        v_scale=v_scale,
        q_units=q_units,
        k_units=k_units,
        v_units=v_units,
        k_mean=k_mean,
        v_mean=v_mean,
        num_rows=value.shape[2],
    )
