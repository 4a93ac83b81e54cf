"""What ranks exchange for heads: queries, keys and values, or Sol-Attn2's operands and its output in FP8.

With the FP8 wire, what attention would make of the same rows travels: its codes, scales and unit means, so that only
the way back adds an error. Ranks hold whole blocks of 64 rows; what spans all rows of a head, the mean key, the mean
value and its scale, they join from one another's statistics first.
"""

from dataclasses import dataclass

import torch

from solgen.errors import InputError
from solgen.kernels.sol_attn2 import NormRope, SolAttn2Config
from solgen.kernels.sol_attn2.config import BLOCK
from solgen.kernels.sol_attn2.details import Stage
from solgen.kernels.sol_attn2.triton.operands import Operands
from solgen.kernels.sol_attn2.wire import (
    PACKET_BYTES,
    HeadStatistics,
    channel_statistics,
    join_statistics,
    pack_output,
    pack_rows,
    pack_values,
    unpack_operands,
    unpack_output,
)
from solgen.parallel.ulysses import Arrival, Ulysses
from solgen.presets.schema import Preset

BACKENDS = ("sol-attn2", "fp8")
"""Those that attend with Sol-Attn2's operands."""


def check_wire(preset: Preset) -> None:
    """Refuse operands on the wire where nothing attends with them.

    Raises:
        InputError: with the backends that do.
    """
    if preset.parallel.wire == "fp8" and preset.attention.backend not in BACKENDS:
        raise InputError(
            f"parallel.wire=fp8 sends the operands of Sol-Attn2, and --attention {preset.attention.backend} attends "
            f"in 16 bit; use {' or '.join(BACKENDS)}, or parallel.wire=bf16"
        )


def send_heads(
    ulysses: Ulysses, query: torch.Tensor, key: torch.Tensor, *values: torch.Tensor, norm: NormRope | None
) -> Arrival[tuple[torch.Tensor, ...]]:
    """`Ulysses.start_to_heads` of queries and keys that may lack their norm.

    Args:
        ulysses: Ranks and their rows.
        query, key: Of this rank's rows, [1, n, H, D].
        values: At most one, [1, n, H, D].
        norm: What queries and keys lack, with the angles of this rank's rows: one kernel adds it and packs them. None
            where they lack nothing.

    Returns:
        Brings the same, each [1, N, H / P, D].
    """
    if norm is None:
        return ulysses.start_to_heads(query, key, *values)
    # Triton is imported only when it is used: CPU installations may not have it.
    from solgen.kernels.fused import norm_pack

    packed = norm_pack(
        query[0],
        key[0],
        values[0][0] if values else None,
        norm.query_weight,
        norm.key_weight,
        norm.cos,
        norm.sin,
        eps=norm.eps,
        ranks=len(ulysses.rows),
    )
    return ulysses.start_packed(packed)


@dataclass(frozen=True)
class SentValues:
    """Values on their way.

    Attributes:
        statistics: Mean and scale of all heads.
        packets: Brings those of this rank's heads from every rank.
    """

    statistics: HeadStatistics
    packets: Arrival[list[torch.Tensor]]


@dataclass(frozen=True)
class OperandExchange:
    """The exchanges of one attention call.

    Attributes:
        ulysses: Ranks and their rows.
        config: Says what is smoothed.
        stage: Entered around "operator" and its "prepare" for what is computed; exchanges lie outside.
    """

    ulysses: Ulysses
    config: SolAttn2Config
    stage: Stage

    def send_values(self, value: torch.Tensor) -> SentValues:
        """Quantise this rank's values [1, n, H, 128] and begin to send them."""
        value = value.transpose(1, 2)
        statistics = self._statistics(value, smooth=self.config.smooth_value)
        with self.stage("operator"), self.stage("prepare"):
            packets = pack_values(value, statistics)
        return SentValues(statistics, self.ulysses.start_packets(packets, self._widths("values")))

    def operands(self, query: torch.Tensor, key: torch.Tensor, sent: SentValues) -> Operands:
        """All rows of this rank's heads, from its rows of all heads, [1, n, H, 128] each."""
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        if self.config.smooth_key:
            mean = self._statistics(key, smooth=True).mean
        else:
            mean = torch.zeros_like(sent.statistics.mean)
        with self.stage("operator"), self.stage("prepare"):
            packets = pack_rows(query, key, mean)
        rows = self.ulysses.start_packets(packets, self._widths("rows"))()
        values = sent.packets()
        heads = self._heads(len(mean))
        with self.stage("operator"), self.stage("prepare"):
            return unpack_operands(
                rows,
                values,
                num_rows=sum(self.ulysses.rows),
                key_mean=mean[heads],
                value=sent.statistics.heads(heads),
            )

    def to_rows(self, output: torch.Tensor, sent: SentValues) -> torch.Tensor:
        """This rank's rows of all heads, [1, n, H, 128], from all rows of its heads, [1, N, h, 128]."""
        mean = sent.statistics.mean
        packets = pack_output(output[0], mean[self._heads(len(mean))])
        return unpack_output(self.ulysses.packets_to_rows(packets), mean, output.dtype)[None]

    def _statistics(self, x: torch.Tensor, *, smooth: bool) -> HeadStatistics:
        """Of all rows of [1, H, n, 128]."""
        with self.stage("operator"), self.stage("prepare"):
            mine = channel_statistics(x)
        parts = self.ulysses.stack(mine)
        with self.stage("operator"), self.stage("prepare"):
            return join_statistics(parts, sum(self.ulysses.rows), smooth=smooth)

    def _heads(self, num_heads: int) -> slice:
        """This rank's."""
        share = num_heads // len(self.ulysses.rows)
        return slice(self.ulysses.rank * share, (self.ulysses.rank + 1) * share)

    def _widths(self, kind: str) -> list[int]:
        """Bytes of a head's packet from every rank."""
        return [-(-rows // BLOCK) * PACKET_BYTES[kind] for rows in self.ulysses.rows]
