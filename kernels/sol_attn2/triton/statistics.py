"""Per-head statistics of keys and values that quantisation needs before it starts (spec section 3).

    k_mean = mean over rows of k        v_mean = mean over rows of v
    v_scale = max(max_rd |v_rd - v_mean_d| / 448, SCALE_FLOOR)

x - mean rounds monotonically in x, so the extremes of every channel give the largest |v - v_mean| exactly, in one
reading of v. Two stages in a fixed order, no atomics: every program reduces CHUNK rows of a head to a sum, a maximum
and a minimum a channel, then one program a head joins the chunks.

Legend: G heads (batch x heads), N rows, D = 128 channels, C = ceil(N / CHUNK) chunks.
"""

import torch
import triton
import triton.language as tl

from solgen.kernels.sol_attn2.config import HEAD_DIM
from solgen.kernels.sol_attn2.triton.e4m3 import scale_of

CHUNK = 1024
"""Rows one program reduces."""


@triton.jit
def sum_rows(b_x, D: tl.constexpr):
    """Sum of 16 rows, [D]; halves onto halves, whatever the layout."""
    b_x = tl.sum(tl.reshape(b_x, [2, 8, D]), 0)
    b_x = tl.sum(tl.reshape(b_x, [2, 4, D]), 0)
    b_x = tl.sum(tl.reshape(b_x, [2, 2, D]), 0)
    return tl.sum(b_x, 0)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_chunks"])
def _chunk_kernel(
    p_x,
    p_partial,  # [G, C, 3, D] fp32: sum, maximum, minimum
    num_rows,
    num_heads,
    num_chunks,
    stride_batch,
    stride_head,
    stride_row,
    EXTREMES: tl.constexpr,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
):
    i_g, i_c = tl.program_id(0), tl.program_id(1)
    o_d = tl.arange(0, D)
    o_r = tl.arange(0, 16)
    p_x += (i_g // num_heads).to(tl.int64) * stride_batch + (i_g % num_heads).to(tl.int64) * stride_head
    b_sum = tl.zeros([16, D], tl.float32)
    b_max = tl.full([16, D], float("-inf"), tl.float32)
    b_min = tl.full([16, D], float("inf"), tl.float32)
    for i_r in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, num_rows), 64):
        for u in tl.static_range(4):  # four loads in flight
            o_row = i_r + u * 16 + o_r
            # Past the end the last row stands in: it changes no extreme.
            p_tile = p_x + tl.minimum(o_row, num_rows - 1).to(tl.int64)[:, None] * stride_row + o_d[None, :]
            b_x = tl.load(p_tile).to(tl.float32)  # [16, D]
            b_sum += tl.where((o_row < num_rows)[:, None], b_x, 0.0)
            if EXTREMES:
                b_max = tl.maximum(b_max, b_x)
                b_min = tl.minimum(b_min, b_x)
    p_out = p_partial + (i_g * num_chunks + i_c).to(tl.int64) * (3 * D) + o_d
    tl.store(p_out, sum_rows(b_sum, D))
    if EXTREMES:
        tl.store(p_out + D, tl.max(b_max, 0))
        tl.store(p_out + 2 * D, tl.min(b_min, 0))


@triton.jit(do_not_specialize=["num_rows", "num_chunks"])
def _join_kernel(
    p_partial,  # [G, C, 3, D] fp32
    p_mean,  # [G, D] fp32
    p_scale,  # [G] fp32, written with EXTREMES
    num_rows,
    num_chunks,
    SMOOTH: tl.constexpr,
    EXTREMES: tl.constexpr,
    CHUNKS: tl.constexpr,
    D: tl.constexpr,
):
    i_g = tl.program_id(0)
    o_d = tl.arange(0, D)
    o_c = tl.arange(0, CHUNKS)
    b_sum = tl.zeros([CHUNKS, D], tl.float32)
    b_max = tl.full([CHUNKS, D], float("-inf"), tl.float32)
    b_min = tl.full([CHUNKS, D], float("inf"), tl.float32)
    for i_c in range(0, num_chunks, CHUNKS):
        m_c = (i_c + o_c < num_chunks)[:, None]
        p_in = p_partial + (i_g * num_chunks + i_c + o_c).to(tl.int64)[:, None] * (3 * D) + o_d[None, :]
        b_sum += tl.load(p_in, mask=m_c, other=0.0)
        if EXTREMES:
            b_max = tl.maximum(b_max, tl.load(p_in + D, mask=m_c, other=float("-inf")))
            b_min = tl.minimum(b_min, tl.load(p_in + 2 * D, mask=m_c, other=float("inf")))
    b_mean = tl.zeros([D], tl.float32)
    if SMOOTH:
        b_mean = tl.div_rn(tl.sum(b_sum, 0), tl.full([D], 1.0, tl.float32) * num_rows)
    tl.store(p_mean + i_g * D + o_d, b_mean)
    if EXTREMES:
        b_amax = tl.maximum(tl.abs(tl.max(b_max, 0) - b_mean), tl.abs(tl.min(b_min, 0) - b_mean))
        tl.store(p_scale + i_g, scale_of(tl.max(b_amax, 0)))


def chunk_sums(x: torch.Tensor, *, extremes: bool) -> torch.Tensor:
    """Sum of every chunk, and with `extremes` maximum and minimum, of a [B, H, N, D] view: [B * H, C, 3, D] fp32."""
    batch, heads, rows, _ = x.shape
    groups, chunks = batch * heads, triton.cdiv(rows, CHUNK)
    partial = torch.empty(groups, chunks, 3, HEAD_DIM, dtype=torch.float32, device=x.device)
    _chunk_kernel[(groups, chunks)](
        x, partial, rows, heads, chunks, *x.stride()[:3], EXTREMES=extremes, CHUNK=CHUNK, D=HEAD_DIM
    )
    return partial


def join_chunks(
    partial: torch.Tensor, num_rows: int, *, smooth: bool, extremes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean [G, D] and, with `extremes`, FP8 scale [G] from what `chunk_sums` returns."""
    groups, chunks = partial.shape[:2]
    mean = torch.empty(groups, HEAD_DIM, dtype=torch.float32, device=partial.device)
    scale = torch.empty(groups, dtype=torch.float32, device=partial.device)
    _join_kernel[(groups,)](
        partial, mean, scale, num_rows, chunks, SMOOTH=smooth, EXTREMES=extremes, CHUNKS=16, D=HEAD_DIM
    )
    return mean, scale


def channel_statistics(x: torch.Tensor) -> torch.Tensor:
    """Sum, maximum and minimum of every head and channel of a [B, H, N, D] view, [B * H, 3, D] fp32; N > 0."""
    partial = chunk_sums(x, extremes=True)
    return torch.stack([partial[:, :, 0].sum(1), partial[:, :, 1].amax(1), partial[:, :, 2].amin(1)], dim=1)


def key_mean(key: torch.Tensor, *, smooth: bool) -> torch.Tensor:
    """Mean key of every head, [B * H, D] fp32; zeros without smoothing."""
    if not smooth:
        return torch.zeros(key.shape[0] * key.shape[1], HEAD_DIM, dtype=torch.float32, device=key.device)
    return join_chunks(chunk_sums(key, extremes=False), key.shape[2], smooth=True, extremes=False)[0]


def value_mean_and_scale(value: torch.Tensor, *, smooth: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean value [B * H, D] (zeros without smoothing) and FP8 scale [B * H] of every head, fp32."""
    return join_chunks(chunk_sums(value, extremes=True), value.shape[2], smooth=smooth, extremes=True)
