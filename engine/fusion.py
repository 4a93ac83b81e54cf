"""Whether the transformer's blocks run fused, and the switch between their own forwards and ours, from outside."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from diffusers import MiniMaxH3Transformer3DModel

from solgen.errors import InputError

Setting = Literal["auto", "on", "off"]
"""The preset's `fusion`."""


def check_fusion(setting: Setting, device: torch.device) -> None:
    """Refuse fusion that the machine cannot serve, before weights are read.

    Raises:
        InputError: one line.
    """
    if setting == "on" and (reason := _hindrance(device)):
        raise InputError(f"fusion=on needs a CUDA GPU and Triton, {reason}; use --set fusion=auto")


def runs_fused(setting: Setting, device: torch.device) -> bool:
    """Whether a request runs fused: as asked, or by default wherever the kernels run."""
    return setting == "on" or (setting == "auto" and _hindrance(device) is None)


def _hindrance(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"this run is on the {device.type}"
    return None if importlib.util.find_spec("triton") else "Triton is not installed"


@contextmanager
def fused(transformer: MiniMaxH3Transformer3DModel, on: bool) -> Iterator[None]:
    """Run the transformer's blocks fused while the body runs; with `on` False nothing changes.

    Only `forward` of the blocks, their SwiGLU and the output norm is replaced, so hooks stay where they are, and the
    linear layers, attention and AdaLN projections inside are called as modules, whatever stands in their places.
    Norms of queries and keys belong to the attention processor (`AttentionRun.fused`). A kernel that fails is an
    error. There is no backward.
    """
    if not on:
        yield
        return
    # Triton is imported only when it is used: CPU installations may not have it.
    from solgen.engine.fused_block import fused_forwards

    forwards = fused_forwards(transformer)
    for module, forward in forwards:
        assert "forward" not in vars(module), "somebody else has replaced this forward"
        module.forward = forward
    try:
        yield
    finally:
        for module, _ in forwards:
            del module.forward
