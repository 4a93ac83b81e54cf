"""Kernels that pack the attention's output into E4M3 and unpack it; see `solgen.kernels.sol_attn2.wire.output`.

    packet row = codes [h, D], scales [h] fp32        y = code scale + mean, rounded once

A program works on PAIRS (row, head) pairs: rows are stored head by head, so that it reads and writes adjacent bytes.
Heads are constants: the width of a packet's row decides how wide its bytes are moved.

Legend: P ranks, N rows, n rows of a rank, H heads of all, h = H / P of a rank, D = 128.
"""

import torch
import triton
import triton.language as tl

from solgen.kernels.sol_attn2.config import HEAD_DIM
from solgen.kernels.sol_attn2.triton.e4m3 import decode, divide, encode, interpreted, scale_of

PAIRS = 32
"""Pairs of one program."""


@triton.jit(do_not_specialize=["num_pairs"])
def _pack_kernel(
    p_x,
    p_mean,  # [h, D] fp32
    p_codes,  # [N, h (D + 4)] uint8, the packet
    p_scales,  # the same bytes as fp32
    num_pairs,  # N h
    stride_row,
    stride_head,
    HEADS: tl.constexpr,
    INTEGER: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
):
    o_p = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    m_p = o_p < num_pairs
    o_n, o_h = o_p // HEADS, o_p % HEADS
    o_d = tl.arange(0, D)[None, :]
    p_x += o_n[:, None] * stride_row + o_h[:, None] * stride_head + o_d
    b_x = tl.load(p_x, mask=m_p[:, None], other=0.0).to(tl.float32)
    b_x -= tl.load(p_mean + o_h[:, None] * D + o_d)
    b_scale = scale_of(tl.max(tl.abs(b_x), 1))
    b_inverse = tl.div_rn(tl.full([PAIRS], 1.0, tl.float32), b_scale)
    b_codes = encode(divide(b_x, b_scale[:, None], b_inverse[:, None]), INTEGER)
    tl.store(p_codes + o_n[:, None] * (HEADS * (D + 4)) + o_h[:, None] * D + o_d, b_codes, mask=m_p[:, None])
    tl.store(p_scales + o_n * (HEADS * (D + 4) // 4) + HEADS * D // 4 + o_h, b_scale, mask=m_p)


@triton.jit(do_not_specialize=["num_pairs", "num_rows"])
def _unpack_kernel(
    p_codes,  # [P, n, h (D + 4)] uint8, the packets
    p_scales,  # the same bytes as fp32
    p_mean,  # [H, D] fp32
    p_out,  # [n, H, D] contiguous
    num_pairs,  # n H
    num_rows,  # n
    ALL_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    INTEGER: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
):
    o_p = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    m_p = o_p < num_pairs
    o_n, o_g = o_p // ALL_HEADS, o_p % ALL_HEADS
    o_row, o_h = o_g // HEADS * num_rows + o_n, o_g % HEADS
    o_d = tl.arange(0, D)[None, :]
    p_codes += o_row[:, None] * (HEADS * (D + 4)) + o_h[:, None] * D + o_d
    b_codes = tl.load(p_codes, mask=m_p[:, None], other=0)
    b_scale = tl.load(p_scales + o_row * (HEADS * (D + 4) // 4) + HEADS * D // 4 + o_h, mask=m_p, other=0.0)
    b_x = decode(b_codes, INTEGER)
    if INTEGER:  # which decodes finite bytes alone
        b_x = tl.where((b_codes & 0x7F) == 0x7F, float("nan"), b_x)
    b_y = b_x * b_scale[:, None] + tl.load(p_mean + o_g[:, None] * D + o_d)
    tl.store(p_out + o_p[:, None] * D + o_d, b_y.to(p_out.dtype.element_ty), mask=m_p[:, None])


def pack_output(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """See `solgen.kernels.sol_attn2.wire.output.pack_output`."""
    rows, heads, width = x.shape
    packet = torch.empty(rows, heads * (width + 4), dtype=torch.uint8, device=x.device)
    if rows:
        _pack_kernel[(triton.cdiv(rows * heads, PAIRS),)](
            x,
            mean,
            packet,
            packet.view(torch.float32),
            rows * heads,
            *x.stride()[:2],
            HEADS=heads,
            INTEGER=interpreted(),
            D=HEAD_DIM,
            PAIRS=PAIRS,
            num_warps=4,
        )
    return packet


def unpack_output(packets: torch.Tensor, mean: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `solgen.kernels.sol_attn2.wire.output.unpack_output`."""
    ranks, rows, width = packets.shape
    heads = width // (HEAD_DIM + 4)
    out = torch.empty(rows, ranks * heads, HEAD_DIM, dtype=dtype, device=packets.device)
    if rows:
        _unpack_kernel[(triton.cdiv(rows * ranks * heads, PAIRS),)](
            packets,
            packets.view(torch.float32),
            mean,
            out,
            rows * ranks * heads,
            rows,
            ALL_HEADS=ranks * heads,
            HEADS=heads,
            INTEGER=interpreted(),
            D=HEAD_DIM,
            PAIRS=PAIRS,
            num_warps=4,
        )
    return out
