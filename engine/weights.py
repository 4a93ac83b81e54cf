"""Tensors of a component's safetensors files, read one at a time into memory of their own.

A memory map would count every page it touched until the file is closed; plain reads hold one tensor.
"""

import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from solgen.engine.shards import read_headers
from solgen.errors import SetupError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of the format (https://github.com/huggingface/safetensors, "Format")."""

PIECE = 1 << 26
"""Bytes that one thread reads at a time."""

READERS = 4
"""Threads that read the pieces of one tensor: what a fast disk needs to be busy."""


class Weights:
    """The tensors of one component, to be read within `with`."""

    def __init__(self, folder: Path) -> None:
        """Read the headers.

        Args:
            folder: With one `*.safetensors` file or an index and its shards.

        Raises:
            InputError: one line with the path of a broken file.
        """
        headers = read_headers(folder)
        self._starts = {folder / file: _start(folder / file) for file in headers}
        self._entries = {name: (folder / file, entry) for file, part in headers.items() for name, entry in part.items()}
        offsets = (entry["data_offsets"] for _, entry in self._entries.values())
        self._largest = max((end - begin for begin, end in offsets), default=0)
        self._readers = ThreadPoolExecutor(READERS)
        self._staging = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._readers.shutdown(cancel_futures=True)
        self._staging = torch.empty(0, dtype=torch.uint8)

    def place(self, name: str) -> tuple[Path, int]:
        """File and offset of a tensor: in this order they are read fastest."""
        path, entry = self._entries[name]
        return path, entry["data_offsets"][0]

    def read(self, name: str, device: torch.device) -> Tensor:
        """One tensor in its stored type.

        Args:
            name: As the headers have it.
            device: Where it goes; a GPU is reached through one page-locked buffer.

        Raises:
            SetupError: if the file is shorter than its header promised.
        """
        path, entry = self._entries[name]
        begin, end = entry["data_offsets"]
        if device.type == "cuda":
            if not self._staging.numel():
                self._staging = torch.empty(self._largest, dtype=torch.uint8, pin_memory=True)
            raw = self._staging[: end - begin]
        else:
            raw = torch.empty(end - begin, dtype=torch.uint8)
        self._fill(raw, path, self._starts[path] + begin)
        return raw.view(DTYPES[entry["dtype"]]).view(entry["shape"]).to(device)

    def _fill(self, raw: Tensor, path: Path, begin: int) -> None:
        """Read the bytes of a file from `begin` on, several pieces at a time."""
        array: Any = raw.numpy()
        whole = memoryview(array)

        def piece(offset: int) -> None:
            rest = whole[offset : offset + PIECE]
            with path.open("rb", buffering=0) as file:
                file.seek(begin + offset)
                while rest:
                    count = file.readinto(rest)
                    if not count:
                        raise SetupError(f"{path} ended early while it was read; download it again")
                    rest = rest[count:]

        for _ in self._readers.map(piece, range(0, len(whole), PIECE)):
            pass


def _start(path: Path) -> int:
    """Where a file's tensors start."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    return 8 + length
