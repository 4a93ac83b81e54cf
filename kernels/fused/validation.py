"""Who computes a call of a fused op, and the checks of its arguments."""

from collections.abc import Sequence
from typing import Literal

import torch
import triton

Impl = Literal["reference", "triton"]

IMPLS = ("reference", "triton")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Types of the kernels; the references take float64 too."""


def choose_impl(impl: Impl | None, x: torch.Tensor, *others: torch.Tensor) -> Impl:
    """The implementation asked for, or the kernel on a GPU and the reference elsewhere.

    Args:
        impl: Asked for; None to choose.
        x: The op's main input, whose type the output has.
        others: Its other inputs.

    Raises:
        ValueError: if there is no such implementation, or it does not cover the call.
    """
    if impl is not None and impl not in IMPLS:
        raise ValueError(f"impl is {impl!r}; expected None or one of {', '.join(IMPLS)}")
    chosen: Impl = impl or ("triton" if x.is_cuda and x.dtype != torch.float64 else "reference")
    if chosen == "triton" and (reason := _uncovered(x, *others)):
        raise ValueError(f'impl "triton" got {reason}; use impl="reference"')
    return chosen


def check_rows(shape: Sequence[int], **tensors: torch.Tensor) -> None:
    """Raise ValueError unless every named tensor has two dimensions of this shape and unit stride along the second."""
    if len(shape) != 2:
        raise ValueError(f"{next(iter(tensors))} has shape {tuple(shape)}; expected rows and channels")
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(shape)}")
        if shape[1] > 1 and tensor.stride(1) != 1:
            raise ValueError(
                f"{name} has strides {tensor.stride()}; expected unit stride along its {shape[1]} channels"
            )


def check_modulation(shape: Sequence[int], index: torch.Tensor, **tables: torch.Tensor) -> None:
    """Raise ValueError unless the tables fit rows of this shape, and `index` holds an integer for every row."""
    rows, width = shape
    height = len(next(iter(tables.values())))
    for name, table in tables.items():
        check_rows((height, width), **{name: table})
    if index.shape != (rows,) or index.dtype not in (torch.int64, torch.int32) or not index.is_contiguous():
        raise ValueError(
            f"index is {index.dtype} {tuple(index.shape)} with strides {index.stride()}; "
            f"expected contiguous int64 or int32 ({rows},)"
        )


def check_weight(width: int, **weights: torch.Tensor) -> None:
    """Raise ValueError unless every named weight is a contiguous [width]."""
    for name, weight in weights.items():
        if weight.shape != (width,) or not weight.is_contiguous():
            raise ValueError(f"{name} is {tuple(weight.shape)} with strides {weight.stride()}; expected ({width},)")


def _uncovered(*tensors: torch.Tensor) -> str | None:
    if not tensors[0].is_cuda and not triton.knobs.runtime.interpret:
        return f"tensors on {tensors[0].device}; expected CUDA"
    if tensors[0].dtype not in DTYPES:
        return f"{tensors[0].dtype}; expected float32, bfloat16 or float16"
    if any(tensor.device != tensors[0].device for tensor in tensors):
        return "tensors on several devices; expected one"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "inputs that require a gradient; the kernels have no backward"
    return None
