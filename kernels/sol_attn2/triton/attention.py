"""FP8 attention over kept key blocks and surrogates, one query block a program (spec sections 2 to 4).

    O_r = v_mean + v_scale sum P V / sum P        P = E4M3 byte of code RNE(8 (x - M + offset) + 55.65)
    LSE_r = (M - offset) ln 2 + ln sum P + s q_r . k_mean

x is the score in octaves; M, whole octaves, is the row's pivot: the ceiling of the first kept tile's maximum, moved to
the ceiling of a later tile's maximum when that exceeds M + 8 - offset. The surrogates are the first tile, with a
pivot of their own; the first kept tile sets the tokens' pivot and the power of two between both carries over what has
been summed. Each tile's FP8 product is added to the sums in FP32.

Layout: see operands.py. G heads, N rows, NB blocks of 64, D = 128. Tiles: 64 rows x 64 keys, 64 rows x 128 channels.
Key columns of value tiles follow VALUE_ORDER, and the probabilities are permuted alike, so that they stay in registers.

Paths: FP8 tensor cores on sm_89, sm_90, sm_100 and sm_120; bf16 products of the same bytes below (sm_80). Run on sm_90
only: the others are compiled in the tests but untested on hardware. Triton's interpreter runs small sizes on a CPU.
"""

from typing import Literal

import torch
import triton
import triton.language as tl

from solgen.kernels.sol_attn2.config import HEAD_DIM
from solgen.kernels.sol_attn2.triton.expcast import (
    CODES_PER_NAT,
    CODES_PER_OCTAVE,
    decode_bf16,
    expcast,
    pivot_bias,
    power_of_two,
)
from solgen.kernels.sol_attn2.triton.operands import Operands, Route, Tail

TailKind = Literal["slots", "anchors", "none"]

STAGES = 3
"""Key and value tiles in flight in a program."""

LN2 = tl.constexpr(0.6931471805599453)
LOWEST_PIVOT = tl.constexpr(-(2.0**20))
"""Pivot of a tail without any surrogate, in place of -inf."""


@triton.jit
def _operand(p_tile, FP8: tl.constexpr):
    """A tile of codes as a product takes it: E4M3, or bf16 of the bytes."""
    b_tile = tl.load(p_tile)
    return b_tile if FP8 else decode_bf16(b_tile)


