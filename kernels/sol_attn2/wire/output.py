"""The attention's output as E4M3 with one scale a row and head, and back.

    packet  = per row: codes [h, D], then scales [h] fp32
    y_nhd   = code_nhd scale_nh + mean_hd        code = E4M3((x - mean) / scale), scale = max_d |x - mean| / 448

`mean` is the head's mean value: attention adds it to every row, so that it costs nothing to leave it out of what is
rounded. Relative error of what is left, for a code with 3 bits after the point: at most 2^-4, 2.6 % of the norm.

Legend: P ranks, N rows of all, n rows of a rank, H heads of all, h = H / P heads of a rank, D = 128.
"""

import torch

from solgen.kernels.sol_attn2.config import HEAD_DIM
from solgen.kernels.sol_attn2.reference.quantise import quantise

OUTPUT_BYTES = HEAD_DIM + 4
"""Of one row and head."""


def pack_output(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Pack all rows of a rank's heads.

    Args:
        x: [N, h, D] with unit stride along D; float32, bfloat16 or float16.
        mean: [h, D] fp32, contiguous.

    Returns:
        [N, h `OUTPUT_BYTES`] uint8.
    """
    if x.is_cuda:
        from solgen.kernels.sol_attn2.triton.output import pack_output as on_gpu

        return on_gpu(x, mean)
    return pack_output_reference(x, mean)


def unpack_output(packets: torch.Tensor, mean: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unpack a rank's rows of all heads.

    Args:
        packets: From every rank its heads of these rows, [P, n, h `OUTPUT_BYTES`] uint8, contiguous.
        mean: [H, D] fp32, contiguous.
        dtype: Of the output: float32, bfloat16 or float16.

    Returns:
        [n, H, D] contiguous.
    """
    if packets.is_cuda:
        from solgen.kernels.sol_attn2.triton.output import unpack_output as on_gpu

        return on_gpu(packets, mean, dtype)
    return unpack_output_reference(packets, mean, dtype)


def pack_output_reference(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """As `pack_output`, on any device."""
    codes, scale = quantise(x.float() - mean, (2,))
    parts = codes.to(torch.float8_e4m3fn).view(torch.uint8), scale.view(torch.uint8)
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def unpack_output_reference(packets: torch.Tensor, mean: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As `unpack_output`, on any device."""
    ranks, rows, width = packets.shape
    heads = width // OUTPUT_BYTES
    codes, scale = packets.split([heads * HEAD_DIM, heads * 4], dim=2)
    values = codes.contiguous().view(torch.float8_e4m3fn).view(ranks, rows, heads, HEAD_DIM).float()
    values = values * scale.contiguous().view(torch.float32).unsqueeze(-1)
    return (values.transpose(0, 1).flatten(1, 2) + mean).to(dtype)
