"""ExpCast: FP8 probability bytes from scores without an exponential (specification sections 4 and 5).

Scores are in octaves (base 2) and scaled by 8, the codes of an octave: x8 = 8 log2(e) t for t in nats.
"""

import math
from typing import Literal

import torch

from solgen.kernels.sol_attn2.config import EXPCAST_BIAS, EXPCAST_MAX

CODES_PER_OCTAVE = 8


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent, exact, fp32; whole exponents in any dtype, clamped to the normal range [-126, 127]."""
    return (exponent.clamp(-126, 127).to(torch.int32) + 127).bitwise_left_shift(23).view(torch.float32)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of the E4M3 bytes 0 to 126, given as whole numbers of any dtype.

    A byte eeee.mmm shifted into the exponent field of an FP32 is its value times 2^-120, subnormals included.
    """
    return codes.to(torch.int32).bitwise_left_shift(20).view(torch.float32) * 2.0**120


def curve_slope(positions: torch.Tensor, values: torch.Tensor, shadow: Literal["linear", "smooth"]) -> torch.Tensor:
    """d(probability) / d(octave) of the curve through the bytes, zero where the code is clipped.

    Args:
        positions: Unrounded codes, any shape.
        values: Decoded bytes, the shape of `positions`.
        shadow: "linear" extends E4M3 decoding to real codes; "smooth" is the slope ln 2 x value of 2^u.
    """
    if shadow == "smooth":
        slope = values * math.log(2)
    else:
        octave = (positions.clamp(0, EXPCAST_MAX) / CODES_PER_OCTAVE).floor().clamp(min=1)
        slope = power_of_two(octave - 7).to(values.dtype)
    return slope * ((positions >= 0) & (positions <= EXPCAST_MAX))


def probabilities(positions: torch.Tensor, shadow: Literal["linear", "smooth"]) -> torch.Tensor:
    """Decoded bytes of unrounded codes 8u + 55.65, with the gradient of the curve through them.

    Args:
        positions: Unrounded codes, any shape, finite; fp32 values, held in the working dtype.
        shadow: See `curve_slope`.
    """
    values = decode(positions.detach().round().clamp_(0, EXPCAST_MAX)).to(positions.dtype)
    if not (torch.is_grad_enabled() and positions.requires_grad):
        return values
    slope = curve_slope(positions.detach(), values, shadow) / CODES_PER_OCTAVE
    return values + slope * (positions - positions.detach())


def pivot_bias(pivots: torch.Tensor, offset: int) -> torch.Tensor:
    """What turns x8 into an unrounded code: 55.65 + 8 (offset - pivot), fp32; pivots are whole octaves."""
    top = torch.tensor(EXPCAST_BIAS + CODES_PER_OCTAVE * offset, dtype=torch.float32, device=pivots.device)
    return top - CODES_PER_OCTAVE * pivots.float()


def sticky_pivots(tile_max: torch.Tensor, offset: int) -> torch.Tensor:
    """Pivot in force at every tile of every row.

    The first tile sets the pivot to the ceiling of its maximum. A later tile moves it, again to the ceiling
    of its own maximum, only when that lies more than 8 - offset octaves above: code 120 is never passed.

    Args:
        tile_max: Row maxima in octaves, [..., K], tiles in visiting order, the first one finite; -inf
            marks a tile to skip.

    Returns:
        Whole octaves, the shape and dtype of `tile_max`; the last column is the row's final pivot.
    """
    pivots = tile_max[..., :1].ceil().expand_as(tile_max).clone()
    tiles = torch.arange(tile_max.shape[-1], device=tile_max.device)
    while True:
        exceeds = tile_max > pivots + (8 - offset)
        if not exceeds.any():
            return pivots
        first = exceeds.int().argmax(-1, keepdim=True)
        moved = exceeds.any(-1, keepdim=True) & (tiles >= first)
        pivots = torch.where(moved, tile_max.gather(-1, first).ceil(), pivots)
