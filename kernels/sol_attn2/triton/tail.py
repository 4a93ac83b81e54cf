"""The tail: 64 surrogate tokens a query block for the key blocks it does not keep (spec section 2).

    w_u = n_u exp(s qbar . kbar_u)                                   units u of the blocks not kept, anchor qbar
    S_c = sum_{u in c} w_u     k_F = sum w_u kbar_u / S_c     v_F = sum w_u vbar_u / S_c
    b_F = ln S_c - s qbar . k_mean - s qhat . khat_F                 hats: dequantised, k_F less k_mean
    slot of key block j = floor(C j / NB)

Kinds: "slots" has one anchor a query block, the mean of its rows, and C = 64 slots; "anchors" has its 8 unit means and
C = 8. Surrogate a C + c belongs to anchor a.

Two kernels. The first owns 64 anchors and one slot: two products on the tensor cores with a running maximum between
them; the FP16 weights that multiply the means are the ones that are summed. It knows the head's value scale, but not
yet the largest k_F of a query block: the second kernel quantises k_F, transposes the value codes and forms the bias.
The first holds no correctly rounded division: its slow path is a call, and ptxas serialises products around calls.
Sizes stay variables in what casts to FP8, as in `prepare`.

Legend: G heads, NB blocks of 64 rows, A anchors a block, R = NB A anchors of a head, D = 128.
"""

import math

import torch
import triton
import triton.language as tl

from solgen.kernels.sol_attn2.config import HEAD_DIM, SLOTS, UNIT, UNITS, SolAttn2Config
from solgen.kernels.sol_attn2.triton.e4m3 import decode, divide, encode, interpreted, join_columns, scale_of
from solgen.kernels.sol_attn2.triton.operands import Operands, Route, Tail

LN2 = tl.constexpr(math.log(2))

ROWS, STEP, STAGES = 64, 64, 2
"""Anchors of a program, units of one of its products, and products whose loads are in flight."""


@triton.jit(do_not_specialize=["num_rows", "num_anchors"])
def _anchor_kernel(p_units, p_anchor, num_rows, num_anchors, D: tl.constexpr):
    """FP16 means of query blocks, [G, NB, D], from their unit means."""
    i_i, i_g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_i = i_i * 16 + tl.arange(0, 16)
    o_d = tl.arange(0, D)
    m_i = (o_i < num_anchors)[:, None]
    b_sum = tl.zeros([16, D], tl.float32)
    for u in tl.static_range(8):
        b_count = tl.minimum(tl.maximum(num_rows - o_i * 64 - u * 8, 0), 8).to(tl.float32)
        p_unit = p_units + ((i_g * num_anchors + o_i) * 8 + u)[:, None] * D + o_d[None, :]
        b_sum += tl.load(p_unit, mask=m_i, other=0.0).to(tl.float32) * b_count[:, None]
    b_rows = tl.minimum(tl.maximum(num_rows - o_i * 64, 1), 64).to(tl.float32)
    p_out = p_anchor + (i_g * num_anchors + o_i)[:, None] * D + o_d[None, :]
    tl.store(p_out, (b_sum / b_rows[:, None]).to(tl.float16), mask=m_i)


@triton.jit
def _slot_start(i_c, num_blocks, SLOTS: tl.constexpr):
    """First block j with floor(SLOTS j / NB) >= i_c."""
    return (i_c * num_blocks + SLOTS - 1) // SLOTS


