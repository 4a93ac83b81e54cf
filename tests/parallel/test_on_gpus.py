"""Over NCCL, two GPUs compute what one does, and the loss of one ends the other."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from solgen.parallel.launch import RankError, launch
from tests.parallel import on_gpus
from tests.parallel.exchanging import lose
from tests.parallel.test_faults import FAULTS, LIMIT, break_down  # noqa: F401

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]

BOUNDS = {"dense": 5e-3, "sol-attn2": 2e-2, "block-sparse": 5e-3}
"""Distance of a call's output from one GPU's, over its norm: bf16 everywhere, and FP8 in attention."""


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    return launch(on_gpus.measure, num_ranks=2)


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return launch(on_gpus.measure, num_ranks=1)


@pytest.mark.parametrize("case", on_gpus.CASES, ids=str)
def test_the_transformer_is_that_of_one_gpu(two: dict[str, Any], one: dict[str, Any], case: tuple[Any, ...]) -> None:
    for found, expected in zip(two["outputs"][case], one["outputs"][case], strict=True):
        assert (found - expected).norm() <= BOUNDS[case[0]] * expected.norm()


@pytest.mark.parametrize("case", on_gpus.WIRES, ids=str)
def test_over_any_wire_it_is_that_of_one_gpu(two: dict[str, Any], one: dict[str, Any], case: tuple[Any, ...]) -> None:
    for found, expected in zip(two["wires"][case], one["wires"][case], strict=True):
        assert (found - expected).norm() <= (3e-2 if case[0] == "fp8" else 2e-2) * expected.norm()


def test_overlap_changes_no_bit(two: dict[str, Any]) -> None:
    for late, early in zip(on_gpus.WIRES[::2], on_gpus.WIRES[1::2], strict=True):
        assert not late[3]
        assert early[3]
        assert all(torch.equal(*pair) for pair in zip(two["wires"][late], two["wires"][early], strict=True))


def test_packing_with_the_norms_changes_no_bit(two: dict[str, Any]) -> None:
    (plain, _), _ = two["packing"]
    for together, apart in two["packing"]:
        for found in (together, apart):
            assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))


@pytest.mark.parametrize("kind", FAULTS)
def test_a_failing_rank_ends_the_job(kind: str, break_down: Callable[[str], None]) -> None:  # noqa: F811
    break_down(kind)


def test_a_killed_rank_frees_both_gpus(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]
    with pytest.raises(RankError, match=r"^rank 1 was ended by SIGKILL; is there enough memory\?$"):
        launch(lose, 1, tmp_path, "cuda", num_ranks=2)
    assert time.time() - (tmp_path / "1").stat().st_mtime < LIMIT
    assert "".join(capfd.readouterr()) == ""
    assert not any(Path("/proc", path.read_text()).exists() for path in tmp_path.iterdir())
    context = 2**28  # a rank's is larger
    assert all(torch.cuda.mem_get_info(gpu)[0] > before - context for gpu, before in enumerate(free))
