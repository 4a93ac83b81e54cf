"""Histogram of the router's shares, from which a density becomes an epsilon (see `density`).

    share = m_ij - L_i + ln NB          pairs of an all-video query block i and an all-video key block j

Counts are integers, so the atomic sums do not depend on their order.

Legend: G heads of a group, NB blocks of 64 rows.
"""

import math

import torch
import triton
import triton.language as tl

from solgen.kernels.sol_attn2.density import HISTOGRAM_BINS, HISTOGRAM_REACH, HISTOGRAM_SHARPNESS
from solgen.kernels.sol_attn2.triton.route import CHUNK, log_total, row_tile


@triton.jit(do_not_specialize=["num_blocks"])
def _histogram_kernel(
    p_mass,  # [G, NB, NB] fp32
    p_mixed,  # [NB] bool
    p_histogram,  # [BINS] int64, added to
    num_blocks,
    log_blocks,
    sharpness,
    reach,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
):
    i_i, i_g = tl.program_id(0), tl.program_id(1)
    o_j = tl.arange(0, WORDS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    m_video = tl.load(p_mixed + o_j, mask=o_j < num_blocks, other=1) == 0
    b_histogram = tl.zeros([BINS], tl.int32)
    for i in range(i_i * ROWS, min(i_i * ROWS + ROWS, num_blocks)):
        p_row = p_mass + (i_g * num_blocks + i).to(tl.int64) * num_blocks
        b_m, _ = row_tile(p_row, 0, num_blocks, WORDS)
        b_share = b_m - log_total(p_row, num_blocks, CHUNK) + log_blocks
        b_place = tl.log2(1.0 + sharpness * tl.abs(b_share)) / reach
        b_bin = BINS / 2 * (1.0 + tl.where(b_share < 0, -b_place, b_place))
        b_bin = tl.minimum(tl.maximum(b_bin, 0.0), BINS - 1.0).to(tl.int32)
        m_count = m_video & (tl.load(p_mixed + i) == 0)
        b_histogram += tl.histogram(tl.reshape(b_bin, [WORDS * 32]), BINS, mask=tl.reshape(m_count, [WORDS * 32]))
    o_bin = tl.arange(0, BINS)
    tl.atomic_add(p_histogram + o_bin, b_histogram.to(tl.int64), mask=b_histogram > 0, sem="relaxed")


def add_share_histogram(histogram: torch.Tensor, masses: torch.Tensor, mixed: torch.Tensor) -> None:
    """Count the shares m_ij - L_i + ln NB of all-video block pairs into `histogram`, [HISTOGRAM_BINS] int64."""
    groups, blocks, _ = masses.shape
    _histogram_kernel[(triton.cdiv(blocks, 32), groups)](
        masses,
        mixed,
        histogram,
        blocks,
        math.log(blocks),
        HISTOGRAM_SHARPNESS,
        HISTOGRAM_REACH,
        ROWS=32,
        WORDS=triton.next_power_of_2(triton.cdiv(blocks, 32)),
        CHUNK=CHUNK,
        BINS=HISTOGRAM_BINS,
    )
