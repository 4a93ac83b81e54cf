"""Stereo sound from tracks: a tone whose pitch is the colour's and whose place is the object's, and clicks."""

import math

import torch
from torch import Tensor

from solgen.engine.demo_training.tracks import FPS, Canvas, Tracks

SAMPLE_RATE = 32_000
HOP = 800
"""Samples of one audio latent."""


def num_latents(num_frames: int) -> int:
    """Audio latents of a clip, 40 a second."""
    return round(num_frames / FPS * SAMPLE_RATE / HOP)


def synthesise(tracks: Tracks, canvas: Canvas) -> Tensor:
    """Make the sound of whole clips.

    Args:
        tracks: Of B clips with all frames of the canvas.
        canvas: Its width scales the pan.

    Returns:
        Samples in [-1, 1], [B, 2, latents * 800] float32 on the device of the tracks; left first.
    """
    device, frames = tracks.centre.device, tracks.radius.shape[1]
    samples = num_latents(frames) * HOP
    time = torch.arange(samples, device=device) / SAMPLE_RATE
    position = (time * FPS).clamp(max=frames - 1)
    before = position.long()
    after, share = (before + 1).clamp(max=frames - 1), position - before

    weight = tracks.radius.square()
    total = weight.sum(-1).clamp_min(1e-6)
    place = (tracks.centre[..., 0] * weight).sum(-1) / total / canvas.half_extent[0]
    loudness = 0.08 + 1.2 * (total / math.pi).sqrt()
    place, loudness = (torch.lerp(v[:, before], v[:, after], share) for v in (place, loudness))

    phase = 2 * math.pi * tracks.pitch[:, before] * time
    tone = (phase.sin() + 0.3 * (2 * phase).sin()) * loudness
    tone = (tone + _clicks(tracks.click, time)) * _fade(time)
    angle = (place.clamp(-1, 1) + 1) * (math.pi / 4)
    return torch.stack([angle.cos() * tone, angle.sin() * tone], 1).clamp(-1, 1)


def _clicks(click: Tensor, time: Tensor) -> Tensor:
    """A short 2 kHz ring at the start of every marked frame, [B, samples]."""
    frames = click.shape[1]
    since = time - (time * FPS).floor().clamp(max=frames - 1) / FPS
    ring = 0.5 * (-since / 0.008).exp() * (2 * math.pi * 2000 * since).sin()
    return click[:, (time * FPS).long().clamp(max=frames - 1)] * ring


def _fade(time: Tensor) -> Tensor:
    """50 ms of rise and fall."""
    return (time / 0.05).clamp(max=1) * ((time[-1] - time) / 0.05).clamp(0, 1)
