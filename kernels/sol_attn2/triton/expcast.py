"""Device helpers of ExpCast: probability bytes, exact powers of two and E4M3 decoding (spec section 4)."""

import math

import triton
import triton.language as tl

from solgen.kernels.sol_attn2.config import EXPCAST_BIAS, EXPCAST_MAX, JOIN_MAX

CODES_PER_OCTAVE = tl.constexpr(8.0)
CODES_PER_NAT = tl.constexpr(8.0 / math.log(2))
BIAS = tl.constexpr(EXPCAST_BIAS)
MAX_CODE = tl.constexpr(EXPCAST_MAX)
MAX_JOIN = tl.constexpr(JOIN_MAX)
ROUND_MAGIC = tl.constexpr(1.5 * 2.0**23)
"""Added and subtracted, it rounds an FP32 below 2^22 to the nearest even integer."""

PACK_BYTES = tl.constexpr(
    """{
    .reg .s32 a<4>; .reg .b32 high;
    cvt.rni.s32.f32 a0, $1; cvt.rni.s32.f32 a1, $2; cvt.rni.s32.f32 a2, $3; cvt.rni.s32.f32 a3, $4;
    cvt.pack.sat.u8.s32.b32 high, a3, a2, 0; cvt.pack.sat.u8.s32.b32 $0, a1, a0, high;
    }"""
)
"""Four FP32 to four bytes: nearest even, saturated to [0, 255]; ptxas makes two F2IP of it on sm_90."""


@triton.jit
def expcast(b_code, ASM: tl.constexpr):
    """Bytes of unrounded codes that do not exceed 120; -inf gives 0. ASM selects the inline PTX form."""
    if ASM:
        b_byte = tl.inline_asm_elementwise(PACK_BYTES, "=r,r,r,r,r", [b_code], dtype=tl.int8, is_pure=True, pack=4)
    else:
        b_rounded = b_code + ROUND_MAGIC - ROUND_MAGIC
        b_byte = tl.minimum(tl.maximum(b_rounded, 0.0), MAX_CODE).to(tl.int8)
    return b_byte


@triton.jit
def pivot_bias(b_pivot, OFFSET: tl.constexpr):
    """What turns a score in codes into an unrounded ExpCast code: 55.65 + 8 (offset - pivot)."""
    return tl.fma(b_pivot, -CODES_PER_OCTAVE, BIAS + CODES_PER_OCTAVE * OFFSET)


@triton.jit
def power_of_two(b_exponent):
    """2^exponent for whole FP32 exponents, clamped to +-100, exact."""
    b_exponent = tl.minimum(tl.maximum(b_exponent, -MAX_JOIN), MAX_JOIN)
    return ((b_exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode_bf16(b_byte):
    """E4M3 bytes (as int8) as bf16, exact, on GPUs without FP8 conversions.

    A byte s.eeee.mmm moved into the exponent field of an FP32 is its value times 2^-120, subnormals included.
    """
    b_bits = b_byte.to(tl.int32)
    b_magnitude = ((b_bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(b_bits < 0, -b_magnitude, b_magnitude).to(tl.bfloat16)
