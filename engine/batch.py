"""Several clips from one command: prompt files, seeds, and the name of every output."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from solgen.engine.request import Options, Request, options_from, resolve
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
    base = Path() if prompt_file is None else prompt_file.parent
    rows = [options] if prompt_file is None else list(_rows(prompt_file, options))
    jobs: list[Job] = []
    taken: set[Path] = set()
    many = len(rows) * num_outputs > 1
    for row in rows:
        first = resolve(row, seed=seed, base=base if prompt_file is not None else Path())
        for index in range(num_outputs):
            request = dataclasses.replace(first, seed=first.seed + index)
            output = _output(row.output, request, taken, index=len(jobs) if many else None, reuse=overwrite or resume)
            _check_output(output, overwrite=overwrite, resume=resume)
            taken.add(output)
            jobs.append(Job(request, output))
    return jobs


def _rows(path: Path, options: Options) -> Iterator[Options]:
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
        if path.suffix != ".jsonl":
            yield dataclasses.replace(options, prompt=line.rstrip("\r"))
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path} line {number} is not JSON: {error.msg}") from error
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise InputError(f'{path} line {number}: expected an object with "prompt"')
        if unknown := set(row) - OVERRIDES:
            raise InputError(
                f"{path} line {number}: unknown key {min(unknown)!r}; known: {', '.join(sorted(OVERRIDES))}"
            )
        given = options_from(row, f"{path} line {number}")
        yield dataclasses.replace(options, **{key: getattr(given, key) for key in row})


def _output(given: str | None, request: Request, taken: set[Path], *, index: int | None, reuse: bool) -> Path:
    """Path of one clip: as given, numbered in a batch, or the next free default name. Never from the prompt."""
    folder = Path(given or ".")
    if given is None or given.endswith(("/", os.sep)) or folder.is_dir():
        name = f"solgen-{request.preset_name}-{request.seed}"
        path, number = folder / f"{name}.mp4", 2
        while path in taken or (not reuse and (path.exists() or path.with_suffix(".json").exists())):
            path, number = folder / f"{name}-{number}.mp4", number + 1
        return path
    if folder.suffix.lower() != ".mp4":
        raise InputError(f"--output {given!r}: expected a name ending in .mp4, or a folder")
    return folder if index is None else folder.with_name(f"{folder.stem}-{index:04d}{folder.suffix}")


def _check_output(output: Path, *, overwrite: bool, resume: bool) -> None:
    folder = output.parent
    if not folder.is_dir():
        raise InputError(f"output folder {folder} does not exist; create it or choose another --output")
    try:
        # A trial file is the only answer that read-only mounts, quotas and name limits all agree with.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{output.stem[:60]}"):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write to output folder {folder}: {error.strerror}; choose another --output"
        ) from error
    if overwrite or resume:
        return
    for path in (output, output.with_suffix(".json")):
        if path.exists():
            raise InputError(f"{path} exists; choose another --output or pass --overwrite")
