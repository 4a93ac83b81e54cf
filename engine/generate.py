"""The life of a request: check, load, encode, denoise, decode, write. One function serves every command."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import resolve_canvas_size
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from solgen.engine.adapters.two_time import takes_two_times
from solgen.engine.attention import AttentionRun, install_attention
from solgen.engine.batch import Job
from solgen.engine.check import check
from solgen.engine.decode import Latents
from solgen.engine.denoise import StepHook, denoise
from solgen.engine.loader import load_pipeline
from solgen.engine.machine import device_name, model_dtype, versions
from solgen.engine.media.read import read_image
from solgen.engine.media.references import build_reference
from solgen.engine.output import rounded, write_clip
from solgen.engine.pipeline import H3Pipeline, generator, transformer_name
from solgen.engine.repository import Repository
from solgen.engine.request import Request
from solgen.engine.schedule import sigma_schedules
from solgen.engine.sidecar import finished_record, finite, latents_digest, request_record
from solgen.engine.stages import Listener, Stages
from solgen.errors import SolgenError

CONDITIONS = ("before_encode", "text_encoder", "vae_encoder")
"""Blocks that read the prompt and the media; they run for every clip before the conditioner is freed."""


@dataclass
class Clip:
    """A request on its way: the pipeline's state and what is known of it so far."""

    job: Job
    state: PipelineState
    stages: Stages
    run: AttentionRun | None = None
    latents: Latents | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def request(self) -> Request:
        """The clip's request."""
        return self.job.request


def generate(
    jobs: Sequence[Job],
    listener: Listener,
    *,
    overwrite: bool = False,
    resume: bool = False,
    on_step: StepHook | None = None,
) -> list[dict[str, Any]]:
    """Make every clip of a command with one load of the model.

    Args:
        jobs: Resolved requests; all use one model, and one task's components.
        listener: Shows progress.
        overwrite: Whether existing files may be replaced.
        resume: Skip clips whose file and record are already there.
        on_step: Called after every denoiser call, see `solgen.engine.denoise.StepHook`.

    Returns:
        The record of every clip in the jobs' order, as its sidecar holds it.

    Raises:
        SolgenError: one line; nothing is written for a clip that failed, except kept latents.
    """
    finished = {job.output: kept for job in jobs if resume and (kept := finished_record(job, overwrite=overwrite))}
    waiting = [job for job in jobs if job.output not in finished]
    for output in finished:
        listener.note(f"{output} is finished; skipped")
    if not waiting:
        return list(finished.values())
    device, repository = check(waiting)
    for note in dict.fromkeys(note for job in waiting for note in job.request.notes):
        listener.note(note)
    stages = Stages(device, listener)
    first = waiting[0].request
    with stages.stage("load"):
        pipeline = load_pipeline(repository, first.task, device=device, dtype=model_dtype(device))
    for note in repository.overlay.notes if repository.overlay else ():
        listener.note(note)
    clips = [Clip(job, PipelineState(), Stages(device, listener)) for job in waiting]
    for clip in clips:
        encode(pipeline, clip)
    # On a GPU the conditioner's memory is needed by the activations of the denoiser.
    pipeline.unload_components("text_encoder")
    for clip in clips:
        sample(pipeline, clip, on_step or (lambda *_: None))
        clip.record = record(clip, repository, device, stages.seconds)
        finished[clip.job.output] = write(pipeline, clip, overwrite=overwrite)
        clip.state, clip.latents = PipelineState(), None
    return [finished[job.output] for job in jobs]


def encode(pipeline: H3Pipeline, clip: Clip) -> None:
    """Run the blocks that read the prompt and the media."""
    request, state = clip.request, clip.state
    canvas = request.preset.canvas
    reference_canvas = partial(
        resolve_canvas_size,
        canvas_multiple=pipeline.canvas_multiple,
        short_edge=pipeline.config.canvas_short_edge,
        max_pixels=pipeline.config.canvas_max_pixels,
    )
    inputs = {
        "prompt": request.prompt,
        "height": canvas.height,
        "width": canvas.width,
        "num_frames": canvas.num_frames,
        "image": request.image and read_image(request.image),
        "last_image": request.last_image and read_image(request.last_image),
        "references": [
            build_reference(reference.kind, reference.path, max_frames=canvas.num_frames, canvas=reference_canvas)
            for reference in request.references
        ]
        or None,
        "generator": generator(request.seed),
    }
    for name, value in inputs.items():
        state.set(name, value)
    with clip.stages.stage("encode"), torch.no_grad():
        for name, block in pipeline.blocks.sub_blocks.items():
            if name in CONDITIONS:
                block(pipeline, state)


