"""Sol-Attn 1.0 in plain PyTorch, in float64 for float64 inputs and FP32 otherwise.

Legend: NB blocks of 64 rows, n_j real rows of block j, R query blocks of a chunk, D channels.
"""

import math

import torch

from solgen.kernels.sol_attn1.config import SolAttn1Config
from solgen.kernels.sol_attn1.thresholds import row_thresholds
from solgen.kernels.sol_attn2.details import SolAttn2Details
from solgen.kernels.sol_attn2.reference.blocks import Blocks, make_blocks, mixed_blocks
from solgen.kernels.sol_attn2.reference.forward import working_dtype

SCORES_PER_CHUNK = 2**23
"""Token scores held at once."""


def sol_attn1_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: SolAttn1Config,
    video_rows: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, SolAttn2Details]:
    """Sol-Attn 1.0 of query, key and value [B, H, N, 128]; see `solgen.kernels.sol_attn1.api.sol_attn1`."""
    num_rows, head_dim = query.shape[-2:]
    mixed = mixed_blocks(video_rows, num_rows, query.device)
    softmax_scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    results = []
    for q, k, v in zip(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), strict=True):
        head = Head(q, k, v, mixed, softmax_scale)
        kept = head.select(config)
        step = max(1, SCORES_PER_CHUNK // (64 * 64 * head.blocks.num_blocks))
        rows = torch.arange(head.blocks.num_blocks, device=q.device).split(step)
        parts = [head.attend(chunk, kept[chunk]) for chunk in rows]
        output, lse = (torch.cat(part).flatten(0, 1)[:num_rows] for part in zip(*parts, strict=True))
        results.append((output, lse, kept))
    outputs, lses, routes = (torch.stack(part).unflatten(0, query.shape[:2]) for part in zip(*results, strict=True))
    return outputs.to(query.dtype), SolAttn2Details.from_route(lses, routes, mixed)


class Head:
    """One head's blocks, and what they are compressed to."""

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mixed: torch.Tensor, scale: float
    ) -> None:
        """Take rows [N, D]. Mean keys and summed values are rounded to the inputs' dtype, as the kernels store them."""
        self.dtype, self.scale = query.dtype, scale
        self.blocks: Blocks = make_blocks(query.shape[0], mixed, working_dtype(query.dtype))
        self.query, self.key, self.value = (
            self.blocks.split(x.to(working_dtype(query.dtype))) for x in (query, key, value)
        )
        counts = self.blocks.block_counts.unsqueeze(-1)
        self.q_means = self.query.sum(1) / counts
        self.k_means = self._stored(self.key.sum(1) / counts)
        self.v_sums = self._stored(self.value.sum(1))

    def select(self, config: SolAttn1Config) -> torch.Tensor:
        """Exact key blocks of every query block, [NB, NB] bool."""
        thresholds = row_thresholds(
            self.q_means, self.k_means, tau=config.tau, threshold=config.threshold, scale=self.scale
        )
        block = torch.arange(self.blocks.num_blocks, device=thresholds.device)
        kept = self.scale * self.q_means @ self.k_means.t() > thresholds.unsqueeze(-1)
        kept |= (block[:, None] - block).abs() <= 1
        kept |= self.blocks.mixed[:, None]
        if config.sink:
            kept |= self.blocks.mixed[None, :]
        return kept

    def attend(
        self, rows: torch.Tensor, kept: torch.Tensor, *, round_weights: bool = False, atoms: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [R, 64, D] and natural-log denominator [R, 64] of query blocks `rows` that keep `kept` [R, NB].

        With `round_weights` the weights that multiply values pass through the inputs' dtype, as in the kernels. Without
        `atoms` the other blocks are left out: every row must keep one.
        """
        query, num_blocks = self.scale * self.query[rows], self.blocks.num_blocks
        real = torch.arange(num_blocks * 64, device=rows.device) < self.blocks.num_rows
        hidden = ~(kept.repeat_interleave(64, dim=1) & real)
        tokens = (query @ self.key.flatten(0, 1).t()).masked_fill(hidden.unsqueeze(1), -torch.inf)
        means = query @ self.k_means.t()
        means = means.masked_fill(kept.unsqueeze(1), -torch.inf) if atoms else torch.full_like(means, -torch.inf)
        top = torch.maximum(tokens.amax(-1), means.amax(-1)).unsqueeze(-1)
        tokens, means = (tokens - top).exp(), (means - top).exp()
        total = tokens.sum(-1) + means @ self.blocks.block_counts
        if round_weights:
            tokens, means = self._stored(tokens), self._stored(means)
        summed = tokens @ self.value.flatten(0, 1) + means @ self.v_sums
        return summed / total.unsqueeze(-1), top.squeeze(-1) + total.log()

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype).to(x.dtype)
