"""Products of quantised rows.

    y_nm = s_n t_m sum_k code_nk weight_mk        codes E4M3, s and t their scales, sums in FP32, one rounding

On a GPU this is `torch._scaled_mm` with row-wise scales (cuBLAS or CUTLASS), which promotes its partial sums to FP32
unless `fast` lets them stay in the tensor cores' narrower accumulators.

Legend: N rows, K channels in, M channels out.
"""

import torch

from solgen.kernels.fp8_linear.quantise import quantise_rows

MULTIPLE = 16
"""Of which the GPU's product wants K and M."""


def multiply_rows(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight_codes: torch.Tensor,
    weight_scales: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
) -> torch.Tensor:
    """Multiply quantised rows by a quantised weight.

    Args:
        codes: [N, K] float8_e4m3fn, contiguous.
        scales: [N] fp32.
        weight_codes: [M, K] float8_e4m3fn, contiguous.
        weight_scales: [M] fp32.
        dtype: Of the output; bfloat16 on a GPU.
        fast: Let the GPU sum in its tensor cores' own accumulators.

    Returns:
        [N, M].

    Raises:
        ValueError: if the sizes do not fit the GPU's product.
    """
    (rows, width), channels = codes.shape, weight_codes.shape[0]
    if not codes.is_cuda:
        return multiply_rows_reference(codes, scales, weight_codes, weight_scales).to(dtype)
    if width % MULTIPLE or channels % MULTIPLE or dtype != torch.bfloat16:
        raise ValueError(
            f"a product of {width} channels to {channels} in {dtype}; expected multiples of {MULTIPLE} in bfloat16"
        )
    if not rows:
        return codes.new_empty(0, channels, dtype=dtype)
    return torch._scaled_mm(
        codes,
        weight_codes.t(),
        scale_a=scales[:, None],
        scale_b=weight_scales[None, :],
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def multiply_rows_reference(
    codes: torch.Tensor, scales: torch.Tensor, weight_codes: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """The equation in float64, [N, M]."""
    products = codes.to(torch.float32).double() @ weight_codes.to(torch.float32).double().t()
    return products * scales.double()[:, None] * weight_scales.double()


def fp8_linear(
    x: torch.Tensor, weight_codes: torch.Tensor, weight_scales: torch.Tensor, *, fast: bool = False
) -> torch.Tensor:
    """x W^T with rows of both in E4M3.

    Args:
        x: [N, K], unit stride along the channels; bfloat16 on a GPU, any float on a CPU.
        weight_codes: [M, K] float8_e4m3fn, contiguous, from `quantise_rows` of the weight.
        weight_scales: [M] fp32.
        fast: See `multiply_rows`.

    Returns:
        [N, M] in `x`'s type.
    """
    return multiply_rows(*quantise_rows(x), weight_codes, weight_scales, dtype=x.dtype, fast=fast)
