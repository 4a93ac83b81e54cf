"""Block geometry of a packed sequence: padding, real rows of a unit, blocks with text or audio."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from solgen.kernels.sol_attn2.config import BLOCK, UNIT, UNITS


@dataclass(frozen=True)
class Blocks:
    """Where the real rows of a sequence lie in its blocks of 64 and units of 8.

    Attributes:
        num_rows: Rows N of the sequence.
        num_blocks: NB = ceil(N / 64).
        unit_counts: Real rows of every unit, [NB, 8], working dtype; 8 except at the end of the sequence.
        mixed: Blocks with at least one text or audio row, [NB] bool.
    """

    num_rows: int
    num_blocks: int
    unit_counts: torch.Tensor
    mixed: torch.Tensor

    @property
    def block_counts(self) -> torch.Tensor:
        """Real rows of every block, [NB]."""
        return self.unit_counts.sum(-1)

    @property
    def padding(self) -> int:
        """Rows missing from the last block."""
        return self.num_blocks * BLOCK - self.num_rows

    def split(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [N, D] as blocks [NB, 64, D], zero past the end."""
        return F.pad(rows, (0, 0, 0, self.padding)).view(self.num_blocks, BLOCK, -1)

    def unit_means(self, blocks: torch.Tensor) -> torch.Tensor:
        """Means of the real rows of every unit: [NB, 64, D] to [NB, 8, D]; zero for an empty unit."""
        sums = blocks.unflatten(1, (UNITS, UNIT)).sum(2)
        return sums / self.unit_counts.clamp(min=1).unsqueeze(-1)

    def group_means(self, means: torch.Tensor, groups: int) -> torch.Tensor:
        """Count-weighted means over runs of units: [NB, 8, D] unit means to [NB, groups, D]."""
        weights = self.unit_counts.unflatten(1, (groups, -1)).unsqueeze(-1)
        sums = (means.unflatten(1, (groups, -1)) * weights).sum(2)
        return sums / weights.sum(2).clamp(min=1)


def mixed_blocks(video_rows: torch.Tensor | None, num_rows: int, device: torch.device) -> torch.Tensor:
    """Blocks that hold any text or audio row, [NB] bool, from a video mask [N] (None: every row is video)."""
    num_blocks = -(-num_rows // BLOCK)
    if video_rows is None:
        return torch.zeros(num_blocks, dtype=torch.bool, device=device)
    padded = F.pad(~video_rows.to(device), (0, num_blocks * BLOCK - num_rows))
    return padded.view(num_blocks, BLOCK).any(-1)


def make_blocks(num_rows: int, mixed: torch.Tensor, dtype: torch.dtype) -> Blocks:
    """Geometry of `num_rows` rows with counts in `dtype`, on the device of `mixed`."""
    num_blocks = mixed.numel()
    starts = torch.arange(num_blocks * UNITS, device=mixed.device).view(num_blocks, UNITS) * UNIT
    counts = (num_rows - starts).clamp(0, UNIT).to(dtype)
    return Blocks(num_rows, num_blocks, counts, mixed)
