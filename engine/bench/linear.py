"""`solgen bench linear`: the linear layers of a block in bf16 and in FP8, their time and their error.

Every layer multiplies the same random rows and weight in all arms, which take turns. The error is the relative
Frobenius distance to the float64 product of the unrounded bf16 operands, over the first rows.
"""

import gc
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional

from solgen.engine.bench.clock import Stage, alternate
from solgen.engine.bench.record import record
from solgen.errors import InputError, SetupError
from solgen.kernels.fp8_linear.linear import multiply_rows
from solgen.kernels.fp8_linear.quantise import quantise_rows

LAYERS = ((5376, 7168), (7168, 5376), (5376, 28_672), (14_336, 5376))
"""Channels in and out of MiniMax-H3's layers: each of q, k and v; out; up; down."""

ARMS = ("bf16", "fp8", "fp8 fast")
"""Arms: as the model has it; as `linear=fp8` computes it; with sums left in the tensor cores' own accumulators."""

ERROR_ROWS = 256
CPU_PRODUCTS = 2**24
"""Products that a CPU is let sum."""

MOST_RUNS = 20
BUDGET_MS = 500.0


@dataclass(frozen=True)
class LinearSettings:
    """What is measured.

    Attributes:
        layers: Channels in and out.
        rows: Of the packed sequence.
        runs: Rounds that every arm takes part in.
        seed: Of the inputs.
    """

    layers: tuple[tuple[int, int], ...] = LAYERS
    rows: int = 83_061
    runs: int = 5
    seed: int = 0


def bench_linear(settings: LinearSettings, note: Callable[[str], None]) -> dict[str, Any]:
    """Measure every layer; `note` is told about progress.

    Raises:
        InputError: without rows.
        SetupError: if there is no GPU that multiplies FP8.
    """
    if settings.rows < 1:
        raise InputError(f"--rows {settings.rows}; expected 1 or more")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and max(settings.rows * math.prod(layer) for layer in settings.layers) > CPU_PRODUCTS:
        raise SetupError("no CUDA GPU found; layers of this size need one. Without it, use --shape 256x128 --rows 64")
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise SetupError(f"{torch.cuda.get_device_name()} has no FP8; solgen bench linear needs sm_89 or newer")
    results = []
    for width, channels in settings.layers:
        note(f"{width} to {channels} channels")
        results.append(_bench_layer(width, channels, settings, device))
        gc.collect()
    return record(device) | {"settings": asdict(settings), "results": results}


def _bench_layer(width: int, channels: int, settings: LinearSettings, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(settings.seed)
    rows = torch.empty(settings.rows, width, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    weight = torch.empty(channels, width, dtype=torch.bfloat16, device=device).normal_(
        std=width**-0.5, generator=generator
    )
    codes, scales = quantise_rows(weight)

    def bf16(stage: Stage) -> torch.Tensor:
        with stage("multiply"):
            return functional.linear(rows, weight)

    def fp8(stage: Stage, fast: bool = False) -> torch.Tensor:
        with stage("quantise"):
            quantised = quantise_rows(rows)
        with stage("multiply"):
            return multiply_rows(*quantised, codes, scales, fast=fast)

    calls: dict[str, Callable[[Stage], torch.Tensor]] = dict(
        zip(ARMS, (bf16, fp8, lambda stage: fp8(stage, fast=True)), strict=True)
    )
    exact = rows[:ERROR_ROWS].double() @ weight.double().t()
    errors = {name: _error(call, exact) for name, call in calls.items()}
    clocks = alternate(calls, device, runs=settings.runs, most=max(MOST_RUNS, settings.runs), budget_ms=BUDGET_MS)
    operations = 2 * settings.rows * width * channels
    arms = {
        name: {
            "call_ms": clock.median_ms(),
            "stages_ms": clock.stage_ms(),
            "tflops": operations / clock.stage_ms()["multiply"] / 1e9,
            "speedup": clocks["bf16"].median_ms() / clock.median_ms(),
            "error": errors[name],
        }
        for name, clock in clocks.items()
    }
    return {"in": width, "out": channels, "arms": arms}


def _error(call: Callable[[Stage], torch.Tensor], exact: torch.Tensor) -> float:
    output = call(nullcontext)[: len(exact)].double()
    return float((output - exact).norm() / exact.norm())
