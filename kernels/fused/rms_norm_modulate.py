"""RMSNorm of every row, modulated by the AdaLN parameters that the row selects.

    y_nc = x_nc / sqrt(mean_c x_nc^2 + eps) * weight_c * (1 + scale[index_n, c]) + shift[index_n, c]

FP32 inside, one rounding at the end, where the stock block rounds after the norm, the sum 1 + scale, the product and
the last sum (diffusers, `MiniMaxH3TransformerBlock.forward`).

Legend: N rows of the packed sequence, C channels, T rows of the modulation tables (timestep x modality).
"""

import torch
import triton
import triton.language as tl

from solgen.kernels.fused.rows import compute_type, load_piece, piece_of, store_norm_modulate
from solgen.kernels.fused.validation import Impl, check_modulation, check_rows, check_weight, choose_impl


def rms_norm_modulate_reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """The equation in FP32, or in float64 for float64 `x`; arguments as for `rms_norm_modulate`."""
    wide = compute_type(x)
    rows = x.to(wide)
    normed = rows * (rows.square().mean(1, keepdim=True) + eps).rsqrt() * weight.to(wide)
    return (normed * (1 + scale.to(wide)[index]) + shift.to(wide)[index]).to(x.dtype)


@triton.jit
def _rms_norm_modulate_kernel(
    p_x,
    p_weight,
    p_scale,
    p_shift,
    p_index,
    p_out,  # [N, C] contiguous
    stride_x,
    stride_scale,
    stride_shift,
    eps,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    i_t = tl.load(p_index + i_n).to(tl.int64)
    b_x: tl.tuple = ()
    for c in tl.static_range(PIECES):
        b_x += (load_piece(p_x + i_n * stride_x, c, WIDTH, PIECE, ONCE=True),)
    p_scale += i_t * stride_scale
    p_shift += i_t * stride_shift
    store_norm_modulate(b_x, p_weight, p_scale, p_shift, p_out + i_n * WIDTH, eps, PIECES, WIDTH, PIECE)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor, eps: float
) -> torch.Tensor:
    rows, width = x.shape
    piece = piece_of(width)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _rms_norm_modulate_kernel[(rows,)](
        x,
        weight,
        scale,
        shift,
        index,
        out,
        x.stride(0),
        scale.stride(0),
        shift.stride(0),
        eps,
        PIECES=triton.cdiv(width, piece),
        WIDTH=width,
        PIECE=piece,
        num_warps=4,
    )
    return out


def rms_norm_modulate(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    index: torch.Tensor,
    *,
    eps: float,
    impl: Impl | None = None,
) -> torch.Tensor:
    """Norm and modulate rows in one reading and one writing.

    Args:
        x: [N, C], unit stride along C; float64 (reference only), float32, bfloat16 or float16.
        weight: Of the norm, [C], any float type.
        scale: Table [T, C], unit stride along C, any float type.
        shift: Table like `scale`.
        index: Row of the tables for every row of `x`, [N] int64 or int32, within 0 to T - 1 (not checked: it lies
            on the device).
        eps: Added to the mean square.
        impl: Who computes it; None takes the kernel on a GPU, the reference elsewhere.

    Returns:
        [N, C] contiguous, in `x`'s type.

    Raises:
        ValueError: if shapes or strides do not fit, or `impl` does not cover the call.
    """
    check_rows(x.shape, x=x)
    check_weight(x.shape[1], weight=weight)
    check_modulation(x.shape, index, scale=scale, shift=shift)
    if choose_impl(impl, x, weight, scale, shift, index) == "reference":
        return rms_norm_modulate_reference(x, weight, scale, shift, index, eps=eps)
    return _launch(x, weight, scale, shift, index, eps)
