"""`solgen lora`: look at adapters, or merge them into a model once and for all."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from solgen import options

app = typer.Typer(help="Inspect adapters, or merge them into a model.", no_args_is_help=True, rich_markup_mode=None)


@app.command("inspect")
def inspect(
    file: Annotated[str, typer.Argument(help="PATH, or REPO/FILE on the Hub.", metavar="FILE")],
    model: Annotated[
        str | None,
        typer.Option(help="Model to fit it to.", metavar="PATH|REPO", show_default="MiniMax-H3's shapes, no download"),
    ] = None,
    set_keys: options.Set = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Say what a file is and whether it would be applied; exit code 2 if not."""
    from solgen.engine.adapters.source import parse_sources

    (source,) = parse_sources((file,))
    settings = _preset(set_keys, model)
    from solgen.engine.adapters.inspect import h3_shapes, inspect_adapter, model_shapes

    if model is None:
        shapes = h3_shapes()
    else:
        from solgen.engine.repository import open_repository

        shapes = model_shapes(open_repository(settings.model, "t2va").folders["transformer"])
    report = inspect_adapter(source, shapes, settings.lora)
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        for key, value in report.items():
            print(f"{key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
    if report["verdict"] != "ok":
        raise typer.Exit(2)


@app.command("merge")
def merge(
    lora: Annotated[list[str], typer.Option(help=options.LORA_HELP, metavar=options.LORA_FORM)],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to create.", metavar="DIR")],
    model: options.Model = None,
    task: Annotated[str, typer.Option(help="ref2va merges into the transformer for references.")] = "t2va",
    set_keys: options.Set = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Write a model with adapters merged into its transformer."""
    from solgen.engine.adapters.source import parse_sources
    from solgen.engine.request import check_task

    sources = parse_sources(tuple(lora))
    settings = _preset(set_keys, model)
    checked = check_task(task)
    from solgen.console import Console
    from solgen.engine.adapters.checkpoint import merge_checkpoint

    with Console() as console:
        record = merge_checkpoint(settings.model, sources, output, console, task=checked, settings=settings.lora)
    print(json.dumps(record, ensure_ascii=False) if as_json else output)


def _preset(set_keys: list[str] | None, model: str | None) -> Any:
    """The base preset with `--set` and `--model`, for its lora and model tables."""
    from solgen.presets.schema import load_preset, set_key

    table: dict[str, Any] = {}
    for assignment in set_keys or ():
        set_key(table, assignment)
    chosen = {"model": {"source": model}} if model else {}
    return load_preset("base-5s", ("command line", chosen), ("--set", table))
