"""What a ref2va request is conditioned on: pictures, clips and sounds as diffusers' reference objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from solgen.engine.media import FPS, SAMPLING_RATE
from solgen.engine.media.ffmpeg import Ffmpeg
from solgen.engine.media.probe import Kind, probe_media
from solgen.engine.media.read import read_audio, read_image, read_video
from solgen.errors import InputError

if TYPE_CHECKING:
    from diffusers.modular_pipelines.minimax_h3.references import MiniMaxH3Reference

MAX_ASPECT = 4
"""The longer side of a reference may be this many times the shorter one."""

MIN_FRAMES = 13
"""The conditioner reads two frames per second, merged in pairs: the first pair is frames 0 and 12."""

DURATION_ERROR_S = 0.005
"""ffmpeg tells the duration of a file in hundredths of a second."""


def build_reference(
    kind: Kind,
    path: Path,
    *,
    max_frames: int,
    canvas: Callable[[int, int], tuple[int, int]] | None = None,
    ffmpeg: Ffmpeg | None = None,
) -> MiniMaxH3Reference:
    """Decode one reference into memory, at the rates that spare diffusers every resampling.

    diffusers' own `from_file` needs PyAV, and torchaudio for any sound that is not at 32 kHz.

    Args:
        kind: What the file is to be read as; a video brings its sound along.
        path: The user's file.
        max_frames: Frames of the requested clip. A longer reference is never used beyond them.
        canvas: From a clip's (width, height) to the (height, width) it is conditioned at, usually diffusers'
            `resolve_canvas_size`; scaled while decoding, which saves memory and is the released model's way.
        ffmpeg: The decoder, by default imageio-ffmpeg's own.

    Raises:
        InputError: the file is missing, damaged, of another kind, too short or too narrow.
    """
    import torch
    from diffusers.modular_pipelines.minimax_h3.references import (
        MiniMaxH3AudioReference,
        MiniMaxH3ImageReference,
        MiniMaxH3VideoReference,
    )

    if kind == "audio":
        sound = read_audio(path, max_frames=max_frames, ffmpeg=ffmpeg)
        return MiniMaxH3AudioReference(audio=torch.from_numpy(sound), sample_rate=SAMPLING_RATE)
    if kind == "image":
        image = read_image(path)
        _check_aspect(path, *image.size)
        return MiniMaxH3ImageReference(image=image)
    info = probe_media(path, "video", ffmpeg=ffmpeg)
    _check_aspect(path, info.width, info.height)
    frames, soundtrack = read_video(path, max_frames=max_frames, canvas=canvas, ffmpeg=ffmpeg)
    _check_length(path, len(frames))
    return MiniMaxH3VideoReference(
        frames=frames,
        fps=float(FPS),
        audio=None if soundtrack is None else torch.from_numpy(soundtrack),
        sample_rate=None if soundtrack is None else SAMPLING_RATE,
    )


def check_reference(kind: Kind, path: Path) -> None:
    """Refuse a reference by a quick look that decodes next to nothing of a clip; `build_reference` counts its frames.

    Raises:
        InputError: as for `build_reference`.
    """
    if kind == "image":
        _check_aspect(path, *read_image(path).size)
        return
    info = probe_media(path, kind)
    if kind == "video":
        _check_aspect(path, info.width, info.height)
        if info.duration_s is not None:
            _check_length(path, round((info.duration_s + DURATION_ERROR_S) * FPS))


def _check_length(path: Path, num_frames: int) -> None:
    if num_frames < MIN_FRAMES:
        raise InputError(
            f"reference video {str(path)!r} has {num_frames} frames at {FPS} fps, expected {MIN_FRAMES} "
            "or more; use a longer one, or a frame of it as an image reference"
        )


def _check_aspect(path: Path, width: int, height: int) -> None:
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise InputError(
            f"reference {str(path)!r} is {width}x{height}, expected 1:{MAX_ASPECT} to {MAX_ASPECT}:1; crop it"
        )
