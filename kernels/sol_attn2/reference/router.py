"""The router: which key blocks a query block attends to exactly (specification section 1).

Legend: NB blocks of 64 rows, units of 8 rows, R query blocks of a chunk, s the softmax scale.
"""

import math
from collections.abc import Iterator

import torch

from solgen.kernels.sol_attn2.config import SolAttn2Config
from solgen.kernels.sol_attn2.reference.blocks import Blocks
from solgen.kernels.sol_attn2.reference.quantise import straight_through
from solgen.kernels.sol_attn2.validation import NonFiniteError

UNIT_SCORES_PER_CHUNK = 2**23
"""Unit scores held at once: 32 MiB in FP32."""


def router_means(rows: torch.Tensor, blocks: Blocks, precision: str) -> torch.Tensor:
    """Unit means [NB, 8, D] of blocks [NB, 64, D], through FP16 as the kernels store them under "fp8"."""
    means = blocks.unit_means(rows)
    if precision == "exact":
        return means
    return straight_through(means.detach().half().to(means.dtype), means)


def block_log_masses(
    q_units: torch.Tensor, k_units: torch.Tensor, blocks: Blocks, scale: float
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Normalised log masses m_ij - L_i of all pairs, in nats, a chunk of query blocks at a time.

    m_ij = log n_j + log(sum_ab c_a c_b exp(s_ab) / sum_ab c_a c_b) over units a of block i and b of block j,
    with s_ab = s qbar_a . kbar_b and c the real rows of a unit; L_i = logsumexp_j m_ij. Non-finite scores are
    passed on.

    Args:
        q_units: Unit means of the queries, [NB, 8, D], fp32 or float64.
        k_units: Unit means of the keys, [NB, 8, D].

    Yields:
        The query blocks, and their log masses [R, NB] in the dtype of the means.
    """
    log_counts = blocks.unit_counts.log()
    keys = k_units.flatten(0, 1).t()
    chunk = max(1, UNIT_SCORES_PER_CHUNK // (64 * blocks.num_blocks))
    for start in range(0, blocks.num_blocks, chunk):
        rows = slice(start, min(start + chunk, blocks.num_blocks))
        scores = (q_units[rows].flatten(0, 1) @ keys).mul_(scale).view(-1, 8, blocks.num_blocks, 8)
        # Empty units have log count -inf. sum_ab c_a c_b = n_i n_j: n_j cancels, and n_i does in m_ij - L_i.
        scores += log_counts
        scores += log_counts[rows, :, None, None]
        mass = scores.logsumexp((1, 3))
        yield rows, mass - mass.logsumexp(-1, keepdim=True)


def block_mean_scores(q_units: torch.Tensor, k_units: torch.Tensor, blocks: Blocks, scale: float) -> torch.Tensor:
    """Scores of the 64-row means, [NB, NB] (page 000, "Routing and complementary approximation")."""
    query = blocks.group_means(q_units, 1).squeeze(1)
    key = blocks.group_means(k_units, 1).squeeze(1)
    return query @ key.t() * scale


def top_blocks(scores: torch.Tensor, fraction: float) -> torch.Tensor:
    """The round(fraction x NB) best blocks of a row, at least one, [NB, NB] bool; ties go to the earlier."""
    count = max(1, round(fraction * scores.shape[-1]))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def _require_finite(scores: torch.Tensor) -> None:
    if not scores.isfinite().all():
        raise NonFiniteError("router scores are not finite; expected query and key means below 65504; scale the inputs")


@torch.no_grad()
def select_blocks(
    q_units: torch.Tensor, k_units: torch.Tensor, blocks: Blocks, scale: float, config: SolAttn2Config
) -> torch.Tensor:
    """Kept key blocks of every query block, [NB, NB] bool.

    Blocks with text or audio rows keep everything as query blocks; under `config.sink` all query blocks keep
    them as key blocks.

    Raises:
        ValueError: if a score is not finite.
    """
    if config.top_k is not None:
        scores = block_mean_scores(q_units, k_units, blocks, scale)
        _require_finite(scores)
        kept = top_blocks(scores, config.top_k)
    else:
        kept = torch.empty(blocks.num_blocks, blocks.num_blocks, dtype=torch.bool, device=q_units.device)
        threshold = config.epsilon - math.log(blocks.num_blocks)
        for rows, masses in block_log_masses(q_units, k_units, blocks, scale):
            _require_finite(masses)
            kept[rows] = masses > threshold
    kept |= blocks.mixed[:, None]
    if config.sink:
        kept |= blocks.mixed[None, :]
    return kept
