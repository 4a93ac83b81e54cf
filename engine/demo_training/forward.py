"""The transformer over a batch of packed sequences in which every clip has noise levels of its own.

diffusers' own forward shares one list of timesteps between all items of a batch, which would train every clip of a
step at one noise level. The modules are the model's; only their order of calls is repeated here, and the test holds
both forwards to the same numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep
from torch import Tensor

VIDEO_TAG, TEXT_TAG, AUDIO_TAG = 0, 1, 2
VIDEO_TIME, AUDIO_TIME, CONDITION_TIME = 0, 1, 2
KINDS = 3
"""Of times and of tags."""

Advance = Callable[..., Tensor]
"""`advance_block` or what a compiler made of it."""


@dataclass(frozen=True)
class Layout:
    """A packed sequence: text, keyframes, sound, video.

    Attributes:
        position_ids: [N, 3] float64 rotary coordinates.
        num_text, num_condition, num_audio, num_video: Rows of every part.
        times, tags: [N] int64, which time and which tag a row is modulated by.
    """

    position_ids: Tensor
    num_text: int
    num_condition: int
    num_audio: int
    num_video: int
    times: Tensor
    tags: Tensor

    @classmethod
    def build(
        cls, text_tags: Tensor, anchors: tuple[str, ...], latent_grid: tuple[int, int, int], num_audio_latents: int
    ) -> "Layout":
        """Lay out a request as diffusers does.

        Args:
            text_tags: [L] int64, tag of every text row.
            anchors: "first" and "last" keyframes, in packed order.
            latent_grid: Latent frames, height and width.
            num_audio_latents: Of one channel.
        """
        position_ids, tags, video, audio, text, conditions, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            text_tags, *latent_grid, num_audio_latents, (1, 2, 2), 2, AUDIO_TAG, VIDEO_TAG, anchors
        )
        kinds = torch.full_like(tags, VIDEO_TIME)
        kinds[audio] = AUDIO_TIME
        kinds[video[:conditions]] = CONDITION_TIME
        return cls(position_ids, text.numel(), conditions, audio.numel(), video.numel() - conditions, kinds, tags)

    @cached_property
    def parts(self) -> tuple[int, int, int, int]:
        """Rows in packed order."""
        return self.num_text, self.num_condition, self.num_audio, self.num_video


@dataclass(frozen=True)
class RowTables:
    """What a layout fixes for every row, on the model's device.

    Attributes:
        cos, sin: [N, 1, 48] rotary tables.
        pair: [N, 9] one-hot, (time, tag) of every row: a product with it selects, and its backward sums in one order.
        time: [N, 3] one-hot, the time alone.
    """

    cos: Tensor
    sin: Tensor
    pair: Tensor
    time: Tensor

    @classmethod
    def build(cls, model: MiniMaxH3Transformer3DModel, layout: Layout, device: torch.device) -> "RowTables":
        """Tables of one layout."""
        cos, sin = (t[:, None, : t.shape[-1] // 2].to(device) for t in model.rope(layout.position_ids.to(device)))
        pair = F.one_hot(layout.times * KINDS + layout.tags, KINDS * KINDS).float().to(device)
        return cls(cos, sin, pair, F.one_hot(layout.times, KINDS).float().to(device))


def velocity(
    model: MiniMaxH3Transformer3DModel,
    video: Tensor,
    audio: Tensor,
    text: Tensor,
    times: Tensor,
    layout: Layout,
    tables: RowTables,
    advance: Advance | None = None,
) -> tuple[Tensor, Tensor]:
    """Predict the velocity towards the data.

    Args:
        model: float32 weights, under autocast or not.
        video: [B, conditions + video rows, 96].
        audio: [B, audio rows, 32].
        text: [B, L, text_dim].
        times: [B, 3], t of video, sound and keyframe rows; 1 is clean.
        layout: Shared by the batch.
        tables: Its tables.
        advance: `advance_block`, compiled; itself without one.

    Returns:
        Velocity of the generated video rows [B, rows, 96] and of the audio rows [B, rows, 32], float32.
    """
    words = model.token_refiner(model.context_embedder(text))
    condition, target = model.proj_in(video).split([layout.num_condition, layout.num_video], 1)
    parts = [words, condition, model.audio_proj_in(audio), target]
    hidden = torch.cat([part.float() for part in parts], 1)

    embedded = model.time_embedder(model.time_proj(times.flatten())).float()
    activated = F.silu(embedded).unflatten(0, times.shape)
    for block in model.transformer_blocks:
        hidden = (advance or advance_block)(block, hidden, activated, tables.cos, tables.sin, tables.pair)

    shift, scale = (tables.time @ model.norm_out.linear(activated)).chunk(2, -1)
    hidden = model.norm_out.norm(hidden) * (1 + scale) + shift
    _, _, sound, picture = hidden.split(layout.parts, 1)
    return model.proj_out(picture).float(), model.audio_proj_out(sound).float()


def advance_block(block: Any, hidden: Tensor, activated: Tensor, cos: Tensor, sin: Tensor, pair: Tensor) -> Tensor:
    """One transformer block over the residual stream [B, N, d].

    Args:
        block: The model's.
        hidden: float32.
        activated: [B, times, c], embedded times after SiLU.
        cos, sin, pair: Of `RowTables`.
    """
    table = block.adaln_proj.linear(activated).unflatten(-1, (KINDS, -1)).flatten(1, 2)
    shift1, scale1, gate1, shift2, scale2, gate2 = (pair @ table).chunk(6, -1)
    inner = block.norm1(hidden) * (1 + scale1) + shift1
    hidden = hidden + gate1 * _attend(block.attn, inner, cos, sin)
    inner = block.norm2(hidden) * (1 + scale2) + shift2
    return hidden + gate2 * block.ff(inner)


def _attend(attention: Any, inner: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Dense self-attention of one block."""
    query, key, value = (
        projection(inner).unflatten(-1, (attention.heads, -1))
        for projection in (attention.to_q, attention.to_k, attention.to_v)
    )
    # Under autocast the norms return float32, twice the memory traffic that the rotation needs.
    query = rotate(attention.norm_q(query).to(value.dtype), cos, sin)
    key = rotate(attention.norm_k(key).to(value.dtype), cos, sin)
    output = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return attention.to_out[0](output.transpose(1, 2).flatten(2))


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading channels [..., N, H, D] in halves; cos and sin are [..., N, 1, rotary / 2]."""
    cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    width = cos.shape[-1]
    first, second, rest = heads.split([width, width, heads.shape[-1] - 2 * width], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
