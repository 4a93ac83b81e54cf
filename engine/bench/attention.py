"""`solgen bench attention`: speed of the attention operators on the same inputs, in one process.

Every arm first passes the correctness gate on these inputs, then the arms take turns. A complete call takes bf16 query,
key and value, views of one packed tensor, and ends with the bf16 output; "kernel only" is its attention stage.
"""

import gc
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from solgen.engine.bench.arms import ARMS, Arm, Inputs
from solgen.engine.bench.clock import Clock, alternate
from solgen.engine.bench.gate import Verdict, check
from solgen.engine.bench.record import record
from solgen.engine.bench.threshold import make_arms
from solgen.errors import InputError, SetupError, SolgenError
from solgen.kernels.structured import structured_qkv

SHAPES = ((32, 32_768), (32, 65_536), (32, 131_072), (56, 35_345), (56, 83_072), (56, 219_524))
"""Heads and rows: the kernel table of the paper's page, then 5 s, 12 s and 1080p 15 s of MiniMax-H3."""

MOST_RUNS = 20
BUDGET_MS = 1000.0
"""An arm is timed again, up to MOST_RUNS times, until its calls have taken this long."""

CPU_ROWS = 2**15
"""Heads times rows that a CPU is let compare."""

LONG_ROWS = 150_000
LONG_RUNS = 3
"""Rounds of sequences longer than LONG_ROWS."""


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        shapes: Heads and rows of every comparison.
        arms: Operators, from `ARMS`.
        density: Share of kept block pairs that the sparse operators' thresholds are solved for.
        tail: Tail of Sol-Attn2.
        runs: Rounds that every arm takes part in, fewer for very long sequences.
        data: "random" normals, or "structured" (`kernels/structured.py`).
        seed: Seed of the inputs.
        impl: Implementation of sol-attn2 and fp8, None for the fastest.
    """

    shapes: tuple[tuple[int, int], ...] = SHAPES
    arms: tuple[str, ...] = ARMS
    density: float = 0.1
    tail: str = "slots"
    runs: int = 5
    data: str = "random"
    seed: int = 0
    impl: str | None = None

    def __post_init__(self) -> None:
        if self.data not in ("random", "structured"):
            raise InputError(f"--data {self.data} is not a kind of input; choose random or structured")


def make_inputs(heads: int, rows: int, *, data: str, seed: int, device: torch.device) -> Inputs:
    """Query, key and value, [1, heads, rows, 128] bf16 views of one packed [rows, 3, heads, 128]."""
    if data == "structured":
        return structured_qkv(heads, rows, seed=seed, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    packed = torch.empty(rows, 3, heads, 128, dtype=torch.bfloat16, device=device)
    for part in packed.split(8192):
        part.normal_(generator=generator)
    query, key, value = packed.permute(1, 2, 0, 3).unsqueeze(1)
    return query, key, value


def bench_attention(settings: Settings, note: Callable[[str], None]) -> dict[str, Any]:
    """Measure every shape; `note` is told about progress.

    Raises:
        SolgenError: if an arm fails its correctness gate.
        SetupError: if there is no GPU for shapes of this size.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and (large := [shape for shape in settings.shapes if math.prod(shape) > CPU_ROWS]):
        raise SetupError(
            f"no CUDA GPU found; {large[0][0]} heads x {large[0][1]} rows need one. Without it, use --shape 1x2048"
        )
    results = []
    for heads, rows in settings.shapes:
        note(f"{heads} heads x {rows} rows")
        results.append(_bench_shape(heads, rows, settings, device))
        gc.collect()
    return record(device) | {"settings": asdict(settings), "results": results}


def _bench_shape(heads: int, rows: int, settings: Settings, device: torch.device) -> dict[str, Any]:
    inputs = make_inputs(heads, rows, data=settings.data, seed=settings.seed, device=device)
    arms = make_arms(settings.arms, inputs, density=settings.density, tail=settings.tail, impl=settings.impl)
    verdicts = {arm.name: check(arm, inputs) for arm in arms}
    for name, verdict in verdicts.items():
        if not verdict.passed:
            raise SolgenError(f"{name} fails its correctness gate at {heads} heads x {rows} rows: {verdict.row()}")
    calls = {arm.name: arm.call(inputs) for arm in arms}
    runs = min(settings.runs, LONG_RUNS) if rows > LONG_ROWS else settings.runs
    clocks = alternate(calls, device, runs=runs, most=max(MOST_RUNS, runs), budget_ms=BUDGET_MS)
    table = {arm.name: _row(arm, clocks[arm.name], verdicts[arm.name], clocks) for arm in arms}
    return {"heads": heads, "rows": rows, "blocks": -(-rows // 64), "arms": table}


def _row(arm: Arm, clock: Clock, verdict: Verdict, clocks: dict[str, Clock]) -> dict[str, Any]:
    stages = clock.stage_ms()
    call = clock.median_ms()
    return {
        "call_ms": call,
        "kernel_ms": stages["attention"],
        "stages_ms": stages,
        "calls": len(clock.calls),
        "least_ms": min(clock.calls),
        "most_ms": max(clock.calls),
        "speedup": {name: clocks[name].median_ms() / call for name in ("dense", "sol-attn1") if name in clocks},
        "density": None if math.isnan(verdict.density) else verdict.density,
        "config": None if arm.config is None else asdict(arm.config),
        "gate": {name: None if value != value else value for name, value in verdict.row().items()},
    }
