"""Checks of a Sol-Attn2 call's arguments."""

import torch

from solgen.kernels.sol_attn2.config import BLOCK, HEAD_DIM, SolAttn2Config

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
IMPLS = ("reference", "triton", "gluon")
MAX_GPU_BLOCKS = 4096
"""Longest sequence of the GPU implementations, in blocks: 262,144 rows."""


class NonFiniteError(ValueError):
    """An input or a router score is NaN or infinite."""


def validate_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, video_rows: torch.Tensor | None
) -> None:
    """Raise ValueError unless the tensors form one attention call."""
    if query.dim() != 4 or query.shape != key.shape or query.shape != value.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"query, key, value have shapes {shapes}; expected three equal [B, H, N, {HEAD_DIM}]")
    if query.shape[-1] != HEAD_DIM:
        raise ValueError(f"head width is {query.shape[-1]}; expected {HEAD_DIM}, the only width implemented")
    if 0 in query.shape:
        raise ValueError(f"query has shape {tuple(query.shape)}; expected at least one batch, head and row")
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"dtypes are {query.dtype}, {key.dtype}, {value.dtype}; expected float64, float32, bfloat16 or "
            "float16 for all three; cast them"
        )
    if not query.device == key.device == value.device:
        raise ValueError(f"devices are {query.device}, {key.device}, {value.device}; expected one; move them")
    if video_rows is not None and (video_rows.dtype != torch.bool or video_rows.shape != query.shape[2:3]):
        raise ValueError(
            f"video_rows is {video_rows.dtype} {tuple(video_rows.shape)}; expected torch.bool "
            f"({query.shape[2]},), True where a row is video"
        )


def validate_finite(**inputs: torch.Tensor) -> None:
    """Raise NonFiniteError if a named tensor holds NaN or infinity; waits for the device."""
    for name, tensor in inputs.items():
        if not tensor.isfinite().all():
            raise NonFiniteError(f"{name} holds NaN or infinite values; expected finite numbers; check its producer")


def validate_gpu(query: torch.Tensor, config: SolAttn2Config, impl: str) -> None:
    """Raise ValueError unless a GPU implementation covers the call."""
    if not query.is_cuda:
        raise ValueError(f'impl "{impl}" got tensors on {query.device}; expected CUDA; use impl="reference"')
    if query.dtype == torch.float64:
        raise ValueError(f'impl "{impl}" got float64; expected float32, bfloat16 or float16; use impl="reference"')
    if config.precision != "fp8":
        raise ValueError(f'impl "{impl}" got precision "{config.precision}"; expected "fp8"; use impl="reference"')
    if config.tail == "whole":
        raise ValueError(f'impl "{impl}" got tail "whole"; expected slots, anchors or none; use impl="reference"')
    if impl == "gluon" and (capability := torch.cuda.get_device_capability(query.device))[0] != 9:
        raise ValueError(f'impl "gluon" got sm_{capability[0]}{capability[1]}; expected sm_90; use impl="triton"')
    num_blocks = -(-query.shape[2] // BLOCK)
    if num_blocks > MAX_GPU_BLOCKS:
        raise ValueError(
            f'impl "{impl}" got {query.shape[2]} rows; expected at most {MAX_GPU_BLOCKS * BLOCK}; split the '
            'sequence or use impl="reference"'
        )
