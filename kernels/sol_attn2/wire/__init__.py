"""Sol-Attn2 over a wire: its operands and its output as bytes that ranks exchange."""

from solgen.kernels.sol_attn2.wire.attend import attend_operands
from solgen.kernels.sol_attn2.wire.operands import (
    PACKET_BYTES,
    HeadStatistics,
    channel_statistics,
    join_statistics,
    pack_rows,
    pack_values,
    unpack_operands,
)
from solgen.kernels.sol_attn2.wire.output import OUTPUT_BYTES, pack_output, unpack_output

__all__ = [
    "OUTPUT_BYTES",
    "PACKET_BYTES",
    "HeadStatistics",
    "attend_operands",
    "channel_statistics",
    "join_statistics",
    "pack_output",
    "pack_rows",
    "pack_values",
    "unpack_operands",
    "unpack_output",
]
