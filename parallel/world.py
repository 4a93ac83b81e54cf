"""Which process of how many this is, as torchrun's environment says. Imports no torch."""

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
        local_rank: Number of this process on its machine, and of its GPU.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "World":
        """Read RANK, WORLD_SIZE and LOCAL_RANK, as torchrun sets them; without them the process is alone.

        Raises:
            InputError: if they are not numbers that fit each other, or several processes are not told where to meet.
        """
        rank, size = environment.get("RANK", "0"), environment.get("WORLD_SIZE", "1")
        local_rank = environment.get("LOCAL_RANK", rank)
        if not (rank.isdecimal() and size.isdecimal() and local_rank.isdecimal() and int(rank) < int(size)):
            raise InputError(
                f"RANK={rank}, WORLD_SIZE={size} and LOCAL_RANK={local_rank} do not fit each other; "
                "start ranks with torchrun"
            )
        if int(size) > 1:
            address, port = (environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
            if not (address and port.isdecimal() and 0 < int(port) < 2**16):
                raise InputError(
                    f"WORLD_SIZE={size}, but MASTER_ADDR={address} and MASTER_PORT={port} name no place to meet; "
                    "start ranks with torchrun"
                )
        return cls(int(rank), int(size), int(local_rank))
