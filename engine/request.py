"""From what the user typed to frozen requests: everything that can be refused without torch is refused here."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

from solgen.engine.adapters.source import Source, parse_sources
from solgen.engine.adapters.terms import contract_terms
from solgen.engine.asked import Asked, Options, gather
from solgen.engine.limits import (
    CANVAS_MULTIPLE,
    REFERENCE_LIMITS,
    check_canvas,
    check_prompt,
    check_references,
    check_seed,
    frames_of,
    is_aspect,
)
from solgen.engine.paths import check_file, recorded_path
from solgen.errors import InputError
from solgen.presets.schema import FPS, Output, Preset, Task, load_preset


@dataclass(frozen=True)
class Reference:
    """One ref2va reference; their order is part of the request."""

    kind: Literal["image", "video", "audio"]
    path: Path


@dataclass(frozen=True)
class Request:
    """One clip, every value resolved.

    Attributes:
        prompt: Text as given.
        preset_name: Name the settings started from.
        preset: Resolved settings.
        task: t2va, fl2va or ref2va.
        seed: Seed of the CPU generator that draws every noise.
        image: First keyframe.
        last_image: Last keyframe.
        references: ref2va references in order.
        loras: Adapters beside the preset's own, in order.
        text_rows: Rows of the random prompt of a model with random weights; None for a real one.
        notes: Lines the user should see, such as a rounded duration.
    """

    prompt: str
    preset_name: str
    preset: Preset
    task: Task
    seed: int
    image: Path | None = None
    last_image: Path | None = None
    references: tuple[Reference, ...] = ()
    loras: tuple[Source, ...] = ()
    text_rows: int | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)


def resolve(options: Options, *, seed: int) -> Request:
    """Check one request and fill in what it leaves open; `seed` stands in where none is given.

    Raises:
        InputError: one line saying what, got, expected, how to fix.
    """
    return settle(gather(options), seed=seed)


def settle(asked: Asked, *, seed: int) -> Request:
    """`resolve` for what has been gathered already.

    Raises:
        InputError: one line saying what, got, expected, how to fix.
    """
    options = asked.options
    prompt = check_prompt(options.prompt)
    name = options.preset or "5s"
    notes = [] if options.seed is not None else [f"seed {seed}"]
    seed = seed if options.seed is None else options.seed
    check_seed(seed)
    loras = parse_sources(options.lora or ())
    terms = contract_terms(name, loras, asked.tables, notes)
    preset = load_preset(name, ("adapters", terms), *asked.tables)
    notes += _rounding(options.seconds, preset.canvas.num_frames)
    references = tuple(_reference(text) for text in options.reference or ())
    task = _task(options, references)
    if task not in preset.tasks:
        raise InputError(
            f"preset {name} is {', '.join(preset.tasks)} only; {task} needs --preset {_all_task_preset(name)}"
        )
    image = None if options.image is None else recorded_path("--image", options.image)
    last_image = None if options.last_image is None else recorded_path("--last-image", options.last_image)
    for reference in references:
        check_file(reference.path, reference.kind)
    if keyframes := [path for path in (image, last_image) if path]:
        preset = _fit_canvas(preset, keyframes, asked, notes)
    check_canvas(preset)
    return Request(
        prompt=prompt,
        preset_name=name,
        preset=preset,
        task=task,
        seed=seed,
        image=image,
        last_image=last_image,
        references=references,
        loras=loras,
        notes=tuple(notes),
    )


def check_task(name: str) -> Task:
    """The task of this name.

    Raises:
        InputError: listing the tasks there are.
    """
    if name not in get_args(Task):
        raise InputError(f"unknown task {name!r}; expected {', '.join(get_args(Task))}")
    return cast("Task", name)


def _rounding(seconds: float | None, num_frames: int) -> Iterator[str]:
    """A line for a duration that the clip does not have to the frame."""
    if seconds is not None and frames_of(seconds) == num_frames != seconds * FPS:
        yield f"{seconds:g} s -> {num_frames} frames ({num_frames / FPS:.2f} s)"


def _fit_canvas(preset: Preset, keyframes: list[Path], asked: Asked, notes: list[str]) -> Preset:
    """The first keyframe's aspect ratio at the preset's short edge and area, unless a canvas was asked for.

    That is how diffusers derives it. A crop belongs to the preset's own canvas and goes with it.
    """
    sizes = [_keyframe_size(path) for path in keyframes]
    sides = asked.keys("canvas") & {"width", "height"}
    if len(sides) == 1:
        raise InputError(f"{sides.pop()} alone beside a keyframe; give --width and --height, or neither to fit it")
    if sides:
        return preset
    (width, height), canvas = sizes[0], preset.canvas
    scale = min(canvas.width, canvas.height) / min(width, height)
    scale = min(scale, (canvas.width * canvas.height / (width * height)) ** 0.5)
    fitted = [max(32, round(edge * scale / CANVAS_MULTIPLE) * CANVAS_MULTIPLE) for edge in (width, height)]
    if fitted == [canvas.width, canvas.height]:
        return preset
    notes.append(f"canvas {fitted[0]}x{fitted[1]} from {keyframes[0].name} ({width}x{height})")
    canvas = canvas.model_copy(update={"width": fitted[0], "height": fitted[1]})
    output = preset.output if "crop" in asked.keys("output") else Output()
    return preset.model_copy(update={"canvas": canvas, "output": output})


def _keyframe_size(path: Path) -> tuple[int, int]:
    """Width and height of a picture that the model can start or end with."""
    check_file(path, "image")
    from PIL import ImageOps

    from solgen.engine.media.probe import open_image

    width, height = ImageOps.exif_transpose(open_image(path)).size
    if not is_aspect(width, height):
        raise InputError(f"{path} is {width}x{height}; keyframes lie within the aspect ratios 1:4 to 4:1")
    return width, height


def _task(options: Options, references: tuple[Reference, ...]) -> Task:
    keyframes = options.image is not None or options.last_image is not None
    if keyframes and references:
        raise InputError("keyframes (--image, --last-image) and --reference are different tasks; give one kind")
    inferred: Task = "ref2va" if references else "fl2va" if keyframes else "t2va"
    if options.task is not None:
        check_task(options.task)
    if options.task not in (None, inferred):
        needs = {"t2va": "no media", "fl2va": "--image or --last-image", "ref2va": "--reference TYPE:PATH"}
        raise InputError(f"--task {options.task} takes {needs[options.task]}; these inputs are {inferred}")
    check_references([reference.kind for reference in references])
    return inferred


def _reference(text: str) -> Reference:
    kind, colon, path = text.partition(":")
    if not colon or kind not in REFERENCE_LIMITS or not path:
        raise InputError(f"--reference {text!r}: expected TYPE:PATH with TYPE one of image, video, audio")
    return Reference(cast("Literal['image', 'video', 'audio']", kind), recorded_path("--reference", path))


def _all_task_preset(name: str) -> str:
    return f"hyperflow-{name}" if name in ("5s", "12s", "1080p15") else "hyperflow-5s"
