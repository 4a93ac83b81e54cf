"""Tables and plots of benchmark results."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import rich.console
from rich.table import Table

from solgen.engine.paths import check_new_file
from solgen.errors import InputError, SetupError

WIDTH = 120
"""Columns of a table that does not go to a terminal."""

STAGES = ("prepare", "route", "tail", "attention")


def speed_tables(report: dict[str, Any]) -> Iterator[Table]:
    """One table a shape: complete call, its stages, ratios, density and the gate's error."""
    for shape in report["results"]:
        title = f"{shape['heads']} heads x {shape['rows']} rows, ms"
        table = Table("", "call", *STAGES, "x dense", "x sol-attn1", "density", "error", title=title)
        for name, row in shape["arms"].items():
            stages = [_number(row["stages_ms"].get(stage), ".2f") for stage in STAGES]
            ratios = [_number(row["speedup"].get(other), ".2f") for other in ("dense", "sol-attn1")]
            density, error = _number(row["density"], ".4f"), _number(row["gate"]["error"], ".4f")
            table.add_row(name, f"{row['call_ms']:.2f}", *stages, *ratios, density, error)
        yield table


def kernel_tables(report: dict[str, Any]) -> Iterator[Table]:
    """One table a length: both forms of every op, their ratio and bandwidth, and the errors of both."""
    for length in report["results"]:
        title = f"{length['rows']} rows, {report['impl']}"
        columns = ("fused ms", "eager ms", "x eager", "GB/s", "eager GB/s", "error", "eager error")
        table = Table("", *columns, title=title)
        for name, row in length["ops"].items():
            times = [f"{row['fused_ms']:.3f}", f"{row['eager_ms']:.3f}", f"{row['ratio']:.2f}"]
            rates = [f"{row['fused_gb_s']:.0f}", f"{row['eager_gb_s']:.0f}"]
            table.add_row(name, *times, *rates, f"{row['gate']['error']:.5f}", f"{row['gate']['eager']:.5f}")
        yield table


def linear_tables(report: dict[str, Any]) -> Iterator[Table]:
    """One table: a row for every layer and arm."""
    table = Table("in x out", "", "call", "quantise", "multiply", "TFLOP/s", "x bf16", "error")
    table.title = f"{report['settings']['rows']} rows, ms"
    for layer in report["results"]:
        for name, arm in layer["arms"].items():
            stages = [_number(arm["stages_ms"].get(stage), ".2f") for stage in ("quantise", "multiply")]
            numbers = f"{arm['tflops']:.0f}", f"{arm['speedup']:.2f}", f"{arm['error']:.5f}"
            shape = f"{layer['in']} x {layer['out']}"
            table.add_row(shape, name, f"{arm['call_ms']:.2f}", *stages, *numbers)
    yield table


def merge_table(report: dict[str, Any]) -> Table:
    """One merge in a row."""
    table = Table("layers", "parameters", "rank", "adapter, GiB", "open, s", "merge, s", "beside, GiB", "turned")
    beside = "" if report["bytes_beside"] is None else f"{report['bytes_beside'] / 2**30:.2f}"
    table.add_row(
        str(report["layers"]),
        f"{report['parameters']:,}",
        str(report["settings"]["rank"]),
        f"{report['adapter_bytes'] / 2**30:.2f}",
        f"{report['open_s']:.2f}",
        f"{report['merge_s']:.2f}",
        beside,
        f"{report['turned']:.1e}",
    )
    return table


def error_tables(report: dict[str, Any]) -> Iterator[Table]:
    """One table of all lengths for each channel mean."""
    for mean in dict.fromkeys(result["structure"]["channel_mean"] for result in report["results"]):
        chosen = [result for result in report["results"] if result["structure"]["channel_mean"] == mean]
        lengths = [f"{result['rows']} rows" for result in chosen]
        table = Table("", "", *lengths, title=f"error (operator error), channel mean {mean:g}")
        for rows in zip(*(result["table"] for result in chosen), strict=True):
            table.add_row(rows[0]["table"], rows[0]["name"], *(_errors(row) for row in rows))
        yield table


def _errors(row: dict[str, Any]) -> str:
    inner = row.get("operator_error")
    return f"{row['error']:.4f}" + (f" ({inner:.4f})" if inner is not None else "")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def show(tables: Iterator[Table]) -> None:
    """Print tables on stdout."""
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    for table in tables:
        console.print(table)


def check_results(files: Mapping[str, Path | None]) -> None:
    """Refuse the files of a measurement that could not be written when it ends.

    Args:
        files: What is to be written, by the option that names it; None for nothing.

    Raises:
        SolgenError: one line; for a `--plot` without matplotlib too.
    """
    for option, path in files.items():
        if path is not None:
            check_new_file(option, path)
    if (plot := files.get("--plot")) is not None:
        formats = pyplot().matplotlib.backend_bases.FigureCanvasBase.get_supported_filetypes()
        if plot.suffix[1:] not in formats:
            raise InputError(f"--plot {plot}: unknown kind of picture; expected a name ending in .png, .svg or .pdf")


def pyplot() -> Any:
    """matplotlib's pyplot, which draws into files alone.

    Raises:
        SetupError: without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise SetupError("--plot needs matplotlib, which is not installed; pip install 'solgen[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def speed_plot(report: dict[str, Any], path: Path) -> None:
    """Complete calls as bars, one group a shape, on a logarithmic axis; needs matplotlib."""
    shapes = report["results"]
    names = list(shapes[0]["arms"])
    figure, axes = pyplot().subplots(figsize=(2 + 1.6 * len(shapes), 4.5))
    for index, name in enumerate(names):
        places = [place + (index - len(names) / 2 + 0.5) * 0.8 / len(names) for place in range(len(shapes))]
        times = [shape["arms"][name]["call_ms"] for shape in shapes]
        bars = axes.bar(places, times, 0.8 / len(names), label=name)
        axes.bar_label(
            bars,
            [f"{time:,.0f}" if time >= 100 else f"{time:.3g}" for time in times],
            fontsize=6,
            rotation=90,
            padding=2,
        )
    axes.set_xticks(range(len(shapes)), [f"{shape['heads']} x {shape['rows']:,}" for shape in shapes])
    axes.margins(y=0.15)
    axes.set(yscale="log", ylabel="ms a complete call", xlabel="heads x rows", title=report["device"])
    axes.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
