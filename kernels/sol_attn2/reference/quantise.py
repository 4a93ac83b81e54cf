"""E4M3 quantisation with one FP32 scale a group (specification section 3), straight-through for autograd."""

import torch

from solgen.kernels.sol_attn2.config import E4M3_MAX, SCALE_FLOOR


def straight_through(rounded: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The finite values of `rounded`, bit for bit, with the gradient of `source`."""
    if not (torch.is_grad_enabled() and source.requires_grad):
        return rounded
    return rounded.detach() + (source - source.detach()).to(rounded.dtype)


def quantise(
    values: torch.Tensor, group_dims: tuple[int, ...], scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round values / scale to E4M3 with scale = max(amax / 448, floor).

    Both divisions are IEEE FP32. The floor keeps an all-zero or denormal-only group at zero instead of 0 / 0.
    The scale counts as a constant: the gradient with respect to code x scale passes unchanged to `values`.

    Args:
        values: Any shape, working dtype (fp32 or float64).
        group_dims: Dimensions that share one scale.
        scale: A scale to use instead of the group's own, fp32, broadcastable; larger values saturate.

    Returns:
        codes: E4M3 values in the working dtype, the shape of `values`.
        scale: fp32, `group_dims` kept with size 1.
    """
    plain = values.detach().float()
    if scale is None:
        largest = plain.abs().amax(group_dims, keepdim=True)
        # By a tensor: PyTorch divides by a number on a GPU with its rounded inverse.
        scale = (largest / torch.full_like(largest, E4M3_MAX)).clamp(min=SCALE_FLOOR)
    codes = (plain / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(values.dtype)
    return straight_through(codes, values / scale.to(values.dtype)), scale
