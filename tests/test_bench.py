"""`solgen bench`: tables, JSON, refusals, and gates that catch wrong outputs."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch

from solgen.engine.bench import attention, gate, kernels
from solgen.engine.bench.arms import ARMS, Arm
from solgen.engine.bench.clock import alternate
from solgen.engine.bench.oracle import Oracle
from solgen.engine.bench.pairs import Sizes, make_pairs
from solgen.engine.bench.threshold import make_arms
from solgen.kernels.sol_attn2.config import SolAttn2Config
from solgen.kernels.sol_attn2.density import log_shares
from solgen.kernels.sol_attn2.details import pack_route
from tests.command_line import solgen

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def inputs():
    return attention.make_inputs(2, 777, data="structured", seed=0, device=CPU)


@pytest.fixture(scope="module")
def arms(inputs):
    return {arm.name: arm for arm in make_arms(ARMS, inputs, density=0.4, tail="slots", impl=None)}


def test_speed_report(tmp_path, capsys):
    path = tmp_path / "results" / "attention.json"
    assert solgen("bench", "attention", "--shape", "1x650", "--density", "0.5", "--runs", "2", "--json", str(path)) == 0
    report = json.loads(path.read_text())
    (shape,) = report["results"]
    assert list(shape["arms"]) == list(ARMS)
    assert {"command", "commit", "device", "versions"} <= report.keys()
    for name, row in shape["arms"].items():
        assert row["gate"]["passed"]
        assert row["calls"] >= 2
        assert 0 < row["kernel_ms"] <= row["call_ms"]
        assert row["speedup"]["dense"] > 0
        if name not in ("dense", "fp8"):
            assert row["density"] == pytest.approx(0.5, abs=0.02)
    assert "1 heads x 650 rows" in capsys.readouterr().out


def test_error_report(tmp_path, capsys):
    path = tmp_path / "errors.json"
    assert solgen("bench", "attention", "--errors", "--shape", "1x650", "--density", "0.4", "--json", str(path)) == 0
    report = json.loads(path.read_text())
    table = {(row["table"], row["name"]): row for row in report["results"][0]["table"]}
    assert {name for kind, name in table if kind == "offset"} == set("01234567")
    assert len([name for kind, name in table if kind == "smoothing"]) == 4
    assert table["operator", "dense"]["error"] < 3e-3
    assert table["pivot", "shared"]["operator_error"] < table["pivot", "shared"]["error"]
    assert table["tail", "slots"]["error"] < table["tail", "none"]["error"]
    assert table["offset", "7"] | {"table": "", "name": ""} == table["smoothing", "K on, V on"] | {
        "table": "",
        "name": "",
    }
    assert "channel mean 10" in capsys.readouterr().out


def test_a_shared_pivot_costs_the_kept_tokens_their_probabilities():
    """Tokens of the kept block score -1.4 nats, 8 octaves below the surrogates of 64 tokens of score 0."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (0.1 * torch.randn(4096, 128, generator=generator) for _ in range(3))
    query[:, 0] += 2 * 128**0.5
    key[:64, 0] -= 0.7
    value[:64] += 10
    oracle, block = Oracle(query, key, value), torch.tensor([5])
    kept = torch.zeros(1, 64, dtype=torch.bool)
    kept[0, 0] = True
    config = SolAttn2Config(offset=0)
    exact = oracle.expected(Arm("sol-attn2", config), block, kept, rounded=False)
    own, shared = (
        (oracle.expected(Arm(name, config), block, kept, rounded=True) - exact).norm() / exact.norm()
        for name in ("sol-attn2", "shared-pivot")
    )
    assert own < 2**0.107 - 1 + 2**-4  # a code's half step, and E4M3
    assert shared > 0.5  # flushed to code 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "56by83072"), "--shape 56by83072 is not HEADSxROWS"),
        (("--shape", "0x64"), "--shape 0x64 is not HEADSxROWS"),
        (("--shape", "1x640", "--attention", "dense,flash"), "--attention flash is not an operator"),
        (("--data", "real"), "--data real is not a kind of input"),
        (("--shape", "1x640", "--density", "0"), "--density 0; expected a share above 0"),
        (("--shape", "1x640", "--density", "1.5"), "--density 1.5; expected a share above 0 and at most 1"),
        (("--shape", "1x128"), "sol-attn1: density 0.1 is not above 1, "),
        (("--shape", "1x640", "--tail", "whole"), "--tail whole; expected one of slots, anchors, none"),
        (("--shape", "1x640", "--impl", "cuda"), "--impl cuda; expected one of reference, triton, gluon"),
        (("--errors", "--shape", "1x640", "--plot", "a.png"), "--errors measures the same with any --plot"),
        (("--errors", "--shape", "1x640", "--runs", "5"), "leave --runs out"),
        (("--errors", "--shape", "1x640", "--shape", "2x640"), "give every --shape the same"),
        (("--json", "."), "--json . cannot be written: it is a folder; choose another"),
        (("--json", "/dev/null/a.json"), "--json /dev/null/a.json cannot be written: not a directory"),
    ],
)
def test_refusals(capsys, arguments, message):
    assert solgen("bench", "attention", *arguments) == 2
    assert message in capsys.readouterr().err


def test_kernels_for_a_gpu_are_refused_without_one(capsys):
    assert solgen("bench", "attention", "--shape", "1x640", "--impl", "triton") == 2
    assert '--impl "triton" got tensors on cpu; expected CUDA' in capsys.readouterr().err


