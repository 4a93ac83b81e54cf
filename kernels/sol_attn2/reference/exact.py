"""Joint softmax of kept tokens and surrogates in the working precision (specification sections 2 and 4)."""

import torch

from solgen.kernels.sol_attn2.config import BLOCK
from solgen.kernels.sol_attn2.reference.blocks import Blocks
from solgen.kernels.sol_attn2.reference.selection import Selection
from solgen.kernels.sol_attn2.reference.tail import Surrogates, at_anchors


class ExactHead:
    """One head, unquantised."""

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks, scale: float
    ) -> None:
        """Take query, key and value as blocks [NB, 64, D], zero past the end."""
        self.query, self.key, self.value = query, key, value
        self.blocks, self.scale = blocks, scale

    def attend(self, selection: Selection, surrogates: Surrogates | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [R, 64, D] and natural-log denominator [R, 64] of the selection's query blocks.

        A row with neither tokens nor surrogates gets output 0 and denominator -inf.
        """
        query = self.query[selection.rows]
        scores, values = [], []
        if selection.width:
            tokens = self.scale * query @ selection.gather(self.key).transpose(-1, -2)
            hidden = selection.hidden(self.blocks).flatten(-2).unsqueeze(-2)
            scores.append(tokens.masked_fill(hidden, -torch.inf))
            values.append(selection.gather(self.value).expand(len(query), -1, -1))
        if surrogates is not None:
            bias = surrogates.log_mass - self.scale * at_anchors(surrogates.anchors, surrogates.keys)
            tail = self.scale * query @ surrogates.keys.transpose(-1, -2) + bias.unsqueeze(-2)
            scores.append(tail.masked_fill(surrogates.hidden(), -torch.inf))
            values.append(surrogates.values)
        if not scores:
            return torch.zeros_like(query), query.new_full((len(query), BLOCK), -torch.inf)
        joint = torch.cat(scores, -1)
        lse = joint.logsumexp(-1)
        return (joint - lse.unsqueeze(-1)).exp() @ torch.cat(values, -2), lse
