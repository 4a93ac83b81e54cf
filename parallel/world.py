"""Which process of how many this is, as torchrun's environment says."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from solgen.errors import InputError


@dataclass(frozen=True)
class World:
    """The processes of one run.

    Attributes:
        rank: Number of this process, 0 to `size` - 1.
        size: Processes in all.
    """

    rank: int
    size: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "World":
        """Read RANK and WORLD_SIZE; without them the process is alone.

        Raises:
            InputError: if they are not numbers that fit each other.
        """
        rank, size = environment.get("RANK", "0"), environment.get("WORLD_SIZE", "1")
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise InputError(f"RANK={rank} and WORLD_SIZE={size} do not fit each other; start ranks with torchrun")
        return cls(int(rank), int(size))

    def require_one(self) -> None:
        """Refuse several processes, which would all make the same clip.

        Raises:
            InputError: if `size` is not 1.
        """
        if self.size > 1:
            raise InputError(f"{self.size} processes were started, but a clip is made by one; use --nproc-per-node 1")
