"""What the user asks for, gathered from a config file, the command line and a line of a prompt file."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from solgen.engine.limits import MAX_SEED, frames_of
from solgen.engine.paths import check_unicode, expanded
from solgen.errors import InputError
from solgen.presets.complaint import describe
from solgen.presets.schema import check_table, read_table, set_key

COMMAND_ONLY = ("prompt_file", "num_outputs", "gpus", "overwrite", "resume", "set", "config", "json", "debug")
"""Options that a config file cannot set."""


@dataclass(frozen=True)
class Options:
    """One clip as asked for in one place. None means not asked.

    Attributes:
        sets: `--set` assignments, in order.
        config: Path of a TOML file holding any of the others by name, and preset tables.
    """

    prompt: str | None = None
    preset: str | None = None
    output: str | None = None
    task: str | None = None
    image: str | None = None
    last_image: str | None = None
    reference: tuple[str, ...] | None = None
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED)] = None
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
    offload: str | None = None
    sets: tuple[str, ...] = ()
    config: Path | None = None


NAMES = tuple(field.name for field in dataclasses.fields(Options) if field.name not in ("sets", "config"))
"""Options that files may give."""


@dataclass(frozen=True)
class Asked:
    """What several places ask for together.

    Attributes:
        options: Every option as the highest place has it.
        tables: The preset tables that the places stand for, each with where it comes from, lowest first.
    """

    options: Options = Options()
    tables: tuple[tuple[str, dict[str, Any]], ...] = ()

    def under(self, origin: str, options: Options) -> "Asked":
        """This with `options` from `origin` laid over it."""
        given = {name: value for name in NAMES if (value := getattr(options, name)) is not None}
        merged = dataclasses.replace(self.options, **given)
        return Asked(merged, (*self.tables, (origin, _preset_table(options))))

    def keys(self, name: str) -> set[str]:
        """Keys of one table of the preset that somebody asked for."""
        return {key for _, table in self.tables for key in table.get(name, {})}


def gather(options: Options) -> Asked:
    """The command line over its config file, `--set` on top.

    Raises:
        InputError: naming the place, the key and the value.
    """
    asked = Asked() if options.config is None else _read_config(expanded(options.config))
    texts = {"--model": (options.model,), "--lora": options.lora, "--set": options.sets}
    for option, text in ((option, text) for option, given in texts.items() for text in given or () if text):
        check_unicode(f"{option} {text!r}", text)
    asked = asked.under("command line", options)
    table: dict[str, Any] = {}
    for assignment in options.sets:
        set_key(table, assignment)
    check_table("--set", table)
    return Asked(asked.options, (*asked.tables, ("--set", table)))


def options_from(table: dict[str, Any], origin: str) -> Options:
    """Check the types of options that come from a file.

    Raises:
        InputError: naming `origin`, the key and the value.
    """
    for key, value in table.items():
        if isinstance(value, bool):
            raise InputError(f"{origin}: {key}: expected a number or a text, got {str(value).lower()}")
    try:
        return TypeAdapter(Options).validate_python(table)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{origin}: {first['loc'][0]}: {describe(first)}") from error


@contextmanager
def blamed_on(place: str) -> Iterator[None]:
    """Begin the message of an InputError with `place`, unless it names it already."""
    try:
        yield
    except InputError as error:
        if place in str(error):
            raise
        raise InputError(f"{place}: {error}") from error


def _read_config(path: Path) -> Asked:
    """Options of a TOML file at its top, preset tables below; `model` and `attention` are either."""
    table = read_table(path)
    options = {key: table.pop(key) for key in NAMES if key in table and not isinstance(table[key], dict)}
    if only := set(COMMAND_ONLY) & set(table):
        key = min(only)
        raise InputError(f"{path}: {key} works on the command line alone, as --{key.replace('_', '-')}")
    check_table(str(path), table, others=NAMES)
    with blamed_on(str(path)):
        return Asked(tables=((str(path), table),)).under(str(path), options_from(options, str(path)))


def _preset_table(options: Options) -> dict[str, Any]:
    """The preset table that options stand for."""
    attention: dict[str, Any] = {"backend": options.attention, "tail": options.tail}
    if options.epsilon is not None and options.density is not None:
        raise InputError("--epsilon and --density are two ways to set the router's threshold; give one")
    if options.epsilon is not None:
        attention |= {"epsilon": options.epsilon, "density": "off", "top_k": "off"}
    if options.density is not None:
        attention |= {"density": options.density, "top_k": "off"}
    tables: dict[str, dict[str, Any]] = {
        "canvas": {"width": options.width, "height": options.height, "num_frames": _num_frames(options)},
        "sampler": {"steps": options.steps},
        "model": {"source": options.model},
        "attention": attention,
        "lora": {"mode": options.lora_mode},
        "memory": {"offload": options.offload},
    }
    given = {name: {k: v for k, v in table.items() if v is not None} for name, table in tables.items()}
    return {name: table for name, table in given.items() if table}


def _num_frames(options: Options) -> int | None:
    if options.seconds is None:
        return options.num_frames
    if options.num_frames is not None:
        raise InputError("--seconds and --num-frames both set the length; give one")
    return frames_of(options.seconds)
