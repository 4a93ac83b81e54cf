"""Operands of Sol-Attn2 as bytes: quantised where the rows are, attended with where the heads are.

Nothing is added to the operator's own error: what travels are the codes, scales and unit means that it would make of
the same rows (specification section 3). Two statistics span all rows, the mean key of a head and the mean and
largest deviation of its values: every rank reduces its rows, the ranks exchange that, and all join it alike.

A packet holds, for every head, its parts one after the other, each contiguous:

    rows    query codes [NB 64, D], key codes, query unit means [NB 8, D] fp16, key's, both scales [NB, 2] fp32
    values  codes [NB, D, 64], unit means [NB 8, D] fp16

A block's share of every part is a multiple of eight bytes, and eight at a time they are moved.

Legend: H heads, n rows of a rank in NB blocks of 64, N rows of all, D = 128.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from solgen.kernels.sol_attn2.config import BLOCK, E4M3_MAX, HEAD_DIM, SCALE_FLOOR, UNITS
from solgen.kernels.sol_attn2.reference.operands import quantize_rows_reference, quantize_values_reference
from solgen.kernels.sol_attn2.triton.operands import Operands

CODES = BLOCK * HEAD_DIM
MEANS = UNITS * HEAD_DIM * 2
PACKET_BYTES = {"rows": 2 * (CODES + MEANS + 4), "values": CODES + MEANS}
"""Bytes of one head's block of 64 rows in either packet; the same in bf16 are 32,768 and 16,384."""


@dataclass(frozen=True)
class HeadStatistics:
    """What all rows of a head share, [H, D] fp32 and [H] fp32."""

    mean: torch.Tensor
    scale: torch.Tensor

    def heads(self, group: slice) -> "HeadStatistics":
        """Those of some heads; views."""
        return HeadStatistics(self.mean[group], self.scale[group])


def channel_statistics(x: torch.Tensor) -> torch.Tensor:
    """Sum, maximum and minimum over the rows of a rank.

    Args:
        x: [1, H, n, D] with unit stride along D; n may be 0.

    Returns:
        [H, 3, D] fp32; of no rows 0, -inf and inf.
    """
    _, heads, rows, width = x.shape
    if rows == 0:
        none = torch.tensor([0.0, -torch.inf, torch.inf], device=x.device)
        return none.view(1, 3, 1).repeat(heads, 1, width)
    if x.is_cuda:
        from solgen.kernels.sol_attn2.triton.statistics import channel_statistics as on_gpu

        return on_gpu(x)
    wide = x[0].float()
    return torch.stack([wide.sum(1), wide.amax(1), wide.amin(1)], dim=1)


def join_statistics(parts: torch.Tensor, num_rows: int, *, smooth: bool) -> HeadStatistics:
    """Mean and FP8 scale of every head from the statistics of all ranks.

    Args:
        parts: [P, H, 3, D] fp32, in the order of the ranks.
        num_rows: N.
        smooth: Whether the mean is taken off; without, it is zero.
    """
    total = parts[:, :, 0].sum(0)
    mean = total / num_rows if smooth else torch.zeros_like(total)
    # x - mean rounds monotonically in x: the extremes give the largest deviation exactly.
    deviation = (parts[:, :, 1].amax(0) - mean).abs().maximum((parts[:, :, 2].amin(0) - mean).abs())
    # Divided by a tensor: by a number, a GPU would multiply with its rounded inverse.
    scale = deviation.amax(1) / total.new_full((), E4M3_MAX)
    return HeadStatistics(mean, scale.clamp(min=SCALE_FLOOR))


