"""The router: which key blocks a query block attends to exactly (spec section 1).

    s_ab = s qbar_a . kbar_b                                            units a of block i, b of block j
    m_ij = ln( sum_ab c_a c_b exp(s_ab) ) - ln n_i                      c, n: real tokens of a unit, a block
    L_i  = ln sum_j exp(m_ij)
    keep (i, j)  <=>  m_ij - L_i > epsilon - ln NB

Two kernels. The first multiplies unit means on the tensor cores and writes m. Its operand rows are gathered in an
order that puts the 64 scores of a block pair into the accumulators of four lanes, so pooling them takes two exchanges.
The second reads one row of m a program and writes the route; the compaction order is the block order.

A score that is not finite marks its query block as failed. `poison` then fills the block's output with NaN.

Legend: G heads of a group, N rows, NB blocks of 64 rows, D = 128, s the softmax scale.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from solgen.kernels.sol_attn2.config import BLOCK, HEAD_DIM, SolAttn2Config
from solgen.kernels.sol_attn2.triton.e4m3 import interpreted
from solgen.kernels.sol_attn2.triton.operands import Route

LN2 = tl.constexpr(math.log(2))

CHUNK = 16
"""Words of 32 key blocks that the second kernel holds at once."""


@dataclass(frozen=True)
class Routing:
    """The route of one head group and what was seen on the way."""

    route: Route
    kept_video: torch.Tensor  # [G, NB] int32, kept all-video key blocks of all-video query blocks
    failed: torch.Tensor  # [G, NB] bool, query blocks with a score that is not finite


@triton.jit
def _filled(o_block, o_unit, num_rows):
    """Real rows of a unit, as a share of 8."""
    return tl.minimum(tl.maximum(num_rows - o_block * 64 - o_unit * 8, 0), 8).to(tl.float32) / 8


@triton.jit
def _log2(b_x, ASM: tl.constexpr):
    """log2 to 2^-22, one instruction with ASM."""
    if ASM:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(b_x)


@triton.jit
def _mass_tile(
    b_q,
    p_k,
    p_mass,
    i_q,
    i_k,
    num_rows,
    num_blocks,
    octaves,
    MEAN: tl.constexpr,
    RAGGED_Q: tl.constexpr,
    RAGGED_K: tl.constexpr,
    ASM: tl.constexpr,
):
    """m of 32 query and 8 key blocks; RAGGED weighs units by their real rows. octaves = s log2(e)."""
    # Row 16 w + 8 h + 4 g + u of a product holds unit 4 h + u of key block 2 w + g.
    o_r = tl.arange(0, 64)
    o_unit = i_k * 64 + (o_r // 16 * 2 + o_r // 4 % 2) * 8 + o_r // 8 % 2 * 4 + o_r % 4
    o_d = tl.arange(0, 128)
    p_tile = p_k + o_unit[:, None] * 128 + o_d[None, :]
    b_k = tl.load(p_tile, mask=(o_unit < num_blocks * 8)[:, None], other=0.0)  # [64, D]
    b_s = tl.dot(b_k, b_q)  # [64, 256]
    # Query block 4 m + t, key block 2 w + g, unit u, (h, n, b): the last dimension lies in one thread.
    b_s = tl.permute(tl.reshape(b_s, [4, 2, 2, 4, 8, 4, 4, 2]), [4, 6, 0, 2, 3, 1, 5, 7])
    b_s = tl.reshape(b_s, [32, 8, 4, 16])

    o_i = i_q * 32 + tl.arange(0, 32)
    o_j = i_k * 8 + tl.arange(0, 8)
    o_e = tl.arange(0, 16)
    b_w = tl.full([1, 1, 1, 1], 1.0, tl.float32)
    if RAGGED_K:
        o_u = (o_e // 8 * 4)[None, None, :] + tl.arange(0, 4)[None, :, None]
        b_w = _filled(o_j[:, None, None], o_u, num_rows)[None, :, :, :]  # [1, 8, 4, 16]
    if RAGGED_Q:
        b_w = b_w * _filled(o_i[:, None], (o_e % 8)[None, :], num_rows)[:, None, None, :]
    b_w = tl.broadcast_to(b_w, [32, 8, 4, 16])
    if MEAN:
        b_mass = tl.sum(tl.sum(b_s * b_w, 3), 2) / tl.sum(tl.sum(b_w, 3), 2) * (octaves * LN2)
    else:
        if RAGGED_Q or RAGGED_K:
            b_s = tl.where(b_w > 0, b_s, float("-inf"))
        b_top = tl.max(tl.max(b_s, 3), 2) * octaves
        b_e = tl.exp2(b_s * octaves - b_top[:, :, None, None]) * b_w
        b_mass = (b_top + _log2(tl.sum(tl.sum(b_e, 3), 2), ASM)) * LN2
        if RAGGED_Q:
            b_rows = tl.minimum(tl.maximum(num_rows - o_i * 64, 0), 64).to(tl.float32)
            b_mass -= tl.log(b_rows / 64)[:, None]
    m_out = (o_i < num_blocks)[:, None] & (o_j < num_blocks)[None, :]
    tl.store(p_mass + o_i.to(tl.int64)[:, None] * num_blocks + o_j[None, :], b_mass, mask=m_out)


@triton.jit(do_not_specialize=["first_tile", "num_rows", "num_blocks"])
def _masses_kernel(
    p_q,  # [G, NB * 8, D] fp16
    p_k,  # [G, NB * 8, D] fp16
    p_mass,  # [G, NB, NB] fp32
    first_tile,
    num_rows,
    num_blocks,
    octaves,
    MEAN: tl.constexpr,
    RAGGED: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """RAGGED: the tile with the last, partly filled query block. Grid: query tiles, heads, ranges of key tiles."""
    i_q, i_g = first_tile + tl.program_id(0), tl.program_id(1).to(tl.int64)
    p_q += i_g * num_blocks * 1024
    p_k += i_g * num_blocks * 1024
    p_mass += i_g * num_blocks * num_blocks
    # Column 32 m + 8 n + 2 t + b of a product holds unit 2 n + b of query block 4 m + t.
    o_c = tl.arange(0, 256)
    o_unit = i_q * 256 + (o_c // 32 * 4 + o_c // 2 % 4) * 8 + o_c // 8 % 4 * 2 + o_c % 2
    o_d = tl.arange(0, 128)
    p_tile = p_q + o_unit[:, None] * 128 + o_d[None, :]
    b_q = tl.trans(tl.load(p_tile, mask=(o_unit < num_blocks * 8)[:, None], other=0.0))  # [D, 256]

    num_tiles = tl.cdiv(num_blocks, 8)
    first = num_tiles * tl.program_id(2) // tl.num_programs(2)
    last = num_tiles * (tl.program_id(2) + 1) // tl.num_programs(2)
    num_full = num_rows // 512  # tiles of whole key blocks
    if num_rows % 64 == 0:
        num_full = num_tiles
    for i_k in tl.range(first, tl.minimum(last, num_full), num_stages=STAGES):
        _mass_tile(b_q, p_k, p_mass, i_q, i_k, num_rows, num_blocks, octaves, MEAN, RAGGED, False, ASM)
    if last > num_full:  # the last key block is partly filled
        _mass_tile(b_q, p_k, p_mass, i_q, num_tiles - 1, num_rows, num_blocks, octaves, MEAN, RAGGED, True, ASM)


@triton.jit
def row_tile(p_row, i_w, num_blocks, WORDS: tl.constexpr):
    """Masses of WORDS x 32 key blocks of a row from word i_w on, -inf past the end, and their blocks."""
    o_j = (i_w + tl.arange(0, WORDS))[:, None] * 32 + tl.arange(0, 32)[None, :]
    return tl.load(p_row + o_j, mask=o_j < num_blocks, other=float("-inf")), o_j


@triton.jit
def log_total(p_row, num_blocks, WORDS: tl.constexpr):
    """ln sum exp of one row."""
    b_top = tl.full([WORDS, 32], -1e30, tl.float32)
    b_sum = tl.zeros([WORDS, 32], tl.float32)
    for i_w in range(0, tl.cdiv(num_blocks, 32), WORDS):
        b_m = row_tile(p_row, i_w, num_blocks, WORDS)[0] * (1 / LN2)
        b_new = tl.maximum(b_top, b_m)
        b_sum = b_sum * tl.exp2(b_top - b_new) + tl.exp2(b_m - b_new)
        b_top = b_new
    top = tl.max(tl.max(b_top, 1), 0)
    return (top + tl.log2(tl.sum(tl.sum(b_sum * tl.exp2(b_top - top), 1), 0))) * LN2


@triton.jit
def _pack(m_bits):
    """Words [WORDS] of a row of bits [WORDS, 32]."""
    return tl.sum(m_bits.to(tl.int32) << tl.arange(0, 32)[None, :], 1)


@triton.jit
def _population(b_word):
    """Bits set in each int32."""
    b_word = b_word - ((b_word >> 1) & 0x55555555)
    b_word = (b_word & 0x33333333) + ((b_word >> 2) & 0x33333333)
    return ((((b_word + (b_word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24) & 0x3F


@triton.jit
def _rank(b_word):
    """Bits set before each bit of a row of words: [WORDS, 32], and in all of it."""
    b_count = _population(b_word)
    b_before = tl.cumsum(b_count, 0) - b_count
    b_below = b_word[:, None] & ((1 << tl.arange(0, 32)) - 1)[None, :]
    return b_before[:, None] + _population(b_below), tl.sum(b_count, 0)


@triton.jit
def _order(b_m):
    """Integers ordered like the floats."""
    b_bits = b_m.to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _cut(p_row, num_blocks, top_k, WORDS: tl.constexpr):
    """The top_k-th largest mass of a row, by `_order`, and how many of its equals belong to the top_k."""
    b_m, o_j = row_tile(p_row, 0, num_blocks, WORDS)
    m_j = o_j < num_blocks
    b_key = _order(b_m).to(tl.int64)
    low = tl.full([], -(2**31), tl.int64)
    high = tl.full([], 2**31, tl.int64)
    for _ in range(32):
        middle = (low + high) // 2
        reached = tl.sum(tl.sum((m_j & (b_key >= middle)).to(tl.int32), 1), 0) >= top_k
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low.to(tl.int32), top_k - tl.sum(tl.sum((m_j & (b_key > low)).to(tl.int32), 1), 0)


@triton.jit(do_not_specialize=["num_blocks", "num_words", "top_k"])
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
    CHUNK: tl.constexpr,
):
    i_i, i_g = tl.program_id(0), tl.program_id(1)
    i_row = (i_g * num_blocks + i_i).to(tl.int64)
    p_row = p_mass + i_row * num_blocks
    o_bit = tl.arange(0, 32)
    is_mixed = tl.load(p_mixed + i_i) != 0
    if TOP_K:
        cut, spare = _cut(p_row, num_blocks, top_k, WORDS)
    else:
        total = log_total(p_row, num_blocks, CHUNK)

    count = 0
    count_video = 0
    b_bad = tl.zeros([CHUNK, 32], tl.float32)
    for i_w in range(0, num_words, CHUNK):
        b_m, o_j = row_tile(p_row, i_w, num_blocks, CHUNK)
        m_j = o_j < num_blocks
        b_bad += tl.where(m_j, b_m * 0.0, 0.0)
        b_mixed = _pack(tl.load(p_mixed + o_j, mask=m_j, other=0) != 0)
        if TOP_K:
            b_key = _order(b_m)
            m_tie = m_j & (b_key == cut)
            b_rank, num_ties = _rank(_pack(m_tie))
            b_word = _pack((b_key > cut) | (m_tie & (b_rank < spare)))
            spare -= num_ties
        else:
            b_word = _pack(b_m - total > threshold)
        if SINK:
            b_word = b_word | b_mixed
        b_valid = _pack(m_j)
        b_word = tl.where(is_mixed, b_valid, b_word & b_valid)

        b_rank, kept = _rank(b_word)
        p_list = p_blocks + i_row * num_blocks + count
        tl.store(p_list + b_rank, o_j.to(tl.int16), mask=((b_word[:, None] >> o_bit[None, :]) & 1) != 0)
        o_w = i_w + tl.arange(0, CHUNK)
        tl.store(p_mask + i_row * num_words + o_w, b_word, mask=o_w < num_words)
        count += kept
        count_video += tl.sum(_population(b_word & ~b_mixed), 0)
    tl.store(p_count + i_row, count)
    tl.store(p_kept_video + i_row, tl.where(is_mixed, 0, count_video))
    tl.store(p_failed + i_row, tl.sum(tl.sum(b_bad, 1), 0) != 0.0)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _poison_kernel(p_failed, p_out, num_rows, num_blocks, stride_head, stride_row, D: tl.constexpr):
    i_i, i_g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(p_failed + i_g * num_blocks + i_i) != 0:
        o_r = i_i * 64 + tl.arange(0, 64)
        p_tile = p_out + i_g * stride_head + o_r.to(tl.int64)[:, None] * stride_row + tl.arange(0, D)[None, :]
        tl.store(p_tile, tl.full([64, D], float("nan"), tl.float32), mask=(o_r < num_rows)[:, None])


def block_masses(
    q_units: torch.Tensor, k_units: torch.Tensor, num_rows: int, *, scale: float, mean: bool = False
) -> torch.Tensor:
    """m_ij of all block pairs, [G, NB, NB] fp32, in nats; with `mean` the scores of the block means instead."""
    groups, blocks = q_units.shape[0], triton.cdiv(num_rows, BLOCK)
    masses = torch.empty(groups, blocks, blocks, dtype=torch.float32, device=q_units.device)
    tiles = triton.cdiv(blocks, 32)
    ragged = min(1, num_rows % BLOCK)
    # The tile with the partly filled query block is one of a head, so its keys are split among programs.
    split = min(8, triton.cdiv(blocks, 8))
    for first, count, ranges in ((0, tiles - ragged, 1), (tiles - ragged, ragged, split)):
        if count:
            _masses_kernel[(count, groups, ranges)](
                q_units,
                k_units,
                masses,
                first,
                num_rows,
                blocks,
                scale / math.log(2),
                MEAN=mean,
                RAGGED=ragged > 0 and first == tiles - 1,
                ASM=not interpreted(),
                STAGES=3,
                num_warps=8,
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
        CHUNK=CHUNK,
        num_warps=2 if config.top_k is None else 8,
    )
    return Routing(route, kept_video, failed)


def poison(failed: torch.Tensor, out: torch.Tensor) -> None:
    """Fill the rows of failed query blocks [G, NB] with NaN in out [G, N, D], unit stride along D."""
    groups, blocks = failed.shape
    _poison_kernel[(blocks, groups)](
        failed, out, out.shape[1], blocks, out.stride(0), out.stride(1), D=HEAD_DIM, num_warps=1
    )
