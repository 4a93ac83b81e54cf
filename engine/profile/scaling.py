"""One profile on several numbers of GPUs: how much faster, and what is lost to communication and uneven shares."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from safetensors.torch import load_file

from solgen.engine.bench.show import pyplot
from solgen.engine.profile.breakdown import COMMUNICATION
from solgen.engine.profile.plan import STOCK
from solgen.errors import InputError

COMPARED = ("video", "audio", "attention")
"""Parts of an arm's output, as `solgen.engine.profile.arms.Arm` says."""


def gpu_counts(given: str | None, *, names: Sequence[str] | None, trace: Path | None) -> list[int]:
    """Numbers of GPUs of `--gpus 1,2`; none where nothing is given.

    Args:
        given: As on the command line.
        names: Ways of attending.
        trace: Where a trace is to be written.

    Raises:
        InputError: if they are not different whole numbers, or do not go with the rest.
    """
    if given is None:
        return []
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts) or len(set(map(int, parts))) < len(parts):
        raise InputError(f"--gpus {given}; expected a number, or different ones as 1,2,4")
    counts = [int(part) for part in parts]
    if STOCK in (names or ()) and max(counts) > 1:
        raise InputError("the stock call runs on one GPU; leave stock out of --attention, or --gpus")
    if trace is not None and len(counts) > 1:
        raise InputError(f"--trace writes one file, and --gpus lists {len(counts)} profiles; give one number")
    return counts


def output_file(folder: Path, arm: str, gpus: int) -> Path:
    """Where a profile leaves the output of an arm's timed call."""
    return folder / f"{arm}-{gpus}.safetensors"


def scaling(reports: Sequence[dict[str, Any]], outputs: Path) -> list[dict[str, Any]]:
    """What every arm gains from more GPUs, and whether it computes the same.

    Args:
        reports: Of one request, each on another number of GPUs.
        outputs: Folder with the `output_file` of every arm and report.

    Returns:
        A row for every arm and report. `speedup` is over the first report, `efficiency` that speed-up for each GPU it
        took. `communication_ms` is what the call waits for exchanges, on rank 0 and under the instruments, `hidden_ms`
        what passes behind computation;
        `communication_share` of the instrumented call; `imbalance` by how much the busiest rank computes longer than
        the mean; `video_error`, `audio_error` and `attention_error` the distance of that part of the output to the
        first report's, over its norm.
    """
    rows = []
    for place, first in enumerate(reports[0]["arms"]):
        expected = load_file(output_file(outputs, first["name"], reports[0]["facts"]["world size"]))
        for report in reports:
            arm, gpus = report["arms"][place], report["facts"]["world size"]
            speedup = first["call_ms"] / arm["call_ms"]
            found = load_file(output_file(outputs, arm["name"], gpus))
            errors = {f"{name}_error": _distance(found[name], expected[name]) for name in COMPARED}
            communication = next(row["ms"] for row in arm["modules"] if row["name"] == COMMUNICATION)
            rows.append(
                {
                    "arm": arm["name"],
                    "gpus": gpus,
                    "call_ms": arm["call_ms"],
                    "speedup": speedup,
                    "efficiency": speedup * reports[0]["facts"]["world size"] / gpus,
                    "communication_ms": communication,
                    "hidden_ms": arm.get("hidden_ms", 0.0),
                    "communication_share": communication / arm["instrumented_ms"],
                    "imbalance": arm.get("imbalance", 0.0),
                    "peak_gib": arm["peak_gib"],
                    **errors,
                }
            )
    return rows


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def scaling_tables(rows: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """A line for every arm and number of GPUs: how fast, then what it needs and whether it is the same."""
    speed = Table("", "GPUs", "call, ms", "faster", "efficiency", "exposed, ms", "hidden", "of the call", "imbalance")
    speed.title = f"over {rows[0]['gpus']} GPU{'s' * (rows[0]['gpus'] > 1)}; exchanges, exposed and hidden"
    same = Table("", "GPUs", "peak, GiB", "video", "audio", "attention", title="memory and errors")
    for row in rows:
        shares = (f"{row[name]:.1%}" for name in ("communication_share", "imbalance"))
        waits = (f"{row[name]:,.1f}" for name in ("communication_ms", "hidden_ms"))
        times = f"{row['call_ms']:,.1f}", f"{row['speedup']:.2f}x", f"{row['efficiency']:.1%}"
        speed.add_row(row["arm"], str(row["gpus"]), *times, *waits, *shares)
        peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        same.add_row(row["arm"], str(row["gpus"]), peak, *(f"{row[f'{part}_error']:.1e}" for part in COMPARED))
    yield speed
    yield same


def scaling_plot(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Speed-up of every arm over the number of GPUs, beside the ideal one.

    Raises:
        SetupError: without matplotlib.
    """
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(6, 4.5))
    counts = sorted({row["gpus"] for row in rows})
    axes.plot(counts, [count / rows[0]["gpus"] for count in counts], "--", color="grey", label="ideal")
    for name in dict.fromkeys(row["arm"] for row in rows):
        mine = sorted((row["gpus"], row["speedup"]) for row in rows if row["arm"] == name)
        axes.plot(*zip(*mine, strict=True), marker="o", label=name)
    axes.set_xticks(counts)
    axes.set(xlabel="GPUs", ylabel=f"times the speed of {rows[0]['gpus']}", title=title)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plots.close(figure)
