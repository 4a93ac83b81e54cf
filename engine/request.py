"""From what the user typed to frozen requests: everything that can be refused without torch is refused here."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from pydantic import TypeAdapter, ValidationError

from solgen.engine.adapters.source import Source, parse_sources
from solgen.engine.adapters.terms import contract_terms
from solgen.errors import InputError
from solgen.presets.schema import FPS, Preset, Task, legal_frames, load_preset, read_table, set_key

MAX_PROMPT_CHARACTERS = 7000
"""Longest prompt MiniMax-H3 documents."""

REFERENCE_LIMITS = {"image": 9, "video": 3, "audio": 3}
"""References of a kind that a ref2va request may carry (model card)."""

MAX_REFERENCES = 12
"""References of all kinds together."""

CANVAS_MULTIPLE = 32
"""Pixels: VAE compression 16 times the transformer's patch of 2."""


@dataclass(frozen=True)
class Reference:
    """One ref2va reference; their order is part of the request."""

    kind: Literal["image", "video", "audio"]
    path: Path


@dataclass(frozen=True)
class Options:
    """One clip as asked for. None means not asked; `Request` is the answer.

    Attributes:
        sets: `--set` assignments, in order.
        config: Path of a TOML file holding any of these by name, and preset tables.
    """

    prompt: str | None = None
    preset: str | None = None
    output: str | None = None
    task: str | None = None
    image: str | None = None
    last_image: str | None = None
    reference: tuple[str, ...] | None = None
    seed: int | None = None
    steps: int | None = None
    width: int | None = None
    height: int | None = None
    seconds: float | None = None
    num_frames: int | None = None
    model: str | None = None
    attention: str | None = None
    epsilon: float | None = None
    density: float | None = None
    tail: str | None = None
    lora: tuple[str, ...] | None = None
    lora_mode: str | None = None
    sets: tuple[str, ...] = ()
    config: Path | None = None


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
    notes: tuple[str, ...] = field(default=(), compare=False)


def resolve(options: Options, *, seed: int, base: Path = Path()) -> Request:
    """Check one request and fill in what it leaves open.

    Args:
        options: What was asked; a config file fills fields that are None.
        seed: Used when `options.seed` is None.
        base: Folder that relative media paths of a prompt file start from.

    Raises:
        InputError: one line saying what, got, expected, how to fix.
    """
    options, tables = _with_config(options)
    prompt = _checked_prompt(options.prompt)
    name = options.preset or "5s"
    notes = [] if options.seed is not None else [f"seed {seed}"]
    tables += [("command line", _overrides(options, notes)), ("--set", _sets(options))]
    loras = parse_sources(options.lora or ())
    terms = contract_terms(name, loras, tables, notes)
    preset = load_preset(name, ("adapters", terms), *tables)
    references = tuple(_reference(text, base) for text in options.reference or ())
    task = _task(options, references)
    if task not in preset.tasks:
        raise InputError(
            f"preset {name} is {', '.join(preset.tasks)} only; {task} needs --preset {_all_task_preset(name)}"
        )
    image, last_image = (base / path if path else None for path in (options.image, options.last_image))
    if (keyframe := image or last_image) and options.width is None and options.height is None:
        preset = _fit_canvas(preset, keyframe, notes)
    _check_canvas(preset)
    return Request(
        prompt=prompt,
        preset_name=name,
        preset=preset,
        task=task,
        seed=seed if options.seed is None else options.seed,
        image=image,
        last_image=last_image,
        references=references,
        loras=loras,
        notes=tuple(notes),
    )


def options_from(table: dict[str, Any], origin: str) -> Options:
    """Check the types of options that come from a file.

    Raises:
        InputError: naming `origin`, the key and the value.
    """
    try:
        return TypeAdapter(Options).validate_python(table)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{origin}: {first['loc'][0]}: {first['msg']}, got {first['input']!r}") from error


def check_task(name: str) -> Task:
    """The task of this name.

    Raises:
        InputError: listing the tasks there are.
    """
    if name not in get_args(Task):
        raise InputError(f"unknown task {name!r}; expected {', '.join(get_args(Task))}")
    return cast("Task", name)


def _with_config(options: Options) -> tuple[Options, list[tuple[str, dict[str, Any]]]]:
    """Fill what is open from the config file; its tables become overrides of the preset."""
    if options.config is None:
        return options, []
    table = read_table(options.config)
    names = {field.name for field in dataclasses.fields(Options)} - {"sets", "config"}
    # `model`, `attention` and `lora` name both a flag and a table of the preset.
    flags = {key: table.pop(key) for key in list(table) if key in names and not isinstance(table[key], dict)}
    given = options_from(flags, str(options.config))
    filled = {key: getattr(given, key) for key in flags if getattr(options, key) is None}
    return dataclasses.replace(options, **filled), [(str(options.config), table)]


