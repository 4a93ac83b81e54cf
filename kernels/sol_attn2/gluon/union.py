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
    there is a tail, then the union of the kept key blocks, ascending. Tile n lies in stage n % S, round n // S.
    """

    loads: torch.Tensor  # [G, NT, NB] int32, key block | number of consumers << 16, the first num_loads entries
    num_loads: torch.Tensor  # [G, NT] int32
    turns: torch.Tensor  # [G, NB, NB] int32, key block | stage << 16 | round % 2 << 24, the first counts entries
    order: torch.Tensor  # [G * NT] int32, head * NT + trio, in order of work


@triton.jit
def _union_kernel(
    p_mask, p_loads, p_num_loads, p_turns, num_blocks, num_words, TAIL: tl.constexpr, STAGES: tl.constexpr
):
    i_trio = tl.program_id(0)
    i_head = tl.program_id(1).to(tl.int64)
    i_first = i_trio * 3
    i_task = i_head * num_blocks + i_first
    i_group = i_head * tl.num_programs(0) + i_trio
    base = tl.minimum(3, num_blocks - i_first) if TAIL else 0
    num_loads = 0
    count_0 = 0
    count_1 = 0
    count_2 = 0
    o_bit = tl.arange(0, 32)
    for word in range(0, num_words, 32):
        o_word = word + tl.arange(0, 32)
        o_key = tl.reshape(o_word[:, None] * 32 + o_bit[None, :], [1024])
        p_word = p_mask + i_task * num_words + o_word
        m_word = o_word < num_words
        b_word = tl.load(p_word, m_word, other=0)
        b_0 = tl.reshape(b_word[:, None] >> o_bit[None, :] & 1, [1024])
        b_word = tl.load(p_word + num_words, m_word & (i_first + 1 < num_blocks), other=0)
        b_1 = tl.reshape(b_word[:, None] >> o_bit[None, :] & 1, [1024])
        b_word = tl.load(p_word + 2 * num_words, m_word & (i_first + 2 < num_blocks), other=0)
        b_2 = tl.reshape(b_word[:, None] >> o_bit[None, :] & 1, [1024])

        b_any = b_0 | b_1 | b_2
        b_rank = num_loads + tl.cumsum(b_any, 0) - b_any
        b_load = o_key | (b_0 + b_1 + b_2) << 16
        tl.store(p_loads + i_group * num_blocks + b_rank, b_load, b_any != 0)
        b_place = base + b_rank
        b_turn = o_key | b_place % STAGES << 16 | (b_place // STAGES & 1) << 24
        p_turn = p_turns + i_task * num_blocks
        tl.store(p_turn + count_0 + tl.cumsum(b_0, 0) - b_0, b_turn, b_0 != 0)
        tl.store(p_turn + num_blocks + count_1 + tl.cumsum(b_1, 0) - b_1, b_turn, b_1 != 0)
        tl.store(p_turn + 2 * num_blocks + count_2 + tl.cumsum(b_2, 0) - b_2, b_turn, b_2 != 0)
        num_loads += tl.sum(b_any, 0)
        count_0 += tl.sum(b_0, 0)
        count_1 += tl.sum(b_1, 0)
        count_2 += tl.sum(b_2, 0)
    tl.store(p_num_loads + i_group, num_loads)


def schedule(route: Route, *, has_tail: bool, stages: int) -> Schedule:
    """Merge the routes of neighbouring query blocks into one stream of key blocks a trio; no synchronisation.

    Trios with long streams (dense text and audio rows) come first, the others head by head, so that the keys and
    values of a head stay in L2.
    """
    num_heads, num_blocks, num_words = route.mask.shape
    num_trios = triton.cdiv(num_blocks, TRIO)
    made = {"dtype": torch.int32, "device": route.mask.device}
    loads = torch.empty(num_heads, num_trios, num_blocks, **made)
    num_loads = torch.empty(num_heads, num_trios, **made)
    turns = torch.empty(num_heads, num_blocks, num_blocks, **made)
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
