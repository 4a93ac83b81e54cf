"""The router: which key blocks a query block attends to exactly (spec section 1).

    s_ab = s qbar_a . kbar_b                                            units a of block i, b of block j
    m_ij = ln( sum_ab c_a c_b exp(s_ab) ) - ln n_i                      c, n: real tokens of a unit, a block
    L_i  = ln sum_j exp(m_ij)
    keep (i, j)  <=>  m_ij - L_i > epsilon - ln NB

Two kernels. The first multiplies unit means on the tensor cores and writes m. Its operand rows are gathered in an
order that puts all 64 scores of a block pair into one thread's accumulators, so pooling them crosses no lanes. The
second reads one row of m a program and writes the route; the compaction order is the block order.

A score that is not finite marks its query block as failed. `poison` then fills the block's output with NaN.

Legend: G heads of a group, N rows, NB blocks of 64 rows, D = 128, s the softmax scale.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from solgen.kernels.sol_attn2.config import HEAD_DIM, SolAttn2Config
from solgen.kernels.sol_attn2.triton.operands import Operands, Route

LN2 = tl.constexpr(math.log(2))
HISTOGRAM_LOW = -8.0
HISTOGRAM_BINS = 2048
HISTOGRAM_PER_NAT = 128
"""Share histogram: bin b counts shares in [-8 + b / 128, -8 + (b + 1) / 128) nats; the ends take what lies beyond."""


@dataclass(frozen=True)
class Routing:
    """The route of one head group and what was seen on the way."""

    route: Route
    kept_video: torch.Tensor  # [G, NB] int32, kept all-video key blocks of all-video query blocks
    failed: torch.Tensor  # [G, NB] bool, query blocks with a score that is not finite


@triton.jit
def _counts(o_block, o_unit, num_rows):
    """Real rows of a unit, fp32."""
    return tl.minimum(tl.maximum(num_rows - o_block * 64 - o_unit * 8, 0), 8).to(tl.float32)


@triton.jit
def _mass_tile(b_q, p_k, p_mass, i_q, i_k, num_rows, num_blocks, octaves, MEAN: tl.constexpr, RAGGED: tl.constexpr):
    """m of 32 query and 8 key blocks; RAGGED weighs units by their real rows. octaves = s log2(e)."""
    # Column 32 n4 + 8 n + 2 t + b of a product holds unit 2 n + b of key block 4 n4 + t.
    o_c = tl.arange(0, 64)
    o_unit = i_k * 64 + (o_c // 32 * 4 + o_c // 2 % 4) * 8 + o_c // 8 % 4 * 2 + o_c % 2
    o_d = tl.arange(0, 128)
    p_tile = p_k + o_unit[:, None] * 128 + o_d[None, :]
    b_k = tl.load(p_tile, mask=(o_unit < num_blocks * 8)[:, None], other=0.0)  # [64, D]
    b_s = tl.dot(b_q, tl.trans(b_k))  # [256, 64]
    b_s = tl.permute(tl.reshape(b_s, [4, 4, 2, 8, 2, 4, 4, 2]), [1, 3, 4, 6, 0, 2, 5, 7])
    b_s = tl.reshape(b_s, [32, 8, 8, 8])  # query block i, key block j, unit a of i, unit b of j

    o_i = i_q * 32 + tl.arange(0, 32)
    o_j = i_k * 8 + tl.arange(0, 8)
    if RAGGED:
        o_u = tl.arange(0, 8)
        b_ca = _counts(o_i[:, None], o_u[None, :], num_rows)  # [32, 8]
        b_cb = _counts(o_j[:, None], o_u[None, :], num_rows)  # [8, 8]
        b_ni = tl.sum(b_ca, 1)[:, None]
        if MEAN:
            b_mass = tl.sum(tl.sum(b_s * b_cb[None, :, None, :], 3) * b_ca[:, None, :], 2)
            b_mass = b_mass / (b_ni * tl.sum(b_cb, 1)[None, :]) * (octaves * LN2)
        else:
            b_s = b_s * octaves + tl.log2(b_cb)[None, :, None, :] + tl.log2(b_ca)[:, None, :, None]
            b_top = tl.max(tl.max(b_s, 3), 2)
            b_sum = tl.sum(tl.sum(tl.exp2(b_s - b_top[:, :, None, None]), 3), 2)
            b_mass = (b_top + tl.log2(b_sum) - tl.log2(b_ni)) * LN2
    else:
        if MEAN:
            b_mass = tl.sum(tl.sum(b_s, 3), 2) * (octaves * LN2 / 64)
        else:
            b_top = tl.max(tl.max(b_s, 3), 2) * octaves
            b_sum = tl.sum(tl.sum(tl.exp2(b_s * octaves - b_top[:, :, None, None]), 3), 2)
            b_mass = (b_top + tl.log2(b_sum)) * LN2
    m_out = (o_i < num_blocks)[:, None] & (o_j < num_blocks)[None, :]
    tl.store(p_mass + o_i.to(tl.int64)[:, None] * num_blocks + o_j[None, :], b_mass, mask=m_out)


@triton.jit
def _masses_kernel(
    p_q,  # [G, NB * 8, D] fp16
    p_k,  # [G, NB * 8, D] fp16
    p_mass,  # [G, NB, NB] fp32
    num_rows,
    num_blocks,
    octaves,
    MEAN: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_q, i_g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    p_q += i_g * num_blocks * 1024
    p_k += i_g * num_blocks * 1024
    p_mass += i_g * num_blocks * num_blocks
    # Row 64 m + 16 w + 8 h + g of a product holds unit 2 m + h of query block 8 w + g.
    o_r = tl.arange(0, 256)
    o_unit = i_q * 256 + (o_r // 16 % 4 * 8 + o_r % 8) * 8 + o_r // 64 * 2 + o_r // 8 % 2
    o_d = tl.arange(0, 128)
    p_tile = p_q + o_unit[:, None] * 128 + o_d[None, :]
    b_q = tl.load(p_tile, mask=(o_unit < num_blocks * 8)[:, None], other=0.0)  # [256, D]

    num_tiles = tl.cdiv(num_blocks, 8)
    num_full = num_tiles
    if num_rows % 64 != 0:
        num_full = tl.where(i_q * 32 + 32 >= num_blocks, 0, (num_blocks - 1) // 8)
    for i_k in tl.range(0, num_full, num_stages=STAGES):
        _mass_tile(b_q, p_k, p_mass, i_q, i_k, num_rows, num_blocks, octaves, MEAN, False)
    for i_k in tl.range(num_full, num_tiles, num_stages=1):
        _mass_tile(b_q, p_k, p_mass, i_q, i_k, num_rows, num_blocks, octaves, MEAN, True)


@triton.jit
def _log_total(b_m):
    """ln sum exp of one row."""
    b_top = tl.max(b_m, 0)
    return b_top + tl.log(tl.sum(tl.exp(b_m - b_top), 0))


@triton.jit
def _best(b_m, m_j, top_k):
    """The top_k largest of a row; ties go to the earlier."""
    b_key = b_m.to(tl.int32, bitcast=True)
    b_key = (b_key ^ ((b_key >> 31) & 0x7FFFFFFF)).to(tl.int64)  # ordered like the floats
    low = tl.full([], -(2**31), tl.int64)
    high = tl.full([], 2**31, tl.int64)
    for _ in range(32):  # the largest key that top_k blocks reach
        middle = (low + high) // 2
        reached = tl.sum((m_j & (b_key >= middle)).to(tl.int32), 0) >= top_k
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    m_above = m_j & (b_key > low)
    m_tie = m_j & (b_key == low)
    left = top_k - tl.sum(m_above.to(tl.int32), 0)
    return m_above | (m_tie & (tl.cumsum(m_tie.to(tl.int32), 0) <= left))


@triton.jit
def _select_kernel(
    p_mass,  # [G, NB, NB] fp32
    p_mixed,  # [NB] bool, blocks with text or audio rows
    p_mask,  # [G, NB, W] int32
    p_count,  # [G, NB] int32
    p_blocks,  # [G, NB, NB] int16
    p_kept_video,  # [G, NB] int32
    p_failed,  # [G, NB] bool
    num_blocks,
    num_words,
    threshold,
    top_k,
    TOP_K: tl.constexpr,
    SINK: tl.constexpr,
    WORDS: tl.constexpr,
):
    i_i, i_g = tl.program_id(0), tl.program_id(1)
    i_row = (i_g * num_blocks + i_i).to(tl.int64)
    o_j = tl.arange(0, WORDS * 32)
    m_j = o_j < num_blocks
    b_m = tl.load(p_mass + i_row * num_blocks + o_j, mask=m_j, other=float("-inf"))
    b_mixed = tl.load(p_mixed + o_j, mask=m_j, other=1) != 0
    is_mixed = tl.load(p_mixed + i_i) != 0

    if TOP_K:
        m_keep = _best(b_m, m_j, top_k)
    else:
        m_keep = b_m - _log_total(b_m) > threshold
    m_keep = m_keep | is_mixed
    if SINK:
        m_keep = m_keep | b_mixed
    m_keep = m_keep & m_j

    b_keep = m_keep.to(tl.int32)
    b_position = tl.cumsum(b_keep, 0) - b_keep
    tl.store(p_blocks + i_row * num_blocks + b_position, o_j.to(tl.int16), mask=m_keep)
    b_bits = tl.reshape(b_keep, [WORDS, 32]) << tl.arange(0, 32)[None, :]
    o_w = tl.arange(0, WORDS)
    tl.store(p_mask + i_row * num_words + o_w, tl.sum(b_bits, 1), mask=o_w < num_words)
    tl.store(p_count + i_row, tl.sum(b_keep, 0))
    video = tl.sum((m_keep & ~b_mixed).to(tl.int32), 0)
    tl.store(p_kept_video + i_row, tl.where(is_mixed, 0, video))
    tl.store(p_failed + i_row, tl.sum(tl.where(m_j, b_m * 0.0, 0.0), 0) != 0.0)


@triton.jit
def _histogram_kernel(
    p_mass,  # [G, NB, NB] fp32
    p_mixed,  # [NB] bool
    p_histogram,  # [BINS] int64, added to
    num_blocks,
    log_blocks,
    low,
    per_nat,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BINS: tl.constexpr,
):
    i_i, i_g = tl.program_id(0), tl.program_id(1)
    o_j = tl.arange(0, COLUMNS)
    m_j = o_j < num_blocks
    m_video = tl.load(p_mixed + o_j, mask=m_j, other=1) == 0
    b_histogram = tl.zeros([BINS], tl.int32)
    for i in range(i_i * ROWS, min(i_i * ROWS + ROWS, num_blocks)):
        i_row = (i_g * num_blocks + i).to(tl.int64)
        b_m = tl.load(p_mass + i_row * num_blocks + o_j, mask=m_j, other=float("-inf"))
        b_share = b_m - _log_total(b_m) + log_blocks
        b_bin = tl.minimum(tl.maximum((b_share - low) * per_nat, 0.0), BINS - 1.0).to(tl.int32)
        is_video = tl.load(p_mixed + i) == 0
        b_histogram += tl.histogram(b_bin, BINS, mask=m_video & is_video)
    o_bin = tl.arange(0, BINS)
    tl.atomic_add(p_histogram + o_bin, b_histogram.to(tl.int64), mask=b_histogram > 0, sem="relaxed")


@triton.jit
def _poison_kernel(p_failed, p_out, num_rows, num_blocks, stride_head, stride_row, D: tl.constexpr):
    i_i, i_g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(p_failed + i_g * num_blocks + i_i) != 0:
        o_r = i_i * 64 + tl.arange(0, 64)
        p_tile = p_out + i_g * stride_head + o_r.to(tl.int64)[:, None] * stride_row + tl.arange(0, D)[None, :]
        tl.store(p_tile, tl.full([64, D], float("nan"), tl.float32), mask=(o_r < num_rows)[:, None])


def block_masses(operands: Operands, *, scale: float, mean: bool = False) -> torch.Tensor:
    """m_ij of all block pairs, [G, NB, NB] fp32, in nats; with `mean` the scores of the block means instead."""
    groups, blocks = operands.q_scale.shape
    masses = torch.empty(groups, blocks, blocks, dtype=torch.float32, device=operands.q_scale.device)
    _masses_kernel[(triton.cdiv(blocks, 32), groups)](
        operands.q_units,
        operands.k_units,
        masses,
        operands.num_rows,
        blocks,
        scale / math.log(2),
        MEAN=mean,
        STAGES=3,
    )
    return masses


def select(masses: torch.Tensor, mixed: torch.Tensor, *, config: SolAttn2Config) -> Routing:
    """Route every query block by its masses.

    Args:
        masses: `block_masses`, of the block means when `config.top_k` is set.
        mixed: Blocks that hold any text or audio row, [NB] bool: they keep every key block.
        config: Gives epsilon or top_k, and sink.
    """
    groups, blocks, _ = masses.shape
    words = triton.cdiv(blocks, 32)

    def new(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(groups, blocks, *shape, dtype=dtype, device=masses.device)

    route = Route(
        mask=new(words, dtype=torch.int32), counts=new(dtype=torch.int32), blocks=new(blocks, dtype=torch.int16)
    )
    kept_video, failed = new(dtype=torch.int32), new(dtype=torch.bool)
    _select_kernel[(blocks, groups)](
        masses,
        mixed,
        route.mask,
        route.counts,
        route.blocks,
        kept_video,
        failed,
        blocks,
        words,
        config.epsilon - math.log(blocks),
        max(1, round((config.top_k or 0.0) * blocks)),
        TOP_K=config.top_k is not None,
        SINK=config.sink,
        WORDS=triton.next_power_of_2(words),
    )
    return Routing(route, kept_video, failed)


def add_share_histogram(histogram: torch.Tensor, masses: torch.Tensor, mixed: torch.Tensor) -> None:
    """Count the shares m_ij - L_i + ln NB of all-video block pairs into `histogram`, [HISTOGRAM_BINS] int64."""
    groups, blocks, _ = masses.shape
    _histogram_kernel[(triton.cdiv(blocks, 32), groups)](
        masses,
        mixed,
        histogram,
        blocks,
        math.log(blocks),
        HISTOGRAM_LOW,
        HISTOGRAM_PER_NAT,
        ROWS=32,
        COLUMNS=triton.next_power_of_2(blocks),
        BINS=HISTOGRAM_BINS,
    )


def poison(failed: torch.Tensor, out: torch.Tensor) -> None:
    """Fill the rows of failed query blocks [G, NB] with NaN in out [G, N, D], unit stride along D."""
    groups, blocks = failed.shape
    _poison_kernel[(blocks, groups)](
        failed, out, out.shape[1], blocks, out.stride(0), out.stride(1), D=HEAD_DIM, num_warps=1
    )
