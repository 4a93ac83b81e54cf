"""Several clips from one command: prompt files, seeds, and the name of every output."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solgen.engine.asked import Asked, Options, blamed_on, gather, options_from
from solgen.engine.limits import check_seed
from solgen.engine.naming import check_name, clip_key, free_name, named_file, numbered
from solgen.engine.paths import expanded
from solgen.engine.request import Request, settle
from solgen.errors import InputError

OVERRIDES = frozenset(
    "prompt output task image last_image reference seed steps width height seconds num_frames".split()
)
"""Keys that a line of a .jsonl prompt file may set."""


@dataclass(frozen=True)
class Job:
    """One request and where its clip goes; the sidecar stands beside it as `.json`."""

    request: Request
    output: Path

    @property
    def sidecar(self) -> Path:
        """Path of the JSON record of the clip."""
        return self.output.with_suffix(".json")


@dataclass(frozen=True)
class Row:
    """What one prompt asks for, and the line it stands in ("" for the command's own)."""

    asked: Asked
    place: str = ""


def plan_jobs(
    options: Options, *, prompt_file: Path | None, num_outputs: int, seed: int, overwrite: bool, resume: bool
) -> list[Job]:
    """Resolve every clip of a command and reserve its name.

    Args:
        options: The command's own request.
        prompt_file: Text with one prompt a line, or `.jsonl` with overrides per line.
        num_outputs: Clips per prompt, with seeds counted up from the first.
        seed: First seed where none was given.
        overwrite: Whether existing files may be replaced.
        resume: Whether existing clips are somebody's finished work to be skipped later.

    Raises:
        InputError: for any request that cannot work; nothing is written before all are checked.
    """
    if num_outputs < 1:
        raise InputError(f"--num-outputs {num_outputs}; expected 1 or more")
    if prompt_file is not None and options.prompt is not None:
        raise InputError("--prompt and --prompt-file both set the prompt; give one")
    asked = gather(options)
    rows = [Row(asked)] if prompt_file is None else list(_rows(expanded(prompt_file), asked))
    jobs: list[Job] = []
    taken: set[str] = set()
    for row, names in zip(rows, numbered([_named_file(row) for row in rows], num_outputs), strict=True):
        with blamed_on(row.place):
            if resume and row.asked.options.seed is None:
                seed = _resumed_seed(names, seed)
            first = settle(row.asked, seed=seed)
            check_seed(first.seed + num_outputs - 1)
            for index in range(num_outputs):
                request = dataclasses.replace(first, seed=first.seed + index)
                folder = expanded(row.asked.options.output or "")
                stem = f"solgen-{request.preset_name}-{request.seed}"
                output = names[index] if names else free_name(folder, stem, taken, reuse=overwrite or resume)
                if clip_key(output) in taken:
                    raise InputError(f"{output} is the name of two clips; give each its own")
                check_name(output, overwrite=overwrite, resume=resume)
                taken.add(clip_key(output))
                jobs.append(Job(request, output))
    return jobs


def _named_file(row: Row) -> Path | None:
    with blamed_on(row.place):
        return named_file(row.asked.options.output)


def _resumed_seed(names: Sequence[Path], seed: int) -> int:
    """First seed of the run that left these clips, by its records; `seed` if it left none."""
    if not names:
        raise InputError("--resume needs --seed, or an --output whose record names it")
    for index, path in enumerate(names):
        try:
            recorded = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["request"]["seed"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if type(recorded) is int and recorded >= index:
            return recorded - index
    return seed


def _rows(path: Path, asked: Asked) -> Iterator[Row]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read --prompt-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--prompt-file {path} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InputError(f"--prompt-file {path} holds no prompt")
    for number, line in lines:
        place = f"{path} line {number}"
        with blamed_on(place):
            if path.suffix.lower() == ".jsonl":
                options = _anchored(options_from(_object(line, place), place), path.parent)
            else:
                options = Options(prompt=line.rstrip("\r"))
            row = Row(asked.under(place, options), place)
        yield row


def _object(line: str, place: str) -> dict[str, Any]:
    """The overrides in a line of JSON."""
    try:
        table = json.loads(line)
    except ValueError as error:
        raise InputError(f"{place} is not JSON: {str(error).split(':')[0]}") from error
    if not isinstance(table, dict) or not isinstance(table.get("prompt"), str):
        raise InputError(f'{place}: expected an object with "prompt"')
    if unknown := set(table) - OVERRIDES:
        raise InputError(f"{place}: unknown key {min(unknown)!r}; known: {', '.join(sorted(OVERRIDES))}")
    return table


def _anchored(options: Options, base: Path) -> Options:
    """Options whose media start from the folder of the file that names them."""

    def anchor(path: str) -> str:
        return str(expanded(path, base)) if path else path

    references = [text.partition(":") for text in options.reference or ()]
    return dataclasses.replace(
        options,
        image=options.image and anchor(options.image),
        last_image=options.last_image and anchor(options.last_image),
        reference=tuple(kind + colon + anchor(path) for kind, colon, path in references) or None,
    )
