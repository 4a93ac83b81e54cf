"""RMSNorm of every query and key head, then rotary angles on its leading channels.

    u = x / sqrt(mean(x^2) + eps) * weight
    y_d = u_d cos_nd - u_(d + R/2) sin_nd     for d < R/2
    y_d = u_d cos_nd + u_(d - R/2) sin_nd     for R/2 <= d < R
    y_d = u_d                                 for d >= R

FP32 inside with FP32 angles, one rounding at the end, where the stock processor rounds the norm, the angles, both
products and their sum (diffusers, `_apply_rotary_emb`).

Heads are read in tiles of 16 channels, two threads a head. A channel and the one it is rotated with lie in the same
place of two tiles, so nothing crosses threads but the sum of squares.

The order of that sum and every rounding point are fixed, whatever a thread holds: squares are added over pairs of
tiles, then over eight channels by neighbours, then halves onto halves; x / rms comes before the weight, and `rotate`
before the one rounding. So Sol-Attn2's `norm_prepare` gets the same bits from another layout.

Legend: N rows, H heads, D channels of a head, R rotated ones (96 of 128).
"""

import torch
import triton
import triton.language as tl

from solgen.kernels.fused.rows import compute_type
from solgen.kernels.fused.validation import Impl, check_rows, check_weight, choose_impl

TILE = 16
"""Channels of a tile."""

HEADS = 64
"""Heads of one program; they may belong to several rows."""

REGISTERS = 128
"""Of a thread, so that four programs share a multiprocessor."""


