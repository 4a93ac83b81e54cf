"""Who computes a call of the 16-bit operators, and what their kernels do not cover."""

from typing import Literal

import torch

from solgen.kernels.sol_attn2.config import BLOCK
from solgen.kernels.sol_attn2.validation import MAX_GPU_BLOCKS

Impl = Literal["reference", "triton"]

IMPLS = ("reference", "triton")


def choose_impl(query: torch.Tensor, impl: str | None) -> Impl:
    """The implementation asked for, or the fastest that covers `query` [B, H, N, 128].

    Raises:
        ValueError: if there is no such implementation, or it does not cover the call.
    """
    if impl is not None and impl not in IMPLS:
        raise ValueError(f"impl is {impl!r}; expected None or one of {', '.join(IMPLS)}")
    reason = _uncovered(query)
    if impl == "triton" and reason is not None:
        raise ValueError(f'impl "triton" got {reason}; use impl="reference"')
    return "reference" if impl == "reference" or reason is not None else "triton"


def _uncovered(query: torch.Tensor) -> str | None:
    if not query.is_cuda:
        return f"tensors on {query.device}; expected CUDA"
    capability = torch.cuda.get_device_capability(query.device)
    if capability < (9, 0):
        return f"a GPU of compute capability {capability[0]}.{capability[1]}; expected 9.0, for its copy engine"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"{query.dtype}; expected bfloat16 or float16"
    if query.shape[2] > MAX_GPU_BLOCKS * BLOCK:
        return f"{query.shape[2]} rows; expected at most {MAX_GPU_BLOCKS * BLOCK}"
    return None
