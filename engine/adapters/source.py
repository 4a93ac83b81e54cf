"""Where an adapter lies: `PATH|REPO/FILE[@REVISION][:STRENGTH]`, and how it comes to this machine."""

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from solgen.errors import InputError, SetupError
from solgen.presets.schema import Adapter as PresetAdapter

PEFT_FILE = "adapter_model.safetensors"
"""File that PEFT writes into a folder of its own, with adapter_config.json beside it."""

PEFT_CONFIG = "adapter_config.json"

_HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/(?P<file>[^@]+)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class Source:
    """An adapter as asked for.

    Attributes:
        name: As given, without the strength.
        strength: Factor on everything the adapter changes.
        path: The local file, or None while it is on the Hub.
        repo: Hub repository of a file that is not local.
        file: File inside `repo`.
        revision: Commit, tag or branch of `repo`.
        sha256: Leading characters of the digest that the file must have.
    """

    name: str
    strength: float = 1.0
    path: Path | None = None
    repo: str = ""
    file: str = ""
    revision: str | None = None
    sha256: str = ""

    @property
    def file_name(self) -> str:
        """Last part of the path or of the name on the Hub."""
        return self.path.name if self.path else self.file.rsplit("/", 1)[-1]


def parse_sources(texts: tuple[str, ...]) -> tuple[Source, ...]:
    """Read the values of `--lora`.

    Raises:
        InputError: for a missing file, a bad strength, or a file given twice.
    """
    sources = tuple(_parse(text) for text in texts)
    seen: set[object] = set()
    for source in sources:
        key = source.path.resolve() if source.path else (source.repo, source.file)
        if key in seen:
            raise InputError(f"--lora {source.name} is given twice; give it once, with the sum of the strengths")
        seen.add(key)
    return sources


def preset_source(adapter: PresetAdapter) -> Source:
    """The adapter that a preset names; its `repo` may be a local folder."""
    name = f"{adapter.repo}/{adapter.file}"
    local = Path(adapter.repo).expanduser() / adapter.file
    if local.is_file():
        return Source(name, path=local, sha256=adapter.sha256 or "")
    return Source(name, repo=adapter.repo, file=adapter.file, revision=adapter.revision, sha256=adapter.sha256 or "")


def fetch(source: Source) -> Path:
    """The adapter's file on this machine; downloads it, with PEFT's config, if it is on the Hub.

    Raises:
        InputError: if the Hub has no such file.
        SetupError: if the Hub or its cache cannot provide it.
    """
    if source.path is not None:
        return source.path
    path = _download(source, source.file)
    if source.file_name == PEFT_FILE:
        # Many repositories use the file's name without PEFT's config.
        with suppress(InputError, SetupError):
            _download(source, source.file.removesuffix(PEFT_FILE) + PEFT_CONFIG)
    return path


def _parse(text: str) -> Source:
    name, colon, tail = text.rpartition(":")
    try:
        strength = float(tail) if colon else 1.0
    except ValueError:
        colon, strength = "", 1.0
    if not math.isfinite(strength):
        raise InputError(f"--lora {text!r}: strength {tail} is not finite; give a number such as {name}:0.8")
    name = name if colon else text
    local = Path(name).expanduser()
    if local.is_dir():
        return Source(name, strength, path=_file_in(local))
    if local.is_file():
        return Source(name, strength, path=local)
    match = None if name.startswith((".", "/", "~")) else _HUB_NAME.fullmatch(name)
    if match is None:
        raise InputError(f"--lora {text!r}: no such file; expected PATH or REPO/FILE[@REVISION], then [:STRENGTH]")
    return Source(name, strength, repo=match["repo"], file=match["file"], revision=match["revision"])


def _file_in(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if (folder / PEFT_FILE) in files:
        return folder / PEFT_FILE
    if len(files) != 1:
        raise InputError(f"--lora {folder} holds {len(files)} *.safetensors files, expected one; name the file")
    return files[0]


def _download(source: Source, file: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        return Path(hf_hub_download(source.repo, file, revision=source.revision))
    except GatedRepoError as error:
        raise SetupError(
            f"{source.repo} is gated; accept its licence at https://huggingface.co/{source.repo} and run hf auth login"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise SetupError(
            f"adapter {source.name} is not in the Hub cache and the Hub cannot be reached; "
            "download it with network access, or unset HF_HUB_OFFLINE"
        ) from error
    except (RepositoryNotFoundError, EntryNotFoundError, HFValidationError) as error:
        raise InputError(
            f"adapter {source.name}: no such local file, and no file {file} in {source.repo} on the Hub; check the name"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise SetupError(f"cannot download adapter {source.name}: {str(error).splitlines()[0]}") from error
