"""What an adapter file says of itself, read without torch; kinds that no merge can express are refused here."""

import hashlib
import json
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from solgen.engine.adapters.source import PEFT_CONFIG, PEFT_FILE
from solgen.engine.shards import read_header
from solgen.errors import InputError

PICKLE_STARTS = (b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(1, 6)))
"""First bytes of what torch.save writes: a zip archive, or a bare pickle."""

_DIFFUSERS_CONFIG = "lora_adapter_metadata"
"""Metadata key under which diffusers keeps PEFT's config."""

_REFUSED = (
    (r".*\.set_weight", "replaces a gate of FastVideo's VSA attention, which solgen does not run; use a dense variant"),
    (
        r".*(\.dora_scale|\.lora_magnitude_vector(\..*)?)",
        "belongs to DoRA, which is not a sum; merge it where it was trained",
    ),
    (r".*\.(hada|lokr)_\w+", "belongs to LoHa or LoKr; convert the adapter to plain LoRA"),
    (r"(.*\.)?adaln_t_table", "belongs to a pruned checkpoint with 8-wide AdaLN; use the adapter for full weights"),
    (r"(h3_)?pdd\..*", "belongs to a PDD head bank, which replaces the output heads; solgen does not run those"),
)
"""Tensor names that mark an adapter no sum of deltas can express, and why."""


@dataclass(frozen=True)
class Header:
    """One adapter file.

    Attributes:
        path: The file.
        shapes: Shape of every tensor.
        dtypes: Type of every tensor in safetensors' spelling, as "BF16".
        metadata: The header's `__metadata__`.
        config: PEFT's adapter_config.json, or the copy that diffusers keeps in the metadata; {} without one.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    metadata: dict[str, str]
    config: dict[str, Any]

    def number(self, *names: str) -> float | None:
        """The first of these metadata entries, as a number.

        Raises:
            InputError: if it is not a positive finite number.
        """
        for name in names:
            if (text := self.metadata.get(name)) is None:
                continue
            try:
                value = float(text)
            except ValueError:
                value = -1.0
            if not 0 < value < float("inf"):
                raise InputError(f"{self.path}: metadata {name} is {text!r}, expected a positive number")
            return value
        return None

    def numbers(self, *names: str) -> tuple[float, ...] | None:
        """The first of these metadata entries, as the list of numbers it spells in JSON or with commas."""
        for name in names:
            if (text := self.metadata.get(name)) is not None:
                try:
                    return tuple(float(part) for part in text.strip().strip("[]()").split(","))
                except ValueError as error:
                    raise InputError(f"{self.path}: metadata {name} is {text!r}, expected a list of numbers") from error
        return None


def read_adapter(path: Path) -> Header:
    """Read and judge the header of an adapter file; its tensors are not read and nothing in it is run.

    Raises:
        InputError: for a pickle whatever its name, a broken file, or a kind that cannot be applied.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise InputError(f"cannot read adapter {path}: {error.strerror}") from error
    if start.startswith(PICKLE_STARTS):
        raise InputError(
            f"{path} is a pickle (torch.save), which can run code when it is opened; "
            "convert it to safetensors with the tool that made it"
        )
    entries = read_header(path)
    metadata = _metadata(path)
    header = Header(
        path=path,
        shapes={name: tuple(entry["shape"]) for name, entry in entries.items()},
        dtypes={name: entry["dtype"] for name, entry in entries.items()},
        metadata=metadata,
        config=_peft_config(path, metadata),
    )
    _refuse_kinds(header)
    return header


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal; computed once while the file stays as it is."""
    status = path.stat()
    return _sha256(path.resolve(), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)
def _sha256(path: Path, _size: int, _modified: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _metadata(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)).get("__metadata__") or {}


def _peft_config(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    beside = path.with_name(PEFT_CONFIG)
    try:
        if path.name == PEFT_FILE and beside.is_file():
            return json.loads(beside.read_text(encoding="utf-8"))
        packed = json.loads(metadata.get(_DIFFUSERS_CONFIG, "{}"))
    except ValueError as error:
        raise InputError(f"the PEFT config of {path} is not JSON; download it again") from error
    return {re.sub(r"^transformer(_ref)?\.", "", key): value for key, value in packed.items()}


def _refuse_kinds(header: Header) -> None:
    if header.config.get("use_dora"):
        raise InputError(f"{header.path}: its PEFT config says use_dora, which is not a sum; merge it in its trainer")
    for name, shape in header.shapes.items():
        for pattern, reason in _REFUSED:
            if re.fullmatch(pattern, name):
                raise InputError(f"{header.path}: tensor {name!r} {reason}")
        if re.fullmatch(r"(.*\.)?(audio_)?proj_out\.(weight|bias)", name) and "pdd_num_steps" in header.metadata:
            raise InputError(f"{header.path}: tensor {name!r} {list(shape)} {_REFUSED[-1][1]}")
    if "pdd_num_steps" in header.metadata:
        raise InputError(f"{header.path}: metadata pdd_num_steps {_REFUSED[-1][1]}")
