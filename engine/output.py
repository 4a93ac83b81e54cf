"""Decoding latents into an mp4 and its record, at the end of a run or later from a kept file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from solgen.engine.decode import Latents, decode_audio, decode_video
from solgen.engine.loader import load_decoders
from solgen.engine.machine import model_dtype, pick_device
from solgen.engine.media.ffmpeg import check_ffmpeg
from solgen.engine.media.write import check_output, write_video
from solgen.engine.pipeline import H3Pipeline
from solgen.engine.repository import open_repository
from solgen.engine.sidecar import write_sidecar
from solgen.engine.stages import Listener, Stages
from solgen.errors import InputError
from solgen.parallel.mesh import Mesh
from solgen.presets.schema import FPS, Preset


@dataclass(frozen=True)
class Decoded:
    """A clip before it is written.

    Attributes:
        frames: Consecutive uint8 frames [f, height, width, 3].
        audio: float32 samples [2, S].
        sampling_rate: Samples a second.
    """

    frames: list[np.ndarray]
    audio: np.ndarray
    sampling_rate: int


def decode_clip(pipeline: H3Pipeline, latents: Latents, stages: Stages, mesh: Mesh | None = None) -> Decoded:
    """Decode latents on the leader of a group, whose other ranks help with `decode_video`."""
    with stages.stage("decode audio"):
        audio = decode_audio(pipeline, latents.audio)
    with stages.stage("decode video"):
        frames = decode_video(pipeline, latents.video, mesh)
    return Decoded(frames, audio, pipeline.audio_sampling_rate)


def write_clip(
    decoded: Decoded,
    record: dict[str, Any],
    output: Path,
    stages: Stages,
    *,
    overwrite: bool,
) -> dict[str, Any]:
    """Write a clip as an mp4 of its request's canvas, and the record beside it.

    Args:
        decoded: Its frames and sound.
        record: What is known of the clip; the prompt also goes into the mp4's comment.
        output: The mp4; the record goes to the same name with `.json`.
        stages: Has timed the decoding, and times the writing.
        overwrite: Whether existing files may be replaced.

    Returns:
        The record as written.
    """
    preset = Preset.model_validate(record["request"]["settings"])
    canvas, crop = preset.canvas, preset.output.crop
    with stages.stage("write"):
        write_video(
            output,
            decoded.frames,
            decoded.audio,
            num_frames=canvas.num_frames,
            width=canvas.width,
            height=canvas.height,
            sampling_rate=decoded.sampling_rate,
            crop_height=crop,
            comment=record["request"]["prompt"],
            overwrite=overwrite,
        )
    record = {
        **record,
        "output": {
            "path": str(output),
            "width": canvas.width,
            "height": crop or canvas.height,
            "frames": canvas.num_frames,
            "seconds": canvas.num_frames / FPS,
        },
        "timings": {**record["timings"], **rounded(stages.seconds)},
    }
    write_sidecar(output.with_suffix(".json"), record)
    return record


def decode_file(path: Path, output: Path, listener: Listener, *, overwrite: bool) -> dict[str, Any]:
    """Decode latents that a failed run kept, and write the record that it could not.

    Raises:
        SolgenError: one line.
    """
    latents, record = Latents.load(path)
    try:
        preset = Preset.model_validate(record["request"]["settings"])
        name, task = record["request"]["preset"], record["request"]["task"]
        record["request"]["prompt"], record["timings"]["denoise"]
    except (KeyError, TypeError, ValidationError) as error:
        raise InputError(f"{path} does not hold the record of a clip that this version can decode") from error
    latents.check_shape(path, preset.canvas)
    check_output(output, overwrite=overwrite)
    if output.with_suffix(".json").exists() and not overwrite:
        raise InputError(f"{output.with_suffix('.json')} already exists; choose another name or pass --overwrite")
    check_ffmpeg()
    device = pick_device(name)
    repository = open_repository(preset.model, task)
    stages = Stages(device, listener)
    with stages.stage("load"):
        pipeline = load_decoders(repository, device=device, dtype=model_dtype(device))
    return write_clip(decode_clip(pipeline, latents, stages), record, output, stages, overwrite=overwrite)


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    """Times to the millisecond."""
    return {name: round(value, 3) for name, value in seconds.items()}
