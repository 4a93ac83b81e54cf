"""What the machine can run, found before anything loads."""

import importlib.metadata
import platform

import torch

from solgen.errors import SetupError

PACKAGES = ("torch", "triton", "diffusers", "transformers", "safetensors", "imageio-ffmpeg", "numpy")
"""Packages whose version decides what a clip looks like."""


def pick_device(preset_name: str) -> torch.device:
    """The device that a preset runs on: the first GPU, or the CPU for the demo.

    Raises:
        SetupError: if the preset needs a GPU and none is there, or it lacks bf16.
    """
    if not torch.cuda.is_available():
        if preset_name == "demo":
            return torch.device("cpu")
        raise SetupError(f"no CUDA GPU found; preset {preset_name} needs one. Without it, use --preset demo")
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        name = torch.cuda.get_device_name()
        raise SetupError(f"{name} (sm_{major}{minor}) has no bf16; solgen needs sm_80 or newer")
    return torch.device("cuda", torch.cuda.current_device())


def model_dtype(device: torch.device) -> torch.dtype:
    """bf16 on a GPU; float32 on a CPU, where bf16 products are emulated and slower."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def versions() -> dict[str, str]:
    """Versions of solgen, Python and the packages that decide the numbers."""
    found = {"solgen": _version("solgen"), "python": platform.python_version()}
    return found | {name: _version(name) for name in PACKAGES}


def device_name(device: torch.device) -> str:
    """Name of the GPU or processor, for the record."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


def synchronize(device: torch.device) -> None:
    """Wait for queued work, so that wall-clock times belong to their stage."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