@triton.jit
def _kept_bits(p_word, i_j, num_words):
    """Kept bits of 32 key blocks from i_j on, bit 0 first, for the rows of p_word."""
    i_word = tl.minimum(i_j // 32, num_words - 1)
    b_low = tl.load(p_word + i_word).to(tl.uint32, bitcast=True)
    b_high = tl.load(p_word + tl.minimum(i_word + 1, num_words - 1)).to(tl.uint32, bitcast=True)
    return (b_low >> (i_j % 32)) | (b_high << 1 << (31 - i_j % 32))


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "num_words"])
def _compress_kernel(
    p_anchor,  # [G, R, D] fp16
    p_k,  # [G, NB * 8, D] fp16
    p_v,  # [G, NB * 8, D] fp16
    p_mask,  # [G, NB, W] int32
    p_k_mean,  # [G, D] fp32
    p_v_mean,  # [G, D] fp32
    p_v_scale,  # [G] fp32
    p_key,  # [G, R, C, D] fp16, k_F less k_mean
    p_value,  # [G, R, C, D] uint8, codes of v_F less v_mean
    p_log_mass,  # [G, R, C] fp32, ln S_c
    num_rows,
    num_blocks,
    num_words,
    scale,
    log_last,  # log2 of the real rows of a partial last unit, -inf without one
    ANCHORS: tl.constexpr,
    SLOTS: tl.constexpr,
    INTEGER: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    D: tl.constexpr,
):
    i_r, i_c, i_g = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_anchors = num_blocks * ANCHORS
    o_r = i_r * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, D)
    o_u = tl.arange(0, STEP)
    m_r = o_r < num_anchors
    p_tile = p_anchor + (i_g * num_anchors + o_r)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_tile, mask=m_r[:, None], other=0.0)  # [ROWS, D]
    p_k += i_g * num_blocks * (8 * D)
    p_v += i_g * num_blocks * (8 * D)
    p_word = p_mask + (i_g * num_blocks + tl.minimum(o_r, num_anchors - 1) // ANCHORS) * num_words
    octaves = scale * (1.0 / LN2)

    first = _slot_start(i_c, num_blocks, SLOTS)
    last = _slot_start(i_c + 1, num_blocks, SLOTS)
    b_top = tl.full([ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_key = tl.zeros([ROWS, D], tl.float32)
    b_value = tl.zeros([ROWS, D], tl.float32)
    for i_j in tl.range(first, last, STEP // 8, num_stages=STAGES):
        o_unit = i_j * 8 + o_u
        m_u = o_unit < last * 8
        o_tile = o_unit[:, None] * D + o_d[None, :]
        b_k = tl.load(p_k + o_tile, mask=m_u[:, None], other=0.0)  # [STEP, D]
        b_v = tl.load(p_v + o_tile, mask=m_u[:, None], other=0.0)  # [STEP, D]
        b_kept = _kept_bits(p_word, i_j, num_words)
        b_log = tl.where(o_unit < num_rows // 8, 3.0, tl.where(o_unit == num_rows // 8, log_last, float("-inf")))
        b_log = tl.where(m_u, b_log, float("-inf"))
        b_z = tl.dot(b_q, tl.trans(b_k)) * octaves + b_log[None, :]  # [ROWS, STEP]
        b_z = tl.where((b_kept[:, None] & (1 << (o_u // 8))[None, :]) != 0, float("-inf"), b_z)
        b_new = tl.maximum(b_top, tl.max(b_z, 1))
        b_pivot = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_w = tl.exp2(b_z - b_pivot[:, None]).to(tl.float16)
        b_carry = tl.exp2(b_top - b_pivot)
        b_sum = b_sum * b_carry + tl.sum(b_w.to(tl.float32), 1)
        b_key = tl.dot(b_w, b_k, b_key * b_carry[:, None])
        b_value = tl.dot(b_w, b_v, b_value * b_carry[:, None])
        b_top = b_new

    m_empty = b_sum == 0.0
    b_inverse = 1.0 / tl.where(m_empty, 1.0, b_sum)
    o_out = (i_g * num_anchors + o_r) * SLOTS + i_c
    o_store = o_out[:, None] * D + o_d[None, :]
    b_log_mass = tl.where(m_empty, float("-inf"), (b_top + tl.log2(b_sum)) * LN2)
    tl.store(p_log_mass + o_out, b_log_mass, mask=m_r)
    b_k_mean = tl.load(p_k_mean + i_g * D + o_d)[None, :]
    b_out = tl.where(m_empty[:, None], 0.0, b_key * b_inverse[:, None] - b_k_mean)
    tl.store(p_key + o_store, b_out.to(tl.float16), mask=m_r[:, None])
    b_v_mean = tl.load(p_v_mean + i_g * D + o_d)[None, :]
    v_inverse = 1.0 / tl.load(p_v_scale + i_g)
    b_out = tl.where(m_empty[:, None], 0.0, (b_value * b_inverse[:, None] - b_v_mean) * v_inverse)
    tl.store(p_value + o_store, encode(b_out, INTEGER), mask=m_r[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _encode_kernel(
    p_key,  # [G, NB, 64, D] fp16
    p_value,  # [G, NB, 64, D] uint8
    p_log_mass,  # [G, NB, 64] fp32
    p_q,  # [G, NB, 64, D] uint8
    p_q_scale,  # [G, NB] fp32
    p_anchor,  # [G, NB, A, D] fp16
    p_k_mean,  # [G, D] fp32
    p_k_codes,  # [G, NB, 64, D] uint8
    p_k_scale,  # [G, NB] fp32
    p_v_codes,  # [G, NB, D, 64] uint8, columns in VALUE_ORDER
    p_bias,  # [G, NB, 64] fp32
    num_rows,
    num_blocks,
    scale,
    ANCHORS: tl.constexpr,
    INTEGER: tl.constexpr,
    D: tl.constexpr,
):
    i_i, i_g = tl.program_id(0), tl.program_id(1)
    i_block = (i_g * num_blocks + i_i).to(tl.int64)
    o_r = tl.arange(0, 64)
    o_d = tl.arange(0, D)
    o_tile = i_block * (64 * D) + o_r[:, None] * D + o_d[None, :]
    b_key = tl.load(p_key + o_tile).to(tl.float32)  # [64, D]
    b_scale = scale_of(tl.max(tl.max(tl.abs(b_key), 1), 0))
    b_codes = encode(divide(b_key, b_scale, tl.div_rn(1.0, b_scale)), INTEGER)
    tl.store(p_k_codes + o_tile, b_codes)
    tl.store(p_k_scale + i_block, b_scale)

    # Mean of the dequantised rows of every anchor; rows past the end are zero codes.
    b_q = tl.reshape(decode(tl.load(p_q + o_tile), INTEGER), [ANCHORS, 64 // ANCHORS, D])
    o_a = i_i * 64 + tl.arange(0, ANCHORS) * (64 // ANCHORS)
    b_count = tl.minimum(tl.maximum(num_rows - o_a, 1), 64 // ANCHORS).to(tl.float32)
    b_anchor = tl.sum(b_q, 1) / b_count[:, None]  # [A, D]
    b_product = tl.reshape(decode(b_codes, INTEGER), [ANCHORS, 64 // ANCHORS, D]) * b_anchor[:, None, :]
    b_product = tl.reshape(tl.sum(b_product, 2), [64])
    factor = tl.load(p_q_scale + i_block) * b_scale
    o_anchor = (i_block * ANCHORS + tl.arange(0, ANCHORS))[:, None] * D + o_d[None, :]
    b_shift = tl.load(p_anchor + o_anchor).to(tl.float32) * tl.load(p_k_mean + i_g * D + o_d)[None, :]
    b_shift = tl.broadcast_to(tl.sum(b_shift, 1)[:, None], [ANCHORS, 64 // ANCHORS])
    b_log_mass = tl.load(p_log_mass + i_block * 64 + o_r)
    b_bias = b_log_mass - scale * (tl.reshape(b_shift, [64]) + b_product * factor)
    tl.store(p_bias + i_block * 64 + o_r, b_bias)

    o_a = tl.arange(0, 4)
    o_c = tl.arange(0, 16)
    b_columns: tl.tuple = ()
    for c in tl.static_range(16):  # stored column 16 a + c: see the values of `prepare`
        o_slot = o_a * 16 + (c // 2 % 2) * 8 + c // 4 * 2 + c % 2
        p_slot = p_value + i_block * (64 * D) + o_slot[:, None] * D + o_d[None, :]
        b_columns += (tl.load(p_slot),)
    p_out = p_v_codes + i_block * (64 * D) + o_d[None, :, None] * 64 + o_a[:, None, None] * 16 + o_c[None, None, :]
    tl.store(p_out, join_columns(b_columns, D))


def _anchors(operands: Operands, kind: str) -> torch.Tensor:
    if kind == "anchors":
        return operands.q_units
    groups, blocks = operands.q_scale.shape
    anchors = operands.q_units.new_empty(groups, blocks, HEAD_DIM)
    _anchor_kernel[(triton.cdiv(blocks, 16), groups)](operands.q_units, anchors, operands.num_rows, blocks, D=HEAD_DIM)
    return anchors


def compress(operands: Operands, route: Route, *, config: SolAttn2Config, scale: float) -> Tail:
    """Fold every block that a query block does not keep into its 64 surrogates; `config.tail` is not "none"."""
    groups, blocks = operands.q_scale.shape
    device = operands.q_scale.device
    num_anchors = UNITS if config.tail == "anchors" else 1
    num_slots = SLOTS // num_anchors

    def new(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(groups, blocks, *shape, dtype=dtype, device=device)

    anchors = _anchors(operands, config.tail)
    key, value = new(SLOTS, HEAD_DIM, dtype=torch.float16), new(SLOTS, HEAD_DIM, dtype=torch.uint8)
    log_mass = new(SLOTS, dtype=torch.float32)
    _compress_kernel[(triton.cdiv(blocks * num_anchors, ROWS), num_slots, groups)](
        anchors,
        operands.k_units,
        operands.v_units,
        route.mask,
        operands.k_mean,
        operands.v_mean,
        operands.v_scale,
        key,
        value,
        log_mass,
        operands.num_rows,
        blocks,
        route.mask.shape[-1],
        scale,
        math.log2(last) if (last := operands.num_rows % UNIT) else -math.inf,
        ANCHORS=num_anchors,
        SLOTS=num_slots,
        INTEGER=interpreted(),
        ROWS=ROWS,
        STEP=STEP,
        STAGES=STAGES,
        D=HEAD_DIM,
        num_warps=4,
    )
    k_codes, v_codes = new(SLOTS, HEAD_DIM, dtype=torch.uint8), new(HEAD_DIM, SLOTS, dtype=torch.uint8)
    k_scale, bias = new(dtype=torch.float32), new(SLOTS, dtype=torch.float32)
    _encode_kernel[(blocks, groups)](
        key,
        value,
        log_mass,
        operands.q_codes.view(torch.uint8),
        operands.q_scale,
        anchors,
        operands.k_mean,
        k_codes,
        k_scale,
        v_codes,
        bias,
        operands.num_rows,
        blocks,
        scale,
        ANCHORS=num_anchors,
        INTEGER=interpreted(),
        D=HEAD_DIM,
        num_warps=2,
    )
    return Tail(
        k_codes=k_codes.view(torch.float8_e4m3fn),
        k_scale=k_scale,
        v_codes=v_codes.view(torch.float8_e4m3fn),
        bias=bias,
    )
