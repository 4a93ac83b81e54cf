"""The JSON record beside every clip: all that is needed to understand it and to make it again."""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from solgen.engine.adapters.header import file_sha256
from solgen.engine.batch import Job
from solgen.engine.decode import Latents
from solgen.engine.request import Request
from solgen.errors import InputError


def request_record(request: Request) -> dict[str, Any]:
    """Every resolved value of a request, JSON-ready; equal for requests that ask for the same clip.

    The `parallel` table is left out: it decides who computes a clip, not which.
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
        "settings": request.preset.model_dump(mode="json", exclude={"parallel"}),
    }


def latents_digest(latents: Latents) -> str:
    """SHA-256 of the latents' bytes, hexadecimal: equal for byte-identical results."""
    digest = hashlib.sha256()
    for tensor in (latents.video, latents.audio):
        digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_sidecar(path: Path, record: dict[str, Any]) -> None:
    """Write under a temporary name in the same folder, then rename."""
    temporary = path.with_name(f".solgen-{os.getpid()}.json")
    try:
        text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def finished_record(job: Job, *, overwrite: bool) -> dict[str, Any] | None:
    """The record of a finished clip of exactly this request, so that `--resume` may skip it.

    Raises:
        InputError: if something else lies there and may not be replaced.
    """
    if not os.path.lexists(job.output) and not os.path.lexists(job.sidecar):
        return None
    try:
        record = json.loads(job.sidecar.read_text(encoding="utf-8"))
        if job.output.is_file() and record["request"] == request_record(job.request):
            return record
        problem = "is another request's clip"
    except (OSError, ValueError, KeyError, TypeError):
        problem = f"has no readable record {job.sidecar.name}, so nobody can tell whether it is finished"
    if overwrite:
        return None
    raise InputError(f"{job.output} {problem}; choose another --output or pass --overwrite")


def finite(value: float) -> float | str | None:
    """A number as JSON can hold it: infinities as text, NaN (nothing was there to measure) as null."""
    return None if math.isnan(value) else value if math.isfinite(value) else str(value)


def _digest(path: Path | None) -> dict[str, str]:
    return {} if path is None else {"sha256": file_sha256(path)}


def _media(path: Path | None) -> dict[str, str] | None:
    if path is None:
        return None
    with path.open("rb") as file:
        return {"path": str(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
