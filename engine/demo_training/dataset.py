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
        groups: By task.
    """

    video: Tensor
    audio: Tensor
    keyframes: Tensor
    groups: dict[str, list[Group]]

    def conditions(self, task: str, clips: Tensor) -> Tensor:
        """Keyframe rows of some clips, [b, rows, 96]; no rows for a task from text alone."""
        ends = [0 if anchor == "first" else 1 for anchor in TASKS[task]]
        return self.keyframes[clips][:, ends].flatten(1, 2).float()


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
    batch: int = 8,
) -> Pool:
    """Render and encode every scene; sets the latent statistics of autoencoders that have none yet.

    Args:
        scenes: P of them.
        tracks: Theirs, on the device of the models.
        canvas: Of the clips.
        vae: Trained, in evaluation.
        audio_vae: Likewise.
        conditioner: Frozen.
        keyframed: First so many clips take part in tasks with keyframes; all without a number.
        batch: Clips rendered and encoded at a time.
    """
    device = tracks.centre.device
    video, audio, ends, pictures = [], [], [], []
    for clips in torch.arange(len(scenes), device=device).split(batch):
        part = tracks.take(clips)
        pixels = render(part, canvas)
        pair = pixels[:, :, [0, -1]]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            video.append(encode_means(vae, normalise(pixels)).bfloat16())
            single = normalise(pair).transpose(1, 2).flatten(0, 1)[:, :, None]
            moments = vae.quant_conv(vae.encoder(single))[:, : vae.config.latent_channels]
        ends.append(moments.unflatten(0, (-1, 2)).bfloat16())
        sound = synthesise(part, canvas).flatten(0, 1)[:, None]
        audio.append(audio_vae.encode(sound, return_dict=False)[0].mode().unflatten(0, (-1, 2)).bfloat16())
        pictures.append((pair * 255).round().byte())
    raw_video, raw_audio, raw_ends = (torch.cat(parts).float() for parts in (video, audio, ends))
    set_statistics(vae, raw_video)
    set_statistics(audio_vae, raw_audio.transpose(1, 2))
    rows = patchify_video_latents(standardise(vae, raw_video), PATCH).unflatten(0, (len(scenes), -1))
    keyframes = standardise(vae, raw_ends.flatten(0, 1))
    keyframes = patchify_video_latents(keyframes, PATCH).unflatten(0, (len(scenes), 2, -1))
    sound_rows = standardise(audio_vae, raw_audio.flatten(0, 1)).transpose(1, 2)
    sound_rows = sound_rows.unflatten(0, (len(scenes), 2)).flatten(1, 2)
    frames, height, width = raw_video.shape[2:]
    grid, shown = (frames, height, width), torch.cat(pictures)
    groups = {
        task: group_texts(scenes[: keyframed if anchors else None], shown, conditioner, grid, raw_audio.shape[-1], task)
        for task, anchors in TASKS.items()
    }
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


def set_statistics(model: AutoencoderKLMiniMaxH3 | AutoencoderKLMiniMaxH3Audio, latents: Tensor) -> None:
    """Write per-channel mean and deviation of raw latents [P, C, ...] into a config that still has 0 and 1."""
    if any(model.config.latents_mean):
        return
    dims = [d for d in range(latents.ndim) if d != 1]
    mean, std = latents.mean(dims), latents.std(dims).clamp_min(1e-3)
    model.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


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
