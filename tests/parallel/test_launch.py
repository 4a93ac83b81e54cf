"""One command, any number of ranks: started here or by torchrun, with the same clips."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from solgen.engine.bench.show import show
from solgen.engine.generate import generate
from solgen.engine.profile.scaling import scaling_tables
from solgen.engine.stages import Silent
from tests.command_line import solgen
from tests.engine.conftest import small_job  # noqa: F401

SMALL = ["--preset", "demo", "--width", "64", "--height", "64", "--steps", "1"]
PROMPT = ["-p", "a red ball"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's default for several ranks, and ours."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def record(path: Path) -> dict[str, Any]:
    return json.loads(path.with_suffix(".json").read_text())


@pytest.mark.usefixtures("one_thread")
def test_torchrun_and_gpus_make_the_same_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = tmp_path / "ours.mp4", tmp_path / "theirs.mp4"
    common = ["generate", *SMALL, *PROMPT, "--seed", "7", "-o"]
    assert solgen(*common, str(ours), "--gpus", "2") == 0
    out, err = capfd.readouterr()
    assert out == f"{ours}\n"
    # One rank tells, in plain lines, and each thing once.
    stages = [line.partition(":")[0] for line in err.splitlines()]
    assert stages == ["load", "encode", "AdaLN tables", "denoise", "decode audio", "decode video", "write"]
    assert "\r" not in err
    command = [*TORCHRUN, "--nproc-per-node", "2", "-m", "solgen", *common, str(theirs)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{theirs}\n"
    assert ours.read_bytes() == theirs.read_bytes()
    assert record(ours)["latents_sha256"] == record(theirs)["latents_sha256"]
    assert record(ours)["ranks"] == record(theirs)["ranks"] == {"dp": 1, "sp": 2}


def test_two_groups_make_two_clips(tmp_path: Path, small_job, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red ball\na blue ball\n")
    output = tmp_path / "clip.mp4"
    arguments = ["--prompt-file", str(prompts), "-o", str(output), "--gpus", "2", "--set", "parallel.dp=2", "--json"]
    assert solgen("generate", *SMALL, *arguments) == 0
    out, err = capfd.readouterr()
    records = json.loads(out)
    assert [entry["request"]["prompt"] for entry in records] == ["a red ball", "a blue ball"]
    assert [Path(entry["output"]["path"]).name for entry in records] == ["clip-0000.mp4", "clip-0001.mp4"]
    assert all(Path(entry["output"]["path"]).is_file() for entry in records)
    assert [record(Path(entry["output"]["path"])) for entry in records] == records
    assert all(entry["ranks"] == {"dp": 2, "sp": 1} for entry in records)
    # The seed that nobody gave was chosen once, and told once.
    (seed,) = {entry["request"]["seed"] for entry in records}
    assert [line for line in err.splitlines() if line.startswith("seed")] == [f"seed {seed}"]
    alone = generate([small_job("alone.mp4", prompt="a blue ball", seed=seed)], Silent())
    assert alone[0]["latents_sha256"] == records[1]["latents_sha256"]


def test_a_profile_tells_what_communication_costs(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--attention", "dense,sol-attn2", "--density", "0.5", "--runs", "1", "--gpus", "2", "--json"]
    assert solgen("profile", *SMALL, *arguments) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["facts"]["world size"] == 2
    for arm in report["arms"]:
        rows = {row["name"]: row for row in arm["modules"]}
        assert rows["communication"]["ms"] > 0
        assert rows["communication"]["calls"] == 6 * 2 + 2
        assert sum(row["ms"] for row in arm["modules"] if row["part_of"] is None) == pytest.approx(arm["most_ms"])
        assert rows["unattributed"]["ms"] >= 0
        assert arm["imbalance"] >= 0
        assert arm["hidden_ms"] == 0


def test_a_profile_tells_what_overlap_hides(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--dummy-weights", "--runs", "1", "--gpus", "2", "--json", "--set", "parallel.overlap=on"]
    assert solgen("profile", *SMALL, *arguments, "--set", "parallel.wire=fp8") == 0
    (arm,) = json.loads(capfd.readouterr().out)["arms"]
    rows = {row["name"]: row["ms"] for row in arm["modules"]}
    assert rows["communication"] > 0
    assert 0 <= arm["hidden_ms"] < arm["most_ms"]
    assert sum(row["ms"] for row in arm["modules"] if row["part_of"] is None) == pytest.approx(arm["most_ms"])


def test_a_profile_compares_numbers_of_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--attention", "dense,sol-attn2", "--dummy-weights", "--density", "0.5", "--runs", "1", "--json"]
    plot = ["--plot", str(tmp_path / "scaling.png")] if importlib.util.find_spec("matplotlib") else []
    assert solgen("profile", *SMALL, *arguments, "--gpus", "1,2", *plot) == 0
    told = json.loads(capfd.readouterr().out)
    assert [report["facts"]["world size"] for report in told["reports"]] == [1, 2]
    rows = told["scaling"]
    assert [(row["arm"], row["gpus"]) for row in rows] == [
        ("dense", 1), ("dense", 2), ("sol-attn2", 1), ("sol-attn2", 2)
    ]  # fmt: skip
    for one, two in (rows[:2], rows[2:]):
        assert (one["speedup"], one["efficiency"], one["communication_ms"], one["imbalance"]) == (1, 1, 0, 0)
        assert two["speedup"] == pytest.approx(one["call_ms"] / two["call_ms"])
        assert two["efficiency"] == pytest.approx(two["speedup"] / 2)
        assert 0 < two["communication_share"] < 1
        for name in ("video_error", "audio_error", "attention_error"):
            assert one[name] == 0
            assert two[name] < (1e-5 if two["arm"] == "dense" else 1e-2)
    assert not plot or (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    show(scaling_tables(rows))
    out = capfd.readouterr().out
    assert "over 1 GPU" in out
    assert "…" not in out  # no number is cut off


@pytest.mark.parametrize(
    ("given", "message"),
    [("1,x", "expected a number"), ("0", "expected a number"), ("2,2", "different ones"), ("1,", "expected a number")],
)
def test_numbers_of_ranks_that_are_none(given: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert solgen("profile", *SMALL, "--gpus", given) == 2
    assert message in capfd.readouterr().err


def test_what_does_not_go_with_several_numbers_is_refused_first(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--gpus", "1,2", "--attention", "stock"], "the stock call runs on one GPU"),
        (["--gpus", "1,2", "--trace", "t.json"], "--trace writes one file"),
        (["--gpus", "1,3", "--dummy-weights"], "8 heads cannot be split over 3 GPUs"),
    ):
        assert solgen("profile", *SMALL, *arguments) == 2
        assert message in capfd.readouterr().err


def test_two_nodes_of_torchrun_join(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
    meet += ["--rdzv-endpoint", f"localhost:{port}", "--local-addr", "localhost"]
    output = tmp_path / "clip.mp4"
    command = [*TORCHRUN, *meet, "-m", "solgen", "generate", *SMALL, *PROMPT, "-o", str(output)]
    nodes = [subprocess.Popen(command, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    told = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    assert sorted(out for out, _ in told) == ["", f"{output}\n"]
    assert record(output)["ranks"] == {"dp": 1, "sp": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip.json", "clip.mp4"]


REFUSED = {
    "three": (["--gpus", "3"], "8 heads cannot be split over 3 GPUs; use 1, 2, 4 or 8"),
    "none": (["--gpus", "0"], "--gpus 0; expected 1 or more"),
    "uneven groups": (["--gpus", "3", "--set", "parallel.dp=2"], "parallel.dp=2 does not divide 3 GPUs"),
    "a wire for other attention": (
        ["--gpus", "2", "--set", "parallel.wire=fp8", "--attention", "dense"],
        "--attention dense attends in 16 bit; use sol-attn2 or fp8, or parallel.wire=bf16",
    ),
    "no groups": (["--set", "parallel.dp=0"], "parallel.dp"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_once_before_anything_starts(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, message = REFUSED[case]
    assert solgen("generate", *SMALL, *PROMPT, "-o", str(tmp_path / "clip.mp4"), *arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_torchrun_refuses_once_on_every_rank(tmp_path: Path) -> None:
    command = [*TORCHRUN, "--nproc-per-node", "3", "-m", "solgen", "generate", *SMALL, *PROMPT]
    command += ["-o", str(tmp_path / "clip.mp4")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.count("8 heads cannot be split over 3 GPUs; use 1, 2, 4 or 8") == 1
    assert list(tmp_path.iterdir()) == []


def test_gpus_must_agree_with_torchrun(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    there = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in there.items():
        monkeypatch.setitem(os.environ, name, value)
    assert solgen("generate", *SMALL, *PROMPT, "--gpus", "4") == 2
    assert "--gpus 4, but torchrun started 2 processes; leave --gpus out" in capfd.readouterr().err
