"""`solgen bench attention --errors`: what the approximations cost, on structured inputs at one density.

Errors are relative Frobenius norms over sampled query blocks, against dense float64 attention ("error"), and for
Sol-Attn2 also against the same operator, route and tail with exact exponentials and no quantisation
("operator error": what FP8 and ExpCast add).
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from solgen.engine.bench.arms import ARMS, Arm, Inputs
from solgen.engine.bench.oracle import Oracle, real_rows
from solgen.engine.bench.record import record
from solgen.engine.bench.threshold import make_arms
from solgen.errors import SolgenError
from solgen.kernels.sol_attn2 import SolAttn2Config
from solgen.kernels.structured import Structure, structured_qkv

SOL_ATTN2 = ("sol-attn2", "shared-pivot")
"""Cases with Sol-Attn2's route and tail."""

SAMPLED_BLOCKS = 6
"""Query blocks of every head that errors are measured on, from the first to the last."""


@dataclass(frozen=True)
class ErrorSettings:
    """What is measured.

    Attributes:
        rows: Sequence lengths.
        heads: Heads of every sequence, from diffuse to peaked.
        density: Share of kept block pairs, over all heads together.
        seed: Seed of the inputs.
        channel_means: Means of the massive channel, one comparison each; 0 is no such channel.
        impl: Implementation of sol-attn2 and fp8, None for the fastest.
    """

    rows: tuple[int, ...] = (35_345, 83_072, 219_524)
    heads: int = 8
    density: float = 0.1
    seed: int = 0
    channel_means: tuple[float, ...] = (0.0, 10.0)
    impl: str | None = None


