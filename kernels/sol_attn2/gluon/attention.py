"""wip"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from solgen.kernels.sol_attn2.triton.attention import work_order
from solgen.kernels.sol_attn2.triton.expcast import (
    BIAS,
    CODES_PER_NAT,
    CODES_PER_OCTAVE,
    MAX_JOIN,
    PACK_BYTES,
)
from solgen.kernels.sol_attn2.triton.operands import Operands, Route, Tail

LN2 = gl.constexpr(0.6931471805599453)
LOWEST_PIVOT = gl.constexpr(-(2.0**20))
SWIZZLE_128 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
TILE_BYTES = gl.constexpr(8192)


@gluon.constexpr_function
def product_layout(width):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 32])


@gluon.constexpr_function
def left_layout(width):
    return gl.DotOperandLayout(operand_index=0, parent=product_layout(width), k_width=4)


@gluon.jit
def popc(word):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _bytes(b_code):
    b_code = b_code.reshape([64, 4, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, 64])
    b_code = gl.convert_layout(b_code, left_layout(128), assert_trivial=True)
    b_byte = gl.inline_asm_elementwise(PACK_BYTES, "=r,r,r,r,r", [b_code], dtype=gl.int8, is_pure=True, pack=4)
    return b_byte.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _power_of_two(b_exponent):
    b_exponent = gl.minimum(gl.maximum(b_exponent, -MAX_JOIN), MAX_JOIN)
    return ((b_exponent.to(gl.int32) + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _scores(q, k):
    zero = gl.zeros([64, 64], gl.float32, product_layout(64))
    b_scores = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(b_scores,))


@gluon.jit
def _pv(b_p, v, width: gl.constexpr):
    zero = gl.zeros([64, width], gl.float32, product_layout(width))
    b_p = gl.convert_layout(b_p, left_layout(width), assert_trivial=True)
    return warpgroup_mma(b_p, v.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _weigh(acc, b_sum, b_carry, b_code, v, ones, HALVES: gl.constexpr, ONES: gl.constexpr, FIXED: gl.constexpr):
    b_p = _bytes(b_code)
    if ONES:
        b_l = _pv(b_p, ones, 8)
        c_l = gl.convert_layout(b_carry, gl.SliceLayout(1, product_layout(8)))
    W: gl.constexpr = 128 // HALVES
    c_o = gl.convert_layout(b_carry, gl.SliceLayout(1, product_layout(W)))
    if HALVES == 2:
        a0, a1 = acc
        o0 = _pv(b_p, v.slice(0, 64, 0), 64)
        if not ONES:
            b_h = gl.sum(b_p.to(gl.float16), 1).to(gl.float32)
            b_sum = b_sum * b_carry + gl.convert_layout(b_h, gl.SliceLayout(1, product_layout(64)))
        o0 = warpgroup_mma_wait(0, deps=(o0,))
        if ONES:
            b_l = warpgroup_mma_wait(0, deps=(b_l,))
            b_sum = b_sum * c_l[:, None] + b_l
        o1 = _pv(b_p, v.slice(64, 64, 0), 64)
        if FIXED:
            a0 = a0 + o0
        else:
            a0 = a0 * c_o[:, None] + o0
        o1 = warpgroup_mma_wait(0, deps=(o1,))
        if FIXED:
            a1 = a1 + o1
        else:
            a1 = a1 * c_o[:, None] + o1
        return (a0, a1), b_sum
    else:
        o = _pv(b_p, v, 128)
        if not ONES:
            b_h = gl.sum(b_p.to(gl.float16), 1).to(gl.float32)
            b_sum = b_sum * b_carry + gl.convert_layout(b_h, gl.SliceLayout(1, product_layout(64)))
        o = warpgroup_mma_wait(0, deps=(o,))
        if ONES:
            b_l = warpgroup_mma_wait(0, deps=(b_l,))
            b_sum = b_sum * c_l[:, None] + b_l
        a, = acc
        if FIXED:
            a = a + o
        else:
            a = a * c_o[:, None] + o
        return (a,), b_sum


@gluon.jit
def _producer(W0: gl.constexpr, k_desc, v_desc, tk_desc, tv_desc, tiles, full, empty, p_mask, i_base, i_first, num_blocks, num_words,
              TAIL: gl.constexpr, STAGES: gl.constexpr, V128: gl.constexpr):
    v_rows: gl.constexpr = 64 if V128 else 128
    n = 0
    if TAIL != "none":
        for w in gl.static_range(3):
            i = i_base + i_first + w
            if i_first + w < num_blocks:
                slot = n % STAGES
                mbarrier.wait(empty.index(slot), (n // STAGES & 1) ^ 1)
                mbarrier.expect(full.index(slot), 2 * TILE_BYTES)
                tma.async_copy_global_to_shared(tk_desc, [i * 64, 0], full.index(slot), tiles.index(2 * slot))
                if V128:
                    tma.async_copy_global_to_shared(tv_desc, [i * v_rows, 0], full.index(slot), tiles.index(2 * slot + 1))
                else:
                    tma.async_copy_global_to_shared(tv_desc, [i * v_rows, 0], full.index(slot), tiles.index(2 * slot + 1)._reinterpret(gl.float8e4nv, [128, 64], tv_desc.layout))
                mbarrier.arrive(empty.index(slot), count=2)
                n += 1
    p_rows = p_mask + (i_base + i_first).to(gl.int64) * num_words
    for word in range(num_words):
        m0 = gl.load(p_rows + word)
        m1 = gl.load(p_rows + num_words + word, mask=i_first + 1 < num_blocks, other=0)
        m2 = gl.load(p_rows + 2 * num_words + word, mask=i_first + 2 < num_blocks, other=0)
        left = m0 | m1 | m2
        while left != 0:
            bit = left & -left
            j = i_base + word * 32 + popc(bit - 1)
            users = ((m0 & bit) != 0).to(gl.int32) + ((m1 & bit) != 0).to(gl.int32) + ((m2 & bit) != 0).to(gl.int32)
            slot = n % STAGES
            mbarrier.wait(empty.index(slot), (n // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(slot), 2 * TILE_BYTES)
            tma.async_copy_global_to_shared(k_desc, [j * 64, 0], full.index(slot), tiles.index(2 * slot))
            if V128:
                tma.async_copy_global_to_shared(v_desc, [j * v_rows, 0], full.index(slot), tiles.index(2 * slot + 1))
            else:
                tma.async_copy_global_to_shared(v_desc, [j * v_rows, 0], full.index(slot), tiles.index(2 * slot + 1)._reinterpret(gl.float8e4nv, [128, 64], v_desc.layout))
            mbarrier.arrive(empty.index(slot), count=1, pred=users == 2)
            mbarrier.arrive(empty.index(slot), count=2, pred=users == 1)
            left = left ^ bit
            n += 1


@gluon.jit
def _consumer(W: gl.constexpr, q_tile, ones, tiles, full, empty, p_q, p_q_scale, p_k_scale, p_v_scale, p_v_mean, p_tail_scale, p_tail_bias,
              p_mask, p_out, p_lse, i_head, i_base, i_first, num_rows, num_blocks, num_words, stride_head, stride_row, scale,
              OFFSET: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr, QREG: gl.constexpr, ONES: gl.constexpr,
              V128: gl.constexpr, FIXED: gl.constexpr):
    s_layout: gl.constexpr = product_layout(64)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    col_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    v_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    DW: gl.constexpr = 128 // HALVES
    o_layout: gl.constexpr = product_layout(DW)
    i_query = i_first + W
    if i_query < num_blocks:
        i_task = (i_base + i_query).to(gl.int64)
        o_row = gl.arange(0, 64, layout=row_layout)
        if QREG:
            qr = gl.arange(0, 64, layout=gl.SliceLayout(1, left_layout(64)))
            qc = gl.arange(0, 128, layout=gl.SliceLayout(0, left_layout(64)))
            q = gl.load(p_q + i_task * 8192 + qr[:, None] * 128 + qc[None, :])
        else:
            bl: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
            qr = gl.arange(0, 64, layout=gl.SliceLayout(1, bl))
            qc = gl.arange(0, 128, layout=gl.SliceLayout(0, bl))
            q_tile.store(gl.load(p_q + i_task * 8192 + qr[:, None] * 128 + qc[None, :]))
            fence_async_shared()
            gl.thread_barrier()
            q = q_tile
        q_factor = gl.load(p_q_scale + i_task) * (scale * CODES_PER_NAT)
        b_pivot = gl.zeros([64], gl.float32, row_layout)
        if HALVES == 2:
            acc = (gl.zeros([64, 64], gl.float32, o_layout), gl.zeros([64, 64], gl.float32, o_layout))
        else:
            acc = (gl.zeros([64, 128], gl.float32, o_layout),)
        if ONES:
            b_sum = gl.zeros([64, 8], gl.float32, product_layout(8))
        else:
            b_sum = gl.zeros([64], gl.float32, row_layout)
        n_base = 0
        if TAIL != "none":
            o_col = gl.arange(0, 64, layout=col_layout)
            b_bias = gl.load(p_tail_bias + i_task * 64 + o_col)[None, :] * CODES_PER_NAT
            factor = gl.load(p_tail_scale + i_task) * q_factor
            mbarrier.wait(full.index(W % STAGES), 0)
            b_code = _scores(q, tiles.index(2 * W)) * factor + b_bias
            if TAIL == "anchors":
                b_code = gl.where((o_row // 8)[:, None] == (o_col // 8)[None, :], b_code, float("-inf"))
            b_pivot = gl.max(b_code, 1) / CODES_PER_OCTAVE
            b_pivot = gl.maximum(gl.inline_asm_elementwise("cvt.rpi.f32.f32 $0, $1;", "=r,r", [b_pivot], dtype=gl.float32, is_pure=True, pack=1), LOWEST_PIVOT)
            b_code = b_code + (BIAS + CODES_PER_OCTAVE * OFFSET - b_pivot * CODES_PER_OCTAVE)[:, None]
            v = tiles.index(2 * W + 1)._reinterpret(gl.float8e4nv, [128, 64], v_layout)
            acc, b_sum = _weigh(acc, b_sum, b_pivot * 0, b_code, v, ones, HALVES, ONES, False)
            mbarrier.arrive(empty.index(W), count=1)
            n_base += gl.minimum(3, num_blocks - i_first)
        lag = float("-inf")
        ragged = gl.where(num_rows % 64 != 0, num_blocks - 1, -1)
        p_rows = p_mask + (i_base + i_first).to(gl.int64) * num_words
        m0 = gl.load(p_rows)
        m1 = gl.load(p_rows + num_words, mask=i_first + 1 < num_blocks, other=0)
        m2 = gl.load(p_rows + 2 * num_words, mask=i_first + 2 < num_blocks, other=0)
        for word in range(num_words):
            if W == 0:
                own = m0
            elif W == 1:
                own = m1
            else:
                own = m2
            union = m0 | m1 | m2
            more = word + 1 < num_words
            m0 = gl.load(p_rows + word + 1, mask=more, other=0)
            m1 = gl.load(p_rows + num_words + word + 1, mask=more & (i_first + 1 < num_blocks), other=0)
            m2 = gl.load(p_rows + 2 * num_words + word + 1, mask=more & (i_first + 2 < num_blocks), other=0)
            while own != 0:
                bit = own & -own
                n = n_base + popc(union & (bit - 1))
                j = word * 32 + popc(bit - 1)
                factor = gl.load(p_k_scale + i_base + j) * q_factor
                slot = n % STAGES
                mbarrier.wait(full.index(slot), n // STAGES & 1)
                b_scores = _scores(q, tiles.index(2 * slot))
                if j == ragged:
                    o_key = gl.arange(0, 64, layout=col_layout)
                    b_scores = gl.where((o_key < num_rows % 64)[None, :], b_scores, float("-inf"))
                if FIXED:
                    b_new = b_pivot
                    b_carry = b_pivot
                else:
                    b_top = gl.max(b_scores, 1) * (factor / CODES_PER_OCTAVE)
                    b_ceil = gl.inline_asm_elementwise("cvt.rpi.f32.f32 $0, $1;", "=r,r", [b_top], dtype=gl.float32, is_pure=True, pack=1)
                    b_new = gl.where(b_top > b_pivot + lag, b_ceil, b_pivot)
                    b_carry = _power_of_two(b_pivot - b_new)
                b_code = b_scores * factor + (BIAS + CODES_PER_OCTAVE * OFFSET - b_new * CODES_PER_OCTAVE)[:, None]
                v = tiles.index(2 * slot + 1)._reinterpret(gl.float8e4nv, [128, 64], v_layout)
                acc, b_sum = _weigh(acc, b_sum, b_carry, b_code, v, ones, HALVES, ONES, FIXED)
                b_pivot = b_new
                lag = 8.0 - OFFSET
                mbarrier.arrive(empty.index(slot), count=1)
                own = own ^ bit
            n_base += popc(union)

        if ONES:
            b_total = gl.convert_layout(gl.sum(b_sum, 1) * 0.125, row_layout)
        else:
            b_total = b_sum
        b_weight = gl.where(b_total > 0, gl.load(p_v_scale + i_head) / b_total, 0.0)
        b_w = gl.convert_layout(b_weight, gl.SliceLayout(1, o_layout))
        r = i_query * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, o_layout))
        for h in gl.static_range(HALVES):
            d = h * DW + gl.arange(0, DW, layout=gl.SliceLayout(0, o_layout))
            if V128:
                d = d ^ ((d >> 3) & 1)
            b_mean = gl.load(p_v_mean + i_head * 128 + d)
            b_out = acc[h] * b_w[:, None] + gl.where((b_w > 0)[:, None], b_mean[None, :], 0.0)
            gl.store(p_out + i_head.to(gl.int64) * stride_head + r[:, None].to(gl.int64) * stride_row + d[None, :], b_out.to(p_out.dtype.element_ty), mask=(r < num_rows)[:, None])


@gluon.jit
def _attention_kernel(k_desc, v_desc, tk_desc, tv_desc, p_q, p_q_scale, p_k_scale, p_v_scale, p_v_mean, p_tail_scale, p_tail_bias,
                      p_mask, p_order, p_out, p_lse, num_rows, num_blocks, num_words, stride_head, stride_row, scale,
                      OFFSET: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr, QREG: gl.constexpr, ONES: gl.constexpr,
                      V128: gl.constexpr, FIXED: gl.constexpr, R0: gl.constexpr):
    i_task = gl.load(p_order + gl.program_id(0))
    triples = (num_blocks + 2) // 3
    i_head = i_task // triples
    i_first = i_task % triples * 3
    i_base = i_head * num_blocks
    tiles = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 64, 128], k_desc.layout)
    QN: gl.constexpr = 1 if QREG else 3
    q = gl.allocate_shared_memory(gl.float8e4nv, [QN, 64, 128], k_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=3)
    ones = gl.allocate_shared_memory(gl.float8e4nv, [8, 64], gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2))
    bl: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    ones.store(gl.full([8, 64], 0x38, gl.int8, bl).to(gl.float8e4nv, bitcast=True))
    fence_async_shared()
    gl.warp_specialize([
        (_consumer, (0, q.index(0), ones, tiles, full, empty, p_q, p_q_scale, p_k_scale, p_v_scale, p_v_mean, p_tail_scale, p_tail_bias, p_mask, p_out, p_lse, i_head, i_base, i_first, num_rows, num_blocks, num_words, stride_head, stride_row, scale, OFFSET, TAIL, STAGES, HALVES, QREG, ONES, V128, FIXED)),
        (_consumer, (1, q.index(1 % QN), ones, tiles, full, empty, p_q, p_q_scale, p_k_scale, p_v_scale, p_v_mean, p_tail_scale, p_tail_bias, p_mask, p_out, p_lse, i_head, i_base, i_first, num_rows, num_blocks, num_words, stride_head, stride_row, scale, OFFSET, TAIL, STAGES, HALVES, QREG, ONES, V128, FIXED)),
        (_consumer, (2, q.index(2 % QN), ones, tiles, full, empty, p_q, p_q_scale, p_k_scale, p_v_scale, p_v_mean, p_tail_scale, p_tail_bias, p_mask, p_out, p_lse, i_head, i_base, i_first, num_rows, num_blocks, num_words, stride_head, stride_row, scale, OFFSET, TAIL, STAGES, HALVES, QREG, ONES, V128, FIXED)),
        (_producer, (0, k_desc, v_desc, tk_desc, tv_desc, tiles, full, empty, p_mask, i_base, i_first, num_blocks, num_words, TAIL, STAGES, V128)),
    ], [4, 4, 1], [R0, R0, 24])
