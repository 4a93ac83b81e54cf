"""What a Sol-Attn2 call can report beside its output, and while it runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

Stage = Callable[[str], AbstractContextManager[Any]]
"""Entered around every part of a call, "prepare", "route", "tail" and "attention", which do not overlap; timers hook
in here."""


@dataclass(frozen=True)
class SolAttn2Details:
    """Row sums, route and density of one call.

    Attributes:
        lse: Natural log of every row's softmax denominator, [B, H, N]; float64 for float64 inputs, else fp32. Its
            terms are the kept tokens and the row's surrogates; -inf for a row that attends to nothing.
        packed_route: Kept pairs (query block, key block), [B, H, NB, ceil(NB / 32)] int32; bit j % 32 of word j // 32
            is key block j.
        density: Kept share of the eligible pairs, all-video query blocks x all-video key blocks (page 001), 0-d
            fp32 on the inputs' device; NaN when no pair is eligible.
        density_all: Kept share of all pairs, counted the same way.
    """

    lse: torch.Tensor
    packed_route: torch.Tensor
    density: torch.Tensor
    density_all: torch.Tensor

    @classmethod
    def from_route(cls, lse: torch.Tensor, route: torch.Tensor, mixed: torch.Tensor) -> "SolAttn2Details":
        """Count and pack a route [B, H, NB, NB] bool; mixed [NB] bool marks blocks with text or audio rows."""
        eligible = ~mixed[:, None] & ~mixed[None, :]
        heads = route.shape[0] * route.shape[1]
        density = (route & eligible).sum(dtype=torch.int64).double() / (eligible.sum() * heads).double()
        density_all = route.sum(dtype=torch.int64).double() / route.numel()
        return cls(lse, pack_route(route), density.float(), density_all.float())

    @property
    def route(self) -> torch.Tensor:
        """Kept pairs, [B, H, NB, NB] bool: 32 times the memory of `packed_route`."""
        return unpack_route(self.packed_route, self.packed_route.shape[-2])


def pack_route(route: torch.Tensor) -> torch.Tensor:
    """Pack [..., NB] bool into [..., ceil(NB / 32)] int32 words, the first block in the lowest bit."""
    padded = torch.nn.functional.pad(route, (0, -route.shape[-1] % 32)).unflatten(-1, (-1, 32))
    return (padded.int() << torch.arange(32, device=route.device)).sum(-1, dtype=torch.int32)


def unpack_route(packed: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Undo `pack_route`: [..., num_blocks] bool."""
    bits = torch.arange(32, dtype=torch.int32, device=packed.device)
    return ((packed.unsqueeze(-1) >> bits) & 1).bool().flatten(-2)[..., :num_blocks]