def qk_norm_rope_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The equations in FP32, or in float64 for float64 inputs; arguments as for `qk_norm_rope`."""
    return _rotate(query, query_weight, cos, sin, eps), _rotate(key, key_weight, cos, sin, eps)


def _rotate(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float) -> torch.Tensor:
    wide = compute_type(x)
    normed = x.to(wide)
    normed = normed * (normed.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(wide)
    rotary, rest = normed.split([cos.shape[1], x.shape[2] - cos.shape[1]], dim=-1)
    first, second = rotary.chunk(2, dim=-1)
    cos, sin = cos.to(wide)[:, None], sin.to(wide)[:, None]
    rotary = rotary * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([rotary, rest], dim=-1).to(x.dtype)


@triton.jit
def sum_eights(b_first, b_second, M: tl.constexpr):
    """Squares of two tiles, summed over both and over every eight of their M * 8 channels, [M]."""
    b_sum = tl.fma(b_first, b_first, b_second * b_second)
    b_sum = tl.sum(tl.reshape(b_sum, [M, 4, 2]), 2)
    return tl.sum(tl.sum(tl.reshape(b_sum, [M, 2, 2]), 2), 1)


@triton.jit
def inverse_rms(b_squares, eps, D: tl.constexpr):
    """1 / sqrt(mean + eps) from sums of D squares; no branch, and as exact as a rounded root and quotient."""
    return tl.rsqrt(b_squares * (1.0 / D) + eps)


@triton.jit
def rotate(b_first, b_second, b_cos, b_sin):
    """One half of the rotation: first cos + second sin."""
    return tl.fma(b_first, b_cos, b_second * b_sin)


@triton.jit
def _add_halves(parts):
    """The second half of a tuple added to the first; of an odd number the one in the middle stays as it is."""
    half: tl.constexpr = (len(parts) + 1) // 2
    added: tl.tuple = ()
    for i in tl.static_range(half):
        added += (parts[i] + parts[i + half] if i + half < len(parts) else parts[i],)
    return added


@triton.jit(do_not_specialize=["num_pairs", "num_heads"])
def _norm_rope_kernel(
    p_x,
    p_weight,  # [D]
    p_cos,  # [N, R] fp32
    p_sin,
    p_out,  # [N, H, D] contiguous
    num_pairs,  # N * H
    num_heads,
    stride_row,
    stride_head,
    stride_cos,
    stride_sin,
    eps,
    ROTARY: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
):
    o_p = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    m_p = (o_p < num_pairs)[:, None]
    o_n = (o_p // num_heads).to(tl.int64)[:, None]
    o_h = (o_p % num_heads).to(tl.int64)[:, None]
    o_d = tl.arange(0, TILE)[None, :]
    p_x += o_n * stride_row + o_h * stride_head + o_d
    p_out += o_p.to(tl.int64)[:, None] * D + o_d
    p_cos += o_n * stride_cos + o_d
    p_sin += o_n * stride_sin + o_d

    TILES: tl.constexpr = D // TILE
    HALF: tl.constexpr = ROTARY // TILE // 2
    REST: tl.constexpr = (TILES - 2 * HALF + 1) // 2  # pairs of tiles that are not rotated
    b_x: tl.tuple = ()
    for t in tl.static_range(TILES):
        b_x += (tl.load(p_x + t * TILE, mask=m_p, other=0.0).to(tl.float32),)
    b_sums: tl.tuple = ()
    for t in tl.static_range(HALF):
        b_sums += (sum_eights(b_x[t], b_x[t + HALF], HEADS * (TILE // 8)),)
    for t in tl.static_range(2 * HALF, 2 * HALF + REST):
        b_second = b_x[t + REST] if t + REST < TILES else tl.zeros_like(b_x[t])
        b_sums += (sum_eights(b_x[t], b_second, HEADS * (TILE // 8)),)
    for _ in tl.static_range(TILES):
        b_sums = _add_halves(b_sums)  # until one is left
    b_squares = tl.sum(tl.reshape(b_sums[0], [HEADS, TILE // 8]), 1)
    b_inverse = inverse_rms(b_squares, eps, D)[:, None]
    b_u: tl.tuple = ()
    for t in tl.static_range(TILES):
        b_u += (b_x[t] * b_inverse * tl.load(p_weight + t * TILE + o_d).to(tl.float32),)

    for t in tl.static_range(TILES):
        b_y = b_u[t]
        if t < 2 * HALF:
            b_cos = tl.load(p_cos + t * TILE, mask=m_p, other=0.0)
            b_sin = tl.load(p_sin + t * TILE, mask=m_p, other=0.0)
            if t < HALF:
                b_y = rotate(b_y, b_u[t + HALF], b_cos, b_sin * -1.0)
            else:
                b_y = rotate(b_y, b_u[t - HALF], b_cos, b_sin)
        tl.store(p_out + t * TILE, b_y.to(p_out.dtype.element_ty), mask=m_p)


def _launch(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float) -> torch.Tensor:
    rows, heads, width = x.shape
    out = torch.empty(rows, heads, width, dtype=x.dtype, device=x.device)
    _norm_rope_kernel[(triton.cdiv(rows * heads, HEADS),)](
        x,
        weight,
        cos,
        sin,
        out,
        rows * heads,
        heads,
        *x.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        eps,
        ROTARY=cos.shape[1],
        D=width,
        HEADS=HEADS,
        TILE=TILE,
        num_warps=4,
        maxnreg=REGISTERS,
    )
    return out


def qk_norm_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
    impl: Impl | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and rotate queries and keys, each read once from the projections and written once.

    Args:
        query, key: [N, H, D] with unit stride along D, as views of one packed projection or of two; float64
            (reference only), float32, bfloat16 or float16.
        query_weight, key_weight: Of the norms, [D], any float type.
        cos, sin: Angles of every row, [N, R] with unit stride along R, float32 (float64 for the reference). R / 2
            and D are multiples of 16.
        eps: Added to the mean square.
        impl: Who computes it; None takes the kernel on a GPU, the reference elsewhere.

    Returns:
        Query and key, each [N, H, D] contiguous, in their type.

    Raises:
        ValueError: if shapes or strides do not fit, or `impl` does not cover the call.
    """
    rows, heads, width = query.shape
    rotary = cos.shape[1]
    if key.shape != query.shape or query.stride(2) != 1 or key.stride(2) != 1:
        raise ValueError(
            f"query is {tuple(query.shape)} with strides {query.stride()}, key {tuple(key.shape)} with "
            f"{key.stride()}; expected equal shapes and unit stride along the channels"
        )
    if rotary % (2 * TILE) or width % TILE or rotary > width:
        raise ValueError(
            f"{rotary} of {width} channels are rotated; expected multiples of {2 * TILE} and {TILE}, at most all"
        )
    if rows * heads >= 2**31:
        raise ValueError(f"{rows} rows of {heads} heads; expected fewer than 2^31 heads in all")
    check_weight(width, query_weight=query_weight, key_weight=key_weight)
    check_rows((rows, rotary), cos=cos, sin=sin)
    tensors = (query, key, query_weight, key_weight, cos, sin)
    if choose_impl(impl, *tensors) == "reference":
        return qk_norm_rope_reference(*tensors, eps=eps)
    if not cos.dtype == sin.dtype == torch.float32:
        raise ValueError(f"angles are {cos.dtype}, {sin.dtype}; expected float32, so that none is rounded")
    return _launch(query, query_weight, cos, sin, eps), _launch(key, key_weight, cos, sin, eps)
