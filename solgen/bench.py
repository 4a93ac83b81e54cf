"""`solgen bench`: measurements as tables, JSON and plots."""

import json
from pathlib import Path
from typing import Annotated

import typer

from solgen import options

app = typer.Typer(help="Measure parts of solgen.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Measure parts of solgen."""


@app.command()
def attention(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="One comparison, as 56x83072; repeatable.", metavar="HEADSxROWS", show_default="six shapes"),
    ] = None,
    attention: Annotated[
        str, typer.Option(help="Operators to compare, separated by commas.")
    ] = "dense,fp8,block-sparse,sol-attn1,sol-attn2",
    density: Annotated[float, typer.Option(help="Share of blocks that the sparse operators keep.")] = 0.1,
    tail: Annotated[str, typer.Option(help="Tail of sol-attn2: slots, anchors or none.")] = "slots",
    data: Annotated[str, typer.Option(help="random or structured.")] = "random",
    seed: Annotated[int, typer.Option(help="Seed of the inputs.", min=0)] = 0,
    runs: Annotated[int, typer.Option(help="Rounds that every operator takes part in.", min=1)] = 5,
    impl: Annotated[str | None, typer.Option(help="Of sol-attn2 and fp8: reference, triton or gluon.")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Measure errors on structured inputs instead.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here.", metavar="FILE")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the calls here.", metavar="FILE")] = None,
    debug: options.Debug = False,
) -> None:
    """Compare attention operators on the same inputs: speed, or with --errors accuracy."""
    from solgen.console import Console
    from solgen.engine.bench.show import error_tables, show, speed_plot, speed_tables

    with Console() as console:
        if errors:
            from solgen.engine.bench.errors import ErrorSettings, bench_errors

            lengths = tuple(rows for _, rows in _shapes(shape)) or ErrorSettings.rows
            heads = next((heads for heads, _ in _shapes(shape)), ErrorSettings.heads)
            chosen = ErrorSettings(rows=lengths, heads=heads, density=density, seed=seed, impl=impl)
            report = bench_errors(chosen, console.note)
        else:
            from solgen.engine.bench.attention import SHAPES, Settings, bench_attention

            settings = Settings(
                shapes=_shapes(shape) or SHAPES,
                arms=tuple(attention.split(",")),
                density=density,
                tail=tail,
                runs=runs,
                data=data,
                seed=seed,
                impl=impl,
            )
            report = bench_attention(settings, console.note)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    show(error_tables(report) if errors else speed_tables(report))
    if plot is not None and not errors:
        speed_plot(report, plot)


@app.command()
def kernels(
    rows: Annotated[
        list[int] | None,
        typer.Option(help="Rows of the sequence; repeatable.", min=1, show_default="35345, 83061, 219524"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.", min=0)] = 0,
    runs: Annotated[int, typer.Option(help="Rounds that both forms take part in.", min=1)] = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here.", metavar="FILE")] = None,
    debug: options.Debug = False,
) -> None:
    """Compare the fused ops of a transformer block with the eager forms they replace."""
    from solgen.console import Console
    from solgen.engine.bench.kernels import ROWS, Settings, bench_kernels
    from solgen.engine.bench.show import kernel_tables, show

    with Console() as console:
        report = bench_kernels(Settings(rows=tuple(rows or ROWS), runs=runs, seed=seed), console.note)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    show(kernel_tables(report))


def _shapes(given: list[str] | None) -> tuple[tuple[int, int], ...]:
    from solgen.errors import InputError

    shapes = []
    for text in given or []:
        heads, cross, rows = text.partition("x")
        if not (cross and heads.isdigit() and rows.isdigit() and int(heads) and int(rows)):
            raise InputError(f"--shape {text} is not HEADSxROWS; write it as 56x83072")
        shapes.append((int(heads), int(rows)))
    return tuple(shapes)
