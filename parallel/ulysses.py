"""Ulysses sequence parallelism: rows are dealt out everywhere but in attention, where heads are.

One all-to-all turns this rank's rows of all heads into all rows of its heads, one turns them back (DeepSpeed
Ulysses, arXiv 2309.14509). Rows are dealt out unevenly and never padded.

Legend: P ranks, N rows of the sequence, n rows of this rank, H heads, D channels of a head.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
import torch.distributed as dist

from solgen.parallel.agree import collective
from solgen.parallel.mesh import Mesh

T = TypeVar("T")

Arrival = Callable[[], T]
"""Waits for an exchange that has begun, and returns what it brings; called once."""

Span = Callable[[str], AbstractContextManager[object]]
"""Surrounds the wait for an exchange, to measure it: "heads" of those around attention, "rows" of those that gather."""

Flight = Callable[[dist.Work], None]
"""Told of every exchange that has begun, to measure it to its end whatever runs beside it."""


def split_rows(num_rows: int, num_ranks: int, *, block: int) -> tuple[int, ...]:
    """Rows of every rank: whole blocks, as evenly as they go, the earlier ranks first; the last block is ragged.

    Args:
        num_rows: Rows N of the sequence.
        num_ranks: P; ranks beyond the number of blocks get no rows.
        block: Rows that stay on one rank, so that no scale and no mean is taken over the rows of two.
    """
    share, extra = divmod(-(-num_rows // block), num_ranks)
    blocks = accumulate(share + (rank < extra) for rank in range(num_ranks))
    borders = [0, *(min(num_rows, block * end) for end in blocks)]
    return tuple(end - begin for begin, end in pairwise(borders))


@dataclass(frozen=True)
class Ulysses:
    """The exchanges of one sequence.

    Attributes:
        group: Process group of the P ranks.
        rank: This rank's number in it.
        rows: Rows of every rank; they add up to N.
        span: Surrounds every wait for an exchange.
        flight: Told of every exchange; None where nobody asks.
    """

    group: dist.ProcessGroup
    rank: int
    rows: tuple[int, ...]
    span: Span = nullcontext
    flight: Flight | None = None

    @classmethod
    def over(
        cls, mesh: Mesh, num_rows: int, *, block: int, span: Span = nullcontext, flight: Flight | None = None
    ) -> "Ulysses | None":
        """The exchanges of `num_rows` rows over the mesh's "sp" axis, None when that is one rank."""
        if mesh.sp_group is None or mesh.sp_size == 1:
            return None
        return cls(mesh.sp_group, mesh.sp_rank, split_rows(num_rows, mesh.sp_size, block=block), span, flight)

    def local(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's rows of a tensor with N of them along `dim`; a view."""
        return tensor.narrow(dim, sum(self.rows[: self.rank]), self.rows[self.rank])

    def to_heads(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`start_to_heads`, and wait."""
        return self.start_to_heads(*tensors)()

    def start_to_heads(self, *tensors: torch.Tensor) -> Arrival[tuple[torch.Tensor, ...]]:
        """Begin to exchange this rank's rows of all heads for all rows of its heads, in one all-to-all.

        Args:
            tensors: Query, key and value, each [1, n, H, D], one dtype, with unit stride along D; rows, heads and the
                first element lie at multiples of eight bytes.

        Returns:
            Brings the same, each [1, N, H / P, D]: views of the receive buffer, whose channels are contiguous.

        Raises:
            ValueError: if dtypes differ.
        """
        if len(dtypes := {tensor.dtype for tensor in tensors}) > 1:
            raise ValueError(f"tensors of {', '.join(map(str, dtypes))}; expected one dtype")
        ranks, rows = len(self.rows), self.rows[self.rank]
        words = [tensor[0].view(torch.int64) for tensor in tensors]  # eight bytes at a time
        _, heads, channels = words[0].shape
        packed = words[0].new_empty(ranks, rows, heads // ranks, len(words), channels)
        for index, word in enumerate(words):
            packed[..., index, :] = word.unflatten(1, (ranks, heads // ranks)).transpose(0, 1)
        return self.start_packed(packed.view(tensors[0].dtype))

    def start_packed(self, packed: torch.Tensor) -> Arrival[tuple[torch.Tensor, ...]]:
        """`start_to_heads` of tensors that lie in the send buffer already.

        Args:
            packed: T of them, [P, n, H / P, T, D] contiguous: entry p is what rank p gets. Not to be written before
                the arrival.
        """
        ranks, rows = len(self.rows), self.rows[self.rank]
        received = packed.new_empty(1, sum(self.rows), *packed.shape[2:])
        arrival = self._start("heads", received[0], packed.flatten(0, 1), [rows] * ranks, list(self.rows))

        def arrive() -> tuple[torch.Tensor, ...]:
            arrival()
            return received.unbind(3)

        return arrive

    def start_packets(self, packets: torch.Tensor, widths: Sequence[int]) -> Arrival[list[torch.Tensor]]:
        """Begin to exchange packets of this rank's rows of all heads for those of all rows of its heads.

        Args:
            packets: A packet a head, [H, W] contiguous.
            widths: W of every rank.

        Returns:
            Brings the packets of this rank's heads from every rank, each [H / P, W of that rank].
        """
        ranks = len(self.rows)
        heads = len(packets) // ranks
        sizes = [heads * width for width in widths]
        received = packets.new_empty(sum(sizes))
        arrival = self._start("heads", received, packets.flatten(), [heads * packets.shape[1]] * ranks, sizes)

        def arrive() -> list[torch.Tensor]:
            arrival()
            return [part.view(heads, -1) for part in received.split(sizes)]

        return arrive

    def to_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Undo `to_heads`: all rows of this rank's heads, [1, N, H / P, D], become its rows of all, [1, n, H, D]."""
        return torch.cat(self.packets_to_rows(tensor[0].contiguous()).unbind(), dim=1)[None]

    def packets_to_rows(self, packets: torch.Tensor) -> torch.Tensor:
        """What every rank has of this rank's rows, [P, n, ...], from what this one has of all, [N, ...] contiguous."""
        ranks, rows = len(self.rows), self.rows[self.rank]
        received = packets.new_empty(ranks, rows, *packets.shape[1:])
        self._start("heads", received.flatten(0, 1), packets, list(self.rows), [rows] * ranks)()
        return received

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All rows, [1, N, C], from every rank's [1, n, C]."""
        ranks, rows = len(self.rows), self.rows[self.rank]
        received = tensor.new_empty(1, sum(self.rows), tensor.shape[2])
        # An all-to-all of copies: gloo has no all-gather of uneven parts.
        copies = tensor[0].repeat(ranks, 1)
        self._start("rows", received[0], copies, [rows] * ranks, list(self.rows))()
        return received

    def stack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors of one shape, [P, ...] in their order, on all of them."""
        stacked = tensor.new_empty(len(self.rows), *tensor.shape)
        source = tensor.contiguous()
        with collective():
            work = dist.all_gather(list(stacked), source, group=self.group, async_op=True)
        self._arrival("heads", work, source)()
        return stacked

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def min(self, tensor: torch.Tensor) -> torch.Tensor:
        """Smallest over the ranks, in place."""
        return self._reduce(tensor, dist.ReduceOp.MIN)

    def _reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        with collective():
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor

    def _start(
        self, name: str, output: torch.Tensor, source: torch.Tensor, sent: list[int], received: list[int]
    ) -> Arrival[None]:
        """Begin an all-to-all, `sent` to and `received` from every rank in entries of the first dimension."""
        with collective():
            work = dist.all_to_all_single(output, source, received, sent, group=self.group, async_op=True)
        return self._arrival(name, work, source)

    def _arrival(self, name: str, work: dist.Work, source: torch.Tensor) -> Arrival[None]:
        if self.flight is not None:
            self.flight(work)
        kept = [source]  # until this stream has waited, whoever waited before

        def arrive() -> None:
            with self.span(name), collective():
                work.wait()
            kept.clear()

        return arrive
