"""The transformer over a batch of packed sequences in which every clip has noise levels of its own.

diffusers' own forward shares one list of timesteps between all items of a batch, which would train every clip of a
step at one noise level. The modules are the model's; only their order of calls is repeated here, and the test holds
both forwards to the same numbers.
"""

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


@dataclass(frozen=True)
class Layout:
    """A packed sequence: text, keyframes, sound, video.

    Attributes:
        position_ids: [N, 3] float64 rotary coordinates.
        num_text, num_condition, num_audio, num_video: Rows of every part.
        runs: (rows, which time, tag) of neighbouring rows that are modulated alike, in packed order.
    """

    position_ids: Tensor
    num_text: int
    num_condition: int
    num_audio: int
    num_video: int
    runs: tuple[tuple[int, int, int], ...]

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
        pairs, counts = torch.stack([kinds, tags], 1).unique_consecutive(dim=0, return_counts=True)
        runs = tuple((n, kind, tag) for n, (kind, tag) in zip(counts.tolist(), pairs.tolist(), strict=True))
        return cls(position_ids, text.numel(), conditions, audio.numel(), video.numel() - conditions, runs)

    @cached_property
    def parts(self) -> tuple[int, int, int, int]:
        """Rows in packed order."""
        return self.num_text, self.num_condition, self.num_audio, self.num_video


def velocity(
    model: MiniMaxH3Transformer3DModel,
    video: Tensor,
    audio: Tensor,
    text: Tensor,
    times: Tensor,
    layout: Layout,
    rotary: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Predict the velocity towards the data.

    Args:
        model: float32 weights, under autocast or not.
        video: [B, conditions + video rows, 96].
        audio: [B, audio rows, 32].
        text: [B, L, text_dim].
        times: [B, 3], t of video, sound and keyframe rows; 1 is clean.
        layout: Shared by the batch.
        rotary: `model.rope(layout.position_ids)`, [N, 96] each.

    Returns:
        Velocity of the generated video rows [B, rows, 96] and of the audio rows [B, rows, 32], float32.
    """
    words = model.token_refiner(model.context_embedder(text))
    condition, target = model.proj_in(video).split([layout.num_condition, layout.num_video], 1)
    parts = [words, condition, model.audio_proj_in(audio), target]
    hidden = torch.cat([part.float() for part in parts], 1)

    embedded = model.time_embedder(model.time_proj(times.flatten())).float()
    activated = F.silu(embedded).unflatten(0, times.shape)
    cos, sin = (table[None, :, None, : table.shape[-1] // 2].to(video.device) for table in rotary)
    for block in model.transformer_blocks:
        table = block.adaln_proj.linear(activated).unflatten(-1, (3, 6, -1))
        shift1, scale1, gate1, shift2, scale2, gate2 = _rows(table, layout).unbind(2)
        inner = block.norm1(hidden) * (1 + scale1) + shift1
        hidden = hidden + gate1 * _attend(block.attn, inner, cos, sin)
        inner = block.norm2(hidden) * (1 + scale2) + shift2
        hidden = hidden + gate2 * block.ff(inner)

    table = model.norm_out.linear(activated).unflatten(-1, (2, -1))[:, :, None].expand(-1, -1, 3, -1, -1)
    shift, scale = _rows(table, layout).unbind(2)
    hidden = model.norm_out.norm(hidden) * (1 + scale) + shift
    _, _, sound, picture = hidden.split(layout.parts, 1)
    return model.proj_out(picture).float(), model.audio_proj_out(sound).float()


def _rows(table: Tensor, layout: Layout) -> Tensor:
    """Modulation of every row, [B, N, k, d], from a table [B, times, tags, k, d]."""
    parts = [table[:, kind, tag, None].expand(-1, rows, -1, -1) for rows, kind, tag in layout.runs]
    return torch.cat(parts, 1)


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
