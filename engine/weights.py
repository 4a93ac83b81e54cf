"""Tensors of a component's safetensors files, read one at a time into memory of their own.

A memory map would count every page it touched until the file is closed; plain reads hold one tensor.
"""

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

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
    """The files of one component, open within `with`."""

    def __init__(self, folder: Path) -> None:
        """Read the headers.

        Args:
            folder: With one `*.safetensors` file or an index and its shards.

        Raises:
            InputError: one line with the path of a broken file.
        """
        self._folder = folder
        self._entries = {
            name: (file, entry) for file, header in read_headers(folder).items() for name, entry in header.items()
        }
        offsets = (entry["data_offsets"] for _, entry in self._entries.values())
        self._largest = max((end - begin for begin, end in offsets), default=0)
        self._files: dict[str, tuple[BinaryIO, int]] = {}
        self._stack = ExitStack()
        self._staging = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> "Weights":
        self._readers = self._stack.enter_context(ThreadPoolExecutor(READERS))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.clear()
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._stack.close()

    def read(self, name: str, device: torch.device) -> Tensor:
        """One tensor in its stored type.

        Args:
            name: As the headers have it.
            device: Where it goes; a GPU is reached through one page-locked buffer.

        Raises:
            SetupError: if the file is shorter than its header promised.
        """
        file, entry = self._entries[name]
        begin, end = entry["data_offsets"]
        size = end - begin
        if device.type == "cuda":
            if not self._staging.numel():
                self._staging = torch.empty(self._largest, dtype=torch.uint8, pin_memory=True)
            raw = self._staging[:size]
        else:
            raw = torch.empty(size, dtype=torch.uint8)
        self._fill(raw, file, begin)
        return raw.view(DTYPES[entry["dtype"]]).view(entry["shape"]).to(device)

    def _fill(self, raw: Tensor, name: str, begin: int) -> None:
        file, start = self._open(name)
        array: Any = raw.numpy()
        view = memoryview(array)

        def piece(offset: int) -> None:
            part = view[offset : offset + PIECE]
            while part:
                count = os.preadv(file.fileno(), [part], start + begin + offset)
                if not count:
                    raise SetupError(f"{self._folder / name} ended early while it was read; download it again")
                part, offset = part[count:], offset + count

        for _ in self._readers.map(piece, range(0, len(view), PIECE)):
            pass

    def _open(self, name: str) -> tuple[BinaryIO, int]:
        """A file and where its tensors start."""
        if name not in self._files:
            file = self._stack.enter_context((self._folder / name).open("rb", buffering=0))
            (length,) = struct.unpack("<Q", file.read(8))
            self._files[name] = file, 8 + length
        return self._files[name]

    def place(self, name: str) -> tuple[str, int]:
        """File and offset of a tensor: in this order they are read fastest."""
        file, entry = self._entries[name]
        return file, entry["data_offsets"][0]
