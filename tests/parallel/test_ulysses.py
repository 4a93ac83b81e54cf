"""Two, four and eight ranks compute what one does: the same noise, the same routes, the same rows."""

from typing import Any

import pytest
import torch

from solgen.engine.batch import Job
from solgen.engine.request import Options, resolve
from solgen.kernels.sol_attn2 import SolAttn2Config
from solgen.parallel.launch import launch
from solgen.parallel.ulysses import split_rows
from tests.parallel import on_ranks
from tests.parallel.on_ranks import SOUND

pytestmark = pytest.mark.xdist_group("ranks")  # one worker measures, for all


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    options = Options(prompt="a red ball", preset="demo", width=64, height=64, steps=1, density=0.3, offload="layers")
    return Job(resolve(options, seed=7), tmp_path_factory.mktemp("clips") / "clip.mp4")


@pytest.fixture(scope="module")
def alone(job: Job) -> dict[str, Any]:
    return on_ranks.measure(job)


@pytest.fixture(scope="module", params=[2, 4])
def measured(request: pytest.FixtureRequest, job: Job) -> dict[str, Any]:
    """Also runs the exchanges' own checks, on every rank."""
    return launch(on_ranks.measure, job, num_ranks=request.param)


@pytest.mark.parametrize("case", on_ranks.CASES, ids=str)
def test_the_transformer_is_that_of_one_rank(
    measured: dict[str, Any], alone: dict[str, Any], case: tuple[Any, ...]
) -> None:
    found, expected = measured["outputs"][case], alone["outputs"][case]
    # FP8 amplifies rounding of its inputs: 1e-7 to 2e-5 a call, 1e-6 to 1e-4.
    bound = 1e-5 if case[0] == "dense" else 1e-3
    for rows, other in zip(found[:2], expected[:2], strict=True):  # video, then sound
        assert rows.shape == other.shape
        assert (rows - other).norm() <= bound * other.norm()
    assert found[2] == pytest.approx(expected[2], abs=1e-3)


@pytest.mark.parametrize("case", on_ranks.WIRES, ids=str)
def test_over_any_wire_the_transformer_is_that_of_one_rank(
    measured: dict[str, Any], alone: dict[str, Any], case: tuple[Any, ...]
) -> None:
    found, expected = measured["wires"][case], alone["wires"][case]
    bound = 3e-2 if case[0] == "fp8" else 1e-5 if case[1] == "dense" else 1e-3
    for rows, other in zip(found[:2], expected[:2], strict=True):  # video, then sound
        assert (rows - other).norm() <= bound * other.norm()
    # Operands are those of one rank, but for what rounding of the blocks before moves over the threshold.
    assert found[2] == pytest.approx(expected[2], abs=1e-2)


@pytest.mark.parametrize("case", on_ranks.WIRES, ids=str)
def test_packets_are_six_tenths_of_bf16(measured: dict[str, Any], case: tuple[Any, ...]) -> None:
    wire, _, text, _, sound = case
    ranks, heads, rows = len(measured["routes"]), 8, text + sound + on_ranks.VIDEO
    mine = split_rows(rows, ranks, block=64)[0]
    assert mine % 64 == 0
    there = mine * heads * 3 * (128 + 2 * 128 / 8) + mine / 64 * heads * 2 * 4  # codes, means of 8 in fp16; scales
    back = rows * heads / ranks * (128 + 4)
    sparse_blocks = 4
    assert measured["wires"][case][3] == (sparse_blocks * (there + back) if wire == "fp8" else 0)
    in_bf16 = 2 * 128 * heads * (3 * mine + rows / ranks)
    if wire == "fp8":
        assert 0.59 < measured["wires"][case][3] / (sparse_blocks * in_bf16) < 0.61


def test_overlap_changes_no_bit(measured: dict[str, Any]) -> None:
    wires, plain = measured["wires"], measured["outputs"]["sol-attn2", 19]
    for early, late in (
        (wires["bf16", "sol-attn2", 19, True, SOUND], plain),
        (wires["fp8", "sol-attn2", 20, True, SOUND], wires["fp8", "sol-attn2", 20, False, SOUND]),
    ):
        assert all(torch.equal(rows, other) for rows, other in zip(early[:2], late[:2], strict=True))
        assert early[2] == late[2]


def test_packing_with_the_norms_changes_no_bit(measured: dict[str, Any]) -> None:
    for (text, sound, _), (together, apart) in measured["packing"].items():
        plain, _ = measured["packing"][text, sound, False]
        for rows, other, unhurried in zip(together, apart, plain, strict=True):
            assert torch.equal(rows, other)
            assert torch.equal(rows, unhurried)


def test_routes_differ_only_at_the_threshold(measured: dict[str, Any], alone: dict[str, Any]) -> None:
    for block, parts in enumerate(zip(*measured["routes"], strict=True)):
        route = torch.cat([heads for heads, _ in parts], dim=1)
        expected, shares = alone["routes"][0][block]
        assert route.shape == expected.shape
        assert ((shares - SolAttn2Config().epsilon).abs()[route != expected] < 2e-2).all()


def test_noise_has_the_same_bytes_on_every_rank(measured: dict[str, Any], alone: dict[str, Any]) -> None:
    assert {rank["noise"] for rank in measured["request"]} == {alone["request"][0]["noise"]}


def test_every_rank_ends_with_the_latents_of_one(measured: dict[str, Any], alone: dict[str, Any]) -> None:
    first, *others = measured["request"]
    single = alone["request"][0]
    for rank in others:
        assert torch.equal(rank["video"], first["video"])
        assert torch.equal(rank["audio"], first["audio"])
        assert rank["facts"] == first["facts"]
    for name in ("video", "audio"):
        assert (first[name] - single[name]).norm() <= 1e-3 * single[name].norm()
    assert first["facts"]["sequence"] == single["facts"]["sequence"]
    densities = [run["facts"]["attention"]["density"][0] for run in (first, single)]
    assert densities[0] == pytest.approx(densities[1], abs=1e-3)
    # The calibration call's histograms add up to those of one rank.
    epsilons = [run["facts"]["attention"]["epsilon"] for run in (first, single)]
    assert epsilons[0] == pytest.approx(epsilons[1], abs=1e-3)
    assert epsilons[0] != SolAttn2Config().epsilon


def test_eight_ranks_with_a_head_each(job: Job, alone: dict[str, Any]) -> None:
    """All of the above, in one test: eight ranks take long to start."""
    measured = launch(on_ranks.measure, job, num_ranks=8)
    for case in on_ranks.CASES:
        test_the_transformer_is_that_of_one_rank(measured, alone, case)
    for wire in on_ranks.WIRES:
        test_over_any_wire_the_transformer_is_that_of_one_rank(measured, alone, wire)
        test_packets_are_six_tenths_of_bf16(measured, wire)
    test_overlap_changes_no_bit(measured)
    test_packing_with_the_norms_changes_no_bit(measured)
    for same in (
        test_routes_differ_only_at_the_threshold,
        test_noise_has_the_same_bytes_on_every_rank,
        test_every_rank_ends_with_the_latents_of_one,
    ):
        same(measured, alone)
