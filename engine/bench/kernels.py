"""`solgen bench kernels`: every fused op of a transformer block against its eager form, in one process.

Outputs are held against float64 before anything is timed; then the two forms take turns. Bandwidths count every input
and output once, for both forms, so that of the eager form says how much of its traffic was needed.
"""

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from solgen.engine.bench.clock import Stage, alternate
from solgen.engine.bench.pairs import Pair, Sizes, Tensors, make_pairs
from solgen.engine.bench.record import record
from solgen.errors import SetupError, SolgenError

ROWS = (35_345, 83_061, 219_524)
"""Rows of MiniMax-H3 at 5 s and 12 s (736x1312), and at 1080p for 15 s."""

CPU_ROWS = 256
"""Most rows that a CPU is let compare."""

MOST_RUNS = 20
BUDGET_MS = 400.0
"""A form is timed again, up to MOST_RUNS times, until its calls have taken this long."""

JUDGED = 64
"""Rows held against float64 at the beginning, in the middle and at the end."""

NARROW = 1e-6
"""Relative error of FP32 sums, allowed on top where a reference has none."""


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        rows: Rows of every comparison.
        runs: Rounds that both forms take part in.
        seed: Seed of the inputs.
        sizes: Sizes of the block.
    """

    rows: tuple[int, ...] = ROWS
    runs: int = 5
    seed: int = 0
    sizes: Sizes = field(default_factory=Sizes)


@torch.no_grad()
def bench_kernels(settings: Settings, note: Callable[[str], None]) -> dict[str, Any]:
    """Measure every op at every length; `note` is told about progress.

    Returns:
        JSON-ready report: of every op milliseconds of both forms, their ratio, GB/s, and errors against float64.

    Raises:
        SolgenError: if an op fails its correctness gate.
        SetupError: if there is no GPU for this many rows.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and max(settings.rows) > CPU_ROWS:
        raise SetupError(f"no CUDA GPU found; {max(settings.rows)} rows need one. Without it, use --rows 64")
    results = []
    for rows in settings.rows:
        note(f"{rows} rows")
        ops = {}
        for pair in make_pairs(rows, settings.sizes, settings.seed, device):
            ops[pair.name] = _measure(pair, rows, settings, device)
            del pair
            gc.collect()
        results.append({"rows": rows, "ops": ops})
    impl = "triton" if device.type == "cuda" else "reference"
    return record(device) | {"settings": asdict(settings), "impl": impl, "results": results}


def _measure(pair: Pair, rows: int, settings: Settings, device: torch.device) -> dict[str, Any]:
    gate = judge(pair, rows)
    if not gate["passed"]:
        raise SolgenError(f"{pair.name} fails its correctness gate at {rows} rows: {gate}")
    forms = {"fused": pair.fused, "eager": pair.eager}
    calls: dict[str, Callable[[Stage], Any]] = {
        name: lambda _, form=form: pair.run(form)  # type: ignore[misc]
        for name, form in forms.items()
    }
    clocks = alternate(calls, device, runs=settings.runs, most=max(MOST_RUNS, settings.runs), budget_ms=BUDGET_MS)
    times = {name: clock.median_ms() for name, clock in clocks.items()}
    return {
        **{f"{name}_ms": time for name, time in times.items()},
        **{f"{name}_gb_s": pair.bytes / time / 1e6 for name, time in times.items()},
        "ratio": times["eager"] / times["fused"],
        "calls": {name: len(clock.calls) for name, clock in clocks.items()},
        "gate": gate,
    }


def judge(pair: Pair, rows: int) -> dict[str, Any]:
    """Errors of a pair on some rows, as relative Frobenius norms.

    Returns:
        `error` of the fused form against float64, the same of the `eager` one and of the `reference`, the `distance`
        of the fused form to the reference, and whether it `passed`: error at most twice the reference's, distance at
        most 1e-2, and every output finite.
    """
    starts = sorted({0, max(0, rows // 2 - JUDGED // 2), max(0, rows - JUDGED)})
    places = [slice(start, min(rows, start + JUDGED)) for start in starts]
    exact, reference = ([pair.expected(place, exact=kind) for place in places] for kind in (True, False))
    fused, finite = _some(pair.run(pair.fused), places)
    eager, _ = _some(pair.run(pair.eager), places)
    truth, same, got, stock = (_join(parts) for parts in (exact, reference, fused, eager))
    own, error = _relative(same, truth), _relative(got, truth)
    distance = _relative(got, same)
    return {
        "error": error,
        "eager": _relative(stock, truth),
        "reference": own,
        "distance": distance,
        "passed": finite and error <= 2 * own + NARROW and distance <= 1e-2,
    }


def _some(outputs: Tensors, places: list[slice]) -> tuple[list[Tensors], bool]:
    """Copies of some rows of the outputs, and whether all of the outputs is finite."""
    finite = all(bool(part.isfinite().all()) for output in outputs for part in output.split(8192))
    return [tuple(output[place].clone() for output in outputs) for place in places], finite


def _join(parts: list[Tensors]) -> torch.Tensor:
    """Rows of all outputs side by side, in float64."""
    return torch.cat([torch.cat([output.double().flatten(1) for output in part], dim=1) for part in parts])


def _relative(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got - truth).norm() / truth.norm())
