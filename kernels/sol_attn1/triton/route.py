"""Block statistics and the route of Sol-Attn 1.0.

    qbar_i, kc_j = means of the real rows of a block        vc_j = sum of the values
    exact (i, j)  <=>  s qbar_i . kc_j > threshold_i  or  |i - j| <= 1  or  i is mixed  or  (SINK and j is mixed)

qbar is split into two 16-bit halves, so that two tensor-core products give its FP32 score.

Legend: H heads, N rows, NB = ceil(N / 64) blocks, W = ceil(NB / 32) mask words, D = 128.
"""

import torch
import triton
import triton.language as tl

from solgen.kernels.sol_attn2.config import BLOCK, HEAD_DIM
from solgen.kernels.sol_attn2.triton.operands import Route


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _pool_kernel(
    p_x,  # [H, N, D], strided
    p_pooled,  # [H, NB, D]
    num_rows,
    num_blocks,
    stride_head,
    stride_row,
    MEAN: tl.constexpr,
):
    i_h, i_b = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_r = i_b * 64 + tl.arange(0, 64)
    o_d = tl.arange(0, 128)
    p_tile = p_x + i_h * stride_head + o_r.to(tl.int64)[:, None] * stride_row + o_d[None, :]
    b_pooled = tl.sum(tl.load(p_tile, (o_r < num_rows)[:, None], 0.0).to(tl.float32), 0)
    if MEAN:
        b_pooled = b_pooled / tl.minimum(num_rows - i_b * 64, 64).to(tl.float32)
    tl.store(p_pooled + (i_h * num_blocks + i_b) * 128 + o_d, b_pooled.to(p_pooled.dtype.element_ty))


@triton.jit(do_not_specialize=["num_blocks", "num_words"])
def _route_kernel(
    p_q,  # [H, NB, D] fp32
    p_k,  # [H, NB, D] 16-bit
    p_threshold,  # [H, NB] fp32
    p_mixed,  # [NB] bool
    p_mask,  # [H, NB, W] int32
    p_counts,  # [H, NB] int32
    p_blocks,  # [H, NB, NB] int16
    num_blocks,
    num_words,
    scale,
    SINK: tl.constexpr,
):
    i_first, i_head = tl.program_id(0) * 64, tl.program_id(1).to(tl.int64)
    o_i = i_first + tl.arange(0, 64)
    o_d = tl.arange(0, 128)
    m_i = o_i < num_blocks
    o_row = i_head * num_blocks + o_i
    b_q = tl.load(p_q + o_row[:, None] * 128 + o_d[None, :], m_i[:, None], 0.0)  # [64, D]
    b_high = b_q.to(p_k.dtype.element_ty)
    b_low = (b_q - b_high.to(tl.float32)).to(p_k.dtype.element_ty)
    b_threshold = tl.load(p_threshold + o_row, m_i, 0.0)[:, None]
    m_mixed = (tl.load(p_mixed + o_i, m_i, 0) != 0)[:, None]
    b_count = tl.zeros([64], tl.int32)
    for i_k in range(0, num_blocks, 64):
        o_j = i_k + tl.arange(0, 64)
        m_j = o_j < num_blocks
        b_k = tl.load(p_k + (i_head * num_blocks + o_j)[:, None] * 128 + o_d[None, :], m_j[:, None], 0.0).T
        b_score = tl.dot(b_low, b_k, tl.dot(b_high, b_k)) * scale
        m_keep = (b_score > b_threshold) | (tl.abs(o_i[:, None] - o_j[None, :]) <= 1) | m_mixed
        if SINK:
            m_keep = m_keep | (tl.load(p_mixed + o_j, m_j, 0) != 0)[None, :]
        m_keep = m_keep & m_i[:, None] & m_j[None, :]
        b_keep = m_keep.to(tl.int32)
        o_list = b_count[:, None] + tl.cumsum(b_keep, 1) - b_keep
        tl.store(p_blocks + o_row[:, None] * num_blocks + o_list, o_j.to(tl.int16)[None, :], m_keep)
        b_count += tl.sum(b_keep, 1)
        o_word = i_k // 32 + tl.arange(0, 2)
        b_words = tl.sum(b_keep.reshape(64, 2, 32) << tl.arange(0, 32)[None, None, :], 2)
        tl.store(
            p_mask + o_row[:, None] * num_words + o_word[None, :], b_words, m_i[:, None] & (o_word < num_words)[None, :]
        )
    tl.store(p_counts + o_row, b_count, m_i)


def pool_blocks(x: torch.Tensor, *, mean: bool, dtype: torch.dtype) -> torch.Tensor:
    """Mean or sum of the real rows of every block of a view [H, N, D] with unit stride along D, [H, NB, D]."""
    heads, num_rows, _ = x.shape
    blocks = triton.cdiv(num_rows, BLOCK)
    pooled = torch.empty(heads, blocks, HEAD_DIM, dtype=dtype, device=x.device)
    _pool_kernel[(heads, blocks)](x, pooled, num_rows, blocks, x.stride(0), x.stride(1), MEAN=mean)
    return pooled


def select(
    q_means: torch.Tensor,
    k_means: torch.Tensor,
    thresholds: torch.Tensor,
    mixed: torch.Tensor,
    *,
    scale: float,
    sink: bool,
) -> Route:
    """Exact key blocks of every query block of H heads.

    Args:
        q_means: Mean queries, [H, NB, D] fp32.
        k_means: Mean keys, [H, NB, D] fp16 or bf16.
        thresholds: Score in nats that an exact block exceeds, [H, NB] fp32.
        mixed: Blocks that hold any text or audio row, [NB] bool.
        scale: Softmax scale.
        sink: Whether mixed key blocks are exact for every query block.
    """
    heads, blocks, _ = q_means.shape
    words = triton.cdiv(blocks, 32)

    def new(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(heads, blocks, *shape, dtype=dtype, device=q_means.device)

    route = Route(
        mask=new(words, dtype=torch.int32), counts=new(dtype=torch.int32), blocks=new(blocks, dtype=torch.int16)
    )
    _route_kernel[(triton.cdiv(blocks, 64), heads)](
        q_means,
        k_means,
        thresholds,
        mixed,
        route.mask,
        route.counts,
        route.blocks,
        blocks,
        words,
        scale,
        SINK=sink,
        num_warps=4,
    )
    return route
