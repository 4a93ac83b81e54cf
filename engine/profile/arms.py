"""The ways of attending that a profile compares, each set up on the one transformer in turn."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.modular_pipeline import BlockState, LoopSequentialPipelineBlocks
from torch import nn

from solgen.engine.attention import install_attention
from solgen.engine.attention_run import AttentionRun
from solgen.engine.denoise import calibrate, forward
from solgen.engine.dummy import RandomWeights
from solgen.engine.fusion import fused
from solgen.engine.pipeline import H3Pipeline
from solgen.engine.profile.breakdown import breakdown, timed_modules
from solgen.engine.profile.plan import STOCK
from solgen.engine.profile.recorder import Recorder, Total
from solgen.engine.profile.stock import stock_model, timed_attention
from solgen.engine.sharding import sharded
from solgen.errors import SolgenError


@dataclass
class Arm:
    """One way of attending, and what was measured of it.

    Attributes:
        name: As on the command line; "stock" is diffusers' own call.
        run: Shared by its attention processors, unused by the stock call.
        warm_up_s: Wall-clock seconds of the first blocks, run once: the compilation of every kernel.
        call_ms: Milliseconds of one warm call without instruments.
        peak_bytes: Most device memory of that call.
        calls: Spans of every instrumented call.
        output: Of the timed call, in host memory: predictions for "video" and "audio" rows, and "attention", every
            16th channel of what the attention of the middle block adds [1, N, hidden / 16].
    """

    name: str
    run: AttentionRun
    warm_up_s: float = 0.0
    call_ms: float = 0.0
    peak_bytes: int | None = None
    calls: list[dict[str, Total]] = field(default_factory=list)
    output: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def stock(self) -> bool:
        """Whether this is diffusers' own call."""
        return self.name == STOCK

    def median_call(self) -> dict[str, Total]:
        """The instrumented call of median length."""
        return sorted(self.calls, key=lambda call: call["call"].ms)[(len(self.calls) - 1) // 2]

    def rows(self) -> list[dict[str, Any]]:
        """The parts of the median call."""
        return breakdown(self.median_call())


@dataclass
class Bench:
    """One transformer with one set of inputs, on which arms make the same denoiser call.

    Attributes:
        pipeline: Loaded components.
        loop: diffusers' denoising loop of the task.
        state: What it reads: the layout, the noise, the noise levels.
        transformer: The one that `loop` calls.
        device: Where it runs.
        index: Denoiser call of the schedule.
        weights: Source of a dummy's AdaLN projections.
        recorder: Of the instrumented calls.
    """

    pipeline: H3Pipeline
    loop: LoopSequentialPipelineBlocks
    state: BlockState
    transformer: MiniMaxH3Transformer3DModel
    device: torch.device
    index: int
    weights: RandomWeights | None
    recorder: Recorder

    def warm_up(self, arm: Arm) -> None:
        """Run the blocks up to the first of every kind; then solve the density, where that is asked for."""
        blocks = self.transformer.transformer_blocks
        kinds = [arm.run.settings.is_dense_block(index) for index in range(len(blocks))]
        enough = 1 + max(kinds.index(kind) for kind in set(kinds))
        seconds = Recorder(self.device)
        with self._set_up(arm), _stopping_before(blocks[enough] if enough < len(blocks) else None):
            with seconds.span("warm-up"), suppress(_Enough):
                self._call(arm)
            arm.warm_up_s = seconds.totals()["warm-up"].ms / 1e3
        if arm.run.solves_density:
            with self._set_up(arm), torch.no_grad():
                calibrate(self.pipeline, self.loop, self.state, arm.run, self.index)

    def time(self, arm: Arm, *, instruments: bool = False) -> None:
        """One call on the clock, without instruments unless asked for.

        Raises:
            SolgenError: if its output is not finite: its time would mean nothing.
        """
        clock = Recorder(self.device)
        attention = _Sample()
        with self._watched(arm) if instruments else nullcontext(), self._set_up(arm), attention.of(self.transformer):
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            with clock.span("call"):
                self._call(arm)
            arm.call_ms = clock.totals()["call"].ms
            if self.device.type == "cuda":
                arm.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        rows = attention.rows if arm.run.ulysses is None else arm.run.ulysses.gather(attention.rows)
        outputs = {"video": self.state.noise_pred, "audio": self.state.audio_noise_pred, "attention": rows}
        arm.output = {name: output.cpu().contiguous() for name, output in outputs.items()}
        if not all(bool(torch.isfinite(output).all()) for output in arm.output.values()):
            raise SolgenError(f"{arm.name}: the call's output is not finite; there is no use in timing it")

    def instrument(self, arm: Arm) -> None:
        """One call with every module timed."""
        with self._watched(arm), self._set_up(arm):
            self._call(arm)

    @contextmanager
    def _watched(self, arm: Arm) -> Iterator[None]:
        """Time every module of a call, with hooks before those of `sharded`: an exchange is no part of a head."""
        arm.run.stage = self.recorder.span_if_watching
        stock = timed_attention(self.recorder) if arm.stock else nullcontext()
        with self.recorder.watching(timed_modules(self.transformer)), stock:
            yield
        arm.calls.append(self.recorder.totals())

    def trace(self, arm: Arm) -> None:
        """One call under its name, for a profiler that is running."""
        with self._set_up(arm), torch.profiler.record_function(arm.name):
            self._call(arm)

    def _call(self, arm: Arm) -> None:
        with torch.no_grad():
            forward(self.pipeline, self.loop, self.state, arm.run, self.index)

    @contextmanager
    def _set_up(self, arm: Arm) -> Iterator[None]:
        if arm.stock:
            with stock_model(self.transformer, self.device, self.weights):
                yield
            return
        install_attention(self.transformer, arm.run)
        with fused(self.transformer, arm.run.fused), sharded(self.transformer, arm.run.ulysses):
            yield


class _Sample:
    """Some channels of what the middle block's attention adds; all heads go into each.

    Random weights have gates near 0 and attention averages their values away, so that the output of a call would
    hardly tell wrong attention.
    """

    rows: torch.Tensor

    @contextmanager
    def of(self, transformer: MiniMaxH3Transformer3DModel) -> Iterator[None]:
        """Take it from a call in the body."""

        def take(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            self.rows = output[..., ::16].clone()

        blocks = transformer.transformer_blocks
        handle = blocks[len(blocks) // 2].attn.register_forward_hook(take)
        try:
            yield
        finally:
            handle.remove()


class _Enough(Exception):
    """Ends a call whose later blocks would bring nothing new."""


@contextmanager
def _stopping_before(block: nn.Module | None) -> Iterator[None]:
    """End a call where it reaches a block."""

    def stop(_module: nn.Module, _args: Any) -> None:
        raise _Enough

    handle = None if block is None else block.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
