"""What a result must carry to be repeated: command, commit, machine, versions."""

import datetime
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from solgen.engine.machine import device_name, versions

ROOT = Path(__file__).resolve().parents[2]


def record(device: torch.device) -> dict[str, Any]:
    """JSON-ready header of a result."""
    header: dict[str, Any] = {
        "command": " ".join(["solgen", *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "versions": {name: versions()[name] for name in ("solgen", "python", "torch", "triton")},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        header["versions"] |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        header["gpu"] = {"processors": properties.multi_processor_count, "memory_gib": properties.total_memory / 2**30}
        header["gpu"] |= _query_driver(device)
    return header


def commit() -> str:
    """The commit that is measured: SOLGEN_COMMIT where the checkout has no git, else git's own answer."""
    if given := os.environ.get("SOLGEN_COMMIT"):
        return given
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _query_driver(device: torch.device) -> dict[str, str]:
    """Driver and highest clocks as nvidia-smi reports them; empty without it."""
    fields = ("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit")
    query = ["--query-gpu=" + ",".join(fields), "--format=csv,noheader", f"--id={device.index or 0}"]
    try:
        answer = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    return dict(zip(fields, answer.strip().split(", "), strict=False))
