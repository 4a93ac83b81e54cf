"""`solgen bench`: measurements as tables, JSON and plots."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from solgen import options

app = typer.Typer(help="Measure parts of solgen.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Measure parts of solgen."""


@app.command()
def attention(
    context: typer.Context,
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
    from solgen.engine.bench.show import check_results, error_tables, show, speed_plot, speed_tables

    check_results({"--json": json_path, "--plot": plot})
    shapes = _pairs(shape, "HEADSxROWS", "56x83072")
    if errors:
        _refuse_speed_options(context, shapes)
    with Console() as console:
        if errors:
            from solgen.engine.bench.errors import ErrorSettings, bench_errors

            lengths = tuple(rows for _, rows in shapes) or ErrorSettings.rows
            heads = next((heads for heads, _ in shapes), ErrorSettings.heads)
            chosen = ErrorSettings(rows=lengths, heads=heads, density=density, seed=seed, impl=impl)
            report = bench_errors(chosen, console.note)
        else:
            from solgen.engine.bench.attention import SHAPES, Settings, bench_attention

            settings = Settings(
                shapes=shapes or SHAPES,
                arms=tuple(attention.split(",")),
                density=density,
                tail=tail,
                runs=runs,
                data=data,
                seed=seed,
                impl=impl,
            )
            report = bench_attention(settings, console.note)
    show(error_tables(report) if errors else speed_tables(report))
    _write(report, json_path)
    if plot is not None:
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
    from solgen.engine.bench.show import check_results, kernel_tables, show

    check_results({"--json": json_path})
    with Console() as console:
        report = bench_kernels(Settings(rows=tuple(rows or ROWS), runs=runs, seed=seed), console.note)
    show(kernel_tables(report))
    _write(report, json_path)


@app.command()
def linear(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="One layer, as 5376x7168; repeatable.", metavar="INxOUT", show_default="those of a block"),
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows of the packed sequence.", metavar="N")] = 83_061,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.", min=0)] = 0,
    runs: Annotated[int, typer.Option(help="Rounds that every arm takes part in.", min=1)] = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here.", metavar="FILE")] = None,
    debug: options.Debug = False,
) -> None:
    """Compare the linear layers of a block in bf16 and FP8: speed and error."""
    from solgen.console import Console
    from solgen.engine.bench.linear import LAYERS, LinearSettings, bench_linear
    from solgen.engine.bench.show import check_results, linear_tables, show

    check_results({"--json": json_path})
    with Console() as console:
        report = bench_linear(
            LinearSettings(_pairs(shape, "INxOUT", "5376x7168") or LAYERS, rows=rows, runs=runs, seed=seed),
            console.note,
        )
    show(linear_tables(report))
    _write(report, json_path)


@app.command()
def merge(
    preset: Annotated[str, typer.Option(help="Whose model is merged into.")] = "5s",
    rank: Annotated[int, typer.Option(help="Of the adapter.", metavar="N")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the adapter.", min=0)] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here.", metavar="FILE")] = None,
    debug: options.Debug = False,
) -> None:
    """Time the merge of a random adapter into random weights of a model's size."""
    from solgen.console import Console
    from solgen.engine.bench.merge import MergeSettings, bench_merge
    from solgen.engine.bench.show import check_results, merge_table, show

    check_results({"--json": json_path})
    with Console() as console:
        report = bench_merge(MergeSettings(preset, rank, seed), console.note)
    show(iter([merge_table(report)]))
    _write(report, json_path)


@app.command()
def scaling(
    profiles: Annotated[list[Path], typer.Argument(help="JSON of solgen profile; with --gpus 1,2, measured beside.")],
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, separated by commas.")] = "1,2,4,8",
    link: Annotated[float, typer.Option(help="GB/s that a GPU sends and receives at once.", min=1)] = 323.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here.", metavar="FILE")] = None,
    debug: options.Debug = False,
) -> None:
    """Predict a denoiser call on several GPUs from its profile on one; measures nothing."""
    from solgen.engine.bench.scaling import Machine, bench_scaling, prediction_tables
    from solgen.engine.bench.show import check_results, show
    from solgen.engine.profile.scaling import gpu_counts

    check_results({"--json": json_path})
    counts = gpu_counts(gpus, names=None, trace=None)
    reports = bench_scaling(profiles, counts, Machine(link=link))
    show(prediction_tables(reports))
    _write(reports, json_path)


def _write(report: Any, path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


def _refuse_speed_options(context: typer.Context, shapes: tuple[tuple[int, int], ...]) -> None:
    """Refuse what would change nothing with `--errors`: it measures every operator and tail on the same heads."""
    from solgen.errors import InputError

    for name in ("attention", "tail", "data", "runs", "plot"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(f"--errors measures the same with any --{name}; leave --{name} out")
    if len({heads for heads, _ in shapes}) > 1:
        raise InputError("--errors compares sequences of one number of heads; give every --shape the same")


def _pairs(given: list[str] | None, form: str, example: str) -> tuple[tuple[int, int], ...]:
    """Pairs of whole numbers from the values of `--shape`."""
    from solgen.errors import InputError

    pairs = []
    for text in given or []:
        first, cross, second = text.partition("x")
        if not (cross and first.isdigit() and second.isdigit() and int(first) and int(second)):
            raise InputError(f"--shape {text} is not {form}; write it as {example}")
        pairs.append((int(first), int(second)))
    return tuple(pairs)
