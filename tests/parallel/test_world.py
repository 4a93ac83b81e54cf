"""Ranks come from torchrun's environment."""

import pytest

from solgen.errors import InputError
from solgen.parallel.world import World


def test_without_torchrun_the_process_is_alone() -> None:
    world = World.from_environment({})
    assert world == World(rank=0, size=1)
    world.require_one()


def test_torchrun_sets_rank_and_size() -> None:
    assert World.from_environment({"RANK": "3", "WORLD_SIZE": "4"}) == World(rank=3, size=4)


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("x", "2"), ("0", ""), ("-1", "2")])
def test_values_that_do_not_fit_are_refused(rank: str, size: str) -> None:
    with pytest.raises(InputError, match="do not fit"):
        World.from_environment({"RANK": rank, "WORLD_SIZE": size})


def test_several_processes_are_refused() -> None:
    with pytest.raises(InputError, match="2 processes were started"):
        World(rank=1, size=2).require_one()
