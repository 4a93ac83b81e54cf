"""E4M3 quantisation of rows: one scale a row.

    s_n = max(max_k |x_nk| / 448, SCALE_FLOOR)        code_nk = RNE_E4M3(x_nk / s_n)

A row of activations is one token, a row of a weight one output channel. Each row is read once and kept in registers.

Legend: N rows, K channels.
"""

from typing import Literal

import torch
import triton
import triton.language as tl

from solgen.kernels.sol_attn2.config import E4M3_MAX, SCALE_FLOOR
from solgen.kernels.sol_attn2.triton.e4m3 import divide, encode, interpreted, scale_of

Impl = Literal["reference", "triton"]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

MAX_WIDTH = 2**15
"""Channels that one program keeps in registers."""


def quantise_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The equation, rounding where the kernel rounds; arguments as for `quantise_rows`."""
    values = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    scales = (values.abs().amax(1) / E4M3_MAX).clamp(min=SCALE_FLOOR).float()
    return (values / scales[:, None]).to(torch.float8_e4m3fn), scales


@triton.jit
def _quantise_rows_kernel(
    p_x,
    p_codes,  # [N, K] bytes, contiguous
    p_scales,  # [N] fp32
    stride_x,
    INTEGER: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    m_k = o_k < K
    b_x = tl.load(p_x + i_n * stride_x + o_k, mask=m_k, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(b_x), 0))
    b_codes = encode(divide(b_x, scale, tl.div_rn(1.0, scale)), INTEGER)
    tl.store(p_codes + i_n * K + o_k, b_codes, mask=m_k)
    tl.store(p_scales + i_n, scale)


def _launch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    codes = torch.empty(rows, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        _quantise_rows_kernel[(rows,)](
            x,
            codes,
            scales,
            x.stride(0),
            INTEGER=interpreted(),
            K=width,
            BLOCK=block,
            num_warps=min(16, max(1, block // 1024)),
        )
    return codes.view(torch.float8_e4m3fn), scales


def quantise_rows(x: torch.Tensor, *, impl: Impl | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise every row by its own scale.

    Args:
        x: [N, K], unit stride along the channels; float64 (reference only), float32, bfloat16 or float16.
        impl: Who computes it; None takes the kernel on a GPU, the reference elsewhere.

    Returns:
        Codes [N, K] float8_e4m3fn, contiguous, and scales [N] fp32; codes times scales approximate `x`.

    Raises:
        ValueError: if shape, strides or type do not fit, or `impl` does not cover the call.
    """
    if x.ndim != 2 or x.dtype not in DTYPES or not x.shape[1] or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; expected rows of adjacent floats")
    if impl not in (None, "reference", "triton"):
        raise ValueError(f"impl is {impl!r}; expected None, reference or triton")
    chosen = impl or ("triton" if x.is_cuda and x.dtype != torch.float64 else "reference")
    if chosen == "reference":
        return quantise_rows_reference(x)
    if not (x.is_cuda or interpreted()) or x.dtype == torch.float64 or x.shape[1] > MAX_WIDTH:
        raise ValueError(
            f'impl "triton" got {x.dtype} {tuple(x.shape)} on {x.device}; expected at most 32 bits and '
            f'{MAX_WIDTH:,} channels on CUDA; use impl="reference"'
        )
    return _launch(x)