def _overrides(options: Options, notes: list[str]) -> dict[str, Any]:
    """The preset tables that the flags stand for."""
    canvas = {"width": options.width, "height": options.height, "num_frames": _num_frames(options, notes)}
    if options.epsilon is not None and options.density is not None:
        raise InputError("--epsilon and --density are two ways to set the router's threshold; give one")
    attention: dict[str, Any] = {"backend": options.attention, "tail": options.tail}
    if options.epsilon is not None:
        attention |= {"epsilon": options.epsilon, "density": "off", "top_k": "off"}
    if options.density is not None:
        attention |= {"density": options.density, "top_k": "off"}
    tables: dict[str, dict[str, Any]] = {
        "canvas": canvas,
        "sampler": {"steps": options.steps},
        "model": {"source": options.model},
        "attention": attention,
        "lora": {"mode": options.lora_mode},
    }
    given = {name: {k: v for k, v in table.items() if v is not None} for name, table in tables.items()}
    return {name: table for name, table in given.items() if table}


def _sets(options: Options) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for assignment in options.sets:
        set_key(table, assignment)
    return table


def _num_frames(options: Options, notes: list[str]) -> int | None:
    if options.seconds is None:
        return options.num_frames
    if options.num_frames is not None:
        raise InputError("--seconds and --num-frames both set the length; give one")
    if not 5.0 <= options.seconds <= 15.1:
        raise InputError(f"--seconds {options.seconds:g} is outside 5 to 15.1; the model makes 5.17 to 15.08 s")
    frames = legal_frames(round(options.seconds * FPS + 0.499))
    if frames / FPS != options.seconds:
        notes.append(f"{options.seconds:g} s -> {frames} frames ({frames / FPS:.2f} s)")
    return frames


def _check_canvas(preset: Preset) -> None:
    canvas = preset.canvas
    for name, value in (("width", canvas.width), ("height", canvas.height)):
        if value % CANVAS_MULTIPLE:
            below = value // CANVAS_MULTIPLE * CANVAS_MULTIPLE
            nearest = f"{below} or {below + CANVAS_MULTIPLE}" if below else str(CANVAS_MULTIPLE)
            raise InputError(f"{name} {value} is not a multiple of {CANVAS_MULTIPLE}; use {nearest}")
    if max(canvas.width, canvas.height) > 4 * min(canvas.width, canvas.height):
        raise InputError(f"canvas {canvas.width}x{canvas.height} is outside the aspect ratios 1:4 to 4:1")
    frames = canvas.num_frames
    above = legal_frames(frames)
    if above != frames:
        below = max(124, above - 17) if frames < 362 else 345
        nearest = " or ".join(str(n) for n in sorted({below, above}))
        raise InputError(f"{frames} frames are not 17 n + 5 within 124 to 362; the nearest are {nearest}")
    if preset.output.crop is not None and preset.output.crop % 2:
        raise InputError(f"output.crop {preset.output.crop} is odd; yuv420p needs an even number of rows")


def _fit_canvas(preset: Preset, keyframe: Path, notes: list[str]) -> Preset:
    """The keyframe's aspect ratio at the preset's short edge and area, as diffusers derives it."""
    from solgen.engine.media.read import read_image

    width, height = read_image(keyframe).size
    if not 0.25 <= width / height <= 4:
        raise InputError(f"{keyframe} is {width}x{height}; keyframes lie within the aspect ratios 1:4 to 4:1")
    canvas = preset.canvas
    scale = min(canvas.width, canvas.height) / min(width, height)
    scale = min(scale, (canvas.width * canvas.height / (width * height)) ** 0.5)
    fitted = [max(32, round(edge * scale / CANVAS_MULTIPLE) * CANVAS_MULTIPLE) for edge in (width, height)]
    if fitted == [canvas.width, canvas.height]:
        return preset
    notes.append(f"canvas {fitted[0]}x{fitted[1]} from {keyframe.name} ({width}x{height})")
    canvas = canvas.model_copy(update={"width": fitted[0], "height": fitted[1]})
    return preset.model_copy(update={"canvas": canvas})


def _checked_prompt(prompt: str | None) -> str:
    if prompt is None:
        raise InputError("no prompt; give --prompt TEXT or --prompt-file FILE")
    if not prompt.strip():
        raise InputError("the prompt is empty; describe the clip in --prompt TEXT")
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise InputError(
            f"the prompt has {len(prompt):,} characters; the limit is {MAX_PROMPT_CHARACTERS:,}. "
            "It is never cut; shorten it"
        )
    return prompt


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
    for kind, limit in REFERENCE_LIMITS.items():
        count = sum(reference.kind == kind for reference in references)
        if count > limit:
            raise InputError(f"{count} {kind} references; the limit is {limit}")
    if len(references) > MAX_REFERENCES:
        raise InputError(f"{len(references)} references; the limit is {MAX_REFERENCES} in all")
    if references and all(reference.kind == "audio" for reference in references):
        raise InputError("sound cannot be the only reference; add an image or a video")
    return inferred


def _reference(text: str, base: Path) -> Reference:
    kind, colon, path = text.partition(":")
    if not colon or kind not in REFERENCE_LIMITS or not path:
        raise InputError(f"--reference {text!r}: expected TYPE:PATH with TYPE one of image, video, audio")
    return Reference(cast("Literal['image', 'video', 'audio']", kind), base / path)


def _all_task_preset(name: str) -> str:
    return f"hyperflow-{name}" if name in ("5s", "12s", "1080p15") else "hyperflow-5s"
