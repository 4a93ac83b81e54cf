"""The order of the packed sequence: 4x4x4 cubes of video first, then sound, then text.

Attention does not care about order and rotary angles travel with the rows, so one permutation per request makes
every 64-row block a compact patch of the clip (page 001, "Starting training-free"; sol_attn2 specification,
section 6). Only the transformer's index arguments change; latents keep diffusers' raster order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

CUBE = 4
"""Edge of a full cube in latent frames and patch rows; 4^3 = one 64-row block."""


@dataclass(frozen=True)
class TokenOrder:
    """A permutation of the packed sequence.

    Attributes:
        order: Old position of every new row, [N] int64.
        position: New position of every old row, [N] int64; the inverse of `order`.
        video_rows: Whether a new row is video (target or conditioning), [N] bool.
    """

    order: torch.Tensor
    position: torch.Tensor
    video_rows: torch.Tensor


def cube_order(frames: int, height: int, width: int) -> np.ndarray:
    """Raster positions of a video grid in cube order.

    Full 4x4x4 cubes come first; what is left of each axis follows as slabs walked in strips whose
    64-row runs are compact boxes. Nothing is padded.

    Args:
        frames: Latent frames.
        height: Patch rows (latent height / 2).
        width: Patch columns.

    Returns:
        Permutation of `range(frames * height * width)`, int64.
    """
    grid = np.arange(frames * height * width, dtype=np.int64).reshape(frames, height, width)
    t, h, w = (size // CUBE * CUBE for size in grid.shape)
    cubes = grid[:t, :h, :w].reshape(t // CUBE, CUBE, h // CUBE, CUBE, w // CUBE, CUBE)
    parts = [cubes.transpose(0, 2, 4, 1, 3, 5).reshape(-1)]
    # Each slab is thin along its first axis after the transpose; together they tile what is left.
    parts.append(_slab_order(grid[t:]))
    parts.append(_slab_order(grid[:t, h:].transpose(1, 0, 2)))
    parts.append(_slab_order(grid[:t, :h, w:].transpose(2, 0, 1)))
    return np.concatenate(parts)


def _slab_order(slab: np.ndarray) -> np.ndarray:
    """Walk a slab of thickness 0 to 3 in strips whose cross-section makes 64 rows nearly a square box."""
    thickness, rows, _ = slab.shape
    if slab.size == 0:
        return slab.reshape(-1)
    strips = np.array_split(slab, max(1, round(rows / (64 / thickness) ** 0.5)), axis=1)
    # Every second strip runs backwards, so a run that turns a corner stays in one place.
    walks = [strip[:, :, :: -1 if index % 2 else 1] for index, strip in enumerate(strips)]
    return np.concatenate([walk.transpose(2, 1, 0).reshape(-1) for walk in walks])


def cube_token_order(
    video_indices: torch.Tensor,
    audio_indices: torch.Tensor,
    text_indices: torch.Tensor,
    *,
    target_grid: tuple[int, int, int],
    condition_grids: Sequence[tuple[int, int, int]] = (),
) -> TokenOrder:
    """Target video in cubes from row 0, then each conditioning video in cubes, sound, text.

    Modality comes from the index tensors, never from `token_tags`: the vision rows of a keyframe prompt carry the
    video tag but are text rows here.

    Args:
        video_indices: Positions of the video rows, conditioning first, raster inside each grid, [num_video] int64.
        audio_indices: Positions of the audio rows, [num_audio] int64.
        text_indices: Positions of the text rows, [num_text] int64.
        target_grid: Latent frames, patch rows and patch columns of the clip.
        condition_grids: The same for every keyframe or visual reference, in packed order.

    Raises:
        ValueError: if the grids do not add up to the video rows.
    """
    sizes = [int(np.prod(grid)) for grid in (*condition_grids, target_grid)]
    if sum(sizes) != video_indices.numel():
        raise ValueError(f"grids hold {sum(sizes)} rows, the sequence has {video_indices.numel()} video rows")
    *conditions, target = video_indices.split(sizes)
    parts = [
        rows[torch.from_numpy(cube_order(*grid)).to(rows.device)]
        for rows, grid in zip((target, *conditions), (target_grid, *condition_grids), strict=True)
    ]
    order = torch.cat([*parts, audio_indices, text_indices])
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel(), device=order.device)
    video_rows = torch.arange(order.numel(), device=order.device) < video_indices.numel()
    return TokenOrder(order, position, video_rows)
