"""The tail: surrogate keys and values for the blocks a query block does not keep (specification section 2).

Legend: NB blocks, R query blocks of a chunk, A anchors of a query block, C slots of an anchor, S = A C
surrogates, U units of a slot, D channels. Surrogate a C + c belongs to anchor a, which serves 64 / A rows.
"""

from dataclasses import dataclass

import torch

from solgen.kernels.sol_attn2.config import BLOCK, UNITS
from solgen.kernels.sol_attn2.reference.blocks import Blocks
from solgen.kernels.sol_attn2.reference.quantise import straight_through

NUM_ANCHORS = {"slots": 1, "anchors": UNITS, "whole": 2}
"""Anchors of a query block by `SolAttn2Config.tail`."""


@dataclass(frozen=True)
class Surrogates:
    """Surrogate tokens of R query blocks.

    Attributes:
        anchors: Anchor queries qbar, [R, A, D].
        keys: k_F, unshifted, [R, S, D]; zero in an empty slot.
        values: v_F, unshifted, [R, S, D]; zero in an empty slot.
        log_mass: log S_c in nats, [R, S]; -inf in an empty slot.
    """

    anchors: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    log_mass: torch.Tensor

    def hidden(self) -> torch.Tensor:
        """Where row r must not read surrogate c: empty slots and other rows' anchors, [R, 64, S] bool."""
        num_anchors, num_surrogates = self.anchors.shape[1], self.keys.shape[1]
        device = self.keys.device
        row_anchor = torch.arange(BLOCK, device=device) * num_anchors // BLOCK
        slot_anchor = torch.arange(num_surrogates, device=device) * num_anchors // num_surrogates
        return (row_anchor[:, None] != slot_anchor) | self.log_mass.isneginf().unsqueeze(1)


@dataclass(frozen=True)
class SlotUnits:
    """Unit means of the keys and values in slot order: slot c holds the blocks j with floor(C j / NB) = c.

    Attributes:
        blocks: Key block of every unit of a slot, [C, U]; NB where a slot has fewer units than the longest.
        log_counts: Log of the real rows of every unit, [C, U]; -inf where there are none.
        keys: [C, U, D].
        values: [C, U, D].
    """

    blocks: torch.Tensor
    log_counts: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def at_anchors(anchors: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Product of every surrogate key [R, S, D] with its own anchor's row of [R, A, D], [R, S]."""
    return torch.einsum("rad,racd->rac", anchors, keys.unflatten(1, (anchors.shape[1], -1))).flatten(1)


def arrange_slots(k_units: torch.Tensor, v_units: torch.Tensor, blocks: Blocks, num_slots: int) -> SlotUnits:
    """Sort unit means [NB, 8, D] into `num_slots` contiguous ranges of key blocks."""
    num_blocks, device = blocks.num_blocks, k_units.device
    slots = torch.arange(num_slots + 1, device=device)
    starts = -(-slots * num_blocks // num_slots)  # the first block j with floor(C j / NB) >= c
    longest = -(-num_blocks // num_slots)
    table = starts[:-1, None] + torch.arange(longest, device=device)
    inside = table < starts[1:, None]
    source = table.clamp(max=num_blocks - 1)
    counts = blocks.unit_counts[source] * inside.unsqueeze(-1)
    return SlotUnits(
        blocks=torch.where(inside, table, num_blocks).repeat_interleave(UNITS, dim=1),
        log_counts=counts.flatten(1).log(),
        keys=k_units[source].flatten(1, 2),
        values=v_units[source].flatten(1, 2),
    )


def compress(anchors: torch.Tensor, kept: torch.Tensor, slots: SlotUnits, scale: float, precision: str) -> Surrogates:
    """Fold the units of the blocks that are not kept into one surrogate a slot, weighted at each anchor.

    w_u = n_u exp(s qbar . kbar_u); S_c = sum w_u; k_F = sum w_u kbar_u / S_c; v_F likewise, by log-sum-exp.
    Under "fp8" the weights, normalised by the slot's largest, are FP16 in all three sums: kernels multiply
    them on FP16 tensor cores, and the same weights everywhere keep the surrogate a mean.

    Args:
        anchors: qbar, [R, A, D].
        kept: Blocks attended exactly, [R, NB] bool.
    """
    scores = scale * torch.einsum("rad,cud->racu", anchors, slots.keys) + slots.log_counts
    padded = torch.nn.functional.pad(kept, (0, 1), value=True)
    skipped = padded[:, slots.blocks].unsqueeze(1) | slots.log_counts.isneginf()
    scores = scores.masked_fill(skipped, -torch.inf)
    largest = scores.detach().amax(-1, keepdim=True)
    empty = largest.isneginf()
    weights = (scores - largest.masked_fill(empty, 0.0)).exp()
    if precision == "fp8":
        rounded = weights.detach().half().to(weights.dtype)
        # Their own derivative by the score, so that the backward too knows only the rounded weights.
        weights = straight_through(rounded, rounded * scores.masked_fill(skipped, 0.0))
    total = weights.sum(-1, keepdim=True).masked_fill(empty, 1.0)
    return Surrogates(
        anchors=anchors,
        keys=(torch.einsum("racu,cud->racd", weights, slots.keys) / total).flatten(1, 2),
        values=(torch.einsum("racu,cud->racd", weights, slots.values) / total).flatten(1, 2),
        log_mass=(largest + total.log()).squeeze(-1).flatten(1),
    )
