"""From a wanted density to the tau of Sol-Attn 1.0 that gives it."""

import math
from typing import Literal

import torch

from solgen.kernels.sol_attn1.reference import Head
from solgen.kernels.sol_attn1.thresholds import score_moments
from solgen.kernels.sol_attn2.reference.blocks import mixed_blocks
from solgen.kernels.sol_attn2.validation import validate_inputs

MAX_SAMPLES = 2**24
"""Block scores that the quantile is taken of; query blocks are thinned out evenly above that."""


@torch.no_grad()
def solve_tau(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    density: float,
    video_rows: torch.Tensor | None = None,
    threshold: Literal["diag", "exact"] = "diag",
    scale: float | None = None,
) -> float:
    """Tau that makes `density` of the eligible pairs exact, all-video query blocks x all-video key blocks.

    The band |i - j| <= 1 counts as exact pairs. A device sync.

    Args:
        query: [B, H, N, 128].
        key: Like `query`.
        density: Wanted share of exact pairs, in (0, 1].
        video_rows: True where a row is video, [N] bool; None means all.
        threshold: As in `SolAttn1Config`.
        scale: Softmax scale, 128^-0.5 by default.

    Raises:
        ValueError: if the tensors do not form a call, or the density is out of range or below the band's.
    """
    validate_inputs(query, key, key, video_rows)
    if not 0.0 < density <= 1.0:
        raise ValueError(f"density is {density}; expected a share in (0, 1]")
    num_rows, head_dim = query.shape[-2:]
    softmax_scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    mixed = mixed_blocks(video_rows, num_rows, query.device)
    block = torch.arange(mixed.numel(), device=query.device)
    eligible = ~mixed[:, None] & ~mixed[None, :]
    free = eligible & ((block[:, None] - block).abs() > 1)
    total, open_pairs = int(eligible.sum()), int(free.sum())
    share = (density * total - (total - open_pairs)) / max(open_pairs, 1)
    if share <= 0 or total == 0:
        raise ValueError(
            f"density {density} is not above {1 - open_pairs / max(total, 1):.3g}, the share of a block and its "
            "neighbours, which are always exact; ask for more or use a longer sequence"
        )
    if share >= 1:
        return -math.inf
    heads = query.shape[0] * query.shape[1]
    rows = block[:: max(1, math.ceil(heads * mixed.numel() ** 2 / MAX_SAMPLES))]
    samples = []
    for q, k in zip(query.flatten(0, 1), key.flatten(0, 1), strict=True):
        head = Head(q, k, k, mixed, softmax_scale)
        mean, deviation = score_moments(head.q_means, head.k_means, threshold=threshold, scale=softmax_scale)
        scores = softmax_scale * head.q_means[rows] @ head.k_means.t()
        samples.append(((scores - mean[rows, None]) / deviation[rows, None])[free[rows]].float())
    values = torch.cat(samples)
    return float(values.kthvalue(max(1, round((1 - share) * values.numel()))).values)
