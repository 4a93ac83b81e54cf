"""FP8 attention with ExpCast over kept tokens and surrogates (specification sections 3 and 4).

Rounds wherever the kernels round, so the bytes agree but for the order of FP32 sums. Works in the dtype of
its inputs (fp32 or float64); scales, pivots and unrounded codes are FP32 values in either.

Legend: NB blocks, R query blocks of a chunk, K kept key blocks, S surrogates, A anchors, D channels.
"""

import math
from dataclasses import dataclass

import torch

from solgen.kernels.sol_attn2.config import BLOCK, JOIN_MAX, SolAttn2Config
from solgen.kernels.sol_attn2.reference.blocks import Blocks
from solgen.kernels.sol_attn2.reference.expcast import (
    CODES_PER_OCTAVE,
    pivot_bias,
    power_of_two,
    probabilities,
    sticky_pivots,
)
from solgen.kernels.sol_attn2.reference.quantise import quantise, straight_through
from solgen.kernels.sol_attn2.reference.selection import Selection
from solgen.kernels.sol_attn2.reference.tail import NUM_ANCHORS, Surrogates, at_anchors

CODES_PER_NAT = CODES_PER_OCTAVE / math.log(2)


@dataclass(frozen=True)
class PartialSum:
    """Unnormalised softmax sums of R query blocks, in units of 2^(pivot - offset).

    Attributes:
        pivot: Whole octaves, [R, 64] fp32.
        total: Sum of the probabilities, [R, 64].
        values: Sum of the probabilities times the value codes, [R, 64, D].
    """

    pivot: torch.Tensor
    total: torch.Tensor
    values: torch.Tensor


def fused_multiply_add(factor: torch.Tensor, by: torch.Tensor, add: torch.Tensor) -> torch.Tensor:
    """fma(factor, by, add) rounded once to FP32, in the dtype of `factor`."""
    exact = factor.double() * by.double() + add.double()
    return straight_through(exact.detach().float().to(factor.dtype), exact)


def join(tokens: PartialSum | None, tail: PartialSum | None) -> PartialSum:
    """Add the tail's sums to the tokens' by the exact factor 2^(m' - m), which may exceed 1.

    Surrogates score octaves above tokens: under a common pivot they would flush the tokens to code 0.
    """
    if tokens is None or tail is None:
        only = tail if tokens is None else tokens
        assert only is not None
        return only
    factor = power_of_two((tail.pivot - tokens.pivot).clamp(-JOIN_MAX, JOIN_MAX)).to(tokens.total.dtype)
    return PartialSum(
        pivot=tokens.pivot,
        total=tokens.total + factor * tail.total,
        values=tokens.values + factor.unsqueeze(-1) * tail.values,
    )


