"""Sol-Attn 1.0 on a route: mean atoms and exact blocks in one online softmax, one query block of 64 rows a program.

    exact j:  2^(x_r - M) v for every key, x_r = s q_r . k log2(e)
    other j:  one atom, 2^(x_r - M) (vc_j, n_j) in numerator and denominator, x_r = s q_r . kc_j log2(e)

Atoms come 64 at a time, as one more tile; those of exact blocks are masked out.

Legend: block_sparse/triton/tiles.py. H heads of a batch entry, N rows, NB = ceil(N / 64) blocks, n_j real rows of
block j, kc_j and vc_j its mean key and summed value.
"""

import math

import torch
import triton
import triton.language as tl

from solgen.kernels.block_sparse.triton.attention import rows_descriptor
from solgen.kernels.block_sparse.triton.tiles import LOWEST, attend_list, load_queries, load_tile, store_rows, weigh
from solgen.kernels.sol_attn2.triton.attention import work_order
from solgen.kernels.sol_attn2.triton.operands import Route

STAGES = 1
"""Tiles in flight a program. Four programs an SM hide each other's waits better than deeper pipelines of fewer."""

REGISTERS = 128
"""A thread, so that four programs fit. Addresses spill before and after the loop over exact blocks, not inside."""


@triton.jit
def _attend_atoms(
    b_acc,
    b_sum,
    b_top,
    b_q,
    kc_desc,
    vc_desc,
    p_mask,
    i_head,
    num_rows,
    num_blocks,
    num_words,
    octaves,
    STAGES: tl.constexpr,
):
    """Add the atoms of the blocks whose bit in a row of the route's mask is 0."""
    for i_atom in tl.range(0, num_blocks, 64, num_stages=STAGES):
        o_atom = i_atom + tl.arange(0, 64)
        b_word = tl.load(p_mask + o_atom // 32, o_atom // 32 < num_words, 0)
        m_atom = (((b_word >> (o_atom % 32)) & 1) == 0) & (o_atom < num_blocks)
        b_scores = tl.dot(b_q, load_tile(kc_desc, 0, i_head, i_atom).T)  # [64 rows, 64 atoms]
        b_scores = tl.where(m_atom[None, :], b_scores, float("-inf"))
        b_acc, b_sum, b_top, b_p = weigh(b_acc, b_sum, b_top, b_scores, octaves)
        b_tokens = tl.minimum(num_rows - o_atom * 64, 64).to(tl.float32)
        b_sum += tl.sum(b_p * b_tokens[None, :], 1)
        b_vc = load_tile(vc_desc, 0, i_head, i_atom)
        b_acc = tl.dot(b_p.to(b_vc.dtype), b_vc, b_acc)
    return b_acc, b_sum, b_top


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "num_words", "i_batch"])
def _attention_kernel(
    p_q,  # [H, N, D] of one batch entry, strided
    k_desc,  # [B, H, N, D]
    v_desc,  # [B, H, N, D]
    kc_desc,  # [1, H, NB, D]
    vc_desc,  # [1, H, NB, D]
    p_mask,  # [H, NB, W] int32
    p_counts,  # [H, NB] int32
    p_blocks,  # [H, NB, NB] int16
    p_order,  # [H * NB] int32
    p_out,  # [H, N, D], strided
    p_lse,  # [H, N] fp32, written with LSE
    num_rows,
    num_blocks,
    num_words,
    i_batch,
    stride_q_head,
    stride_q_row,
    stride_out_head,
    stride_out_row,
    octaves,
    LSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_task = tl.load(p_order + tl.program_id(0)).to(tl.int64)  # head * NB + query block
    i_head = (i_task // num_blocks).to(tl.int32)
    o_row = (i_task % num_blocks).to(tl.int32) * 64 + tl.arange(0, 64)
    b_q = load_queries(p_q + i_head.to(tl.int64) * stride_q_head, o_row, num_rows, stride_q_row)
    b_acc = tl.zeros([64, 128], tl.float32)
    b_sum = tl.zeros([64], tl.float32)
    b_top = tl.full([64], LOWEST, tl.float32)
    p_mask += i_task * num_words
    b_acc, b_sum, b_top = _attend_atoms(
        b_acc, b_sum, b_top, b_q, kc_desc, vc_desc, p_mask, i_head, num_rows, num_blocks, num_words, octaves, STAGES
    )
    p_list = p_blocks + i_task * num_blocks
    count = tl.load(p_counts + i_task)
    b_acc, b_sum, b_top = attend_list(
        b_acc, b_sum, b_top, b_q, k_desc, v_desc, p_list, count, i_batch, i_head, num_rows, num_blocks, octaves, STAGES
    )
    store_rows(p_out, p_lse, b_acc, b_sum, b_top, i_head, o_row, num_rows, stride_out_head, stride_out_row, LSE)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_means: torch.Tensor,
    v_sums: torch.Tensor,
    route: Route,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    batch: int,
    scale: float,
) -> None:
    """Attend every query block of one batch entry to its exact blocks and the atoms of the others.

    Args:
        query, key, value: [B, H, N, D] from `tileable`, fp16 or bf16.
        k_means: Mean keys of the blocks, [H, NB, D] contiguous, dtype of the inputs.
        v_sums: Summed values of the blocks, like `k_means`.
        route: Exact key blocks of the H heads.
        out: Output, [H, N, D], any strides but a contiguous last dimension, fp16 or bf16.
        lse: Natural log of every row's denominator, [H, N] fp32 contiguous, or None.
        batch: Entry of the batch.
        scale: Softmax scale s, positive.
    """
    num_heads, num_blocks, num_words = route.mask.shape
    _attention_kernel[(num_heads * num_blocks,)](
        query[batch],
        rows_descriptor(key),
        rows_descriptor(value),
        rows_descriptor(k_means[None]),
        rows_descriptor(v_sums[None]),
        route.mask,
        route.counts,
        route.blocks,
        work_order(route.counts),
        out,
        lse,
        query.shape[2],
        num_blocks,
        num_words,
        batch,
        query.stride(1),
        query.stride(2),
        out.stride(0),
        out.stride(1),
        scale / math.log(2),
        LSE=lse is not None,
        STAGES=STAGES,
        num_warps=4,
        maxnreg=REGISTERS,
    )
