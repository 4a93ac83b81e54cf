"""Clips from the model in training, batched: for measuring it, and with more steps than the demo preset takes."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel
from torch import Tensor

from solgen.engine.demo_training.dataset import Group, raw
from solgen.engine.demo_training.distil import euler
from solgen.engine.demo_training.flow import KEYFRAME_TIME, Flow
from solgen.engine.demo_training.video_vae import denormalise


@dataclass(frozen=True)
class Clip:
    """One decoded clip.

    Attributes:
        frames: [F, H, W, 3] uint8, CPU.
        sound: [2, S] float32, CPU.
    """

    frames: Tensor
    sound: Tensor


@torch.no_grad()
def sample(
    flow: Flow, model: MiniMaxH3Transformer3DModel, group: Group, task: str, calls: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Denoise every clip of a group from noise that depends on its number in the pool alone.

    Returns:
        Normalised latent rows of video [n, rows, 96] and sound [n, rows, 32].
    """
    pool, device = flow.pool, flow.device
    noises = []
    for clip in group.clips.tolist():
        generator = torch.Generator().manual_seed(seed * 100_003 + clip)
        shapes = pool.keyframes[0].shape, pool.video.shape[1:], pool.audio.shape[1:]
        noises.append([torch.randn(shape, generator=generator) for shape in shapes])
    ends, video, audio = (torch.stack(part).to(device) for part in zip(*noises, strict=True))
    clean = pool.conditions(task, group.clips)
    noise = ends.flatten(1, 2)[:, : clean.shape[1]]
    conditions = KEYFRAME_TIME * clean + (1 - KEYFRAME_TIME) * noise
    state = video, audio
    grid = torch.linspace(1, 0, calls + 1, device=device)
    for begin, end in pairwise(grid):
        state = euler(flow, model, state, begin, end, conditions, group.text, group.layout)
    return state


@torch.no_grad()
def decode(
    vae: AutoencoderKLMiniMaxH3,
    audio_vae: AutoencoderKLMiniMaxH3Audio,
    video: Tensor,
    audio: Tensor,
    latent_grid: tuple[int, int, int],
) -> list[Clip]:
    """Decode latent rows clip by clip."""
    frames, height, width = latent_grid
    clips = []
    for rows, sound in zip(video, audio, strict=True):
        grid = rows.view(frames, height // 2, width // 2, 24, 2, 2).permute(3, 0, 1, 4, 2, 5)
        latents = raw(vae, grid.reshape(1, 24, frames, height, width))
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
            pixels = vae.decode(latents, return_dict=False)[0]
        picture = (denormalise(pixels.float())[0] * 255).round().byte().permute(1, 2, 3, 0)
        wave = audio_vae.decode(raw(audio_vae, sound.unflatten(0, (2, -1)).transpose(1, 2)), return_dict=False)[0]
        clips.append(Clip(picture.cpu(), wave[:, 0].float().cpu()))
    return clips
