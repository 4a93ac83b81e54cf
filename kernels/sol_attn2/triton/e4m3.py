"""E4M3 quantisation shared by the GPU stages of Sol-Attn2 (spec section 3).

    scale = max(amax / 448, SCALE_FLOOR)        code = RNE_E4M3(x / scale)

The quotient is correctly rounded with three operations an element: r = RN(1 / scale) once a group, q = x r, then one
Markstein step q + r (x - q scale). |x / scale| <= 448 up to one rounding, so the cast never saturates.
"""

import triton
import triton.language as tl

from solgen.kernels.sol_attn2 import config

E4M3_MAX = tl.constexpr(config.E4M3_MAX)
SCALE_FLOOR = tl.constexpr(config.SCALE_FLOOR)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, whose FP8 cast does not round to nearest even."""
    return bool(triton.knobs.runtime.interpret)


@triton.jit
def scale_of(amax):
    """FP8 scale of a group with largest magnitude `amax`."""
    return tl.maximum(tl.div_rn(amax, E4M3_MAX), SCALE_FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def divide(b_x, b_scale, b_inverse):
    """x / scale, correctly rounded, from the correctly rounded inverse of the scale."""
    b_quotient = b_x * b_inverse
    # Times -1 is a sign of an operand; Triton's unary minus is 0 - x, an operation an element.
    return tl.fma(tl.fma(b_quotient, b_scale * -1.0, b_x), b_inverse, b_quotient)


@triton.jit
def encode(b_x, INTEGER: tl.constexpr):
    """E4M3 bytes of fp32 values in [-448, 448], to nearest even; INTEGER builds them without the FP8 cast."""
    if INTEGER:
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_sign = (b_bits >> 24) & 0x80
        b_bits = b_bits & 0x7FFFFFFF
        b_normal = ((b_bits + 0x7FFFF + ((b_bits >> 20) & 1)) >> 20) - 960
        # 2^14 has steps of 2^-9, the E4M3 denormal step; 0x46800000 are its bits.
        b_denormal = (tl.abs(b_x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        b_code = tl.where(b_bits < 0x3C800000, b_denormal, b_normal)
        b_code = tl.where(b_bits > 0x7F800000, 0x7F, b_code)
        return (b_code | b_sign).to(tl.uint8)
    return b_x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def decode(b_code, INTEGER: tl.constexpr):
    """fp32 values of finite E4M3 bytes."""
    if INTEGER:
        b_wide = b_code.to(tl.int32)
        b_magnitude = b_wide & 0x7F
        b_value = ((b_magnitude << 20) + 0x3C000000).to(tl.float32, bitcast=True)
        b_value = tl.where(b_magnitude < 8, b_magnitude.to(tl.float32) * 0.001953125, b_value)
        return tl.where(b_wide >= 128, -b_value, b_value)
    return b_code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _join_halves(tiles):
    joined: tl.tuple = ()
    for i in tl.static_range(len(tiles) // 2):
        joined += (tl.join(tiles[i], tiles[i + len(tiles) // 2]),)
    return joined


@triton.jit
def join_columns(columns, D: tl.constexpr):
    """16 tiles [4, D] as one tile [4, D, 16]."""
    joined = _join_halves(_join_halves(_join_halves(_join_halves(columns))))
    return tl.reshape(joined[0], [4, D, 16])
