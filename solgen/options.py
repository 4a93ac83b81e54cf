"""Command-line options that several commands share; one spelling each."""

from pathlib import Path
from typing import Annotated, Any

from typer import Option

Prompt = Annotated[str | None, Option("-p", "--prompt", help="What the clip shows and sounds like.")]
AnyPrompt = Annotated[
    str | None,
    Option("-p", "--prompt", help="What the clip would show and sound like.", show_default="that of a red ball"),
]
PromptFile = Annotated[
    Path | None, Option(help="One prompt a line, or .jsonl with per-line overrides.", metavar="FILE")
]
Preset = Annotated[str | None, Option(help="Settings to start from; solgen presets list.", show_default="5s")]
Output = Annotated[
    str | None, Option("-o", "--output", help="File or folder.", show_default="solgen-<preset>-<seed>.mp4")
]
Task = Annotated[str | None, Option(help="t2va, fl2va or ref2va; inferred from the inputs.")]
Image = Annotated[str | None, Option(help="First frame (fl2va).", metavar="FILE")]
LastImage = Annotated[str | None, Option(help="Last frame (fl2va).", metavar="FILE")]
Reference = Annotated[
    list[str] | None,
    Option(help="image:PATH, video:PATH or audio:PATH (ref2va); repeatable, in order.", metavar="TYPE:PATH"),
]
Seed = Annotated[int | None, Option(help="Noise seed; chosen and recorded when left out.", min=0)]
FixedSeed = Annotated[int | None, Option("--seed", help="Noise seed.", min=0, show_default="0")]
NumOutputs = Annotated[int, Option(help="Clips per prompt, with seeds N, N+1, ...")]
Steps = Annotated[int | None, Option(help="Denoiser calls.")]
Width = Annotated[int | None, Option(help="Pixels, a multiple of 32.")]
Height = Annotated[int | None, Option(help="Pixels, a multiple of 32.")]
Seconds = Annotated[float | None, Option(help="Length, rounded up to 17 n + 5 frames.")]
NumFrames = Annotated[int | None, Option(help="Length in frames, 17 n + 5.")]
Model = Annotated[str | None, Option(help="Folder or Hub repository in diffusers format.", metavar="PATH|REPO")]
Attention = Annotated[str | None, Option(help="sol-attn2, dense; for comparison sol-attn1, block-sparse, fp8.")]
Attentions = Annotated[
    str | None,
    Option(
        "--attention",
        help="Ways to attend, side by side: those of generate, and stock for diffusers' own call.",
        show_default="the preset's",
        metavar="A,B",
    ),
]
DummyWeights = Annotated[bool, Option("--dummy-weights", help="Random weights and prompt: speed without the model.")]
TextRows = Annotated[int | None, Option(help="Rows of the random prompt.", show_default="40, 38 at 1080p", metavar="N")]
Runs = Annotated[int, Option(help="Instrumented calls of each; 0 times the parts in the one timed call.", metavar="N")]
Trace = Annotated[Path | None, Option(help="Write a Chrome trace of one call of each here.", metavar="FILE")]
Plot = Annotated[Path | None, Option(help="Draw the parts as stacked bars here.", metavar="FILE")]
Epsilon = Annotated[float | None, Option(help="Router threshold in nats above the uniform share.")]
Density = Annotated[float | None, Option(help="Solve the threshold for this share of kept blocks.")]
Tail = Annotated[str | None, Option(help="slots, anchors or none.")]
LORA_FORM = "PATH|REPO/FILE[@REVISION][:STRENGTH]"
LORA_HELP = "Adapter, with strength 1 unless given; repeatable, summed."
Lora = Annotated[list[str] | None, Option(help=LORA_HELP, metavar=LORA_FORM)]
LoraMode = Annotated[str | None, Option(help="merge into the weights, or branch beside them.", show_default="merge")]
Offload = Annotated[
    str | None, Option(help="none, or keep weights in host memory: text-encoder, layers.", show_default="none")
]
Config = Annotated[
    Path | None,
    Option(
        help="TOML of preset tables and, by name, any option but prompt_file, num_outputs, set and flags.",
        metavar="FILE",
    ),
]
Set = Annotated[
    list[str] | None,
    Option("--set", help="Any preset key, as attention.dense_blocks=0-2; repeatable.", metavar="KEY=VALUE"),
]
Gpus = Annotated[
    int | None, Option(help="Processes that share every clip, one a GPU.", show_default="1, or torchrun's", metavar="N")
]
GpuCounts = Annotated[
    str | None,
    Option("--gpus", help="As for generate; several numbers, as 1,2,4, are compared.", metavar="N", show_default="1"),
]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace existing files.")]
Resume = Annotated[bool, Option("--resume", help="Skip clips that are already finished.")]
Json = Annotated[bool, Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, Option("--debug", help="Show tracebacks.")]


def request_options(given: dict[str, Any]) -> Any:
    """The `Options` of a command from its parameters, by name."""
    import dataclasses

    from solgen.engine.asked import Options

    names = {field.name for field in dataclasses.fields(Options)} - {"sets", "reference", "lora"}
    fields = {name: value for name, value in given.items() if name in names}
    return Options(
        **fields,
        sets=tuple(given["set_keys"] or ()),
        reference=tuple(given["reference"]) if given["reference"] else None,
        lora=tuple(given["lora"]) if given["lora"] else None,
    )
