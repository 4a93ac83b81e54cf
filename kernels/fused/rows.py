"""Rows of the packed sequence in pieces: what the row-wise kernels share.

One program of four warps works on one row and keeps it in registers. A row of 5376 channels is no power of two: it is
cut into pieces of 1024, eight channels (16 bytes) a thread, and only the last piece is masked.
"""

import torch
import triton
import triton.language as tl

PIECE = 1024
"""Channels of a piece of a long row."""

MAX_WIDTH = 16 * PIECE
"""Longest row that stays in registers."""


def piece_of(width: int) -> int:
    """Channels of a piece, a power of two.

    Raises:
        ValueError: if the row is too long for one program.
    """
    if not 0 < width <= MAX_WIDTH:
        raise ValueError(f"rows have {width} channels; expected 1 to {MAX_WIDTH}")
    return min(PIECE, triton.next_power_of_2(width))


def compute_type(x: torch.Tensor) -> torch.dtype:
    """Type that a reference computes in: FP32 as the kernels do, float64 for float64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@triton.jit
def load_piece(p_row, c: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, ONCE: tl.constexpr = False):
    """Piece `c` of a row as fp32 [PIECE], zeros past the row's end; what is read ONCE leaves L1 to the tables."""
    o_c = c * PIECE + tl.arange(0, PIECE)
    policy: tl.constexpr = "evict_first" if ONCE else ""
    if (c + 1) * PIECE <= WIDTH:
        b_x = tl.load(p_row + o_c, eviction_policy=policy)
    else:
        b_x = tl.load(p_row + o_c, mask=o_c < WIDTH, other=0.0, eviction_policy=policy)
    return b_x.to(tl.float32)


@triton.jit
def store_piece(p_row, b_x, c: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr):
    """Round piece `c` of a row to the output's type and write it."""
    o_c = c * PIECE + tl.arange(0, PIECE)
    if (c + 1) * PIECE <= WIDTH:
        tl.store(p_row + o_c, b_x.to(p_row.dtype.element_ty))
    else:
        tl.store(p_row + o_c, b_x.to(p_row.dtype.element_ty), mask=o_c < WIDTH)


@triton.jit
def store_norm_modulate(
    b_x, p_weight, p_scale, p_shift, p_out, eps, PIECES: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr
):
    """x / rms(x) * weight * (1 + scale) + shift of one row, given as a tuple of fp32 pieces."""
    b_squares = tl.zeros([PIECE], tl.float32)
    for c in tl.static_range(PIECES):
        b_squares += b_x[c] * b_x[c]
    b_inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(b_squares, 0) / WIDTH + eps))
    for c in tl.static_range(PIECES):
        b_scale = 1.0 + load_piece(p_scale, c, WIDTH, PIECE)
        b_y = b_x[c] * b_inverse * load_piece(p_weight, c, WIDTH, PIECE) * b_scale
        store_piece(p_out, b_y + load_piece(p_shift, c, WIDTH, PIECE), c, WIDTH, PIECE)
