"""Decoding latents into an mp4, at the end of a run or later from a kept file."""

from pathlib import Path

from solgen.engine.decode import Latents, decode_audio, decode_video, frame_chunks
from solgen.engine.loader import load_decoders, open_repository
from solgen.engine.machine import model_dtype, pick_device
from solgen.engine.media.ffmpeg import check_ffmpeg
from solgen.engine.media.write import check_output, write_video
from solgen.engine.pipeline import H3Pipeline
from solgen.engine.stages import Listener, Stages
from solgen.presets.schema import Preset


def decode_and_write(
    pipeline: H3Pipeline,
    latents: Latents,
    preset: Preset,
    output: Path,
    stages: Stages,
    *,
    comment: str,
    overwrite: bool,
) -> None:
    """Decode latents and write them as an mp4 of the preset's canvas, with `comment` in its metadata."""
    with stages.stage("decode audio"):
        audio = decode_audio(pipeline, latents.audio)
    with stages.stage("decode video"):
        video = decode_video(pipeline, latents.video)
    with stages.stage("write"):
        write_video(
            output,
            frame_chunks(pipeline, video),
            audio,
            num_frames=preset.canvas.num_frames,
            width=preset.canvas.width,
            height=preset.canvas.height,
            sampling_rate=pipeline.audio_sampling_rate,
            crop_height=preset.output.crop,
            comment=comment,
            overwrite=overwrite,
        )


def decode_file(path: Path, output: Path, listener: Listener, *, overwrite: bool) -> None:
    """Decode latents that a failed run kept; `write` names the command.

    Raises:
        SolgenError: one line.
    """
    latents, request = Latents.load(path)
    preset = Preset.model_validate(request["settings"])
    check_output(output, overwrite=overwrite)
    check_ffmpeg()
    device = pick_device(request["preset"])
    repository = open_repository(preset.model, request["task"])
    stages = Stages(device, listener)
    with stages.stage("load"):
        pipeline = load_decoders(repository, device=device, dtype=model_dtype(device))
    decode_and_write(pipeline, latents, preset, output, stages, comment=request["prompt"], overwrite=overwrite)
