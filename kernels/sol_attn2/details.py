"""What a Sol-Attn2 call can report beside its output."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SolAttn2Details:
    """Row sums, route and density of one call.

    Attributes:
        lse: Natural log of every row's softmax denominator, [B, H, N]; float64 for float64 inputs, else fp32.
            Its terms are the kept tokens and the row's surrogates; -inf for a row that attends to nothing.
        route: Kept pairs (query block, key block), [B, H, NB, NB] bool.
        density: Kept share of the eligible pairs, all-video query blocks x all-video key blocks (page 001),
            0-d fp32 on the inputs' device; NaN when no pair is eligible.
        density_all: Kept share of all pairs, counted the same way.
    """

    lse: torch.Tensor
    route: torch.Tensor
    density: torch.Tensor
    density_all: torch.Tensor


def route_density(route: torch.Tensor, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Density over eligible and over all pairs of a route [B, H, NB, NB]; mixed [NB] marks text or audio."""
    eligible = ~mixed[:, None] & ~mixed[None, :]
    heads = route.shape[0] * route.shape[1]
    kept = (route & eligible).sum(dtype=torch.int64)
    density = kept.double() / (eligible.sum() * heads).double()
    return density.float(), route.sum(dtype=torch.int64).double().div(route.numel()).float()