class Fp8Head:
    """One head, quantised."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: Blocks,
        scale: float,
        config: SolAttn2Config,
    ) -> None:
        """Quantise query, key and value, blocks [NB, 64, D] that are zero past the end."""
        self.blocks, self.scale, self.config = blocks, scale, config
        self.key_mean = self._mean(key) if config.smooth_key else torch.zeros_like(key[0, 0])
        self.value_mean = self._mean(value) if config.smooth_value else torch.zeros_like(value[0, 0])
        real = blocks.split(query.new_ones(blocks.num_rows, 1))
        self.q_codes, self.q_scale = quantise(query, (1, 2))
        self.k_codes, self.k_scale = quantise((key - self.key_mean) * real, (1, 2))
        self.v_codes, self.v_scale = quantise((value - self.value_mean) * real, (0, 1, 2))
        if config.tail != "none":
            rows = self.q_codes * self.q_scale
            self.q_anchors = blocks.group_means(blocks.unit_means(rows), NUM_ANCHORS[config.tail])

    def _mean(self, rows: torch.Tensor) -> torch.Tensor:
        """FP32 mean of the real rows, [D]; a constant of the backward."""
        return (rows.detach().float().sum((0, 1)) / self.blocks.num_rows).to(rows.dtype)

    def attend(self, selection: Selection, surrogates: Surrogates | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [R, 64, D] and natural-log denominator [R, 64] of the selection's query blocks.

        A row with neither tokens nor surrogates gets output 0 and denominator -inf.
        """
        rows = self.q_codes[selection.rows] * self.q_scale[selection.rows]
        tail = self._tail(selection, surrogates) if surrogates is not None else None
        tokens = self._tokens(selection, tail) if selection.width else None
        if tokens is None and tail is None:
            return torch.zeros_like(rows), rows.new_full(rows.shape[:2], -torch.inf)
        joint = join(tokens, tail)
        output = joint.values / joint.total.unsqueeze(-1) * self.v_scale[0] + self.value_mean
        lse = (joint.pivot - self.config.offset) * math.log(2) + joint.total.log()
        return output, lse + self.scale * (rows @ self.key_mean)

    def _query_factor(self, selection: Selection) -> torch.Tensor:
        """Query scales times what turns nats into ExpCast codes, [R, 1, 1] in the working dtype."""
        return self.q_scale[selection.rows].to(self.q_codes.dtype) * (CODES_PER_NAT * self.scale)

    def _pivots(self, tile_max: torch.Tensor, tail: PartialSum | None) -> torch.Tensor:
        """Pivot in force at every tile of row maxima [R, 64, K] in octaves; the tail has one of its own."""
        return sticky_pivots(tile_max, self.config.offset)

    def _tokens(self, selection: Selection, tail: PartialSum | None) -> PartialSum:
        products = self.q_codes[selection.rows] @ selection.gather(self.k_codes).transpose(-1, -2)
        products = products.unflatten(-1, (selection.width, BLOCK))  # [R, 64, K, 64]
        listed = slice(None) if selection.key_blocks is None else selection.key_blocks
        k_scale = self.k_scale.flatten()[listed].view(-1, 1, selection.width, 1)
        factor = self._query_factor(selection).unsqueeze(-1) * k_scale
        hidden = selection.hidden(self.blocks).unsqueeze(1)
        visible = products.detach().masked_fill(hidden, -torch.inf)
        tile_max = (visible.amax(-1) * factor.squeeze(-1)).float() / CODES_PER_OCTAVE  # [R, 64, K]
        pivots = self._pivots(tile_max, tail)
        positions = fused_multiply_add(products, factor, pivot_bias(pivots, self.config.offset).unsqueeze(-1))
        final = pivots[..., -1:]
        rescale = power_of_two(pivots - final).to(positions.dtype).unsqueeze(-1)
        weights = probabilities(positions, self.config.shadow).masked_fill(hidden, 0.0)
        weights = (weights * rescale).flatten(-2)
        return PartialSum(final.squeeze(-1), weights.sum(-1), weights @ selection.gather(self.v_codes))

    def _tail(self, selection: Selection, surrogates: Surrogates) -> PartialSum:
        empty = surrogates.log_mass.isneginf().unsqueeze(-1)
        keys = (surrogates.keys - self.key_mean).masked_fill(empty, 0.0)
        values = (surrogates.values - self.value_mean).masked_fill(empty, 0.0)
        keys = straight_through(keys.detach().half().to(keys.dtype), keys)  # kernels store them before they know amax
        k_codes, k_scale = quantise(keys, (1, 2))
        v_codes, _ = quantise(values, (1, 2), self.v_scale)
        # b_F from dequantised factors: the mass that the rows read at their anchor is then exactly S_c.
        mean_part = at_anchors(surrogates.anchors, self.key_mean.expand_as(keys))
        bias = (
            surrogates.log_mass.masked_fill(empty.squeeze(-1), 0.0)
            - self.scale * mean_part
            - self.scale * at_anchors(self.q_anchors[selection.rows], k_codes * k_scale)
        )
        products = self.q_codes[selection.rows] @ k_codes.transpose(-1, -2)  # [R, 64, S]
        factor = self._query_factor(selection) * k_scale
        scores = fused_multiply_add(products, factor, CODES_PER_NAT * bias.unsqueeze(1))
        hidden = surrogates.hidden()
        pivot = (scores.detach().masked_fill(hidden, -torch.inf).amax(-1).float() / CODES_PER_OCTAVE).ceil()
        positions = scores + pivot_bias(pivot, self.config.offset).unsqueeze(-1)
        positions = straight_through(positions.detach().float().to(scores.dtype), positions)
        weights = probabilities(positions, self.config.shadow).masked_fill(hidden, 0.0)
        return PartialSum(pivot, weights.sum(-1), weights @ v_codes)


class SharedPivotHead(Fp8Head):
    """One pivot for surrogates and tokens: what `_pivots` avoids, kept to measure what that is worth."""

    def _pivots(self, tile_max: torch.Tensor, tail: PartialSum | None) -> torch.Tensor:
        if tail is None:
            return super()._pivots(tile_max, tail)
        seen = torch.cat([tail.pivot.to(tile_max.dtype).unsqueeze(-1), tile_max], -1)
        return sticky_pivots(seen, self.config.offset)[..., 1:]