def pack_rows(query: torch.Tensor, key: torch.Tensor, key_mean: torch.Tensor | None) -> torch.Tensor:
    """Quantise and pool this rank's queries and keys.

    Args:
        query, key: [1, H, n, D] with unit stride along D; n in whole blocks but at the end of the sequence.
        key_mean: [H, D] to take off the keys, None for nothing.

    Returns:
        Packets [H, NB `PACKET_BYTES["rows"]`] uint8.
    """
    if query.shape[2] == 0:
        return _nothing(query)
    (q_codes, q_scale, q_units), (k_codes, k_scale, k_units) = _quantize(query, None), _quantize(key, key_mean)
    return _join(q_codes, k_codes, q_units, k_units, torch.stack([q_scale, k_scale], dim=-1))


def pack_values(value: torch.Tensor, statistics: HeadStatistics) -> torch.Tensor:
    """Quantise and pool this rank's values [1, H, n, D]: packets [H, NB `PACKET_BYTES["values"]`] uint8."""
    if value.shape[2] == 0:
        return _nothing(value)
    mean, scale = statistics.mean, statistics.scale
    if value.is_cuda:
        from solgen.kernels.sol_attn2.triton.prepare import quantize_values

        return _join(*quantize_values(value, mean, scale, shift=True))
    return _join(*quantize_values_reference(value, mean, scale))


def unpack_operands(
    rows: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    *,
    num_rows: int,
    key_mean: torch.Tensor,
    value: HeadStatistics,
) -> Operands:
    """The operands of this rank's heads from the packets of all ranks.

    Args:
        rows: Packets of every rank's rows in order, [h, ...] uint8 with this rank's h heads.
        values: The same of the values.
        num_rows: N.
        key_mean: [h, D]; zero without smoothing.
        value: Of the h heads.
    """
    fp8, fp16, fp32 = torch.float8_e4m3fn, torch.float16, torch.float32
    parts = [(CODES, fp8), (CODES, fp8), (MEANS, fp16), (MEANS, fp16), (8, fp32)]
    q_codes, k_codes, q_units, k_units, scales = _split(rows, parts)
    q_scale, k_scale = (scale.contiguous() for scale in scales.unflatten(1, (-1, 2)).unbind(2))
    v_codes, v_units = _split(values, [(CODES, fp8), (MEANS, fp16)])
    return Operands(
        q_codes=q_codes.unflatten(1, (-1, HEAD_DIM)),
        q_scale=q_scale,
        k_codes=k_codes.unflatten(1, (-1, HEAD_DIM)),
        k_scale=k_scale,
        v_codes=v_codes.unflatten(1, (-1, HEAD_DIM, BLOCK)),
        v_scale=value.scale.clone(),  # kernels expect aligned addresses
        q_units=q_units.unflatten(1, (-1, HEAD_DIM)),
        k_units=k_units.unflatten(1, (-1, HEAD_DIM)),
        v_units=v_units.unflatten(1, (-1, HEAD_DIM)),
        k_mean=key_mean.clone(),
        v_mean=value.mean.clone(),
        num_rows=num_rows,
    )


def _nothing(x: torch.Tensor) -> torch.Tensor:
    """Packets of a rank without rows."""
    return torch.empty(x.shape[1], 0, dtype=torch.uint8, device=x.device)


def _quantize(x: torch.Tensor, mean: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if x.is_cuda:
        from solgen.kernels.sol_attn2.triton.prepare import quantize_rows

        return quantize_rows(x, mean)
    return quantize_rows_reference(x, mean)


def _join(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.flatten(1).view(torch.int64) for part in parts], dim=1).view(torch.uint8)


def _split(packets: Sequence[torch.Tensor], parts: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Every part of all packets' blocks, [h, ...] contiguous; parts are bytes of a block and a type."""
    block = sum(size for size, _ in parts)
    found = []
    begin = 0
    for size, dtype in parts:
        # A packet holds all blocks of a part together.
        pieces = [
            packet.view(torch.int64)[:, blocks * begin // 8 : blocks * (begin + size) // 8]
            for packet in packets
            if (blocks := packet.shape[1] // block)
        ]
        found.append(torch.cat(pieces, dim=1).view(dtype))
        begin += size
    return found
