"""FP8 attention over kept key blocks and surrogates on sm_90a: three query blocks a program (spec sections 2 to 4).

Computes what ../triton/attention.py computes. One warp streams the union of the kept key blocks of three neighbouring
query blocks (a trio, see union.py) through a ring of shared memory; three warpgroups, one a query block, take from it
what their own block keeps. The surrogates of each query block come first.

The tensor cores also sum the probability bytes, by a product with a tile of ones. A warpgroup hands a tile back
before it waits for its next one (the ring could not reach that otherwise) and starts its scores before the loop turns.

Layout: see ../triton/operands.py. G heads, N rows, NB blocks of 64, D = 128. Tiles of codes are 8 KiB. A value tile
[D, 64] travels as [64, 128], two channels a line, which the copy engine swizzles by 128 bytes; read back under the
64-byte swizzle that the product needs, channels 2c and 2c + 1 are swapped where bit 3 of the channel is set.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from solgen.kernels.sol_attn2.config import HEAD_DIM
from solgen.kernels.sol_attn2.gluon.expcast import (
    FORCE_MOVE,
    LN2,
    code_constant,
    expcast,
    power_of_two,
    product_layout,
    quads_of_rows,
    row_max,
    spread_product,
    sticky_expcast,
)
from solgen.kernels.sol_attn2.gluon.ring import await_tile, await_turn, produce
from solgen.kernels.sol_attn2.gluon.union import schedule
from solgen.kernels.sol_attn2.triton.attention import LOWEST_PIVOT, TailKind
from solgen.kernels.sol_attn2.triton.expcast import CODES_PER_NAT, CODES_PER_OCTAVE
from solgen.kernels.sol_attn2.triton.operands import Operands, Route, Tail

STAGES = 12
"""Tiles in flight: 16 KiB each."""

CODE_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
VALUE_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2))
ROW_TILE = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _scores(q, tiles, stage):
    """Start the raw scores [64, 64] of a query tile against the keys of a stage."""
    zero = gl.zeros([64, 64], gl.float32, product_layout(64))
    return warpgroup_mma(q, tiles.index(2 * stage).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _values(tiles, stage):
    """The value tile [D, 64] of a stage."""
    return tiles.index(2 * stage + 1)._reinterpret(gl.float8e4nv, [128, 64], VALUE_TILE)


@gluon.jit
def _weighted(b_p, rows, width: gl.constexpr):
    """Start the product of probabilities [64, 64] with the transpose of a [width, 64] tile."""
    zero = gl.zeros([64, width], gl.float32, product_layout(width))
    b_p = gl.convert_layout(b_p, gl.DotOperandLayout(0, product_layout(width), 4), assert_trivial=True)
    return warpgroup_mma(b_p, rows.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _carry(b_total, b_carry, b_part):
    """b_total x 2^k + b_part, with the power of two of each row given as quads."""
    return gl.fma(b_total, spread_product(b_carry, b_total.shape[1]), b_part)


@gluon.jit
def _add_tile(b_acc, b_sum, b_carry, b_p, v, ones):
    """Sums of numerator pieces and denominator, carried over, plus one tile; waits for every product."""
    b_part = _weighted(b_p, ones, 8)
    b_tile = _weighted(b_p, v, 128)
    b_part, b_tile = warpgroup_mma_wait(0, deps=(b_part, b_tile))
    return _carry(b_acc, b_carry, b_tile), _carry(b_sum, b_carry, b_part)


@gluon.jit
def _write(b_acc, b_weight, p_rows, p_v_mean, i_query, num_rows, stride_row):
    """Store normalised rows; rows without any weight become zero."""
    o_row = i_query * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, product_layout(128)))
    o_dim = gl.arange(0, 128, layout=gl.SliceLayout(0, product_layout(128)))
    o_dim = o_dim ^ (o_dim >> 3 & 1)
    b_weight = spread_product(b_weight, 128)
    b_mean = gl.load(p_v_mean + o_dim)[None, :].broadcast_to([64, 128])
    b_out = gl.where(b_weight > 0, gl.fma(b_acc, b_weight, b_mean), 0.0)
    p_out = p_rows + o_row[:, None].to(gl.int64) * stride_row + o_dim[None, :]
    gl.store(p_out, b_out.to(p_rows.dtype.element_ty), mask=(o_row < num_rows)[:, None])


@gluon.jit
def _consume(
    W: gl.constexpr,
    q,
    shared,
    OFFSET: gl.constexpr,
    TAIL: gl.constexpr,
    LSE: gl.constexpr,
    STAGES: gl.constexpr,
):
    (
        ones, tiles, full, empty, p_q, p_q_scale, p_k_scale, p_v_scale, p_k_mean, p_v_mean, p_tail_k_scale,
        p_tail_bias, p_counts, p_turns, p_out, p_lse, i_head, i_base, i_first, num_rows, num_blocks, stride_head,
        stride_row, scale,
    ) = shared  # fmt: skip
    row_layout: gl.constexpr = gl.SliceLayout(1, product_layout(64))
    column_layout: gl.constexpr = gl.SliceLayout(0, product_layout(64))
    i_query = i_first + W
    phases = gl.to_tensor(0).to(gl.int64)
    if i_query < num_blocks:
        i_task = (i_base + i_query).to(gl.int64)
        o_row = gl.arange(0, 64, layout=gl.SliceLayout(1, ROW_TILE))
        o_dim = gl.arange(0, 128, layout=gl.SliceLayout(0, ROW_TILE))
        p_query = p_q + i_task * 8192 + o_row[:, None] * 128 + o_dim[None, :]
        q.store(gl.load(p_query))
        fence_async_shared()
        gl.thread_barrier()
        q_factor = gl.load(p_q_scale + i_task) * (scale * CODES_PER_NAT)
        count = gl.load(p_counts + i_task)
        b_acc = gl.zeros([64, 128], gl.float32, product_layout(128))
        b_sum = gl.zeros([64, 8], gl.float32, product_layout(8))
        b_pivot = quads_of_rows(gl.zeros([64], gl.float32, row_layout))

        if TAIL != "none":
            o_key = gl.arange(0, 64, layout=column_layout)
            b_bias = gl.load(p_tail_bias + i_task * 64 + o_key)[None, :] * CODES_PER_NAT
            factor = gl.load(p_tail_k_scale + i_task) * q_factor
            phases = await_tile(full, phases, 1 << W, 0, W, True, STAGES)
            b_code = warpgroup_mma_wait(0, deps=(_scores(q, tiles, W),))
            b_code = gl.fma(b_code, factor, b_bias.broadcast_to([64, 64]))
            if TAIL == "anchors":
                o_unit = gl.arange(0, 64, layout=row_layout) // 8
                b_code = gl.where(o_unit[:, None] == (o_key // 8)[None, :], b_code, float("-inf"))
            b_own = gl.maximum(gl.ceil(row_max(b_code) / CODES_PER_OCTAVE), LOWEST_PIVOT)
            b_code += gl.fma(b_own, -CODES_PER_OCTAVE, code_constant(OFFSET))[:, None]
            b_pivot = quads_of_rows(b_own)
            b_acc, b_sum = _add_tile(b_acc, b_sum, b_pivot, expcast(b_code), _values(tiles, W), ones)
            mbarrier.arrive(empty.index(W), count=1)

        if count > 0:
            p_list = p_turns + i_task * num_blocks
            p_scale = p_k_scale + i_base
            turn = gl.load(p_list)
            has_ragged = 0  # the last block of the sequence, where it is kept and not full
            if num_rows % 64 != 0:
                has_ragged = ((gl.load(p_list + count - 1) & 0xFFFF) == num_blocks - 1).to(gl.int32)
            lag = float("-inf")
            constant = FORCE_MOVE
            k_scale = gl.load(p_scale + (turn & 0xFFFF))
            phases = await_turn(full, phases, turn, True, STAGES)
            stage = turn >> 16 & 0xF
            pending = _scores(q, tiles, stage)
            for i in range(count - has_ragged):
                factor = k_scale * q_factor
                turn = gl.load(p_list + gl.minimum(i + 1, count - 1))
                b_scores = warpgroup_mma_wait(0, deps=(pending,))
                b_p, b_new = sticky_expcast(b_scores, factor, b_pivot, lag, constant, OFFSET)
                b_part = _weighted(b_p, ones, 8)
                b_tile = _weighted(b_p, _values(tiles, stage), 128)
                k_scale = gl.load(p_scale + (turn & 0xFFFF))
                b_carry = power_of_two(b_pivot - b_new)
                b_pivot = b_new
                lag = 8.0 - OFFSET
                constant = code_constant(OFFSET)
                b_part, b_tile = warpgroup_mma_wait(0, deps=(b_part, b_tile))
                mbarrier.arrive(empty.index(stage), count=1)
                b_sum = _carry(b_sum, b_carry, b_part)
                b_acc = _carry(b_acc, b_carry, b_tile)
                exists = i + 1 < count
                phases = gl.where(exists, await_turn(full, phases, turn, exists, STAGES), phases)
                stage = turn >> 16 & 0xF
                pending = _scores(q, tiles, stage)  # of no use after the last tile
            b_scores = warpgroup_mma_wait(0, deps=(pending,))
            if has_ragged != 0:
                o_key = gl.arange(0, 64, layout=column_layout)
                b_scores = gl.where((o_key < num_rows % 64)[None, :], b_scores, float("-inf"))
                b_p, b_new = sticky_expcast(b_scores, k_scale * q_factor, b_pivot, lag, constant, OFFSET)
                b_carry = power_of_two(b_pivot - b_new)
                b_pivot = b_new
                b_acc, b_sum = _add_tile(b_acc, b_sum, b_carry, b_p, _values(tiles, stage), ones)
                mbarrier.arrive(empty.index(stage), count=1)

        b_total = gl.convert_layout(gl.sum(b_sum, 1) * 0.125, row_layout)
        b_weight = gl.where(b_total > 0, gl.load(p_v_scale + i_head) / b_total, 0.0)
        p_rows = p_out + i_head.to(gl.int64) * stride_head
        _write(b_acc, quads_of_rows(b_weight), p_rows, p_v_mean + i_head * 128, i_query, num_rows, stride_row)
        if LSE:
            b_shift = gl.sum(gl.load(p_query).to(gl.float32) * gl.load(p_k_mean + i_head * 128 + o_dim)[None, :], 1)
            b_shift = gl.convert_layout(b_shift, row_layout) * (gl.load(p_q_scale + i_task) * scale)
            b_octaves = gl.convert_layout(gl.max(b_pivot, 1), row_layout) - OFFSET
            o_token = i_query * 64 + gl.arange(0, 64, layout=row_layout)
            p_token = p_lse + i_head.to(gl.int64) * num_rows + o_token
            gl.store(p_token, b_octaves * LN2 + gl.log(b_total) + b_shift, mask=o_token < num_rows)


@gluon.jit(do_not_specialize=["num_rows", "num_blocks"])
def _attention_kernel(
    k_desc,
    v_desc,
    tail_k_desc,
    tail_v_desc,
    p_q,
    p_q_scale,
    p_k_scale,
    p_v_scale,
    p_k_mean,
    p_v_mean,
    p_tail_k_scale,
    p_tail_bias,
    p_counts,
    p_loads,
    p_num_loads,
    p_turns,
    p_order,
    p_out,
    p_lse,
    num_rows,
    num_blocks,
    stride_head,
    stride_row,
    scale,
    OFFSET: gl.constexpr,
    TAIL: gl.constexpr,
    LSE: gl.constexpr,
    STAGES: gl.constexpr,
):
    i_trio = gl.load(p_order + gl.program_id(0))  # head * NT + trio of the head
    num_trios = (num_blocks + 2) // 3
    i_head = i_trio // num_trios
    i_base = i_head * num_blocks  # first block of the head
    i_first = i_trio % num_trios * 3
    tiles = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 64, 128], k_desc.layout)
    q = gl.allocate_shared_memory(gl.float8e4nv, [3, 64, 128], k_desc.layout)
    ones = gl.allocate_shared_memory(gl.float8e4nv, [8, 64], VALUE_TILE)
    full = gl.allocate_shared_memory(gl.int64, [7 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in range(STAGES):
        mbarrier.init(empty.index(i), count=3)
    for i in range(7 * STAGES):
        mbarrier.init(full.index(i), count=1)
    # By bitcast: ptxas 12.8 miscompiles the FP32 to E4M3 cast of a constant.
    b_one = gl.full([8, 64], 0x38, gl.int8, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
    ones.store(b_one.to(gl.float8e4nv, bitcast=True))
    fence_async_shared()
    shared = (
        ones, tiles, full, empty, p_q, p_q_scale, p_k_scale, p_v_scale, p_k_mean, p_v_mean, p_tail_k_scale,
        p_tail_bias, p_counts, p_turns, p_out, p_lse, i_head, i_base, i_first, num_rows, num_blocks, stride_head,
        stride_row, scale,
    )  # fmt: skip
    loads = (
        k_desc, v_desc, tail_k_desc, tail_v_desc, tiles, full, empty, p_loads, p_num_loads, i_trio, i_base, i_first,
        num_blocks,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (0, q.index(0), shared, OFFSET, TAIL, LSE, STAGES)),
            (_consume, (1, q.index(1), shared, OFFSET, TAIL, LSE, STAGES)),
            (_consume, (2, q.index(2), shared, OFFSET, TAIL, LSE, STAGES)),
            (produce, (loads, TAIL, STAGES)),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )


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
    """Attend every query block to its kept key blocks and surrogates; see `triton.attention.attend`."""
    assert out.shape[-1] == HEAD_DIM
    assert out.stride(-1) == 1
    assert (tail is None) == (tail_kind == "none")
    plan = schedule(route, has_tail=tail is not None, stages=STAGES)

    def tiles(codes: torch.Tensor) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(codes.view(-1, 128), [64, 128], CODE_TILE)

    surrogates = operands if tail is None else tail
    _attention_kernel[(plan.order.numel(),)](
        tiles(operands.k_codes),
        tiles(operands.v_codes),
        tiles(surrogates.k_codes),
        tiles(surrogates.v_codes),
        operands.q_codes,
        operands.q_scale,
        operands.k_scale,
        operands.v_scale,
        operands.k_mean,
        operands.v_mean,
        tail.k_scale if tail else None,
        tail.bias if tail else None,
        route.counts,
        plan.loads,
        plan.num_loads,
        plan.turns,
        plan.order,
        out,
        lse,
        operands.num_rows,
        route.counts.shape[1],
        out.stride(0),
        out.stride(1),
        scale,
        OFFSET=offset,
        TAIL=tail_kind,
        LSE=lse is not None,
        STAGES=STAGES,
        num_warps=4,
    )
