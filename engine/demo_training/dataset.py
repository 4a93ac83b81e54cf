"""Clips as the transformer sees them: latent rows and text rows of a pool, grouped by task and length of text."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio
from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents
from torch import Tensor

from solgen.engine.demo_training.conditioner import TASKS, Conditioner
from solgen.engine.demo_training.forward import Layout
from solgen.engine.demo_training.render import render
from solgen.engine.demo_training.scenes import Scene
from solgen.engine.demo_training.sound import synthesise
from solgen.engine.demo_training.tracks import Canvas, Tracks
from solgen.engine.demo_training.video_vae import encode_means, normalise

PATCH = (1, 2, 2)


@dataclass(frozen=True)
class Group:
    """Clips that share a layout.

    Attributes:
        layout: Of their packed sequence.
        clips: [n] int64, numbers in the pool.
        text: [n, L, 32] float32.
    """

    layout: Layout
    clips: Tensor
    text: Tensor


@dataclass(frozen=True)
class Pool:
    """Encoded clips of one canvas, with normalised latents.

    Attributes:
        video: [P, rows, 96] bfloat16.
        audio: [P, 2 x latents, 32] bfloat16, channel-major.
        keyframes: [P, 2, rows of a frame, 96] bfloat16, the first and the last frame encoded alone.
        groups: By task; a task that no clip takes part in is missing.
    """

    video: Tensor
    audio: Tensor
    keyframes: Tensor
    groups: dict[str, list[Group]]

    def conditions(self, task: str, clips: Tensor) -> Tensor:
        """Keyframe rows of some clips, [b, rows, 96]; no rows for a task from text alone."""
        ends = [0 if anchor == "first" else 1 for anchor in TASKS[task]]
        return self.keyframes[clips][:, ends].flatten(1, 2).float()


@dataclass(frozen=True)
class Latents:
    """Posterior means of clips, not standardised, and the pictures of their ends.

    Attributes:
        video: [P, 24, t, h, w] bfloat16.
        audio: [P, 2, 32, latents] bfloat16.
        ends: [P, 2, 24, 1, h, w] bfloat16, the first and the last frame encoded alone.
        pictures: [P, 3, 2, H, W] uint8, the same frames.
    """

    video: Tensor
    audio: Tensor
    ends: Tensor
    pictures: Tensor


PIXELS = 2**26
"""Pixels that are rendered and encoded at a time: eight clips of 256x256 and 124 frames."""


@torch.no_grad()
def encode_clips(
    tracks: Tracks, canvas: Canvas, vae: AutoencoderKLMiniMaxH3, audio_vae: AutoencoderKLMiniMaxH3Audio
) -> Latents:
    """Render and encode P clips, on the device of the tracks and the models."""
    device = tracks.centre.device
    batch = max(1, PIXELS // (canvas.height * canvas.width * canvas.num_frames))
    parts = []
    for clips in torch.arange(len(tracks.centre), device=device).split(batch):
        part = tracks.take(clips)
        pixels = render(part, canvas)
        pair = pixels[:, :, [0, -1]]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            video = encode_means(vae, normalise(pixels)).bfloat16()
            single = normalise(pair).transpose(1, 2).flatten(0, 1)[:, :, None]
            ends = encode_means(vae, single).unflatten(0, (-1, 2)).bfloat16()
        sound = synthesise(part, canvas).flatten(0, 1)[:, None]
        audio = audio_vae.encode(sound, return_dict=False)[0].mode().unflatten(0, (-1, 2)).bfloat16()
        parts.append((video, audio, ends, (pair * 255).round().byte()))
    return Latents(*(torch.cat(some) for some in zip(*parts, strict=True)))


def fit_statistics(vae: AutoencoderKLMiniMaxH3, audio_vae: AutoencoderKLMiniMaxH3Audio, latents: Latents) -> None:
    """Write the per-channel mean and deviation of latents into both configs."""
    for model, raw_latents in ((vae, latents.video), (audio_vae, latents.audio.flatten(0, 1))):
        dims = [d for d in range(raw_latents.ndim) if d != 1]
        values = raw_latents.float()
        mean, std = values.mean(dims), values.std(dims).clamp_min(1e-3)
        model.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


def has_statistics(model: AutoencoderKLMiniMaxH3 | AutoencoderKLMiniMaxH3Audio) -> bool:
    """Whether `fit_statistics` has seen it."""
    return any(model.config.latents_mean)


@torch.no_grad()
def encode_pool(
    scenes: list[Scene],
    tracks: Tracks,
    canvas: Canvas,
    vae: AutoencoderKLMiniMaxH3,
    audio_vae: AutoencoderKLMiniMaxH3Audio,
    conditioner: Conditioner,
    *,
    keyframed: int | None = None,
) -> Pool:
    """Render, encode and standardise every scene.

    Args:
        scenes: P of them.
        tracks: Theirs, on the device of the models.
        canvas: Of the clips.
        vae: Trained, in evaluation, with the statistics of its latents.
        audio_vae: Likewise.
        conditioner: Frozen.
        keyframed: First so many clips take part in tasks with keyframes; all without a number.
    """
    latents = encode_clips(tracks, canvas, vae, audio_vae)
    rows = patchify_video_latents(standardise(vae, latents.video.float()), PATCH).unflatten(0, (len(scenes), -1))
    keyframes = standardise(vae, latents.ends.flatten(0, 1).float())
    keyframes = patchify_video_latents(keyframes, PATCH).unflatten(0, (len(scenes), 2, -1))
    sound_rows = standardise(audio_vae, latents.audio.flatten(0, 1).float()).transpose(1, 2)
    sound_rows = sound_rows.unflatten(0, (len(scenes), 2)).flatten(1, 2)
    frames, height, width = latents.video.shape[2:]
    grid, shown = (frames, height, width), latents.pictures
    groups = {
        task: group_texts(
            scenes[: keyframed if anchors else None], shown, conditioner, grid, latents.audio.shape[-1], task
        )
        for task, anchors in TASKS.items()
    }
    groups = {task: found for task, found in groups.items() if found}
    return Pool(rows.bfloat16(), sound_rows.bfloat16(), keyframes.bfloat16(), groups)


def group_texts(
    scenes: list[Scene],
    pictures: Tensor,
    conditioner: Conditioner,
    latent_grid: tuple[int, int, int],
    num_audio_latents: int,
    task: str,
) -> list[Group]:
    """Encode the text rows of every scene for one task and group them by length.

    Args:
        scenes: P of them.
        pictures: First and last frames, [P, 3, 2, H, W] uint8.
        conditioner: Frozen.
        latent_grid: Latent frames, height and width.
        num_audio_latents: Of one channel.
        task: Key of `TASKS`.
    """
    patches = (pictures.shape[-2] // 32) * (pictures.shape[-1] // 32)
    by_length = defaultdict(list)
    for number, scene in enumerate(scenes):
        ids, tags = conditioner.tokens(scene.caption, task, patches)
        by_length[len(ids)].append((number, ids, tags))
    ends = [0 if anchor == "first" else 1 for anchor in TASKS[task]]
    groups = []
    for members in by_length.values():
        clips = torch.tensor([number for number, _, _ in members], device=pictures.device)
        tokens = torch.tensor([ids for _, ids, _ in members], device=pictures.device)
        texts = []
        for part, some in zip(clips.split(256), tokens.split(256), strict=True):
            frames = pictures[part][:, :, ends].transpose(1, 2).flatten(0, 1) / 255 if ends else None
            texts.append(conditioner.encode(some, frames))
        layout = Layout.build(torch.tensor(members[0][2]), TASKS[task], latent_grid, num_audio_latents)
        groups.append(Group(layout, clips, torch.cat(texts)))
    return groups


def standardise(model: AutoencoderKLMiniMaxH3 | AutoencoderKLMiniMaxH3Audio, latents: Tensor) -> Tensor:
    """Raw latents [P, C, ...] with near zero mean and unit variance."""
    shape = (1, -1, *(1 for _ in latents.shape[2:]))
    mean, std = (latents.new_tensor(values).view(shape) for values in _statistics(model))
    return (latents - mean) / std


def raw(model: AutoencoderKLMiniMaxH3 | AutoencoderKLMiniMaxH3Audio, latents: Tensor) -> Tensor:
    """The inverse of `standardise`."""
    shape = (1, -1, *(1 for _ in latents.shape[2:]))
    mean, std = (latents.new_tensor(values).view(shape) for values in _statistics(model))
    return latents * std + mean


def _statistics(model: AutoencoderKLMiniMaxH3 | AutoencoderKLMiniMaxH3Audio) -> tuple[list[float], list[float]]:
    return model.config.latents_mean, model.config.latents_std
