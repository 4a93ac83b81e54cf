"""Forwards of MiniMax-H3's transformer blocks and output norm with everything between the matrix products fused.

A block ends with the next one's first norm: its last gated residual and that norm are one op. The block still returns
its true output; the normed rows wait in `Border` for the block that is called with that output.
"""

from collections.abc import Callable

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.activations import SwiGLU
from diffusers.models.modeling_utils import get_parameter_dtype
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AdaLayerNormOut, MiniMaxH3TransformerBlock
from torch import nn

from solgen.kernels.fused import gated_residual, gated_residual_norm, rms_norm_modulate, swiglu

Tables = tuple[torch.Tensor, ...]
"""Shift, scale and gate of attention, then of feed-forward, each [T, C]: what a block's `adaln_proj` returns."""


class Border:
    """What a block leaves for the one behind it: its input, normed and modulated, and its AdaLN tables."""

    def __init__(self) -> None:
        self._left: tuple[torch.Tensor, torch.Tensor, Tables] | None = None

    def leave(self, output: torch.Tensor, normed: torch.Tensor, tables: Tables) -> None:
        """Keep these until the next call of a block."""
        self._left = output, normed, tables

    def take(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, Tables] | None:
        """What was left with this very tensor; None if a block is called with anything else."""
        left, self._left = self._left, None
        return left[1:] if left is not None and left[0] is hidden_states else None


class FusedBlock:
    """Forward of one transformer block."""

    def __init__(
        self, block: MiniMaxH3TransformerBlock, following: MiniMaxH3TransformerBlock | None, border: Border
    ) -> None:
        self.block = block
        self.following = following
        self.border = border

    def __call__(
        self,
        hidden_states: torch.Tensor,
        temb: torch.Tensor,
        adaln_indices: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Residual stream [1, N, C] before and after the block; arguments as for the stock block."""
        block, (rows,) = self.block, hidden_states
        normed, tables = self.border.take(hidden_states) or _first_norm(block, rows, temb, adaln_indices)
        _, _, gate_attention, shift, scale, gate_feed_forward = tables
        attended = block.attn(normed[None], rotary_emb, attention_mask)[0]
        del normed
        norm = block.norm2
        rows, normed = gated_residual_norm(
            rows, attended, gate_attention, norm.weight, scale, shift, adaln_indices, eps=norm.eps
        )
        del attended
        fed = block.ff(normed[None])[0]
        del normed
        if self.following is None:
            return gated_residual(rows, fed, gate_feed_forward, adaln_indices)[None]
        tables = self.following.adaln_proj(temb)
        norm, (shift, scale, *_) = self.following.norm1, tables
        rows, normed = gated_residual_norm(
            rows, fed, gate_feed_forward, norm.weight, scale, shift, adaln_indices, eps=norm.eps
        )
        output = rows[None]
        self.border.leave(output, normed, tables)
        return output


def _first_norm(
    block: MiniMaxH3TransformerBlock, rows: torch.Tensor, temb: torch.Tensor, index: torch.Tensor
) -> tuple[torch.Tensor, Tables]:
    """Input of a block's attention and its AdaLN tables, where no block before has left them."""
    tables = block.adaln_proj(temb)
    shift, scale, *_ = tables
    norm = block.norm1
    return rms_norm_modulate(rows, norm.weight, scale, shift, index, eps=norm.eps), tables


def _up_projection(module: SwiGLU) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        """[1, N, C] to [1, N, F]."""
        return swiglu(module.proj(hidden_states)[0])[None]

    return forward


def _output_norm(module: MiniMaxH3AdaLayerNormOut) -> Callable[..., torch.Tensor]:
    def forward(hidden_states: torch.Tensor, temb: torch.Tensor, timestep_indices: torch.Tensor) -> torch.Tensor:
        """[1, N, C] to the same; arguments as for the stock module."""
        temb = nn.functional.silu(temb).to(get_parameter_dtype(module.linear))
        shift, scale = module.linear(temb).chunk(2, dim=-1)
        norm = module.norm
        return rms_norm_modulate(hidden_states[0], norm.weight, scale, shift, timestep_indices, eps=norm.eps)[None]

    return forward


def fused_forwards(transformer: MiniMaxH3Transformer3DModel) -> list[tuple[nn.Module, Callable[..., torch.Tensor]]]:
    """Modules of a transformer whose forward is replaced, each with its new one.

    The text refiner's blocks stay: they see the rows of the prompt alone.
    """
    blocks, border = list(transformer.transformer_blocks), Border()
    fused = [FusedBlock(block, after, border) for block, after in zip(blocks, [*blocks[1:], None], strict=True)]
    return [
        *zip(blocks, fused, strict=True),
        *((block.ff.net[0], _up_projection(block.ff.net[0])) for block in blocks),
        (transformer.norm_out, _output_norm(transformer.norm_out)),
    ]
