"""Paths as people type them."""

import os
import stat
import tempfile
from pathlib import Path

from solgen.errors import InputError


def expanded(text: str | Path, base: Path = Path()) -> Path:
    """`text` with ~ and ~name spelled out, starting from `base` unless it is absolute."""
    return base / os.path.expanduser(text)


def recorded_path(option: str, text: str) -> Path:
    """A path that will stand in the record of a clip.

    Raises:
        InputError: if it is empty, or a record in UTF-8 cannot hold it.
    """
    if not text:
        raise InputError(f"{option} is empty; give a path, or leave it out")
    path = expanded(text)
    check_unicode(f"{option} {text!r}", str(path))
    if "\0" in text:
        raise InputError(f"{option} {text!r} has a NUL in it, which no path can have; remove it")
    return path


def check_unicode(what: str, text: str) -> None:
    """Refuse text that UTF-8 cannot hold: foreign bytes of the command line, lone surrogates of a JSON file.

    Raises:
        InputError: naming `what` and the place.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} is not valid Unicode at character {error.start + 1}; write it, or name the file, in UTF-8"
        ) from error


def check_file(path: Path, kind: str) -> None:
    """Refuse a medium that is not there or empty; whether it can be decoded is seen later.

    Raises:
        InputError: naming the file and the reason.
    """
    try:
        found = path.stat()
        reason = "it is not a file" if not stat.S_ISREG(found.st_mode) else "" if found.st_size else "the file is empty"
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
    if reason:
        raise InputError(f"cannot read {kind} {str(path)!r}: {reason}; check the path")


def check_new_file(option: str, path: Path) -> None:
    """Refuse a result that could not be written once it is there; missing folders will be made.

    Raises:
        InputError: naming the option, the path and the reason.
    """
    try:
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):
            reason = "it is a folder" if path.is_dir() else None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
    if reason:
        raise InputError(f"{option} {path} cannot be written: {reason}; choose another")
