"""The life of a request: check, load, encode, denoise, decode, write. One function serves every command."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import resolve_canvas_size
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from solgen.engine.adapters.two_time import takes_two_times
from solgen.engine.attention import install_attention
from solgen.engine.attention_run import AttentionRun
from solgen.engine.batch import Job
from solgen.engine.check import check
from solgen.engine.decode import Latents, decode_video
from solgen.engine.denoise import StepHook, denoise
from solgen.engine.fusion import fused, runs_fused
from solgen.engine.linear import use_linear
from solgen.engine.loader import load_pipeline
from solgen.engine.machine import device_name, model_dtype, versions
from solgen.engine.media.read import read_image
from solgen.engine.media.references import build_reference
from solgen.engine.output import decode_clip, rounded, write_clip
from solgen.engine.pipeline import H3Pipeline, generator, transformer_name
from solgen.engine.repository import Repository
from solgen.engine.request import Request
from solgen.engine.schedule import sigma_schedules
from solgen.engine.sharding import sharded
from solgen.engine.sidecar import finished_record, finite, latents_digest, request_record
from solgen.engine.stages import Listener, Stages
from solgen.errors import InputError, SolgenError
from solgen.kernels.sol_attn2.config import BLOCK
from solgen.parallel.agree import LostRankError, gather, share, together
from solgen.parallel.launch import unwinding
from solgen.parallel.mesh import Mesh
from solgen.parallel.ulysses import Flight, Span, Ulysses
from solgen.parallel.world import World

CONDITIONS = ("before_encode", "text_encoder", "vae_encoder")
"""Blocks that read the prompt and the media; they run for every clip before the conditioner is freed."""

LOOP = "denoise.denoise"
"""The block that calls the transformer."""


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
    world: World | None = None,
) -> list[dict[str, Any]]:
    """Make every clip of a command with one load of the model.

    Args:
        jobs: Resolved requests, the same on every rank; all use one model, and one task's components.
        listener: Shows progress; a silent one on every rank but 0.
        overwrite: Whether existing files may be replaced.
        resume: Skip clips whose file and record are already there.
        on_step: Called after every denoiser call, see `solgen.engine.denoise.StepHook`.
        world: The processes that share the work, joined; None for this one alone.

    Returns:
        The record of every clip in the jobs' order, as its sidecar holds it; on rank 0, other ranks return nothing.

    Raises:
        SolgenError: one line; nothing is written for a clip that failed, except kept latents.
    """
    world = world or World()
    if any(job.request.text_rows is not None for job in jobs):
        raise InputError("random weights make no clip; --dummy-weights belongs to solgen profile")
    # One rank looks: another may already be writing the first clip.
    finished = share(world, lambda: finished_records(jobs, overwrite=overwrite)) if resume else {}
    waiting = [job for job in jobs if job.output not in finished]
    for output in finished:
        listener.note(f"{output} is finished; skipped")
    if waiting:
        with together(world):
            device, repository = check(waiting, world.size)
        mesh = Mesh.over(world, dp_size=waiting[0].request.preset.parallel.dp, device_type=device.type)
        for note in dict.fromkeys(note for job in waiting for note in job.request.notes):
            listener.note(note)
        if mesh.dp_size > len(waiting):
            listener.note(f"parallel.dp is {mesh.dp_size} for {len(waiting)} clips: the groups without one are idle")
        mine = waiting[mesh.dp_rank :: mesh.dp_size]
        made = make(mine, repository, device, mesh, listener, overwrite=overwrite, on_step=on_step) if mine else {}
        for records in gather(world, made):
            finished |= records
    return [finished[job.output] for job in jobs] if world.rank == 0 else []


def finished_records(jobs: Sequence[Job], *, overwrite: bool) -> dict[Path, dict[str, Any]]:
    """Records of the clips that `--resume` skips, by output."""
    found = {job.output: finished_record(job, overwrite=overwrite) for job in jobs}
    return {output: kept for output, kept in found.items() if kept is not None}


def make(
    jobs: Sequence[Job],
    repository: Repository,
    device: torch.device,
    mesh: Mesh,
    listener: Listener,
    *,
    overwrite: bool,
    on_step: StepHook | None,
) -> dict[Path, dict[str, Any]]:
    """Load once and make the clips of one group of ranks, whose leader writes them and returns their records."""
    stages = Stages(device, listener)
    first = jobs[0].request
    pipeline = load(repository, first, device, mesh, stages)
    use_linear(getattr(pipeline, transformer_name(first.task)), first.preset)
    clips = [Clip(job, PipelineState(), Stages(device, listener)) for job in jobs]
    for clip in clips:
        if mesh.leads:
            encode(pipeline, clip)
        clip.state = mesh.share(clip.state)
    if mesh.leads:
        # On a GPU the conditioner's memory is needed by the activations of the denoiser.
        pipeline.unload_components("text_encoder")
    written = {}
    for clip in clips:
        sample(pipeline, clip, on_step or (lambda *_: None), mesh)
        tell(repository, listener)  # AdaLN projections are merged when their tables are built
        assert clip.latents is not None
        if mesh.leads:
            clip.record = record(clip, repository, device, mesh, stages.seconds)
            written[clip.job.output] = write(pipeline, clip, mesh, overwrite=overwrite)
        else:
            with clip.stages.stage("decode video"):
                decode_video(pipeline, clip.latents.video, mesh)
        clip.state, clip.latents = PipelineState(), None
    return written


def load(repository: Repository, request: Request, device: torch.device, mesh: Mesh, stages: Stages) -> H3Pipeline:
    """Read what this rank needs: only the leader of a group encodes, and decodes the sound."""
    with stages.stage("load"):
        pipeline = load_pipeline(
            repository,
            request.task,
            device=device,
            dtype=model_dtype(device),
            memory=request.preset.memory,
            follows=not mesh.leads,
        )
    tell(repository, stages.listener)
    return pipeline


def tell(repository: Repository, listener: Listener) -> None:
    """Pass on what the adapters have to say."""
    for note in repository.overlay.untold() if repository.overlay else ():
        listener.note(note)


def encode(pipeline: H3Pipeline, clip: Clip) -> None:
    """Run the blocks that read the prompt and the media."""
    take_inputs(pipeline, clip)
    with clip.stages.stage("encode"), torch.no_grad():
        for name, block in pipeline.blocks.sub_blocks.items():
            if name in CONDITIONS:
                block(pipeline, clip.state)


def take_inputs(pipeline: H3Pipeline, clip: Clip) -> None:
    """Put the request's own values and media into the state."""
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


