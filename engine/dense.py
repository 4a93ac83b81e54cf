"""Exact attention by the fastest kernel that is installed: FlashAttention 3, cuDNN's, or PyTorch's own choice.

FlashAttention 3 (arXiv 2407.08608) is taken from the module `flash_attn_interface`, which its builds share.
"""

import importlib
from contextlib import nullcontext
from typing import Literal, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from solgen.errors import SetupError

Dense = Literal["fa3", "cudnn", "sdpa"]


def choose_dense(asked: str, device: torch.device) -> Dense:
    """The kernel that dense attention runs on.

    Args:
        asked: "fa3", "cudnn" or "sdpa", which is never replaced by another, or "auto" for the fastest.
        device: Where it will run.

    Raises:
        SetupError: if the machine does not have what was asked for.
    """
    has_cudnn = device.type == "cuda" and torch.backends.cudnn.is_available()
    if asked == "auto":
        return "fa3" if _fa3_problem(device) is None else "cudnn" if has_cudnn else "sdpa"
    if asked == "fa3" and (problem := _fa3_problem(device)):
        raise SetupError(f"attention.dense fa3: {problem}; use auto, cudnn or sdpa")
    if asked == "cudnn" and not has_cudnn:
        raise SetupError(
            f"attention.dense cudnn: needs cuDNN on a CUDA GPU, this run is on the {device.type}; use sdpa"
        )
    return cast("Dense", asked)


def dense_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: Dense) -> torch.Tensor:
    """Softmax attention of [B, N, H, D] views, 16-bit on a GPU; the output has their shape."""
    if kernel == "fa3":
        output = importlib.import_module("flash_attn_interface").flash_attn_func(query, key, value)
        return output[0] if isinstance(output, tuple) else output  # some builds return the row sums too
    if kernel == "cudnn" and key.shape[1] == 1:
        return value  # the softmax of one score, which cuDNN refuses to take
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if kernel == "cudnn" else nullcontext():
        return scaled_dot_product_attention(query, key, value).transpose(1, 2)


def _fa3_problem(device: torch.device) -> str | None:
    """Why FlashAttention 3 cannot run; None if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return f"FlashAttention 3 runs on sm_90, this run is on {_name(device)}"
    try:
        importlib.import_module("flash_attn_interface")
    except (ImportError, OSError) as error:
        return f"module flash_attn_interface cannot be imported ({str(error).splitlines()[0]})"
    return None


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"the {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
