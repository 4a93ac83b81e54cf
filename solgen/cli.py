"""The `solgen` command line. Nothing heavy is imported until a command runs."""

import json
import secrets
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from solgen import __version__, options
from solgen.bench import app as bench_app
from solgen.lora import app as lora_app
from solgen.train import app as train_app

app = typer.Typer(
    help="Generate video with sound from MiniMax-H3, fast.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
presets_app = typer.Typer(help="Show the presets.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(presets_app, name="presets")
app.add_typer(bench_app, name="bench")
app.add_typer(lora_app, name="lora")
app.add_typer(train_app, name="train")


def _version(value: bool) -> None:
    if value:
        print(f"solgen {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Generate video with sound from MiniMax-H3, fast."""


@app.command()
def generate(
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    preset: options.Preset = None,
    output: options.Output = None,
    task: options.Task = None,
    image: options.Image = None,
    last_image: options.LastImage = None,
    reference: options.Reference = None,
    seed: options.Seed = None,
    num_outputs: options.NumOutputs = 1,
    steps: options.Steps = None,
    width: options.Width = None,
    height: options.Height = None,
    seconds: options.Seconds = None,
    num_frames: options.NumFrames = None,
    model: options.Model = None,
    attention: options.Attention = None,
    epsilon: options.Epsilon = None,
    density: options.Density = None,
    tail: options.Tail = None,
    lora: options.Lora = None,
    lora_mode: options.LoraMode = None,
    offload: options.Offload = None,
    gpus: options.Gpus = None,
    config: options.Config = None,
    set_keys: options.Set = None,
    overwrite: options.Overwrite = False,
    resume: options.Resume = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Make a clip (or several) and a JSON record beside each."""
    given = dict(locals())
    from solgen.engine.batch import plan_jobs

    plan = partial(
        plan_jobs,
        options.request_options(given),
        prompt_file=prompt_file,
        num_outputs=num_outputs,
        seed=secrets.randbelow(2**31),
        overwrite=overwrite,
        resume=resume,
    )
    from solgen.ranks import run

    jobs, records = run(_generate, plan, gpus=gpus, debug=debug, overwrite=overwrite, resume=resume)
    if as_json and jobs:
        print(json.dumps(records if len(jobs) > 1 else records[0]))
    else:
        for job in jobs:
            print(job.output)


def _generate(jobs: Any, listener: Any, **options: Any) -> Any:
    from solgen.engine.generate import generate

    return generate(jobs, listener, **options)


@app.command()
def profile(
    prompt: options.AnyPrompt = None,
    preset: options.Preset = None,
    task: options.Task = None,
    image: options.Image = None,
    last_image: options.LastImage = None,
    reference: options.Reference = None,
    seed: options.FixedSeed = None,
    steps: options.Steps = None,
    width: options.Width = None,
    height: options.Height = None,
    seconds: options.Seconds = None,
    num_frames: options.NumFrames = None,
    model: options.Model = None,
    attention: options.Attentions = None,
    epsilon: options.Epsilon = None,
    density: options.Density = None,
    tail: options.Tail = None,
    lora: options.Lora = None,
    lora_mode: options.LoraMode = None,
    offload: options.Offload = None,
    dummy_weights: options.DummyWeights = False,
    text_rows: options.TextRows = None,
    runs: options.Runs = 3,
    gpus: options.GpuCounts = None,
    trace: options.Trace = None,
    plot: options.Plot = None,
    config: options.Config = None,
    set_keys: options.Set = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Make one denoiser call of a request, attended one way or several, and show where its time goes."""
    given = dict(locals())
    from solgen.engine.bench.show import check_results, show
    from solgen.engine.profile.plan import plan_arms
    from solgen.engine.profile.scaling import gpu_counts

    check_results({"--trace": trace, "--plot": plot})
    names = None if attention is None else attention.split(",")
    counts = gpu_counts(gpus, names=names, trace=trace)
    plan = partial(plan_arms, options.request_options(given), names, dummy=dummy_weights, text_rows=text_rows)
    if len(counts) > 1:
        from solgen.engine.profile.scaling import scaling
        from solgen.ranks import run_counts

        with tempfile.TemporaryDirectory(prefix="solgen-outputs-") as folder:
            outputs = Path(folder)
            reports = run_counts(_profile, plan, counts=counts, debug=debug, names=names, runs=runs, outputs=outputs)
            rows = scaling(reports, outputs)
        _show_scaling(rows, reports, plot, as_json)
        return
    from solgen.ranks import run

    count = counts[0] if counts else None
    jobs, report = run(_profile, plan, gpus=count, debug=debug, names=names, runs=runs, trace=trace)
    if not jobs:
        return
    from solgen.engine.profile.show import headline, tables
    from solgen.engine.profile.show import plot as draw

    if plot is not None:
        draw(report, plot)
    if as_json:
        print(json.dumps(report))
    else:
        print(headline(report))
        show(tables(report))


def _show_scaling(rows: list[dict[str, Any]], reports: list[dict[str, Any]], plot: Path | None, as_json: bool) -> None:
    from solgen.engine.bench.show import show
    from solgen.engine.profile.scaling import scaling_plot, scaling_tables
    from solgen.engine.profile.show import headline, tables

    if as_json:
        print(json.dumps({"scaling": rows, "reports": reports}))
    else:
        for report in reports:
            print(headline(report))
            show(tables(report))
        show(scaling_tables(rows))
    if plot is not None:
        scaling_plot(rows, f"{reports[0]['device']}, {reports[0]['facts']['rows']:,} rows", plot)


def _profile(jobs: Any, listener: Any, **options: Any) -> Any:
    from solgen.engine.profile.run import profile

    return profile(jobs, listener, **options)


@app.command()
def decode(
    latents: Annotated[Path, typer.Argument(help="File kept by a run whose decoding failed.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The mp4 to write.")],
    overwrite: options.Overwrite = False,
    debug: options.Debug = False,
) -> None:
    """Decode kept latents into an mp4."""
    from solgen.console import Console
    from solgen.engine.output import decode_file

    with Console() as console:
        decode_file(latents, output, console, overwrite=overwrite)
    print(output)


@presets_app.command("list")
def presets_list(as_json: options.Json = False) -> None:
    """Names and what they stand for."""
    from solgen.presets.schema import load_preset, preset_names

    found = {name: load_preset(name) for name in preset_names()}
    if as_json:
        print(json.dumps({name: preset.model_dump(mode="json") for name, preset in found.items()}))
        return
    width = max(map(len, found))
    for name, preset in found.items():
        print(f"{name:<{width}}  {preset.description}")


@presets_app.command("show")
def presets_show(name: str, as_json: options.Json = False) -> None:
    """Every resolved key of one preset."""
    from solgen.presets.schema import load_preset

    table = load_preset(name).model_dump(mode="json")
    if as_json:
        print(json.dumps(table))
        return
    for key, value in table.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for sub, inner in rows:
            sys.stdout.write(f"{key}{'.' if sub else ''}{sub} = {json.dumps(inner, ensure_ascii=False)}\n")
