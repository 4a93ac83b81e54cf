"""Check safetensors shards by header and size before anything heavy loads.

A safetensors file is an 8-byte little-endian header length, a JSON header and the tensors' bytes
(https://github.com/huggingface/safetensors, "Format"), so a truncated file shows without reading its data.
"""

import hashlib
import json
import struct
from pathlib import Path

from solgen.errors import InputError

MAX_HEADER_BYTES = 100_000_000
"""Limit of the format; a larger length means that the file is something else."""

LFS_POINTER = b"version https://git-lfs"


def check_weights(folder: Path) -> str:
    """Check every weight file of one component.

    Args:
        folder: A component's folder, with one `*.safetensors` file or an index and its shards.

    Returns:
        SHA-256 over the headers and sizes, hexadecimal: cheap to compute, different when any tensor's name,
        shape, type or place is.

    Raises:
        InputError: one line with the file's path for a missing, empty, truncated or foreign file.
    """
    indices = sorted(folder.glob("*.safetensors.index.json"))
    names: dict[str, set[str]] = {}
    if indices:
        try:
            weight_map = json.loads(indices[0].read_text())["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"{indices[0]} is not a shard index; download it again") from error
        for tensor, file in weight_map.items():
            names.setdefault(file, set()).add(tensor)
    else:
        names = {path.name: set() for path in sorted(folder.glob("*.safetensors"))}
    if not names:
        raise InputError(f"{folder} holds no *.safetensors file; download it again")
    digest = hashlib.sha256()
    for file in sorted(names):
        header = read_header(folder / file)
        if missing := names[file] - header.keys():
            raise InputError(f"{folder / file} lacks tensor {min(missing)!r} that its index names; download it again")
        digest.update(json.dumps([file, header], sort_keys=True).encode())
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
    except ValueError as error:
        raise InputError(f"{path} is not a safetensors file; download it again") from error
    header.pop("__metadata__", None)
    try:
        expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise InputError(f"{path} is not a safetensors file; download it again") from error
    if size != expected:
        raise InputError(f"{path} has {size:,} bytes, its header promises {expected:,}; download it again")
    return header
