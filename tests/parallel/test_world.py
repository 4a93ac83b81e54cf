"""Ranks come from torchrun's environment; the axes refuse what they cannot hold."""

import pytest

from solgen.errors import InputError
from solgen.parallel.mesh import Mesh, check_split
from solgen.parallel.ulysses import Ulysses, split_rows
from solgen.parallel.world import World


def test_without_torchrun_the_process_is_alone() -> None:
    assert World.from_environment({}) == World(rank=0, size=1, local_rank=0)
    assert Mesh.over(World(), dp_size=1, device_type="cpu") == Mesh()
    assert Ulysses.over(Mesh(), 100, block=64) is None


def test_torchrun_sets_rank_size_and_local_rank() -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert World.from_environment(environment) == World(rank=3, size=4, local_rank=1)
    for name, value in (("MASTER_ADDR", ""), ("MASTER_PORT", ""), ("MASTER_PORT", "abc"), ("MASTER_PORT", "0")):
        with pytest.raises(InputError, match=f"{name}={value}.* no place to meet; start ranks with torchrun"):
            World.from_environment(environment | {name: value})
    with pytest.raises(InputError, match="MASTER_ADDR= and MASTER_PORT= name no place"):
        World.from_environment({"RANK": "3", "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("rank", "size", "local_rank"), [("4", "4", "0"), ("x", "2", "0"), ("0", "", "0"), ("-1", "2", "0"), ("0", "2", "")]
)
def test_values_that_do_not_fit_are_refused(rank: str, size: str, local_rank: str) -> None:
    with pytest.raises(InputError, match="do not fit"):
        World.from_environment({"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank})


@pytest.mark.parametrize("ranks", [3, 5, 6])
def test_heads_that_cannot_be_split_name_the_numbers_that_can(ranks: int) -> None:
    with pytest.raises(InputError) as error:
        check_split(ranks, dp_size=1, num_heads=56)
    assert str(error.value) == f"56 heads cannot be split over {ranks} GPUs; use 1, 2, 4, 7 or 8"
    assert error.value.exit_code == 2


def test_sizes_that_fit_pass_and_dp_must_divide() -> None:
    for ranks, dp_size in [(1, 1), (2, 1), (7, 1), (8, 2), (14, 2), (16, 2), (6, 3)]:
        check_split(ranks, dp_size=dp_size, num_heads=56)
    with pytest.raises(InputError, match=r"parallel.dp=2 does not divide 3 GPUs; use a divisor of 3"):
        check_split(3, dp_size=2, num_heads=56)
    with pytest.raises(InputError, match="7 heads cannot be split over 2 GPUs; use 1 or 7"):
        check_split(2, dp_size=1, num_heads=7)
    with pytest.raises(InputError, match="11 heads cannot be split over 2 GPUs; use 1$"):
        check_split(2, dp_size=1, num_heads=11)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 100, 512, 565, 83_061, 219_524])
def test_rows_are_dealt_out_in_whole_blocks(rows: int, ranks: int) -> None:
    dealt = split_rows(rows, ranks, block=64)
    assert len(dealt) == ranks
    assert sum(dealt) == rows
    full = [count for count in dealt if count]
    assert all(count % 64 == 0 for count in full[:-1])
    assert all(count == 0 for count in dealt[len(full) :])
    assert max(full) - min(full) < 2 * 64