@triton.jit
def _weigh(b_acc, b_sum, b_carry, b_code, p_v, FP8: tl.constexpr, ASM: tl.constexpr):
    """Sums of numerator [64, D] and denominator [64], carried over by a power of two a row, plus one tile."""
    b_byte = expcast(b_code, ASM)  # [64, 64]
    # VALUE_ORDER: old column 16a + 8h + 2t + b becomes 16a + 4t + 2h + b
    b_byte = b_byte.reshape(64, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(64, 64)
    b_p = b_byte.to(tl.float8e4nv, bitcast=True) if FP8 else decode_bf16(b_byte)
    b_sum = b_sum * b_carry + tl.sum(b_p.to(tl.float32), 1)
    b_v = _operand(p_v, FP8)  # [64, D]
    b_acc = b_acc * b_carry[:, None] + tl.dot(b_p, b_v)
    return b_acc, b_sum


@triton.jit
def _attend_tile(
    b_acc, b_sum, b_pivot, b_scores, factor, p_v, is_first, OFFSET: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr
):
    """One kept tile: raw FP8 scores [64, 64] and the factor that turns them into codes."""
    b_top = tl.max(b_scores, 1) * (factor / CODES_PER_OCTAVE)
    m_moves = (b_top > b_pivot + (8 - OFFSET)) | is_first
    b_new = tl.where(m_moves, tl.ceil(b_top), b_pivot)
    b_code = tl.fma(b_scores, factor, pivot_bias(b_new, OFFSET)[:, None])
    b_acc, b_sum = _weigh(b_acc, b_sum, power_of_two(b_pivot - b_new), b_code, p_v, FP8, ASM)
    return b_acc, b_sum, b_new


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _attention_kernel(
    p_q,
    p_q_scale,
    p_k,
    p_k_scale,
    p_v,
    p_v_scale,
    p_k_mean,
    p_v_mean,
    p_tail_k,
    p_tail_k_scale,
    p_tail_v,
    p_tail_bias,
    p_counts,
    p_blocks,
    p_order,
    p_out,
    p_lse,
    num_rows,
    num_blocks,
    stride_head,
    stride_row,
    scale,
    OFFSET: tl.constexpr,
    TAIL: tl.constexpr,
    LSE: tl.constexpr,
    FP8: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_task = tl.load(p_order + tl.program_id(0)).to(tl.int64)  # head * NB + query block
    i_head = i_task // num_blocks
    i_query = (i_task % num_blocks).to(tl.int32)
    i_base = i_head * num_blocks  # first block of the head

    o_row = tl.arange(0, 64)
    o_dim = tl.arange(0, 128)
    o_q = o_row[:, None] * 128 + o_dim[None, :]  # [64, D]
    o_k = o_row[None, :] * 128 + o_dim[:, None]  # [D, 64]
    o_v = o_dim[None, :] * 64 + o_row[:, None]  # [64, D]

    b_q = _operand(p_q + i_task * 8192 + o_q, FP8)
    q_factor = tl.load(p_q_scale + i_task) * (scale * CODES_PER_NAT)
    b_acc = tl.zeros([64, 128], tl.float32)
    b_sum = tl.zeros([64], tl.float32)
    b_pivot = tl.zeros([64], tl.float32)

    if TAIL != "none":
        b_k = _operand(p_tail_k + i_task * 8192 + o_k, FP8)
        b_bias = tl.load(p_tail_bias + i_task * 64 + o_row)[None, :] * CODES_PER_NAT  # [1, 64]
        if TAIL == "anchors":
            b_bias = tl.where(o_row[:, None] // 8 == o_row[None, :] // 8, b_bias, float("-inf"))
        else:
            b_bias = tl.broadcast_to(b_bias, [64, 64])
        b_code = tl.fma(tl.dot(b_q, b_k), q_factor * tl.load(p_tail_k_scale + i_task), b_bias)
        b_pivot = tl.maximum(tl.ceil(tl.max(b_code, 1) / CODES_PER_OCTAVE), LOWEST_PIVOT)
        b_code += pivot_bias(b_pivot, OFFSET)[:, None]
        b_acc, b_sum = _weigh(b_acc, b_sum, b_sum, b_code, p_tail_v + i_task * 8192 + o_v, FP8, ASM)

    count = tl.load(p_counts + i_task)
    p_list = p_blocks + i_task * num_blocks
    has_ragged = 0  # the last block of the sequence, where it is kept and not full
    if num_rows % 64 != 0:
        last = tl.load(p_list + count - 1, mask=count > 0, other=-1).to(tl.int32)
        has_ragged = (last == num_blocks - 1).to(tl.int32)

    for i in tl.range(0, count - has_ragged, num_stages=STAGES):
        i_key = i_base + tl.load(p_list + i).to(tl.int64)
        factor = q_factor * tl.load(p_k_scale + i_key)
        b_scores = tl.dot(b_q, _operand(p_k + i_key * 8192 + o_k, FP8))
        b_acc, b_sum, b_pivot = _attend_tile(
            b_acc, b_sum, b_pivot, b_scores, factor, p_v + i_key * 8192 + o_v, i == 0, OFFSET, FP8, ASM
        )
    if has_ragged:
        i_key = i_base + num_blocks - 1
        factor = q_factor * tl.load(p_k_scale + i_key)
        b_scores = tl.dot(b_q, _operand(p_k + i_key * 8192 + o_k, FP8))
        b_scores = tl.where(o_row[None, :] < num_rows % 64, b_scores, float("-inf"))
        b_acc, b_sum, b_pivot = _attend_tile(
            b_acc, b_sum, b_pivot, b_scores, factor, p_v + i_key * 8192 + o_v, count == 1, OFFSET, FP8, ASM
        )

    o_token = i_query * 64 + o_row
    b_weight = tl.load(p_v_scale + i_head) / tl.where(b_sum > 0, b_sum, 1.0)
    b_mean = tl.load(p_v_mean + i_head * 128 + o_dim)
    b_out = tl.where((b_sum > 0)[:, None], b_acc * b_weight[:, None] + b_mean[None, :], 0.0)
    p_rows = p_out + i_head * stride_head + o_token.to(tl.int64) * stride_row
    tl.store(p_rows[:, None] + o_dim[None, :], b_out.to(p_out.dtype.element_ty), (o_token < num_rows)[:, None])
    if LSE:
        b_k_mean = tl.load(p_k_mean + i_head * 128 + o_dim)
        b_rows = _operand(p_q + i_task * 8192 + o_q, FP8).to(tl.float32)
        b_shift = tl.sum(b_rows * b_k_mean[None, :], 1) * (tl.load(p_q_scale + i_task) * scale)
        b_lse = (b_pivot - OFFSET) * LN2 + tl.log(b_sum) + b_shift
        tl.store(p_lse + i_head * num_rows + o_token, b_lse, o_token < num_rows)


def work_order(counts: torch.Tensor) -> torch.Tensor:
    """Order of work over flattened query blocks [G * NB], int32: the long dense ones first, then head by head.

    Blocks of one head stay together so that its keys and values stay in L2; no synchronisation.
    """
    short = (2 * counts <= counts.shape[-1]).flatten().to(torch.uint8)
    return torch.sort(short, stable=True).indices.int()


def compute_capability(device: torch.device) -> int:
    """Compute capability of a GPU, 90 for sm_90; Triton's CPU interpreter multiplies E4M3 like it."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def launch_options(capability: int, *, lse: bool) -> dict[str, int]:
    """Warps of a program and, on sm_90, the registers that let three programs share a multiprocessor."""
    if capability < 89:
        return {"num_warps": 8}
    return {"num_warps": 4, "maxnreg": 168} if capability == 90 and not lse else {"num_warps": 4}


def attend(
    operands: Operands,
    route: Route,
    tail: Tail | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scale: float,
    offset: int,
    tail_kind: TailKind,
) -> None:
    """Attend every query block to its kept key blocks and surrogates, in FP8 with ExpCast.

    A row that attends to nothing gets output 0 and LSE -inf.

    Args:
        operands: Quantised q, k and v of G heads.
        route: Kept key blocks of every query block.
        tail: Surrogates of every query block; None exactly when `tail_kind` is "none".
        out: Output, [G, N, D], any strides but a contiguous last dimension, fp16, bf16 or fp32.
        lse: Natural log of every row's denominator, [G, N] fp32 contiguous, or None.
        scale: Softmax scale s.
        offset: ExpCast octaves above 1 at which the pivot sits, 0 to 7.
        tail_kind: How a row reads the surrogates: all 64 ("slots"), the 8 of its unit ("anchors"), or none.
    """
    assert out.shape[-1] == HEAD_DIM
    assert out.stride(-1) == 1
    assert (tail is None) == (tail_kind == "none")
    num_heads, num_blocks = route.counts.shape
    capability = compute_capability(out.device)
    fp8 = capability >= 89

    def codes(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if fp8 else tensor.view(torch.int8)

    _attention_kernel[(num_heads * num_blocks,)](
        codes(operands.q_codes),
        operands.q_scale,
        codes(operands.k_codes),
        operands.k_scale,
        codes(operands.v_codes),
        operands.v_scale,
        operands.k_mean,
        operands.v_mean,
        codes(tail.k_codes) if tail else None,
        tail.k_scale if tail else None,
        codes(tail.v_codes) if tail else None,
        tail.bias if tail else None,
        route.counts,
        route.blocks,
        work_order(route.counts),
        out,
        lse,
        operands.num_rows,
        num_blocks,
        out.stride(0),
        out.stride(1),
        scale,
        OFFSET=offset,
        TAIL=tail_kind,
        LSE=lse is not None,
        FP8=fp8,
        ASM=out.device.type == "cuda",
        STAGES=STAGES,
        **launch_options(capability, lse=lse is not None),
    )
