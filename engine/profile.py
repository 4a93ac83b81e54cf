"""Where the time of a request goes: its stages, and the parts of one denoiser call."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from torch import nn

from solgen.engine.batch import Job
from solgen.engine.check import check
from solgen.engine.decode import decode_audio, decode_video
from solgen.engine.generate import Clip, encode, load, sample
from solgen.engine.machine import device_name
from solgen.engine.pipeline import transformer_name
from solgen.engine.request import Request
from solgen.engine.stages import Listener, Stages
from solgen.errors import InputError
from solgen.parallel.agree import gather, together
from solgen.parallel.mesh import Mesh
from solgen.parallel.world import World

EDGES = (
    "rope proj_in audio_proj_in context_embedder time_proj time_embedder token_refiner norm_out proj_out audio_proj_out"
).split()
"""Modules of the transformer outside its blocks."""


class ModuleClock:
    """Times modules of a transformer, call by call, with CUDA events on a GPU and a clock on a CPU.

    Every module is booked under a group; a group's time is that of its modules alone, so nested groups are
    subtracted by the reader.
    """

    def __init__(self, transformer: MiniMaxH3Transformer3DModel, device: torch.device) -> None:
        self._device = device
        self._spans: list[list[tuple[str, Any, Any]]] = []
        self._open: dict[int, Any] = {}
        self._handles: list[Any] = []
        self._watch("call", transformer)
        for name in EDGES:
            self._watch("edges", getattr(transformer, name))
        for block in transformer.transformer_blocks:
            self._watch("block", block)
            self._watch("attention module", block.attn)
            for name in ("to_q", "to_k", "to_v"):
                self._watch("projections", getattr(block.attn, name))
            self._watch("projections", block.attn.to_out[0])
            self._watch("norms", block.attn.norm_q, block.attn.norm_k, block.norm1, block.norm2)
            self._watch("qk norms", block.attn.norm_q, block.attn.norm_k)
            self._watch("ffn", block.ff)
            self._watch("adaln", block.adaln_proj)

    @contextmanager
    def span(self, group: str) -> Iterator[None]:
        """Time the body under a group of its own."""
        start = self._now()
        yield
        self._spans[-1].append((group, start, self._now()))

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()

    def calls(self) -> list[dict[str, float]]:
        """Milliseconds of every group, one entry a denoiser call. Waits for the device once."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [self._sum(call) for call in self._spans]

    def _sum(self, call: list[tuple[str, Any, Any]]) -> dict[str, float]:
        groups: dict[str, float] = defaultdict(float)
        for group, start, end in call:
            groups[group] += start.elapsed_time(end) if self._device.type == "cuda" else 1e3 * (end - start)
        return dict(groups)

    def _watch(self, group: str, *modules: nn.Module) -> None:
        for module in modules:
            key = len(self._handles)

            def before(_module: nn.Module, _args: Any, key: int = key) -> None:
                if group == "call":
                    self._spans.append([])
                elif not self._open:
                    return  # outside of a call, as the embedders while tables are built
                self._open[key] = self._now()

            def after(_module: nn.Module, _args: Any, _output: Any, key: int = key) -> None:
                if key in self._open:
                    self._spans[-1].append((group, self._open.pop(key), self._now()))

            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(after))

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextmanager
def module_clock(transformer: MiniMaxH3Transformer3DModel, device: torch.device) -> Iterator[ModuleClock]:
    """A `ModuleClock` whose hooks are gone afterwards."""
    clock = ModuleClock(transformer, device)
    try:
        yield clock
    finally:
        clock.close()


