"""Check safetensors shards by header and size before anything heavy loads.

A safetensors file is an 8-byte little-endian header length, a JSON header and the tensors' bytes
(https://github.com/huggingface/safetensors, "Format"), so a truncated file shows without reading its data.
"""

import hashlib
import json
import math
import struct
from pathlib import Path

from solgen.engine.json_file import read_object
from solgen.errors import InputError

MAX_HEADER_BYTES = 100_000_000
"""Limit of the format; a larger length means that the file is something else."""

BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of an element, by the format's name of its type; files of other types are refused."""

LFS_POINTER = b"version https://git-lfs"


def read_headers(folder: Path) -> dict[str, dict[str, dict]]:
    """Read and check the header of every weight file of one component.

    Args:
        folder: A component's folder, with one `*.safetensors` file or an index and its shards.

    Returns:
        Header of every file by its name, see `read_header`.

    Raises:
        InputError: one line with the file's path for a missing, empty, truncated or foreign file.
    """
    names = _tensor_names(folder)
    if not names:
        raise InputError(f"{folder} holds no *.safetensors file; download it again")
    headers = {file: read_header(folder / file) for file in sorted(names)}
    for file, header in headers.items():
        if missing := names[file] - header.keys():
            raise InputError(f"{folder / file} lacks tensor {min(missing)!r} that its index names; download it again")
    return headers


def headers_digest(headers: dict[str, dict[str, dict]]) -> str:
    """SHA-256 over a component's headers, hexadecimal.

    Cheap to compute, different when any tensor's name, shape, type or place is.
    """
    digest = hashlib.sha256()
    for file in sorted(headers):
        digest.update(json.dumps([file, headers[file]], sort_keys=True).encode())
    return digest.hexdigest()


def read_header(path: Path) -> dict[str, dict]:
    """Read and check the header of one safetensors file.

    Returns:
        Entry of every tensor: dtype, shape and data_offsets.

    Raises:
        InputError: one line with the path, the expected and the actual size.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
            if start == LFS_POINTER:
                raise InputError(f"{path} is a git-lfs pointer, not the weights; run git lfs pull or download it again")
            if size < 8:
                raise InputError(f"{path} has {size} bytes, too few for a safetensors file; download it again")
            file.seek(0)
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise InputError(f"{path} is not a safetensors file; download it again")
            if length > size - 8:
                raise InputError(f"{path} has {size:,} bytes, its header alone needs {length + 8:,}; download it again")
            header = json.loads(file.read(length))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; download it again") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a safetensors file; download it again") from error
    try:
        header.pop("__metadata__", None)
        expected = 8 + length + max((_end(path, name, entry) for name, entry in header.items()), default=0)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not a safetensors file; download it again") from error
    if size != expected:
        raise InputError(f"{path} has {size:,} bytes, its header promises {expected:,}; download it again")
    return header


def _end(path: Path, name: str, entry: dict) -> int:
    """Where a tensor's bytes end.

    Raises:
        InputError: for a type that is not read, or as many bytes as its shape does not have.
        KeyError, TypeError, ValueError: for an entry that is none.
    """
    start, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise ValueError
    if dtype not in BYTES:
        raise InputError(f"{path}: tensor {name!r} is {dtype}; expected one of {', '.join(BYTES)}")
    if end - start != BYTES[dtype] * math.prod(shape):
        raise InputError(
            f"{path}: tensor {name!r}, {dtype} {shape}, has {end - start:,} bytes, "
            f"expected {BYTES[dtype] * math.prod(shape):,}; download it again"
        )
    return end


def _tensor_names(folder: Path) -> dict[str, set[str]]:
    """Tensors that the index promises of every weight file; none without an index."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if not indices:
        return {path.name: set() for path in folder.glob("*.safetensors")}
    weight_map = read_object(indices[0]).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise InputError(f"{indices[0]} is not a shard index; download it again")
    names: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        names.setdefault(file, set()).add(tensor)
    return names
