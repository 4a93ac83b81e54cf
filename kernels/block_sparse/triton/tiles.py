"""Device helpers of the 16-bit attention kernels: an online softmax over tiles of 64 rows x 64 keys.

    x = s q . k log2(e)        M = running maximum of x
    numerator = sum 2^(x - M) v        denominator = sum 2^(x - M)

Legend: D = 128 channels; `octaves` is s log2(e), positive. b_top [64] is M, b_sum [64] and b_acc [64, D] the
denominator and the numerator. Tensor descriptors cover [B, H, N, D] in boxes of [1, 1, 64, D].
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)
"""Running maximum of a row that has seen no key, in place of -inf."""


@triton.jit
def load_tile(desc, i_batch, i_head, i_row):
    """64 rows of one head, [64, D], by the copy engine; zero past the end of the sequence."""
    return desc.load([i_batch, i_head, i_row, 0]).reshape(64, 128)


@triton.jit
def weigh(b_acc, b_sum, b_top, b_scores, octaves):
    """Sums rescaled to the maximum that includes one tile of raw scores, and the tile's probabilities [64, 64]."""
    b_new = tl.maximum(b_top, tl.max(b_scores, 1) * octaves)
    b_carry = tl.exp2(b_top - b_new)
    b_p = tl.exp2(b_scores * octaves - b_new[:, None])
    return b_acc * b_carry[:, None], b_sum * b_carry, b_new, b_p


@triton.jit
def attend_block(
    b_acc, b_sum, b_top, b_q, k_desc, v_desc, i_batch, i_head, i_key, octaves, num_keys, RAGGED: tl.constexpr
):
    """Add one key block; with RAGGED only its first num_keys keys count."""
    b_scores = tl.dot(b_q, load_tile(k_desc, i_batch, i_head, i_key * 64).T)
    if RAGGED:
        b_scores = tl.where(tl.arange(0, 64)[None, :] < num_keys, b_scores, float("-inf"))
    b_acc, b_sum, b_top, b_p = weigh(b_acc, b_sum, b_top, b_scores, octaves)
    b_sum += tl.sum(b_p, 1)
    b_v = load_tile(v_desc, i_batch, i_head, i_key * 64)
    return tl.dot(b_p.to(b_v.dtype), b_v, b_acc), b_sum, b_top


@triton.jit
def attend_list(
    b_acc,
    b_sum,
    b_top,
    b_q,
    k_desc,
    v_desc,
    p_list,
    count,
    i_batch,
    i_head,
    num_rows,
    num_blocks,
    octaves,
    STAGES: tl.constexpr,
):
    """Add the first `count` key blocks of an ascending list; the sequence's last block may be short."""
    has_ragged = 0
    if num_rows % 64 != 0:
        last = tl.load(p_list + count - 1, mask=count > 0, other=-1).to(tl.int32)
        has_ragged = (last == num_blocks - 1).to(tl.int32)
    for i in tl.range(0, count - has_ragged, num_stages=STAGES):
        i_key = tl.load(p_list + i).to(tl.int32)
        b_acc, b_sum, b_top = attend_block(
            b_acc, b_sum, b_top, b_q, k_desc, v_desc, i_batch, i_head, i_key, octaves, 64, False
        )
    if has_ragged != 0:
        b_acc, b_sum, b_top = attend_block(
            b_acc, b_sum, b_top, b_q, k_desc, v_desc, i_batch, i_head, num_blocks - 1, octaves, num_rows % 64, True
        )
    return b_acc, b_sum, b_top


@triton.jit
def load_queries(p_q, o_row, num_rows, stride_row):
    """Rows of one query block, [64, D]; zero past the end of the sequence."""
    p_tile = p_q + o_row.to(tl.int64)[:, None] * stride_row + tl.arange(0, 128)[None, :]
    return tl.load(p_tile, (o_row < num_rows)[:, None], 0.0)


@triton.jit
def store_rows(p_out, p_lse, b_acc, b_sum, b_top, i_head, o_row, num_rows, stride_head, stride_row, LSE: tl.constexpr):
    """Output rows, zero where nothing was attended to, and natural-log denominators, -inf there."""
    LN2: tl.constexpr = 0.6931471805599453
    i_head = i_head.to(tl.int64)
    b_weight = 1.0 / tl.where(b_sum > 0, b_sum, 1.0)
    p_rows = p_out + i_head * stride_head + o_row.to(tl.int64) * stride_row
    p_tile = p_rows[:, None] + tl.arange(0, 128)[None, :]
    tl.store(p_tile, (b_acc * b_weight[:, None]).to(p_out.dtype.element_ty), (o_row < num_rows)[:, None])
    if LSE:
        tl.store(p_lse + i_head * num_rows + o_row, b_top * LN2 + tl.log(b_sum), o_row < num_rows)
