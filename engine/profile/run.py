"""From requests to a report: load once, let every arm make the same denoiser call in turn, decode the noise."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from safetensors.torch import save_file

from solgen.engine.batch import Job
from solgen.engine.bench.record import record
from solgen.engine.check import check
from solgen.engine.decode import decode_audio, decode_video
from solgen.engine.dummy import DummyRepository, RandomWeights, dummy_pipeline, embed_random_prompt
from solgen.engine.generate import LOOP, Clip, encode, lay_out, load, start_run, take_inputs
from solgen.engine.linear import use_linear
from solgen.engine.machine import model_dtype
from solgen.engine.pipeline import H3Pipeline, transformer_name
from solgen.engine.profile.arms import Arm, Bench
from solgen.engine.profile.plan import STOCK
from solgen.engine.profile.recorder import Recorder
from solgen.engine.profile.report import arm_report, compare
from solgen.engine.profile.scaling import output_file
from solgen.engine.repository import Repository
from solgen.engine.stages import Listener, Stages
from solgen.errors import InputError, SetupError
from solgen.parallel.agree import together
from solgen.parallel.mesh import Mesh
from solgen.parallel.world import World


def profile(
    jobs: Sequence[Job],
    listener: Listener,
    *,
    names: Sequence[str] | None = None,
    runs: int = 3,
    trace: Path | None = None,
    outputs: Path | None = None,
    world: World | None = None,
) -> dict[str, Any]:
    """Measure one denoiser call of a request, for every arm on the same inputs in one process; writes no clip.

    Args:
        jobs: The request once for every arm, differing in the attention backend alone; the same on every rank.
        listener: Shows progress; a silent one on every rank but 0.
        names: Of the arms, in the order of the jobs; None for their backends. "stock" is diffusers' own call.
        runs: Instrumented calls of every arm, beside the timed one; the parts of the median one are reported. With 0
            the timed call carries the instruments itself.
        trace: Where to write a Chrome trace of one call of every arm.
        outputs: Folder for the output of every arm's timed call, see `solgen.engine.profile.scaling.output_file`.
        world: The processes that share the clip, joined; None for this one alone.

    Returns:
        JSON-ready report: what was run where, `facts` of the request, `arms` and `stages` in seconds. Times are
        rank 0's.

    Raises:
        SolgenError: one line, as for `generate`.
    """
    world = world or World()
    names = names or [job.request.preset.attention.backend for job in jobs]
    request = jobs[0].request
    if request.preset.parallel.dp > 1:
        raise InputError(f"parallel.dp={request.preset.parallel.dp}, but a profile is of one clip; leave it out")
    if runs < 0:
        raise InputError(f"--runs {runs}; expected 0 or more")
    if STOCK in names and world.size > 1:
        raise InputError("the stock call runs on one GPU; leave stock out of --attention, or --gpus")
    if STOCK in names and request.text_rows is None and request.preset.memory.tables:
        raise InputError("the stock call needs the AdaLN projections that tables replace; add --set memory.tables=off")
    if STOCK in names and request.preset.linear != "off":
        raise InputError("the stock call multiplies in bf16; leave stock out of --attention, or linear=fp8")
    with together(world):
        device, repository = check(jobs, world.size)
    mesh = Mesh.over(world, dp_size=1, device_type=device.type)
    stages = Stages(device, listener)
    clip = Clip(jobs[0], PipelineState(), stages)
    pipeline, weights = _prepare(clip, repository, device, mesh)
    transformer = getattr(pipeline, transformer_name(request.task))
    use_linear(transformer, request.preset)
    lay_out(pipeline, clip)
    recorder = Recorder(device)
    flight = recorder.flight if request.preset.parallel.overlap else None  # else nothing is hidden
    arms = [
        Arm(name, start_run(Clip(job, clip.state, stages), mesh, recorder.span_if_watching, flight))
        for name, job in zip(names, jobs, strict=True)
    ]
    loop = pipeline.blocks.sub_blocks[LOOP]
    attention, steps = request.preset.attention, request.preset.sampler.steps
    bench = Bench(
        pipeline=pipeline,
        loop=loop,
        state=loop.get_block_state(clip.state),
        transformer=transformer,
        device=device,
        index=min(attention.dense_steps, steps - 1),
        weights=weights,
        recorder=recorder,
    )
    measure(bench, arms, runs, stages)
    if trace is not None:
        write_trace(bench, arms, trace if mesh.leads else None)
    if outputs is not None and mesh.leads:
        for arm in arms:
            save_file(arm.output, output_file(outputs, arm.name, world.size))
    facts = {
        "preset": request.preset_name,
        "task": request.task,
        "weights": repository.source,
        "linear": request.preset.linear,
        "world size": world.size,
        "wire": request.preset.parallel.wire,
        "overlap": "on" if request.preset.parallel.overlap else "off",
        "heads": transformer.config.num_attention_heads,
        "rows": arms[0].run.video_rows.numel(),
        **{f"{name} rows": clip.state.get(f"{name}_indices").numel() for name in ("video", "audio", "text")},
        "denoiser call": f"{bench.index + 1} of {steps}, on noise",
        "instrumented calls": runs,
    }
    reports = [arm_report(arm, transformer, device, world) for arm in arms]
    compare(reports)
    if weights is None:
        _decode(pipeline, clip, mesh)
    return record(device) | {"facts": facts, "arms": reports, "stages": dict(stages.seconds)}


def measure(bench: Bench, arms: Sequence[Arm], runs: int, stages: Stages) -> None:
    """Warm every arm up, time one call of each, then let them take turns under the instruments."""
    with stages.stage("warm-up", total=len(arms)) as advance:
        for arm in arms:
            bench.warm_up(arm)
            advance()
    with stages.stage("denoiser calls", total=len(arms) * (1 + runs)) as advance:
        for arm in arms:
            bench.time(arm, instruments=runs == 0)
            advance()
        for _ in range(runs):
            for arm in arms:
                bench.instrument(arm)
                advance()


def write_trace(bench: Bench, arms: Sequence[Arm], path: Path | None) -> None:
    """Write one call of every arm as a Chrome trace; a rank with no path only takes part.

    Raises:
        SetupError: if nothing arrived on the disk; the profiler itself only logs that.
    """
    with torch.profiler.profile() as profiler:
        for arm in arms:
            bench.trace(arm)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        profiler.export_chrome_trace(str(path))
        if not path.exists():
            path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)  # the profiler's own
            raise SetupError(f"--trace {path} could not be written; free some space or choose another place")


def _prepare(
    clip: Clip, repository: Repository, device: torch.device, mesh: Mesh
) -> tuple[H3Pipeline, RandomWeights | None]:
    """A loaded pipeline and an encoded prompt, or their random stand-ins."""
    if isinstance(repository, DummyRepository):
        weights = RandomWeights(repository, device, model_dtype(device))
        with clip.stages.stage("load"):
            pipeline = dummy_pipeline(weights, tables=clip.request.preset.memory.tables)
        take_inputs(pipeline, clip)
        embed_random_prompt(pipeline, repository, clip.state)
        return pipeline, weights
    pipeline = load(repository, clip.request, device, mesh, clip.stages)
    if mesh.leads:
        encode(pipeline, clip)
        pipeline.unload_components("text_encoder")
    clip.state = mesh.share(clip.state)
    return pipeline, None


def _decode(pipeline: H3Pipeline, clip: Clip, mesh: Mesh) -> None:
    """Decode the noise: decoding takes as long whatever it decodes."""
    with torch.no_grad():
        pipeline.blocks.sub_blocks["denoise.after_denoise"](pipeline, clip.state)
    if mesh.leads:
        with clip.stages.stage("decode audio"):
            decode_audio(pipeline, clip.state.get("audio_latents"))
    with clip.stages.stage("decode video"):
        decode_video(pipeline, clip.state.get("latents"), mesh)
