"""Shared work lists: the key blocks three neighbouring query blocks keep, each loaded once for all of them.

Legend: G heads, NB blocks, NT = ceil(NB / 3) trios of query blocks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from solgen.kernels.sol_attn2.triton.operands import Route

TRIO = 3
"""Query blocks that share one stream of key blocks."""


@dataclass(frozen=True)
class Schedule:
    """What the producer loads for every trio, and where its three consumers find their tiles.

    The tiles of a trio pass through a ring of S stages in one sequence: the surrogates of each query block, where
    there is a tail, then the union of the kept key blocks, ascending; tile n lies in stage n % S. Consumers
    of a tile are a set of three bits.
    """

    loads: torch.Tensor  # [G, NT, NB] int32, key block | set << 16, the first num_loads entries
    num_loads: torch.Tensor  # [G, NT] int32
    turns: torch.Tensor  # [G, NB, NB] int32, the first counts entries: key block | stage << 16 | other consumers of the
    #   tile, two bits << 20 | set << 22
    order: torch.Tensor  # [G * NT] int32, head * NT + trio, in order of work


@triton.jit
def _popcount(b_word):
    """Set bits of int32 words."""
    b_word = b_word.to(tl.uint32, bitcast=True)
    b_word -= b_word >> 1 & 0x55555555
    b_word = (b_word & 0x33333333) + (b_word >> 2 & 0x33333333)
    b_word = b_word + (b_word >> 4) & 0x0F0F0F0F
    b_word += b_word >> 8
    return (b_word + (b_word >> 16) & 0x3F).to(tl.int32)


@triton.jit
def _ranks(b_word, start):
    """Set bits before each bit of 32 words, [32, 32], from `start`, and after them all."""
    b_count = _popcount(b_word)
    b_below = (1 << tl.arange(0, 32)) - 1
    b_rank = _popcount(b_word[:, None] & b_below[None, :]) + (start + tl.cumsum(b_count, 0) - b_count)[:, None]
    return b_rank, start + tl.sum(b_count, 0)


@triton.jit
def _list_turns(p_turn, b_word, b_turn, start):
    """List where a consumer finds its tiles; returns how many are listed."""
    b_own, stop = _ranks(b_word, start)
    tl.store(p_turn + b_own, b_turn, (b_word[:, None] >> tl.arange(0, 32)[None, :] & 1) != 0)
    return stop


@triton.jit(do_not_specialize=["num_blocks", "num_words"])
def _union_kernel(
    p_mask, p_loads, p_num_loads, p_turns, num_blocks, num_words, TAIL: tl.constexpr, STAGES: tl.constexpr
):
    i_trio = tl.program_id(0)
    i_head = tl.program_id(1).to(tl.int64)
    i_first = i_trio * 3
    i_task = i_head * num_blocks + i_first
    p_load = p_loads + (i_head * tl.num_programs(0) + i_trio) * num_blocks
    p_turn = p_turns + i_task * num_blocks
    num_tails = tl.minimum(3, num_blocks - i_first) if TAIL else 0
    num_loads = 0
    count_0 = 0
    count_1 = 0
    count_2 = 0
    o_bit = tl.arange(0, 32)[None, :]
    for word in range(0, num_words, 32):
        o_word = word + tl.arange(0, 32)
        p_word = p_mask + i_task * num_words + o_word
        m_word = o_word < num_words
        b_0 = tl.load(p_word, m_word, other=0)
        b_1 = tl.load(p_word + num_words, m_word & (i_first + 1 < num_blocks), other=0)
        b_2 = tl.load(p_word + 2 * num_words, m_word & (i_first + 2 < num_blocks), other=0)
        b_any = b_0 | b_1 | b_2
        b_rank, stop = _ranks(b_any, num_loads)
        b_tile = o_word[:, None] * 32 + o_bit  # [32, 32]
        b_users = b_0[:, None] >> o_bit & 1 | (b_1[:, None] >> o_bit & 1) << 1 | (b_2[:, None] >> o_bit & 1) << 2
        tl.store(p_load + b_rank, b_tile | b_users << 16, b_users != 0)
        b_stage = (num_tails + b_rank) % STAGES
        b_turn = b_tile | b_stage << 16 | b_users << 22
        count_0 = _list_turns(p_turn, b_0, b_turn | b_users >> 1 << 20, count_0)
        b_others = b_users & 1 | b_users >> 2 << 1
        count_1 = _list_turns(p_turn + num_blocks, b_1, b_turn | b_others << 20, count_1)
        count_2 = _list_turns(p_turn + 2 * num_blocks, b_2, b_turn | (b_users & 3) << 20, count_2)
        num_loads = stop
    tl.store(p_num_loads + i_head * tl.num_programs(0) + i_trio, num_loads)


def schedule(route: Route, *, has_tail: bool, stages: int) -> Schedule:
    """Merge the routes of neighbouring query blocks into one stream of key blocks a trio; no synchronisation.

    Trios with long streams (dense text and audio rows) come first, the others head by head, so that the keys and
    values of a head stay in L2.
    """
    num_heads, num_blocks, num_words = route.mask.shape
    num_trios = triton.cdiv(num_blocks, TRIO)
    loads = route.mask.new_empty(num_heads, num_trios, num_blocks)
    num_loads = route.mask.new_empty(num_heads, num_trios)
    turns = route.mask.new_empty(num_heads, num_blocks, num_blocks)
    _union_kernel[(num_trios, num_heads)](
        route.mask,
        loads,
        num_loads,
        turns,
        num_blocks,
        num_words,
        TAIL=has_tail,
        STAGES=stages,
        num_warps=4,
    )
    short = (num_loads * 4 <= num_blocks * 3).flatten().to(torch.uint8)
    return Schedule(loads, num_loads, turns, torch.sort(short, stable=True).indices.int())
