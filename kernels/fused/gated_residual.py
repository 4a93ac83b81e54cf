"""Gated residual of every row, alone or with the norm and modulation that read it next.

    h_nc = residual_nc + gate[index_n, c] * branch_nc
    y_nc = h_nc / sqrt(mean_c h_nc^2 + eps) * weight_c * (1 + scale[index_n, c]) + shift[index_n, c]

FP32 inside; h and y are each rounded once, and the norm reads h before it is rounded. The same op joins the two halves
of a block (norm2) and a block with the next one (its norm1): all blocks share one index.

Legend: N rows of the packed sequence, C channels, T rows of the modulation tables (timestep x modality).
"""

import torch
import triton
import triton.language as tl

from solgen.kernels.fused.rows import compute_type, load_piece, piece_of, store_norm_modulate, store_piece
from solgen.kernels.fused.validation import Impl, check_modulation, check_rows, check_weight, choose_impl


def gated_residual_reference(
    residual: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """The first equation in FP32, or in float64 for a float64 residual; arguments as for `gated_residual`."""
    return _wide_residual(residual, branch, gate, index).to(residual.dtype)


def gated_residual_norm_reference(
    residual: torch.Tensor,
    branch: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    index: torch.Tensor,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both equations in FP32, or in float64 for a float64 residual; arguments as for `gated_residual_norm`."""
    wide = compute_type(residual)
    hidden = _wide_residual(residual, branch, gate, index)
    normed = hidden * (hidden.square().mean(1, keepdim=True) + eps).rsqrt() * weight.to(wide)
    normed = normed * (1 + scale.to(wide)[index]) + shift.to(wide)[index]
    return hidden.to(residual.dtype), normed.to(residual.dtype)


def _wide_residual(
    residual: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    wide = compute_type(residual)
    return residual.to(wide) + gate.to(wide)[index] * branch.to(wide)


@triton.jit
def _gated_residual_kernel(
    p_residual,
    p_branch,
    p_gate,
    p_weight,  # this and the next two are read with NORM
    p_scale,
    p_shift,
    p_index,
    p_hidden,  # [N, C] contiguous
    p_normed,  # [N, C] contiguous, written with NORM
    stride_residual,
    stride_branch,
    stride_gate,
    stride_scale,
    stride_shift,
    eps,
    NORM: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    i_t = tl.load(p_index + i_n).to(tl.int64)
    p_residual += i_n * stride_residual
    p_branch += i_n * stride_branch
    p_gate += i_t * stride_gate
    b_h: tl.tuple = ()
    for c in tl.static_range(PIECES):
        b_gate = load_piece(p_gate, c, WIDTH, PIECE)
        b_residual = load_piece(p_residual, c, WIDTH, PIECE, ONCE=True)
        b_h += (b_residual + b_gate * load_piece(p_branch, c, WIDTH, PIECE, ONCE=True),)
    for c in tl.static_range(PIECES):
        store_piece(p_hidden + i_n * WIDTH, b_h[c], c, WIDTH, PIECE)
    if NORM:
        p_scale += i_t * stride_scale
        p_shift += i_t * stride_shift
        store_norm_modulate(b_h, p_weight, p_scale, p_shift, p_normed + i_n * WIDTH, eps, PIECES, WIDTH, PIECE)


def _launch(
    residual: torch.Tensor,
    branch: torch.Tensor,
    gate: torch.Tensor,
    index: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, torch.Tensor, float] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm` is (weight, scale, shift, eps); without it the second output is empty."""
    rows, width = residual.shape
    piece = piece_of(width)
    weight, scale, shift, eps = norm or (gate, gate, gate, 0.0)
    hidden = torch.empty(rows, width, dtype=residual.dtype, device=residual.device)
    normed = torch.empty_like(hidden) if norm else hidden.new_empty(0)
    _gated_residual_kernel[(rows,)](
        residual,
        branch,
        gate,
        weight,
        scale,
        shift,
        index,
        hidden,
        normed,
        residual.stride(0),
        branch.stride(0),
        gate.stride(0),
        scale.stride(0),
        shift.stride(0),
        eps,
        NORM=norm is not None,
        PIECES=triton.cdiv(width, piece),
        WIDTH=width,
        PIECE=piece,
        num_warps=4,
    )
    return hidden, normed


def gated_residual(
    residual: torch.Tensor,
    branch: torch.Tensor,
    gate: torch.Tensor,
    index: torch.Tensor,
    *,
    impl: Impl | None = None,
) -> torch.Tensor:
    """Add a gated branch to the residual stream.

    Args:
        residual: [N, C], unit stride along C; float64 (reference only), float32, bfloat16 or float16.
        branch: Output of attention or feed-forward, like `residual`.
        gate: Table [T, C], unit stride along C, any float type.
        index: Row of the table for every row, [N] int64 or int32, within 0 to T - 1 (not checked).
        impl: Who computes it; None takes the kernel on a GPU, the reference elsewhere.

    Returns:
        The new residual stream, [N, C] contiguous, in `residual`'s type.

    Raises:
        ValueError: if shapes or strides do not fit, or `impl` does not cover the call.
    """
    check_rows(residual.shape, residual=residual, branch=branch)
    check_modulation(residual.shape, index, gate=gate)
    if choose_impl(impl, residual, branch, gate, index) == "reference":
        return gated_residual_reference(residual, branch, gate, index)
    return _launch(residual, branch, gate, index, None)[0]


def gated_residual_norm(
    residual: torch.Tensor,
    branch: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    index: torch.Tensor,
    *,
    eps: float,
    impl: Impl | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a gated branch to the residual stream, then norm and modulate it for the next layer, in one pass.

    Args:
        residual, branch, gate, index, impl: As for `gated_residual`.
        weight: Of the norm, [C], any float type.
        scale, shift: Tables like `gate`; of the next block where the op crosses a block's border.
        eps: Added to the mean square.

    Returns:
        The new residual stream and the next layer's input, each [N, C] contiguous, in `residual`'s type.

    Raises:
        ValueError: if shapes or strides do not fit, or `impl` does not cover the call.
    """
    check_rows(residual.shape, residual=residual, branch=branch)
    check_weight(residual.shape[1], weight=weight)
    check_modulation(residual.shape, index, gate=gate, scale=scale, shift=shift)
    if choose_impl(impl, residual, branch, gate, weight, scale, shift, index) == "reference":
        return gated_residual_norm_reference(residual, branch, gate, weight, scale, shift, index, eps=eps)
    return _launch(residual, branch, gate, index, (weight, scale, shift, eps))
