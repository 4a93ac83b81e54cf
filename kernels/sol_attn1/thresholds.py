"""The row thresholds of Sol-Attn 1.0: a mean and a standard deviation of the block scores, from moments of the keys.

    x_ij = s2 qbar_i . kc_j                    s2 = s log2(e), qbar_i mean query of block i, kc_j mean key of block j
    x_ij is compared with    mean_j x_ij + tau sqrt(var + 1e-6)
    diag:   var = s2^2 sum_d qbar_d^2 var_j(kc_jd)
    exact:  var = s2^2 qbar^T cov_j(kc_j) qbar

Blocks count alike whatever their length. Scores here are in nats, as elsewhere in this project: s in place of s2, and
1e-6 scaled by ln(2)^2.
"""

import math
from typing import Literal

import torch

VARIANCE_FLOOR = 1e-6 * math.log(2) ** 2
"""Added to the variance of a row's scores, in nats^2; 1e-6 in octaves^2."""


def score_moments(
    q_means: torch.Tensor, k_means: torch.Tensor, *, threshold: Literal["diag", "exact"], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of every query block's scores over the key blocks, in nats.

    Args:
        q_means: Mean queries of the blocks, [..., NB, D].
        k_means: Mean keys of the blocks, [..., NB, D], dtype of `q_means`.
        threshold: How the variance is formed, see `SolAttn1Config`.
        scale: Softmax scale.

    Returns:
        Two tensors [..., NB].
    """
    center = k_means.mean(-2, keepdim=True)
    spread = k_means - center
    if threshold == "diag":
        variance = (q_means.square() * spread.square().mean(-2, keepdim=True)).sum(-1)
    else:
        covariance = spread.transpose(-1, -2) @ spread / k_means.shape[-2]
        variance = ((q_means @ covariance) * q_means).sum(-1).clamp(min=0)
    return scale * (q_means * center).sum(-1), (scale * scale * variance + VARIANCE_FLOOR).sqrt()


def row_thresholds(
    q_means: torch.Tensor,
    k_means: torch.Tensor,
    *,
    tau: float,
    threshold: Literal["diag", "exact"],
    scale: float,
) -> torch.Tensor:
    """Score in nats that an exact block exceeds, [..., NB]; arguments as for `score_moments`."""
    mean, deviation = score_moments(q_means, k_means, threshold=threshold, scale=scale)
    return mean + tau * deviation
