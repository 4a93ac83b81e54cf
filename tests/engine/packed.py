"""A short packed sequence for the demo transformer, 24 rows of text, sound and video; and the order it comes in."""

from typing import Any

import torch
from torch import Tensor

from solgen.engine.packing import TokenOrder


def packed(timesteps: Tensor, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments of one call; rows take the timesteps [n] or [n, 2] in turns."""
    generator = torch.Generator().manual_seed(5)
    text, audio, video = torch.arange(24).split([3, 5, 16])
    return {
        "hidden_states": torch.randn(1, 16, 96, generator=generator),
        "audio_hidden_states": torch.randn(1, 5, 32, generator=generator),
        "encoder_hidden_states": torch.randn(1, 3, 32, generator=generator).to(dtype),
        "timestep": timesteps,
        "timestep_indices": torch.arange(24) % len(timesteps),
        "token_tags": torch.tensor([1] * 3 + [2] * 5 + [0] * 16),
        "position_ids": torch.rand(24, 3, dtype=torch.float64, generator=generator) * 32,
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
        "return_dict": False,
    }


def raster_order(num_rows: int, video_indices: Tensor) -> TokenOrder:
    """The identity: diffusers' own order of a sequence whose video rows stand at `video_indices`."""
    order = torch.arange(num_rows)
    video_rows = torch.zeros(num_rows, dtype=torch.bool)
    video_rows[video_indices] = True
    return TokenOrder(order, order, video_rows)