def sample(pipeline: H3Pipeline, clip: Clip, on_step: StepHook) -> None:
    """Lay out the sequence, draw the noise and denoise it; leaves `clip.latents`."""
    state, preset = clip.state, clip.request.preset
    video_sigmas, audio_sigmas = sigma_schedules(preset.sampler)
    state.set("video_sigmas", video_sigmas)
    state.set("audio_sigmas", audio_sigmas)
    transformer = getattr(pipeline, transformer_name(clip.request.task))
    state.set("two_times", takes_two_times(transformer))
    for name, block in pipeline.blocks.sub_blocks.items():
        if name in CONDITIONS or name.startswith("decode"):
            continue
        if name != "denoise.denoise":
            with torch.no_grad():
                block(pipeline, state)
            continue
        clip.run = AttentionRun.start(preset.attention, state.get("token_order").video_rows)
        install_attention(transformer, clip.run)
        with clip.stages.stage("denoise", total=preset.sampler.steps) as advance:

            def step(index: int, video: torch.Tensor, audio: torch.Tensor, advance=advance) -> None:
                on_step(index, video, audio)
                advance()

            denoise(pipeline, block, state, transformer, clip.run, step)
        clip.facts = _facts(clip, video_sigmas, audio_sigmas)
    clip.latents = Latents(state.get("latents"), state.get("audio_latents"))


def write(pipeline: H3Pipeline, clip: Clip, *, overwrite: bool) -> dict[str, Any]:
    """Decode, write the mp4 and its record; if that fails, keep the latents and say where.

    Raises:
        SolgenError: naming the latents file and the command that decodes it.
    """
    assert clip.latents is not None
    try:
        return write_clip(pipeline, clip.latents, clip.record, clip.job.output, clip.stages, overwrite=overwrite)
    except Exception as error:
        try:
            kept = clip.latents.keep(clip.job.output, clip.record)
        except Exception as second:
            raise SolgenError(f"{error}; the latents could not be kept either: {second}") from error
        raise SolgenError(f"{error}\nthe latents are kept: solgen decode {kept} -o {clip.job.output}") from error


def record(clip: Clip, repository: Repository, device: torch.device, load_seconds: dict[str, float]) -> dict[str, Any]:
    """What is known of a clip once it is denoised; `write_clip` adds its file and the times of decoding.

    Only `timings` differs between two runs on one machine.
    """
    assert clip.latents is not None
    return {
        "request": request_record(clip.request),
        **clip.facts,
        "latents_sha256": latents_digest(clip.latents),
        "model": {"source": repository.source, "headers_sha256": repository.digests},
        "adapters": repository.overlay.record() if repository.overlay else None,
        "device": device_name(device),
        "versions": versions(),
        "timings": rounded({**load_seconds, **clip.stages.seconds}),
    }


def _facts(clip: Clip, video_sigmas: torch.Tensor, audio_sigmas: torch.Tensor) -> dict[str, Any]:
    """What the run measured and resolved beyond the request."""
    run, state = clip.run, clip.state
    assert run is not None
    rows = {name: state.get(f"{name}_indices").numel() for name in ("video", "audio", "text")}
    return {
        "sequence": {
            "rows": sum(rows.values()),
            **rows,
            "condition_video": state.get("num_condition_video_rows"),
            "condition_audio": state.get("num_condition_audio_rows"),
        },
        "sampler": {
            "calls": len(video_sigmas) - 1,
            "video_sigmas": video_sigmas.tolist(),
            "audio_sigmas": audio_sigmas.tolist(),
        },
        "attention": {
            "backend": run.settings.backend,
            "impl": run.computed_by,
            "epsilon": finite(run.config.epsilon),
            "density": [{block: finite(value) for block, value in row.items()} for row in run.density_table()],
        },
    }