def profile(request: Request, listener: Listener, *, world: World | None = None) -> dict[str, Any]:
    """Run a request, decode it, write nothing.

    Args:
        request: As for `generate`, the same on every rank.
        listener: Shows progress; a silent one on every rank but 0.
        world: The processes that share the clip, joined; None for this one alone.

    Returns:
        JSON-ready report: `facts`, `stages` in seconds, `call_ms` and `modules` of one denoiser call. With more
        than one call the first is left out as warm-up and the median of the others is reported. Times are rank
        0's; `facts` says by how much the busiest rank computes longer than the mean.

    Raises:
        SolgenError: one line, as for `generate`.
    """
    world = world or World()
    if request.preset.parallel.dp > 1:
        raise InputError(f"parallel.dp={request.preset.parallel.dp}, but a profile is of one clip; leave it out")
    job = Job(request, output=Path())
    with together(world):
        device, repository = check([job], world.size)
    mesh = Mesh.over(world, dp_size=1, device_type=device.type)
    stages = Stages(device, listener)
    pipeline = load(repository, request, device, mesh, stages)
    clip = Clip(job, PipelineState(), stages)
    if mesh.leads:
        encode(pipeline, clip)
        pipeline.unload_components("text_encoder")
    clip.state = mesh.share(clip.state)
    with module_clock(getattr(pipeline, transformer_name(request.task)), device) as clock:
        sample(pipeline, clip, lambda *_: None, mesh, clock.span)
        calls = clock.calls()
    assert clip.latents is not None
    if mesh.leads:
        with stages.stage("decode audio"):
            decode_audio(pipeline, clip.latents.audio)
        with stages.stage("decode video"):
            decode_video(pipeline, clip.latents.video)
    measured = calls[-len(clip.facts["sampler"]["video_sigmas"]) + 1 :]
    warm = measured[1:] or measured
    modules = call_breakdown(warm, blocks=len(getattr(pipeline, transformer_name(request.task)).transformer_blocks))
    sequence = clip.facts["sequence"]
    busy = gather(world, statistics.median(call["call"] - communication(call) for call in warm))
    return {
        "facts": {
            "preset": request.preset_name,
            "device": device_name(device),
            "world size": world.size,
            "rows": sequence["rows"],
            "attention": clip.facts["attention"]["backend"],
            "fusion": clip.facts["fusion"],
            "density": _mean_density(clip.facts["attention"]["density"]),
            "calls measured": len(warm),
            "warm-up calls left out": len(measured) - len(warm),
            **({"imbalance": round(max(busy) / statistics.fmean(busy) - 1, 4)} if len(busy) > 1 else {}),
        },
        "call_ms": statistics.median(call["call"] for call in warm),
        "modules": modules,
        "stages": dict(stages.seconds),
    }


def communication(call: dict[str, float]) -> float:
    """Milliseconds of a call in which this rank did nothing but exchange with the others, or wait for them."""
    return call.get("heads", 0.0) + call.get("rows", 0.0)


def call_breakdown(calls: list[dict[str, float]], *, blocks: int) -> list[dict[str, Any]]:
    """Split measured calls into parts that add up to the call.

    Args:
        calls: Milliseconds by group of `ModuleClock`, one entry a call.
        blocks: Transformer blocks.

    Returns:
        Rows with `name`, `ms` (median over the calls) and `calls` (runs of the part in one denoiser call).
    """

    def median(*parts: tuple[int, str]) -> float:
        return statistics.median(sum(sign * call.get(group, 0.0) for sign, group in parts) for call in calls)

    attention = median((1, "attention module"), (-1, "projections"), (-1, "qk norms"), (-1, "heads"))
    exchanges = [("communication", median((1, "heads"), (1, "rows")), 2 * blocks + 2)]
    rows = [
        ("attention, rotary", attention, blocks),
        *(exchanges if any(map(communication, calls)) else ()),
        ("QKV and out projections", median((1, "projections")), blocks),
        ("FFN", median((1, "ffn")), blocks),
        ("norms", median((1, "norms")), blocks),
        ("AdaLN projections", median((1, "adaln")), blocks),
        (
            "modulation, residuals",
            # Block norms are in "norms" with the qk norms, which the attention module holds already.
            median(
                (1, "block"),
                (-1, "attention module"),
                (-1, "ffn"),
                (-1, "adaln"),
                (-1, "norms"),
                (1, "qk norms"),
            ),
            blocks,
        ),
        ("embeddings, refiner, heads", median((1, "edges")), 1),
        ("unattributed", median((1, "call"), (-1, "block"), (-1, "edges"), (-1, "rows")), 1),
    ]
    return [{"name": name, "ms": ms, "calls": count} for name, ms, count in rows]


def _mean_density(table: list[dict[str, float]]) -> float | None:
    values = [value for row in table for value in row.values() if isinstance(value, float)]
    return round(statistics.fmean(values), 4) if values else None
