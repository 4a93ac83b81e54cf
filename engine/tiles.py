"""The video VAE's decoder in its own tiles, several in one batch, one stretch of frames after the other.

Geometry, blending and order are those of diffusers' `AutoencoderKLMiniMaxH3._decode` and `_decode_clip`, whose own
methods are used: 256-pixel tiles that overlap by 64 or more, and stretches of 17 frames that overlap by 5.

Ranks decode different stretches at a time. A stretch has the same batches of tiles whoever decodes it, so the bits are
those of one rank; and its pixels are fewer than those of its overlapping tiles.
"""

from collections.abc import Iterator

import torch
from diffusers import AutoencoderKLMiniMaxH3
from torch import Tensor

from solgen.parallel.mesh import Mesh

TILES_AT_ONCE = 16
"""Tiles in one batch: about 29,000 tokens, enough for a large GPU and 4 GB of activations."""


def decoded_stretches(
    vae: AutoencoderKLMiniMaxH3, latents: Tensor, *, at_once: int = TILES_AT_ONCE, mesh: Mesh | None = None
) -> Iterator[Tensor]:
    """Decode latents piece by piece.

    Args:
        vae: With tiling on, as it is released.
        latents: [1, C, t, h, w], denormalised, t = 5 n + 2.
        at_once: Tiles in one batch. With 1 the bits are those of `vae.decode`.
        mesh: Ranks that share the work; all of them take part.

    Yields:
        Consecutive frames [1, 3, f, 16 h, 16 w] in the decoder's type, together what `vae.decode` returns; nothing on
        ranks but the leader.
    """
    dtype = next(vae.post_quant_conv.parameters()).dtype
    latents = latents.to(dtype)
    step, frames_per_step = vae.tokens_chunk_size, vae.tokens_chunk_size * vae.temporal_compression_ratio
    assert latents.shape[2] % step == vae.token_overlap, "latents are 5 n + 2 frames"
    mesh = mesh or Mesh()
    stretches = [
        latents[:, :, start : start + step + vae.token_overlap]
        for start in range(0, latents.shape[2] - vae.token_overlap, step)
    ]
    overlap: Tensor | None = None
    for first in range(0, len(stretches), mesh.sp_size):
        together = stretches[first : first + mesh.sp_size]
        works = mesh.sp_rank < len(together)
        part = _decode_tiles(vae, together[mesh.sp_rank], at_once) if works else latents.new_empty(0)
        for pixels in mesh.collect(part, len(together)):
            head, tail = (piece[:, :, vae.frame_pre_padding :] for piece in pixels.split(frames_per_step, dim=2))
            yield head if overlap is None else vae._blend(overlap, head, vae.frame_overlap, dim=-3)
            overlap = tail
    if overlap is not None:
        yield overlap


def _decode_tiles(vae: AutoencoderKLMiniMaxH3, latents: Tensor, at_once: int) -> Tensor:
    """Pixels [1, 3, f, 16 h, 16 w] of one stretch of latents [1, C, t, h, w]."""
    ratio = vae.spatial_compression_ratio
    tops, heights, overlaps_y = vae._split_tiles(
        latents.shape[-2] * ratio, vae.tile_sample_min_height, vae.tile_sample_min_overlap_height
    )
    lefts, widths, overlaps_x = vae._split_tiles(
        latents.shape[-1] * ratio, vae.tile_sample_min_width, vae.tile_sample_min_overlap_width
    )
    tiles = torch.cat(
        [
            latents[..., top // ratio : (top + height) // ratio, left // ratio : (left + width) // ratio]
            for top, height in zip(tops, heights, strict=True)
            for left, width in zip(lefts, widths, strict=True)
        ]
    )
    decoded = [tile for batch in tiles.split(at_once) for tile in vae.decoder(vae.post_quant_conv(batch)).split(1)]
    rows = [decoded[start : start + len(lefts)] for start in range(0, len(decoded), len(lefts))]
    return vae._stitch_tiles(rows, overlaps_y, overlaps_x)
