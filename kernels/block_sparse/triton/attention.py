"""16-bit attention over listed key blocks, one query block of 64 rows a program.

    O_r = sum 2^(x - M) v / sum 2^(x - M)        LSE_r = M ln 2 + ln sum 2^(x - M)        over the listed keys

Two tensor-core products a tile, FP32 sums, probabilities rounded to the inputs' type for the second product.

Legend: tiles.py. G heads of a group, N rows, NB = ceil(N / 64) blocks.
"""

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from solgen.kernels.block_sparse.triton.tiles import LOWEST, attend_list, load_queries, store_rows
from solgen.kernels.sol_attn2.config import BLOCK, HEAD_DIM
from solgen.kernels.sol_attn2.triton.attention import work_order
from solgen.kernels.sol_attn2.triton.operands import Route

STAGES = 1
"""Tiles in flight a program. Four programs an SM hide each other's waits better than deeper pipelines of fewer."""

REGISTERS = 128
"""A thread, so that four programs fit."""


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _attention_kernel(
    p_q,  # [G, N, D], strided
    k_desc,  # [1, G, N, D]
    v_desc,  # [1, G, N, D]
    p_counts,  # [G, NB] int32
    p_blocks,  # [G, NB, NB] int16
    p_order,  # [G * NB] int32
    p_out,  # [G, N, D], strided
    p_lse,  # [G, N] fp32, written with LSE
    num_rows,
    num_blocks,
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
    b_acc, b_sum, b_top = attend_list(
        b_acc,
        b_sum,
        b_top,
        b_q,
        k_desc,
        v_desc,
        p_blocks + i_task * num_blocks,
        tl.load(p_counts + i_task),
        0,
        i_head,
        num_rows,
        num_blocks,
        octaves,
        STAGES,
    )
    store_rows(p_out, p_lse, b_acc, b_sum, b_top, i_head, o_row, num_rows, stride_out_head, stride_out_row, LSE)


def rows_descriptor(x: torch.Tensor) -> TensorDescriptor:
    """Boxes of 64 rows of one head of a view [B, H, N, D] with strides from `tileable`."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, BLOCK, HEAD_DIM])


def tileable(x: torch.Tensor) -> torch.Tensor:
    """`x` [B, H, N, D], copied if the copy engine cannot read its strides."""
    size = x.element_size()
    readable = x.stride(-1) == 1 and all(step > 0 and step * size % 16 == 0 for step in x.stride()[:3])
    return x if readable and x.data_ptr() % 16 == 0 else x.contiguous()


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    route: Route,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scale: float,
) -> None:
    """Attend every query block to its kept key blocks.

    A row that attends to nothing gets output 0 and LSE -inf.

    Args:
        query, key, value: [1, G, N, D] from `tileable`, fp16 or bf16.
        route: Kept key blocks of the G heads.
        out: Output, [G, N, D], any strides but a contiguous last dimension, fp16 or bf16.
        lse: Natural log of every row's denominator, [G, N] fp32 contiguous, or None.
        scale: Softmax scale s, positive.
    """
    num_heads, num_blocks = route.counts.shape
    _attention_kernel[(num_heads * num_blocks,)](
        query,
        rows_descriptor(key),
        rows_descriptor(value),
        route.counts,
        route.blocks,
        work_order(route.counts),
        out,
        lse,
        query.shape[2],
        num_blocks,
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
