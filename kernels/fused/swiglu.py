"""SwiGLU of a packed up projection.

    y_nf = value_nf * gate_nf * sigmoid(gate_nf)        value = x[:, :F], gate = x[:, F:]

FP32 inside, one rounding at the end (diffusers' `SwiGLU` keeps the value in the first half).

Legend: N rows, F inner channels of the feed-forward; a row holds 2 F.
"""

import torch
import triton
import triton.language as tl

from solgen.kernels.fused.rows import compute_type
from solgen.kernels.fused.validation import Impl, check_rows, choose_impl

PIECE = 2048
"""Inner channels of one program."""


def swiglu_reference(x: torch.Tensor) -> torch.Tensor:
    """The equation in FP32, or in float64 for float64 `x`; arguments as for `swiglu`."""
    value, gate = x.to(compute_type(x)).chunk(2, dim=1)
    return (value * gate * torch.sigmoid(gate)).to(x.dtype)


@triton.jit
def _swiglu_kernel(
    p_x,
    p_out,  # [N, F] contiguous
    stride_x,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
):
    i_n = (tl.program_id(0) // PIECES).to(tl.int64)
    o_f = tl.program_id(0) % PIECES * PIECE + tl.arange(0, PIECE)
    m_f = o_f < WIDTH
    p_x += i_n * stride_x + o_f
    b_value = tl.load(p_x, mask=m_f, other=0.0).to(tl.float32)
    b_gate = tl.load(p_x + WIDTH, mask=m_f, other=0.0).to(tl.float32)
    b_y = b_value * (b_gate / (1.0 + tl.exp(-b_gate)))
    tl.store(p_out + i_n * WIDTH + o_f, b_y.to(p_out.dtype.element_ty), mask=m_f)


def _launch(x: torch.Tensor) -> torch.Tensor:
    rows, width = x.shape[0], x.shape[1] // 2
    piece = min(PIECE, triton.next_power_of_2(width))
    pieces = triton.cdiv(width, piece)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _swiglu_kernel[(rows * pieces,)](x, out, x.stride(0), PIECES=pieces, WIDTH=width, PIECE=piece, num_warps=4)
    return out


def swiglu(x: torch.Tensor, *, impl: Impl | None = None) -> torch.Tensor:
    """Gate the first half of every row by the SiLU of its second half.

    Args:
        x: [N, 2 F], unit stride along the channels; float64 (reference only), float32, bfloat16 or float16.
        impl: Who computes it; None takes the kernel on a GPU, the reference elsewhere.

    Returns:
        [N, F] contiguous, in `x`'s type.

    Raises:
        ValueError: if the shape or strides do not fit, or `impl` does not cover the call.
    """
    check_rows(x.shape, x=x)
    if x.shape[1] % 2:
        raise ValueError(f"x has {x.shape[1]} channels; expected value and gate, an even number")
    return swiglu_reference(x) if choose_impl(impl, x) == "reference" else _launch(x)
