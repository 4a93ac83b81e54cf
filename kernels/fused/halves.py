"""Heads in two halves: device helpers of the kernels that norm and rotate what they go on with in registers.

Both halves of 64 channels hold what is rotated together in one place, so nothing crosses threads but the sum of
squares; its order and every rounding point are those of `qk_norm_rope`. Angles are loaded behind rows: Triton lays out
what follows as the last loads are, else as the sums of squares, and rows would go through shared memory.

Legend: M rows of heads, D = 128 channels, R of them rotated (64, 96 or 128), one angle for every two.
"""

import triton
import triton.language as tl

from solgen.kernels.fused.qk_norm_rope import inverse_rms, rotate, sum_eights

HEAD_DIM = 128
"""D."""

TURNED = (32, 48, 64)
"""Pairs of channels of which the halves are made, R / 2."""


@triton.jit
def half_channels(ROTARY: tl.constexpr):
    """Both halves of a head's channels, [64] each: those that are turned with one another in one place, then others."""
    o_d = tl.arange(0, 64)
    rest = o_d // (ROTARY // 2)  # 1 from the first channel on that is not rotated, else 0
    return o_d + rest * (ROTARY // 2), o_d + ROTARY // 2 + rest * (64 - ROTARY // 2)


@triton.jit
def load_weights(p_weight, o_first, o_second):
    """Weights of both halves of the channels, fp32 [1, 64]."""
    b_first, b_second = tl.load(p_weight + o_first), tl.load(p_weight + o_second)
    return b_first.to(tl.float32)[None, :], b_second.to(tl.float32)[None, :]


@triton.jit
def load_rows(p_first, p_second, m_r, eps):
    """Halves of rows as fp32 [M, 64], zeros where there is no row, and 1 / rms of each, [M, 1]."""
    b_first = tl.load(p_first, mask=m_r, other=0.0).to(tl.float32)
    b_second = tl.load(p_second, mask=m_r, other=0.0).to(tl.float32)
    M: tl.constexpr = b_first.shape[0]
    b_sum = sum_eights(b_first, b_second, M * 8)
    b_sum = tl.sum(tl.reshape(b_sum, [M, 2, 4]), 1)
    b_sum = tl.sum(tl.reshape(b_sum, [M, 2, 2]), 1)
    return b_first, b_second, inverse_rms(tl.sum(b_sum, 1), eps, 2 * b_first.shape[1])[:, None]


@triton.jit
def norm_rope(b_row, b_weights, b_cos, b_sin, m_turned):
    """Halves of what `load_rows` returns, normed and rotated, not yet rounded, fp32 [M, 64]."""
    b_first, b_second = b_row[0] * b_row[2] * b_weights[0], b_row[1] * b_row[2] * b_weights[1]
    b_turned = tl.where(m_turned, rotate(b_first, b_second, b_cos, b_sin * -1.0), b_first)
    return b_turned, tl.where(m_turned, rotate(b_second, b_first, b_cos, b_sin), b_second)
