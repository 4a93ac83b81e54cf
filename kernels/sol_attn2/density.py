"""From a wanted density to the router threshold that gives it: one histogram of log shares, one epsilon.

A log share is m_ij - L_i + log NB in nats: how far key block j lies above the uniform share of query block i.
"""

import math

import torch

from solgen.kernels.sol_attn2.reference.blocks import make_blocks, mixed_blocks
from solgen.kernels.sol_attn2.reference.router import block_log_masses, router_means
from solgen.kernels.sol_attn2.validation import validate_inputs

HISTOGRAM_BINS = 2048
HISTOGRAM_SHARPNESS = 1024.0
HISTOGRAM_REACH = math.log2(1.0 + 8.0 * HISTOGRAM_SHARPNESS)
"""Share x falls in bin floor(BINS / 2 (1 + sign(x) log2(1 + SHARPNESS |x|) / REACH)); the ends take what lies beyond
8 nats. A bin is 1 % of the share wide, and near 0, where the shares of unstructured inputs crowd, 1e-5 nats."""


def empty_histogram(device: torch.device | str) -> torch.Tensor:
    """Zero counts to add `share_histogram`s to, [HISTOGRAM_BINS] int64."""
    return torch.zeros(HISTOGRAM_BINS, dtype=torch.int64, device=device)


@torch.no_grad()
def log_shares(query: torch.Tensor, key: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
    """Log shares of all block pairs, [B, H, NB, NB] fp32 (float64 for float64 inputs), from FP16 unit means.

    Scores are formed a bounded number at a time; non-finite ones are returned as they are.

    Args:
        query: [B, H, N, 128].
        key: Like `query`.
        scale: Softmax scale, 128^-0.5 by default.

    Raises:
        ValueError: if the tensors do not form a call.
    """
    validate_inputs(query, key, key, None)
    num_rows, head_dim = query.shape[-2:]
    softmax_scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    blocks = make_blocks(num_rows, mixed_blocks(None, num_rows, query.device), dtype)
    shares = torch.empty(*query.shape[:2], blocks.num_blocks, blocks.num_blocks, dtype=dtype, device=query.device)
    heads = zip(query.flatten(0, 1), key.flatten(0, 1), shares.flatten(0, 1), strict=True)
    for q, k, out in heads:
        q_units, k_units = (router_means(blocks.split(x.to(dtype)), blocks, "fp8") for x in (q, k))
        for rows, masses in block_log_masses(q_units, k_units, blocks, softmax_scale):
            out[rows] = masses + math.log(blocks.num_blocks)
    return shares


@torch.no_grad()
def share_histogram(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    video_rows: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Count the log shares of the eligible pairs, all-video query blocks x all-video key blocks.

    Args:
        query: [B, H, N, 128].
        key: Like `query`.
        video_rows: True where a row is video, [N] bool; None means all.
        scale: Softmax scale, 128^-0.5 by default.

    Returns:
        Counts over fixed bins, [HISTOGRAM_BINS] int64 on the inputs' device; those of several calls add up.

    Raises:
        ValueError: if the tensors do not form a call or (on a CPU, or float64) a share is not finite.
    """
    validate_inputs(query, key, key, video_rows)
    if query.is_cuda and query.dtype != torch.float64:
        from solgen.kernels.sol_attn2.triton.forward import add_shares

        counts = empty_histogram(query.device)
        add_shares(counts, query, key, video_rows=video_rows, scale=scale)
        return counts
    video = ~mixed_blocks(video_rows, query.shape[2], query.device)
    counts = empty_histogram(query.device)
    for q, k in zip(query.flatten(0, 1), key.flatten(0, 1), strict=True):
        shares = log_shares(q[None, None], k[None, None], scale=scale)[0, 0][video][:, video].flatten()
        if not shares.isfinite().all():
            raise ValueError("shares are not finite; expected query and key means below 65504; scale them")
        places = shares.sign() * (1.0 + HISTOGRAM_SHARPNESS * shares.abs()).log2() / HISTOGRAM_REACH
        bins = (HISTOGRAM_BINS / 2 * (1.0 + places)).clamp(0, HISTOGRAM_BINS - 1).long()
        counts.scatter_add_(0, bins, torch.ones_like(bins))
    return counts


def solve_epsilon(histogram: torch.Tensor, density: float) -> float:
    """Threshold, on a bin edge, whose kept share of the counted pairs is nearest to `density`; a device sync.

    Args:
        histogram: Sum of `share_histogram`s, [HISTOGRAM_BINS] int64.
        density: Wanted share of kept pairs, in (0, 1]; 1 gives -inf.

    Raises:
        ValueError: if the density is out of range or nothing was counted.
    """
    if not 0.0 < density <= 1.0:
        raise ValueError(f"density is {density}; expected a share in (0, 1]")
    counts = histogram.cpu()
    total = int(counts.sum())
    if total == 0:
        raise ValueError("the share histogram is empty; expected counts of a calibration call; add one first")
    kept = counts.flip(0).cumsum(0).flip(0).double() / total  # kept[b]: shares at or above the lower edge of bin b
    nearest = int((kept - density).abs().argmin())
    if nearest == 0:
        return -math.inf
    place = nearest / (HISTOGRAM_BINS / 2) - 1.0
    return math.copysign((2.0 ** (abs(place) * HISTOGRAM_REACH) - 1.0) / HISTOGRAM_SHARPNESS, place)
