"""What a profile says of its arms, JSON-ready."""

import statistics
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel

from solgen.engine.profile.arms import Arm
from solgen.engine.profile.breakdown import ATTENTION
from solgen.engine.profile.recorder import FLIGHT, Total
from solgen.engine.profile.stock import replaced_projections, stock_dense
from solgen.engine.sidecar import finite
from solgen.parallel.agree import gather
from solgen.parallel.world import World


def arm_report(
    arm: Arm, transformer: MiniMaxH3Transformer3DModel, device: torch.device, world: World
) -> dict[str, Any]:
    """What was measured of one arm; times are rank 0's, memory is that of the rank that needs most.

    `density` is the kept share of the pairs of video blocks, as `--density` asks; `density_all` counts pairs with
    text and sound too. Both are means over the sparse blocks of the last call. Every rank takes part; with several,
    `imbalance` is by how much the busiest computes longer than the mean, `hidden_ms` the time of exchanges that passed
    behind computation.
    """
    run, rows = arm.run, arm.rows()
    blocks = run.density_table()[-1] if run.densities else {}
    densities = [value for value in blocks.values() if value == value]
    peaks = gather(world, arm.peak_bytes)
    busy = gather(world, busy_ms(arm.median_call()))
    sparse = not arm.stock and run.settings.backend != "dense"
    return {
        "name": arm.name,
        "call_ms": arm.call_ms,
        "instrumented_ms": sum(row["ms"] for row in rows if row["part_of"] is None),
        "least_ms": min(call["call"].ms for call in arm.calls),
        "most_ms": max(call["call"].ms for call in arm.calls),
        "warm_up_s": arm.warm_up_s,
        "peak_gib": max((peak / 2**30 for peak in peaks if peak is not None), default=None),
        "density": statistics.fmean(densities) if densities else None,
        "density_all": run.kept_share(),
        "sparse_blocks": len(blocks),
        "epsilon": finite(run.config.epsilon) if sparse else None,
        "impl": run.computed_by,
        "dense": stock_dense(device) if arm.stock else run.dense,
        "fusion": run.fused and not arm.stock,
        "adaln": "tables" if replaced_projections(transformer) and not arm.stock else "projections",
        **({"imbalance": max(busy) / statistics.fmean(busy) - 1} if len(busy) > 1 else {}),
        **({"hidden_ms": hidden_ms(arm.median_call())} if world.size > 1 else {}),
        "modules": rows,
    }


def compare(reports: list[dict[str, Any]]) -> None:
    """Add to every arm what its call would take if attention were free, and how much faster it is than the others.

    Ratios are of calls without instruments; `ceiling` is that ratio to the first arm with attention taken off.
    """
    for report in reports:
        attention = next(row["ms"] for row in report["modules"] if row["name"] == ATTENTION)
        report["attention_ms"] = attention
        report["without_attention_ms"] = report["call_ms"] * (1 - attention / report["instrumented_ms"])
        report["speedup"] = {
            other["name"]: other["call_ms"] / report["call_ms"] for other in reports if other is not report
        }
        report["ceiling"] = reports[0]["call_ms"] / max(report["without_attention_ms"], 1e-9)


def busy_ms(call: dict[str, Total]) -> float:
    """Milliseconds of a call in which this rank did something other than exchange with the others or wait for them."""
    return call["call"].ms - _waiting_ms(call)


def hidden_ms(call: dict[str, Total]) -> float:
    """Milliseconds of exchanges that this rank did not wait for; none where their flight was not timed."""
    return max(0.0, call[FLIGHT].ms - _waiting_ms(call)) if FLIGHT in call else 0.0


def _waiting_ms(call: dict[str, Total]) -> float:
    return sum(call[name].ms for name in ("heads", "rows") if name in call)