def sample(pipeline: H3Pipeline, clip: Clip, on_step: StepHook, mesh: Mesh) -> None:
    """Lay out the sequence, draw the noise and denoise it; leaves `clip.latents`, the same on every rank.

    Args:
        pipeline: Loaded components.
        clip: Encoded.
        on_step: Called after every denoiser call.
        mesh: Ranks that share the sequence.
    """
    state, preset = clip.state, clip.request.preset
    lay_out(pipeline, clip)
    transformer = getattr(pipeline, transformer_name(clip.request.task))
    clip.run = start_run(clip, mesh)
    install_attention(transformer, clip.run)
    with (
        fused(transformer, clip.run.fused),
        sharded(transformer, clip.run.ulysses),
        clip.stages.stage("denoise", total=preset.sampler.steps) as advance,
    ):

        def step(index: int, video: torch.Tensor, audio: torch.Tensor) -> None:
            on_step(index, video, audio)
            advance()

        denoise(pipeline, pipeline.blocks.sub_blocks[LOOP], state, transformer, clip.run, step)
    clip.facts = _facts(clip)
    clip.facts["adaln"] = {"table_bytes": pipeline.tables.nbytes if pipeline.tables else None}
    with torch.no_grad():
        pipeline.blocks.sub_blocks["denoise.after_denoise"](pipeline, state)
    clip.latents = Latents(state.get("latents"), state.get("audio_latents"))


