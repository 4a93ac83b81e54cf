"""Query blocks that are worked on together, and the key blocks they keep."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from solgen.kernels.sol_attn2.config import BLOCK
from solgen.kernels.sol_attn2.reference.blocks import Blocks

TILES_PER_CHUNK = {"cpu": 2**7, "cuda": 2**13}
"""64 x 64 score tiles held at once, by device: near a CPU's cache, and enough to fill a GPU."""


@dataclass(frozen=True)
class Selection:
    """R query blocks of one head with lists of kept key blocks.

    Attributes:
        rows: Query blocks, [R].
        key_blocks: Kept key blocks, ascending, [R, K], followed by arbitrary blocks; None means every block.
        counts: Kept blocks of every row, [R].
        width: K, the longest list.
    """

    rows: torch.Tensor
    key_blocks: torch.Tensor | None
    counts: torch.Tensor
    width: int

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """Rows of the listed blocks of [NB, 64, D]: [R, K 64, D], or [1, NB 64, D] when all are kept."""
        if self.key_blocks is None:
            return blocks.flatten(0, 1).unsqueeze(0)
        return blocks[self.key_blocks].flatten(1, 2)

    def hidden(self, blocks: Blocks) -> torch.Tensor:
        """Listed rows that do not exist or are not kept, [R, K, 64] or [1, NB, 64] bool."""
        columns = torch.arange(BLOCK, device=self.rows.device)
        if self.key_blocks is None:
            starts = torch.arange(blocks.num_blocks, device=self.rows.device)[None, :, None] * BLOCK
            return starts + columns >= blocks.num_rows
        beyond = torch.arange(self.width, device=self.rows.device) >= self.counts[:, None]
        return (self.key_blocks.unsqueeze(-1) * BLOCK + columns >= blocks.num_rows) | beyond.unsqueeze(-1)


def selections(kept: torch.Tensor) -> Iterator[Selection]:
    """Split a route [NB, NB] into chunks of query blocks with like numbers of kept blocks.

    Rows that keep nothing, some and all blocks never share a chunk.
    """
    num_blocks = kept.shape[0]
    budget = TILES_PER_CHUNK["cuda" if kept.is_cuda else "cpu"]
    order = kept.sum(-1).argsort(stable=True)
    counts = kept.sum(-1)[order]
    widths = counts.tolist()
    start = 0
    while start < num_blocks:
        stop, kind = start + 1, _kind(widths[start], num_blocks)
        while (
            stop < num_blocks
            and _kind(widths[stop], num_blocks) == kind
            and (stop + 1 - start) * (widths[stop] + 1 + num_blocks // BLOCK) <= budget
        ):
            stop += 1
        rows, width = order[start:stop], widths[stop - 1]
        listed = None
        if kind == "some":
            listed = (~kept[rows]).to(torch.int8).argsort(dim=-1, stable=True)[:, :width]
        yield Selection(rows, listed, counts[start:stop], width)
        start = stop


def _kind(count: int, num_blocks: int) -> str:
    return "none" if count == 0 else "all" if count == num_blocks else "some"
