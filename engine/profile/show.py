"""A profile as tables and as stacked bars."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from solgen.engine.bench.show import pyplot


def headline(report: dict[str, Any]) -> str:
    """What ran where, in a line."""
    facts = {"device": report["device"]} | report["facts"]
    return " · ".join(f"{key} {_number(value) if isinstance(value, int) else value}" for key, value in facts.items())


def tables(report: dict[str, Any]) -> Iterator[Table]:
    """The parts of the denoiser call with a column an arm, what each arm is, and the stages of the request."""
    arms = report["arms"]
    table = Table("denoiser call, ms", *(arm["name"] for arm in arms), "calls")
    table.add_row("call, no instruments", *(_ms(arm["call_ms"]) for arm in arms), "1", style="bold")
    for rows in zip(*(arm["modules"] for arm in arms), strict=True):
        cells = [
            f"{_ms(row['ms'])} {row['ms'] / arm['instrumented_ms']:6.1%}" for row, arm in zip(rows, arms, strict=True)
        ]
        indent = "" if rows[0]["part_of"] is None else "  "
        table.add_row(indent + rows[0]["name"], *cells, str(max(row["calls"] for row in rows)))
    table.add_row("call, instruments", *(_ms(arm["instrumented_ms"]) for arm in arms), "1", style="bold")
    table.add_row("without attention", *(_ms(arm["without_attention_ms"]) for arm in arms), "")
    yield table
    yield _arms(arms)
    stages = Table("stage", "s")
    for name, seconds in report["stages"].items():
        stages.add_row(name, f"{seconds:.2f}")
    yield stages


def _arms(arms: list[dict[str, Any]]) -> Table:
    first = arms[0]["name"]
    table = Table("", *(arm["name"] for arm in arms))
    rows = {
        f"faster than {first}": [f"{arm['speedup'].get(first, 1.0):.2f}x" for arm in arms],
        f"than {first}, attention free": [f"{arm['ceiling']:.2f}x" for arm in arms],
        "density": [_decimals(arm["density"]) for arm in arms],
        "density with text, sound": [_decimals(arm["density_all"]) for arm in arms],
        "sparse blocks": [str(arm["sparse_blocks"]) for arm in arms],
        "epsilon": [_decimals(arm["epsilon"]) for arm in arms],
        "sparse kernels": [arm["impl"] or "" for arm in arms],
        "dense kernel": [arm["dense"] for arm in arms],
        "fusion": ["on" if arm["fusion"] else "off" for arm in arms],
        "AdaLN": [arm["adaln"] for arm in arms],
        "peak memory, GiB": ["" if arm["peak_gib"] is None else f"{arm['peak_gib']:.1f}" for arm in arms],
        "warm-up with compilation, s": [f"{arm['warm_up_s']:.1f}" for arm in arms],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def plot(report: dict[str, Any], path: Path) -> None:
    """Stacked bars, one an arm: the parts of the instrumented call; needs matplotlib."""
    arms = report["arms"]
    names = [row["name"] for row in arms[0]["modules"] if row["part_of"] is None]
    figure, axes = pyplot().subplots(figsize=(4.5 + 1.2 * len(arms), 5))
    bottoms = [0.0] * len(arms)
    for name in names:
        values = [next(row["ms"] for row in arm["modules"] if row["name"] == name) / 1e3 for arm in arms]
        axes.bar(range(len(arms)), values, 0.6, bottom=bottoms, label=name)
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    for place, (arm, top) in enumerate(zip(arms, bottoms, strict=True)):
        axes.annotate(f"{arm['call_ms'] / 1e3:.3g} s", (place, top), ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(arms)), [arm["name"] for arm in arms])
    axes.margins(y=0.08)
    axes.set(ylabel="s a denoiser call", title=f"{report['device']}, {report['facts']['rows']:,} rows")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot().close(figure)


def _ms(value: float) -> str:
    return f"{value:,.1f}"


def _number(value: int) -> str:
    return f"{value:,}"


def _decimals(value: float | str | None) -> str:
    return f"{value:.4f}" if isinstance(value, float) else value or ""
