"""The ranks of a run on two axes: "dp" takes different prompts, "sp" shares the rows of one clip."""

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from solgen.errors import InputError
from solgen.parallel.agree import broadcast, collective
from solgen.parallel.world import World

T = TypeVar("T")

LARGEST_SUGGESTION = 8
"""GPUs of the largest common host; an error suggests no more."""


@dataclass(frozen=True)
class Mesh:
    """Where this process stands. The default is a process alone.

    Attributes:
        dp_rank: Which share of the prompts it takes, 0 to `dp_size` - 1.
        dp_size: Groups that take different prompts.
        sp_rank: Which rows of a clip it takes, 0 to `sp_size` - 1; 0 also encodes and writes.
        sp_size: Ranks that share one clip.
        sp_group: Process group of the ranks that share this one's clips; None when it is alone.
    """

    dp_rank: int = 0
    dp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1
    sp_group: dist.ProcessGroup | None = None

    @classmethod
    def over(cls, world: World, *, dp_size: int, device_type: str) -> "Mesh":
        """Lay the world out on both axes; neighbouring ranks, which share a host, share a clip.

        Args:
            world: Joined, with a size that `check_split` accepts.
            dp_size: Size of the "dp" axis.
            device_type: "cuda" or "cpu".
        """
        if world.size == 1:
            return cls()
        with collective():
            mesh = init_device_mesh(device_type, (dp_size, world.size // dp_size), mesh_dim_names=("dp", "sp"))
        return cls(
            mesh.get_local_rank("dp"), mesh.size(0), mesh.get_local_rank("sp"), mesh.size(1), mesh.get_group("sp")
        )

    @property
    def leads(self) -> bool:
        """Whether this rank encodes, joins the frames and writes for its group."""
        return self.sp_rank == 0

    def collect(self, part: torch.Tensor, count: int) -> list[torch.Tensor]:
        """The parts of the group's first `count` ranks, of one shape, on its leader; nothing elsewhere.

        Args:
            part: This rank's; empty on the ranks that have none. The leader has one.
            count: At least 1.
        """
        if self.sp_size == 1:
            return [part]
        sizes = [part.numel() * (self.leads and rank < count) for rank in range(self.sp_size)]
        received = part.new_empty(sum(sizes))
        sent = [part.numel(), *[0] * (self.sp_size - 1)]
        with collective():
            dist.all_to_all_single(received, part.flatten(), sizes, sent, group=self.sp_group)
        return [found.view(part.shape) for found in received.split(sizes)[:count]] if self.leads else []

    def share(self, value: T) -> T:
        """The leader's value, on every rank of the group."""
        return value if self.sp_size == 1 else broadcast(value, self.sp_group)


def check_split(num_ranks: int, *, dp_size: int, num_heads: int) -> None:
    """Refuse a number of ranks that the axes cannot hold.

    Args:
        num_ranks: Ranks of the run.
        dp_size: Groups that take different prompts (`parallel.dp`).
        num_heads: Attention heads of the transformer, dealt out within a group.

    Raises:
        InputError: with the numbers that would do.
    """
    if num_ranks % dp_size:
        raise InputError(f"parallel.dp={dp_size} does not divide {num_ranks} GPUs; use a divisor of {num_ranks}")
    sp_size = num_ranks // dp_size
    if num_heads % sp_size:
        *most, last = (str(size) for size in range(1, LARGEST_SUGGESTION + 1) if num_heads % size == 0)
        fitting = f"{', '.join(most)} or {last}" if most else last
        raise InputError(f"{num_heads} heads cannot be split over {sp_size} GPUs; use {fitting}")
