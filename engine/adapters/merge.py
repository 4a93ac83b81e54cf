"""W + sum of strength alpha / rank B A, in FP32 and rounded once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements of a weight in FP32 at a time: bounds the memory beside it, and on a CPU keeps to the cache."""


@dataclass(frozen=True)
class Delta:
    """One adapter's change of one parameter.

    Attributes:
        factor: Strength times alpha / rank.
        up: B [out, r], or a difference in the parameter's shape; FP32 on the parameter's device.
        down: A [r, in]; None for a difference.
    """

    factor: float
    up: Tensor
    down: Tensor | None

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows of the change, FP32."""
        rows = self.up[start:stop]
        return (rows if self.down is None else rows @ self.down) * self.factor


@dataclass
class Kept:
    """How much of a change survived rounding, summed over parameters.

    Attributes:
        along: Sum of what the weights moved, times what they should have.
        wanted: Sum of squares of what they should have moved.
    """

    along: float = 0.0
    wanted: float = 0.0

    @property
    def share(self) -> float:
        """1 for an exact merge; near 0 when most elements were too small a step for the weight's type."""
        return self.along / self.wanted if self.wanted else 1.0

    def add(self, other: "Kept") -> None:
        """Count another parameter."""
        self.along += other.along
        self.wanted += other.wanted


@torch.no_grad()
def merge_into(weight: Tensor, deltas: Sequence[Delta]) -> Kept:
    """Add changes to a weight in place: summed in FP32, added in FP32, rounded once to the weight's type.

    Args:
        weight: Contiguous parameter of any shape, bf16, fp16 or fp32.
        deltas: What to add, in a fixed order.

    Returns:
        What of the sum survived the rounding.
    """
    assert weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
    along = torch.zeros((), dtype=torch.float64, device=weight.device)
    wanted = torch.zeros_like(along)
    step = max(1, CHUNK[weight.device.type] // max(1, weight[0].numel()))
    for start in range(0, len(weight), step):
        rows = weight[start : start + step]
        change = deltas[0].rows(start, start + step)
        for delta in deltas[1:]:
            change += delta.rows(start, start + step)
        before = rows.float() if rows.dtype != torch.float32 else rows.clone()
        rows.copy_(before + change)
        along += ((rows - before) * change).sum()
        wanted += change.square_().sum()
    return Kept(float(along), float(wanted))
