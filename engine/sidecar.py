"""The JSON record beside every clip: all that is needed to understand it and to make it again."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from solgen.engine.adapters.header import file_sha256
from solgen.engine.decode import Latents
from solgen.engine.request import Request


def request_record(request: Request) -> dict[str, Any]:
    """Every resolved value of a request, JSON-ready; equal for requests that ask for the same clip.

    Media files and local adapters are recorded by path and SHA-256.
    """
    return {
        "prompt": request.prompt,
        "task": request.task,
        "seed": request.seed,
        "preset": request.preset_name,
        "image": _media(request.image),
        "last_image": _media(request.last_image),
        "references": [{"kind": ref.kind, **(_media(ref.path) or {})} for ref in request.references],
        "loras": [{"source": lora.name, "strength": lora.strength, **_digest(lora.path)} for lora in request.loras],
        "settings": request.preset.model_dump(mode="json"),
    }


def latents_digest(latents: Latents) -> str:
    """SHA-256 of the latents' bytes, hexadecimal: equal for byte-identical results."""
    digest = hashlib.sha256()
    for tensor in (latents.video, latents.audio):
        digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_sidecar(path: Path, record: dict[str, Any]) -> None:
    """Write under a temporary name in the same folder, then rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def is_finished(output: Path, sidecar: Path, request: Request) -> bool:
    """Whether a clip of exactly this request lies there, so that `--resume` may skip it."""
    try:
        return output.is_file() and json.loads(sidecar.read_text(encoding="utf-8"))["request"] == request_record(
            request
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(path: Path | None) -> dict[str, str]:
    return {} if path is None else {"sha256": file_sha256(path)}


def _media(path: Path | None) -> dict[str, str] | None:
    if path is None:
        return None
    with path.open("rb") as file:
        return {"path": str(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
