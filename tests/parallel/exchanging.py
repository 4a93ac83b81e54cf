"""A rank that loses another in an exchange; imports no model, so that many of them start soon."""

import os
import signal
from pathlib import Path

import torch

from solgen.parallel.agree import joined
from solgen.parallel.launch import unwinding
from solgen.parallel.mesh import Mesh
from solgen.parallel.ulysses import Ulysses
from solgen.parallel.world import World


def lose(victim: int, pids: Path, device_type: str = "cpu") -> None:
    """Exchange rows and heads for ever; `victim` is killed in its third turn, in which the others wait for it."""
    world = World.from_environment()
    (pids / str(world.rank)).write_text(str(os.getpid()))
    with joined(world):
        ulysses = Ulysses.over(Mesh.over(world, dp_size=1, device_type=device_type), 565, block=64)
        assert ulysses is not None
        rows = torch.zeros(1, ulysses.rows[world.rank], world.size, 16, device=device_type)
        turn = 0
        while True:
            turn += 1
            if world.rank == victim and turn == 3:
                (pids / str(world.rank)).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            ulysses.to_rows(ulysses.to_heads(rows)[0])


def interrupted_twice(cleaned: str) -> None:
    """Be ended by a second signal in the clean-up that the first one began; a rank ends by either at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with unwinding():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            Path(cleaned).touch()
