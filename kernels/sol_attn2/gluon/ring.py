"""The ring of shared memory between the warp that loads key and value tiles and the warpgroups that use them.

A stage holds the keys and the values of one block, 16 KiB. The loading warp fills it once all three consumers have
handed it back, and signals the barrier of the stage and of the set of consumers that the tile is for; see union.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def await_tile(full, phases, consumers, others, stage, exists, STAGES: gl.constexpr):
    """Wait until a tile for a set of consumers has arrived.

    A consumer skips the tiles of others, so a barrier of the stage alone could have moved on by two rounds unseen:
    every set has its own barriers. `phases` holds a bit for each that the consumer takes part in.
    """
    bit = others * 16 + stage
    mbarrier.wait(full.index((consumers - 1) * STAGES + stage), (phases >> bit & 1).to(gl.int32), pred=exists)
    return phases ^ (gl.to_tensor(1).to(gl.int64) << bit)


@gluon.jit
def await_turn(full, phases, turn, exists, STAGES: gl.constexpr):
    """Wait until the tile of a turn has arrived."""
    return await_tile(full, phases, turn >> 22, turn >> 20 & 3, turn >> 16 & 0xF, exists, STAGES)


@gluon.jit
def _load_tile(k_desc, v_desc, block, consumers, tiles, full, empty, stage, parity, STAGES: gl.constexpr):
    """Load the keys and values of a block into a stage once it is free, for a set of consumers."""
    bar = full.index((consumers - 1) * STAGES + stage)
    mbarrier.wait(empty.index(stage), parity)
    mbarrier.expect(bar, 2 * 64 * 128)
    tma.async_copy_global_to_shared(k_desc, [block * 64, 0], bar, tiles.index(2 * stage))
    tma.async_copy_global_to_shared(v_desc, [block * 64, 0], bar, tiles.index(2 * stage + 1))
    is_single = (consumers & (consumers - 1)) == 0
    mbarrier.arrive(empty.index(stage), count=2, pred=is_single)  # for those who skip the tile
    mbarrier.arrive(empty.index(stage), count=1, pred=(consumers != 7) & (not is_single))
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, parity ^ 1, parity)


@gluon.jit
def produce(loads, TAIL: gl.constexpr, STAGES: gl.constexpr):
    (
        k_desc, v_desc, tail_k_desc, tail_v_desc, tiles, full, empty, p_loads, p_num_loads, i_trio, i_base, i_first,
        num_blocks,
    ) = loads  # fmt: skip
    stage = 0
    parity = 1
    num_loads = gl.load(p_num_loads + i_trio)
    p_list = p_loads + i_trio.to(gl.int64) * num_blocks
    load = gl.load(p_list)
    if TAIL != "none":
        for w in range(gl.minimum(3, num_blocks - i_first)):
            stage, parity = _load_tile(
                tail_k_desc, tail_v_desc, i_base + i_first + w, 1 << w, tiles, full, empty, stage, parity, STAGES
            )
    for i in range(num_loads):
        following = gl.load(p_list + gl.minimum(i + 1, num_loads - 1))
        stage, parity = _load_tile(
            k_desc, v_desc, i_base + (load & 0xFFFF), load >> 16, tiles, full, empty, stage, parity, STAGES
        )
        load = following
