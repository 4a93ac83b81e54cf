"""What the GPU stages of Sol-Attn2 hand to one another.

Legend: G heads of one group (batch x heads, worked on together), N rows, NB = ceil(N / 64) blocks, D = 128.
Rows NB*64 - N past the end hold zero codes and zero means. All tensors are contiguous.

Key columns of every value tile are stored in the order that lets the FP8 product take its left operand from
registers: stored column c of a 64-wide tile holds token `VALUE_ORDER[c]` of the block.
"""

from dataclasses import dataclass
from typing import Any

import torch

VALUE_ORDER = torch.arange(64).reshape(4, 2, 4, 2).permute(0, 2, 1, 3).reshape(64)
"""Token of a block behind each stored column of a value tile."""


@dataclass(frozen=True)
class Operands:
    """Quantised inputs and unit means of one head group (spec sections 1 and 3)."""

    q_codes: torch.Tensor  # [G, NB*64, D] e4m3
    q_scale: torch.Tensor  # [G, NB] fp32
    k_codes: torch.Tensor  # [G, NB*64, D] e4m3, of k - k_mean
    k_scale: torch.Tensor  # [G, NB] fp32
    v_codes: torch.Tensor  # [G, NB, D, 64] e4m3, of v - v_mean, columns in VALUE_ORDER
    v_scale: torch.Tensor  # [G] fp32
    q_units: torch.Tensor  # [G, NB*8, D] fp16, means of 8 rows of q
    k_units: torch.Tensor  # [G, NB*8, D] fp16, means of 8 rows of k, not shifted
    v_units: torch.Tensor  # [G, NB*8, D] fp16, means of 8 rows of v, not shifted
    k_mean: torch.Tensor  # [G, D] fp32, zero without key smoothing
    v_mean: torch.Tensor  # [G, D] fp32, zero without value smoothing
    num_rows: int

    def heads(self, group: slice) -> "Operands":
        """Those of some heads; views."""
        values: dict[str, Any] = {name: x[group] if torch.is_tensor(x) else x for name, x in vars(self).items()}
        return Operands(**values)


@dataclass(frozen=True)
class Route:
    """Kept key blocks of every query block of one head group."""

    mask: torch.Tensor  # [G, NB, ceil(NB / 32)] int32, bit j % 32 of word j // 32 is key block j
    counts: torch.Tensor  # [G, NB] int32, kept blocks of a row
    blocks: torch.Tensor  # [G, NB, NB] int16, the first counts[g, i] entries are kept blocks, ascending


@dataclass(frozen=True)
class Tail:
    """The 64 surrogates of every query block of one head group (spec section 2)."""

    k_codes: torch.Tensor  # [G, NB, 64, D] e4m3
    k_scale: torch.Tensor  # [G, NB] fp32, one a query block
    v_codes: torch.Tensor  # [G, NB, D, 64] e4m3 under the head's v_scale, columns in VALUE_ORDER
    bias: torch.Tensor  # [G, NB, 64] fp32, b_F in nats; -inf where a slot is empty