def bench_errors(settings: ErrorSettings, note: Callable[[str], None]) -> dict[str, Any]:
    """Measure every length; `note` is told about progress."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = []
    for rows in settings.rows:
        for mean in settings.channel_means:
            note(f"{settings.heads} heads x {rows} rows, channel mean {mean:g}")
            structure = Structure(channel_mean=mean)
            inputs = structured_qkv(settings.heads, rows, seed=settings.seed, device=device, structure=structure)
            measured = _measure(inputs, settings)
            results.append({"rows": rows, "heads": settings.heads, "structure": asdict(structure)} | measured)
            gc.collect()
    return record(device) | {"settings": asdict(settings), "results": results}


def variants(base: SolAttn2Config) -> list[tuple[str, str, SolAttn2Config]]:
    """Table, row and configuration of every Sol-Attn2 variant; the route is the same for all."""
    tails = [("tail", tail, replace(base, tail=tail)) for tail in ("none", "slots", "anchors")]
    offsets = [("offset", str(offset), replace(base, offset=offset)) for offset in range(8)]
    bare = [("offset, no tail", str(offset), replace(base, offset=offset, tail="none")) for offset in (4, 7)]
    smoothing = [
        ("smoothing", f"K {_switch(key)}, V {_switch(value)}", replace(base, smooth_key=key, smooth_value=value))
        for key in (True, False)
        for value in (True, False)
    ]
    return tails + offsets + bare + smoothing


def _switch(on: bool) -> str:
    return "on" if on else "off"


@torch.no_grad()
def _measure(inputs: Inputs, settings: ErrorSettings) -> dict[str, Any]:
    num_rows = inputs[0].shape[2]
    num_blocks = -(-num_rows // 64)
    blocks = torch.linspace(0, num_blocks - 1, SAMPLED_BLOCKS, device=inputs[0].device).long().unique()
    *others, sol_attn2 = make_arms(ARMS, inputs, density=settings.density, tail="slots", impl=settings.impl)
    assert isinstance(sol_attn2.config, SolAttn2Config)
    chosen = variants(sol_attn2.config)
    cases = others + [replace(sol_attn2, config=config) for _, _, config in chosen]
    on_kernels = inputs[0].is_cuda and settings.impl != "reference"
    outputs: list[tuple[torch.Tensor, torch.Tensor | None] | None]
    outputs = [_of_kernel(arm, inputs, blocks) if on_kernels else None for arm in cases]
    cases.append(replace(sol_attn2, name="shared-pivot"))  # no kernel has it
    outputs.append(None)
    heads = [_head_errors(h, cases, outputs, inputs, blocks) for h in range(inputs[0].shape[1])]
    table = []
    labels = [("operator", arm.name) for arm in others] + [(kind, name) for kind, name, _ in chosen]
    labels.append(("pivot", "shared"))
    for (kind, name), arm, errors in zip(labels, cases, zip(*heads, strict=True), strict=True):
        row = {"table": kind, "name": name, "density": sum(one.density for one in errors) / len(errors)}
        row["error"] = Squares.ratio([one.error for one in errors])
        if isinstance(arm.config, SolAttn2Config) and arm.name in SOL_ATTN2:
            row["operator_error"] = Squares.ratio([one.operator_error for one in errors])
        if kind in ("operator", "tail"):
            row["error_by_head"] = [Squares.ratio([one.error]) for one in errors]
        table.append(row)
    return {"epsilon": sol_attn2.config.epsilon, "rows_sampled": len(real_rows(blocks, num_rows)), "table": table}


@dataclass(frozen=True)
class Squares:
    """Squared norms of a difference and of what it is relative to."""

    difference: float
    wanted: float

    @classmethod
    def of(cls, found: torch.Tensor, wanted: torch.Tensor) -> "Squares":
        """Of two tensors of rows."""
        return cls(float((found - wanted).square().sum()), float(wanted.square().sum()))

    @staticmethod
    def ratio(parts: list["Squares"]) -> float:
        """Relative Frobenius norm over several heads."""
        return (sum(part.difference for part in parts) / sum(part.wanted for part in parts)) ** 0.5


@dataclass(frozen=True)
class HeadErrors:
    """Errors of one case on one head, and its kept share of the sampled query blocks."""

    error: Squares
    operator_error: Squares
    density: float


def _of_kernel(arm: Arm, inputs: Inputs, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [H, M, 128] and routes [H, R, NB] of sampled query blocks of one call; no route for dense attention."""
    output, details = arm.details(inputs)
    found = output[0][:, real_rows(blocks, output.shape[2])].double()
    return found, None if details is None else details.route[0][:, blocks]


def _head_errors(
    head: int,
    cases: list[Arm],
    outputs: Sequence[tuple[torch.Tensor, torch.Tensor | None] | None],
    inputs: Inputs,
    blocks: torch.Tensor,
) -> list[HeadErrors]:
    """Errors of every case on one head; of the reference, which forms only the sampled blocks, without an output.

    Raises:
        SolgenError: if an output is not finite.
    """
    oracle = Oracle(*(x[0, head] for x in inputs))
    truth = dense_rows(*oracle.rows, real_rows(blocks, oracle.num_rows))
    exact: dict[str, torch.Tensor] = {}
    results = []
    for arm, output in zip(cases, outputs, strict=True):
        route = None if output is None or output[1] is None else output[1][head]
        kept = oracle.route(arm, blocks) if route is None else route
        found = oracle.expected(arm, blocks, kept, rounded=True) if output is None else output[0][head]
        if not found.isfinite().all():
            raise SolgenError(f"{arm.name} with {arm.config} gives an output that is not finite")
        wanted = truth
        if isinstance(arm.config, SolAttn2Config) and arm.name in SOL_ATTN2:
            if arm.config.tail not in exact:
                exact[arm.config.tail] = oracle.expected(arm, blocks, kept, rounded=False)
            wanted = exact[arm.config.tail]
        results.append(HeadErrors(Squares.of(found, truth), Squares.of(found, wanted), float(kept.float().mean())))
    return results


def dense_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Dense attention of some rows [M] of one head's [N, 128] in float64, [M, 128]."""
    scores = query[rows].double() @ key.double().t() * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value.double()
