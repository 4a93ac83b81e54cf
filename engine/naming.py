"""The name of every clip: as given, numbered where clips share one, or the next that is free."""

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from solgen.engine.paths import recorded_path
from solgen.errors import InputError


def named_file(given: str | None) -> Path | None:
    """The file that `--output` names; None where it names a folder, or nothing.

    Raises:
        InputError: for a name that no clip can have.
    """
    if given is None:
        return None
    path = recorded_path("--output", given)
    if given.endswith(("/", os.sep)):
        return None
    if path.suffix.lower() == ".mp4":
        return path
    if not os.path.isdir(path):
        raise InputError(f"--output {given!r}: expected a name ending in .mp4, or a folder")
    return None


def numbered(paths: Sequence[Path | None], num_outputs: int) -> list[list[Path]]:
    """The names of `num_outputs` clips for each of `paths`, counted up where several clips share one.

    None, where the name is ours to choose, has no names.
    """
    clips = Counter(clip_key(path) for path in paths if path)
    numbers: Counter[str] = Counter()
    names: list[list[Path]] = []
    for path in paths:
        names.append([])
        for _ in range(num_outputs if path else 0):
            assert path is not None
            key = clip_key(path)
            alone = clips[key] * num_outputs == 1
            names[-1].append(path if alone else path.with_stem(f"{path.stem}-{numbers[key]:04d}"))
            numbers[key] += 1
    return names


def free_name(folder: Path, stem: str, taken: set[str], *, reuse: bool) -> Path:
    """`stem` in a folder, with the first number that no other clip has. Never made from the prompt.

    Args:
        folder: Where it goes.
        stem: Name without suffix.
        taken: Keys (`clip_key`) of this command's clips.
        reuse: Whether clips of earlier commands may have the name too.
    """
    path, number = folder / f"{stem}.mp4", 2
    while clip_key(path) in taken or (not reuse and any(map(os.path.lexists, (path, path.with_suffix(".json"))))):
        path, number = folder / f"{stem}-{number}.mp4", number + 1
    return path


def clip_key(path: Path) -> str:
    """Equal for names of one clip, or of clips that would share a record."""
    return os.path.abspath(path.with_suffix(""))


def check_name(output: Path, *, overwrite: bool, resume: bool) -> None:
    """Refuse a clip's name unless the clip and its record can be written.

    Raises:
        InputError: naming the path and the reason.
    """
    folder = output.parent
    try:
        # A trial file is the only answer that read-only mounts and quotas agree with.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".solgen-"):
            pass
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.lexists(folder):
            raise InputError(f"output folder {folder} does not exist; create it or choose another --output") from error
        raise InputError(
            f"cannot write to output folder {folder}: {error.strerror}; choose another --output"
        ) from error
    for path in (output, output.with_suffix(".json")):
        _check_free(path, overwrite=overwrite, resume=resume)


def _check_free(path: Path, *, overwrite: bool, resume: bool) -> None:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; choose another --output") from error
    if os.path.isdir(path):
        raise InputError(f"{path} is a folder; choose another --output")
    if not (overwrite or (resume and os.path.exists(path))):
        raise InputError(f"{path} exists; choose another --output or pass --overwrite")