def lay_out(pipeline: H3Pipeline, clip: Clip) -> None:
    """Run the blocks between the conditioner and the loop: layout, noise, noise levels; prepare their AdaLN tables."""
    state = clip.state
    video_sigmas, audio_sigmas = sigma_schedules(clip.request.preset.sampler)
    state.set("video_sigmas", video_sigmas)
    state.set("audio_sigmas", audio_sigmas)
    state.set("two_times", takes_two_times(getattr(pipeline, transformer_name(clip.request.task))))
    with torch.no_grad():
        for name, block in pipeline.blocks.sub_blocks.items():
            if name == LOOP:
                break
            if name not in CONDITIONS:
                block(pipeline, state)
    if pipeline.tables is not None:
        with clip.stages.stage("AdaLN tables"):
            pipeline.tables.prepare(state.get("row_timestep_plan"))


def start_run(clip: Clip, mesh: Mesh, span: Span = nullcontext, flight: Flight | None = None) -> AttentionRun:
    """What the attention processors share, for a sequence that is laid out.

    Args:
        clip: Laid out.
        mesh: Ranks that share the sequence.
        span: Surrounds every wait for an exchange between them.
        flight: Told of every exchange.
    """
    preset = clip.request.preset
    video_rows = clip.state.get("token_order").video_rows
    ulysses = Ulysses.over(mesh, video_rows.numel(), block=BLOCK, span=span, flight=flight)
    return AttentionRun.start(
        preset.attention,
        video_rows,
        ulysses,
        fused=runs_fused(preset.fusion, video_rows.device),
        parallel=preset.parallel,
    )


def write(pipeline: H3Pipeline, clip: Clip, mesh: Mesh, *, overwrite: bool) -> dict[str, Any]:
    """Decode with the help of the group, write the mp4 and its record; if that fails, keep the latents and say where.

    Raises:
        SolgenError: naming the latents file and the command that decodes it.
        LostRankError: if another rank is gone; the listener has been told where the latents are.
    """
    assert clip.latents is not None
    try:
        decoded = decode_clip(pipeline, clip.latents, clip.stages, mesh)
        with unwinding():
            return write_clip(decoded, clip.record, clip.job.output, clip.stages, overwrite=overwrite)
    except Exception as error:
        try:
            with unwinding():
                kept = clip.latents.keep(clip.job.output, clip.record)
        except Exception as second:
            raise SolgenError(f"{error}; the latents could not be kept either: {second}") from error
        told = f"the latents are kept: solgen decode {kept} -o {clip.job.output}"
        if isinstance(error, LostRankError):
            clip.stages.listener.note(told)
            raise
        raise SolgenError(f"{error}\n{told}") from error


def record(
    clip: Clip, repository: Repository, device: torch.device, mesh: Mesh, load_seconds: dict[str, float]
) -> dict[str, Any]:
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
        "ranks": {"dp": mesh.dp_size, "sp": mesh.sp_size},
        "device": device_name(device),
        "versions": versions(),
        "timings": rounded({**load_seconds, **clip.stages.seconds}),
    }


def _facts(clip: Clip) -> dict[str, Any]:
    """What the run measured and resolved beyond the request."""
    run, state = clip.run, clip.state
    assert run is not None
    video_sigmas, audio_sigmas = state.get("video_sigmas"), state.get("audio_sigmas")
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
        "fusion": "on" if run.fused else "off",
        "attention": {
            "backend": run.settings.backend,
            "impl": run.computed_by,
            "dense": run.dense,
            "epsilon": finite(run.config.epsilon),
            "density": [{block: finite(value) for block, value in row.items()} for row in run.density_table()],
        },
    }