def test_large_shapes_need_a_gpu(capsys):
    assert solgen("bench", "attention") == 1
    assert "no CUDA GPU found; 32 heads x 32768 rows need one" in capsys.readouterr().err


@pytest.mark.parametrize("name", ARMS)
def test_the_gate_passes_the_reference(arms, inputs, name):
    verdict = gate.check(arms[name], inputs)
    assert verdict.passed, verdict


class Broken(Arm):
    """An arm whose result is changed behind its back."""

    def details(self, inputs):
        output, details = super().details(inputs)
        output[0, 0, 5:9] = output[0, 0, 6:10].clone()
        return output, details


@pytest.mark.parametrize("name", ARMS)
def test_the_gate_catches_a_few_wrong_rows(arms, inputs, name):
    arm = arms[name]
    assert not gate.check(Broken(arm.name, arm.config, arm.impl), inputs).passed


@pytest.mark.parametrize("name", ["block-sparse", "sol-attn1", "sol-attn2"])
def test_the_gate_catches_a_wrong_route(arms, inputs, name):
    details = arms[name].details(inputs)[1]
    route = details.route
    route[0, 0][tuple((~route[0, 0]).nonzero()[0])] = True
    details = dataclasses.replace(details, packed_route=pack_route(route))
    assert gate.misrouted(arms[name], inputs, details) == 1


def test_route_rows_are_rows_of_the_route(arms, inputs):
    blocks = torch.tensor([0, 5, 12])
    oracle = Oracle(*(x[0, 1] for x in inputs))
    assert torch.allclose(oracle.shares(blocks), log_shares(*inputs[:2])[0, 1, blocks], atol=1e-5)
    for name in ("block-sparse", "sol-attn1", "fp8"):
        expected = arms[name].details(inputs)[1].route[0, 1, blocks]
        assert torch.equal(oracle.route(arms[name], blocks), expected)


def test_arms_take_turns_and_slow_ones_stop_first():
    order = []
    calls = {"slow": lambda stage: order.append("slow"), "fast": lambda stage: order.append("fast")}
    clocks = alternate(calls, CPU, runs=2, most=3, budget_ms=math.inf)
    assert order == ["slow", "fast"] * 4  # the first is not timed
    assert len(clocks["slow"].calls) == 3
    assert len(alternate(calls, CPU, runs=2, most=3, budget_ms=0.0)["slow"].calls) == 2


SMALL = Sizes(width=96, inner=128, heads=2)


def test_kernels_report(tmp_path, capsys):
    path = tmp_path / "results" / "kernels.json"
    assert solgen("bench", "kernels", "--rows", "2", "--rows", "5", "--runs", "2", "--json", str(path)) == 0
    report = json.loads(path.read_text())
    assert [length["rows"] for length in report["results"]] == [2, 5]
    assert {"command", "commit", "device", "versions"} <= report.keys()
    for length in report["results"]:
        assert list(length["ops"]) == [pair.name for pair in make_pairs(1, SMALL, 0, CPU)]
        for row in length["ops"].values():
            assert row["gate"]["passed"]
            assert min(row["calls"].values()) >= 2
            assert row["ratio"] == pytest.approx(row["eager_ms"] / row["fused_ms"])
    assert "5 rows" in capsys.readouterr().out


def test_long_sequences_of_the_kernels_need_a_gpu(capsys):
    assert solgen("bench", "kernels") == 1
    assert "no CUDA GPU found; 219524 rows need one" in capsys.readouterr().err


@pytest.mark.parametrize("index", range(7))
def test_the_gate_of_the_kernels_catches_one_wrong_row(index):
    pair = list(make_pairs(300, SMALL, 0, CPU))[index]
    verdict = kernels.judge(pair, 300)
    assert verdict["passed"], verdict
    assert verdict["error"] <= verdict["eager"] * 1.001

    def broken(**inputs):
        outputs = pair.fused(**inputs)
        last = outputs[-1] if isinstance(outputs, tuple) else outputs
        last[299] = last[298].clone()
        return outputs

    assert not kernels.judge(dataclasses.replace(pair, fused=broken), 300)["passed"]


def test_needs_neither_diffusers_nor_pydantic():
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['diffusers', 'pydantic', 'transformers', 'imageio_ffmpeg']));"
        "import solgen.cli, solgen.engine.bench.attention, solgen.engine.bench.errors, solgen.engine.bench.kernels;"
        "import solgen.engine.bench.show"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_linear_layers_in_fp8(tmp_path, capsys):
    path = tmp_path / "linear.json"
    shapes = ("--shape", "256x128", "--shape", "384x64")
    assert solgen("bench", "linear", *shapes, "--rows", "65", "--runs", "1", "--json", str(path)) == 0
    assert "256 x 128" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert [(layer["in"], layer["out"]) for layer in report["results"]] == [(256, 128), (384, 64)]
    for layer in report["results"]:
        # bf16 rounds once, E4M3 every operand: 2^-9 and 2^-4 at most, in squares.
        assert layer["arms"]["bf16"]["error"] < 2**-9 < layer["arms"]["fp8"]["error"] < 2**-4 * (2 / 3) ** 0.5


def test_large_layers_need_a_gpu(capsys):
    assert solgen("bench", "linear") == 1
    assert "no CUDA GPU found; layers of this size need one" in capsys.readouterr().err
