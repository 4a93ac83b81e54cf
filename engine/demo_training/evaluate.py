"""Measures a trained model on held-out prompts: the probe, both autoencoders, anchored frames."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel
from PIL import Image
from torch import Tensor

from solgen.engine.demo_training.audio_vae import log_spectral_distance
from solgen.engine.demo_training.conditioner import TASKS, Conditioner
from solgen.engine.demo_training.dataset import Pool, encode_pool
from solgen.engine.demo_training.flow import Flow
from solgen.engine.demo_training.peaks import block_peaks
from solgen.engine.demo_training.probe import pan_agrees, pitch_agrees, read_clip
from solgen.engine.demo_training.render import render
from solgen.engine.demo_training.sample import Clip, decode, sample
from solgen.engine.demo_training.scenes import Scene
from solgen.engine.demo_training.sound import synthesise
from solgen.engine.demo_training.tracks import Canvas, Tracks, track_scenes
from solgen.engine.demo_training.video_vae import decoded_psnr, encode_means, mse_psnr, normalise

SHEET_FRAMES = 6


@dataclass(frozen=True)
class HeldOut:
    """Held-out prompts and their rendered clips, encoded."""

    scenes: list[Scene]
    tracks: Tracks
    canvas: Canvas
    pool: Pool

    @classmethod
    def encode(
        cls,
        scenes: list[Scene],
        canvas: Canvas,
        vae: AutoencoderKLMiniMaxH3,
        audio_vae: AutoencoderKLMiniMaxH3Audio,
        conditioner: Conditioner,
        device: torch.device,
    ) -> "HeldOut":
        """Render and encode scenes of one shot, of combinations that training never showed."""
        tracks = track_scenes(scenes, canvas).to(device)
        return cls(scenes, tracks, canvas, encode_pool(scenes, tracks, canvas, vae, audio_vae, conditioner))

    @property
    def latent_grid(self) -> tuple[int, int, int]:
        """Latent frames, height and width."""
        return (self.canvas.num_frames - 5) // 17 * 5 + 2, self.canvas.height // 16, self.canvas.width // 16


def probe_prompts(
    held_out: HeldOut,
    model: MiniMaxH3Transformer3DModel,
    vae: AutoencoderKLMiniMaxH3,
    audio_vae: AutoencoderKLMiniMaxH3Audio,
    calls: int,
    task: str = "text",
) -> tuple[dict[str, Any], dict[int, Clip]]:
    """Generate the held-out prompts and read them back.

    Returns:
        Shares of agreement, with the PSNR of anchored frames where the task has keyframes, and the clips by number.
    """
    flow = Flow(model, held_out.pool, 1)
    clips: dict[int, Clip] = {}
    for group in held_out.pool.groups[task]:
        rows = sample(flow, model, group, task, calls, seed=0)
        for number, clip in zip(group.clips.tolist(), decode(vae, audio_vae, *rows, held_out.latent_grid), strict=True):
            clips[number] = clip
    agreed: dict[str, list[bool]] = {"colour": [], "motion": [], "pitch": [], "pan": [], "pitch or pan": []}
    rows_of = []
    for number, clip in sorted(clips.items()):
        shot = held_out.scenes[number].shots[0]
        factor = max(1, min(clip.frames.shape[1:3]) // 64)
        reading = read_clip(thumbnails(clip.frames[::2], factor), clip.sound.numpy())
        found = {
            "colour": reading.colour == shot.colour,
            "motion": reading.motion == shot.motion,
            "pitch": pitch_agrees(reading, shot.colour),
            "pan": pan_agrees(reading, shot.motion),
        }
        found["pitch or pan"] = found["pitch"] or found["pan"]
        for name, value in found.items():
            agreed[name].append(value)
        rows_of.append(
            [
                held_out.scenes[number].caption,
                reading.colour,
                reading.motion,
                round(reading.pitch),
                *map(int, found.values()),
            ]
        )
    result: dict[str, Any] = {name: sum(values) / len(values) for name, values in agreed.items()}
    result |= {"prompts": len(clips), "calls": calls, "readings": rows_of}
    if TASKS[task]:
        result["anchor_psnr"] = anchor_psnr(held_out, clips, task)
    return result, clips


def thumbnails(frames: Tensor, factor: int) -> np.ndarray:
    """Frames [F, H, W, 3] uint8 averaged over squares of `factor` pixels, which loses nothing that the probe reads."""
    small = F.avg_pool2d(frames.permute(0, 3, 1, 2).float(), factor)
    return small.round().byte().permute(0, 2, 3, 1).numpy()


def anchor_psnr(held_out: HeldOut, clips: dict[int, Clip], task: str) -> dict[str, float]:
    """Mean PSNR in decibels of the generated frames that a keyframe anchors."""
    found: dict[str, list[float]] = {anchor: [] for anchor in TASKS[task]}
    for number, clip in clips.items():
        track = held_out.tracks.take(torch.tensor([number], device=held_out.tracks.centre.device))
        truth = render(track, held_out.canvas)[0].cpu()
        for anchor, values in found.items():
            frame = 0 if anchor == "first" else -1
            values.append(mse_psnr(clip.frames[frame].permute(2, 0, 1) / 255, truth[:, frame]))
    return {anchor: float(np.mean(values)) for anchor, values in found.items()}


@torch.no_grad()
def autoencoder_quality(
    held_out: HeldOut, vae: AutoencoderKLMiniMaxH3, audio_vae: AutoencoderKLMiniMaxH3Audio, count: int
) -> dict[str, float]:
    """PSNR of reconstructed video and log-spectral distance of reconstructed sound, both in decibels."""
    psnr, distance = [], []
    for clips in torch.arange(count, device=held_out.tracks.centre.device).split(4):
        tracks = held_out.tracks.take(clips)
        pixels = render(tracks, held_out.canvas)
        psnr.append(decoded_psnr(vae, pixels, encode_means(vae, normalise(pixels)).float()))
        sound = synthesise(tracks, held_out.canvas).flatten(0, 1)[:, None]
        again = audio_vae.decode(audio_vae.encode(sound, return_dict=False)[0].mode(), return_dict=False)[0]
        distance.append(log_spectral_distance(sound, again))
    every = torch.cat(psnr)
    return {
        "video_psnr_db": float(every.mean()),
        "video_psnr_worst_db": float(every.min()),
        "audio_log_spectral_distance_db": float(torch.cat(distance).mean()),
    }


def attention_peaks(held_out: HeldOut, model: MiniMaxH3Transformer3DModel) -> dict[str, list[list[float]]]:
    """Share of mass in the top tenth of key blocks, by block and head, at the four noise levels of the demo preset."""
    flow, group = Flow(model, held_out.pool, 1), held_out.pool.groups["text"][0]
    levels = (1.0, 0.75, 0.5, 0.25)
    return {
        str(level): [
            [round(share, 4) for share in heads]
            for heads in block_peaks(flow, model, "text", group, held_out.latent_grid, level).tolist()
        ]
        for level in levels
    }


def contact_sheet(clips: list[Tensor], path: Path, columns: int = 2, size: int = 80) -> None:
    """Save a PNG with six frames of every clip in a row; clips are [F, H, W, 3] uint8."""
    strips = []
    for frames in clips:
        chosen = frames[torch.linspace(0, len(frames) - 1, SHEET_FRAMES).round().long()]
        images = [np.asarray(Image.fromarray(f.numpy()).resize((size, size), Image.Resampling.BOX)) for f in chosen]
        strips.append(np.concatenate(images, 1))
    while len(strips) % columns:
        strips.append(np.zeros_like(strips[0]))
    rows = [np.concatenate(strips[i : i + columns], 1) for i in range(0, len(strips), columns)]
    Image.fromarray(np.concatenate(rows, 0)).quantize(128).save(path, optimize=True)


def report(
    held_out: HeldOut,
    student: MiniMaxH3Transformer3DModel,
    teacher: MiniMaxH3Transformer3DModel,
    vae: AutoencoderKLMiniMaxH3,
    audio_vae: AutoencoderKLMiniMaxH3Audio,
    folder: Path,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Everything above for one trained model; contact sheets go to `folder`."""
    found: dict[str, Any] = {
        "autoencoders": autoencoder_quality(held_out, vae, audio_vae, min(16, len(held_out.scenes)))
    }
    log(f"autoencoders {found['autoencoders']}")
    arms = [
        ("student_4", student, 4, "text"),
        ("teacher_16", teacher, 16, "text"),
        ("student_4_both", student, 4, "both"),
    ]
    found["peaks"] = attention_peaks(held_out, student)
    for name, model, calls, task in arms:
        found[name], clips = probe_prompts(held_out, model, vae, audio_vae, calls, task)
        log(f"{name} " + ", ".join(f"{key} {value}" for key, value in found[name].items() if key != "readings"))
        contact_sheet([clips[n].frames for n in sorted(clips)[:20]], folder / f"{name}.png")
    return found


def report_long(
    held_out: HeldOut,
    student: MiniMaxH3Transformer3DModel,
    vae: AutoencoderKLMiniMaxH3,
    audio_vae: AutoencoderKLMiniMaxH3Audio,
    folder: Path,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """A few prompts on a canvas of many rows: agreement, attention, and their contact sheet in `folder`."""
    found, clips = probe_prompts(held_out, student, vae, audio_vae, 4)
    log("student_4_long " + ", ".join(f"{key} {value}" for key, value in found.items() if key != "readings"))
    contact_sheet([clips[n].frames for n in sorted(clips)], folder / "student_4_long.png")
    return {"student_4_long": found, "peaks_long": attention_peaks(held_out, student)}
