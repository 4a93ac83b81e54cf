"""`solgen train`: models that are trained here."""

from pathlib import Path
from typing import Annotated

import typer

from solgen import options

app = typer.Typer(help="Train models.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def train() -> None:
    """Train models."""


@app.command()
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the run; an unfinished run continues.")],
    smoke: Annotated[bool, typer.Option("--smoke", help="Every stage at toy size, on a CPU too.")] = False,
    start: Annotated[
        Path | None, typer.Option("--from", help="Run or model whose weights to begin with.", metavar="DIR")
    ] = None,
    steps: Annotated[
        list[str] | None, typer.Option(help="Steps of a stage, as flow=3000; repeatable.", metavar="STAGE=N")
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Train the embedded demo model: autoencoders, transformer, distillation, measurement."""
    from solgen.errors import InputError, SetupError

    given = _steps(steps or [])
    if start is not None and not ((start / "transformer").is_dir() or list(start.glob("*.safetensors"))):
        raise InputError(f"--from {start} is neither a run nor a model; name the folder given to an earlier -o")

    import torch

    if not smoke and not torch.cuda.is_available():
        raise SetupError("no CUDA GPU found; training needs one. Without it, only --smoke runs")

    from solgen.console import Console
    from solgen.engine.demo_training.recipe import RECIPE, SMOKE
    from solgen.engine.demo_training.run import train_demo

    recipe = (SMOKE if smoke else RECIPE).with_steps(given)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {output}: {error.strerror}; name a folder that can be made") from error
    device = torch.device("cuda" if torch.cuda.is_available() and not smoke else "cpu")
    with Console() as console:
        model = train_demo(recipe, output, device, console.note, start)
    print(model)


def _steps(given: list[str]) -> dict[str, int]:
    from solgen.errors import InputError

    found = {}
    for text in given:
        stage, _, count = text.partition("=")
        if not stage or not (count.isascii() and count.isdigit()):
            raise InputError(f"--steps {text} is not STAGE=N, such as flow=3000")
        found[stage] = int(count)
    return found
