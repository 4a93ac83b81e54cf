"""Whatever happens to a rank, the whole job ends soon, with one message, and leaves nothing behind."""

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from solgen.engine.batch import Job
from solgen.engine.request import Options, resolve
from solgen.parallel.launch import RankError, launch
from solgen.presets.demo import demo_model_path
from tests.parallel.exchanging import lose
from tests.parallel.on_ranks import fail

LIMIT = 30.0
"""Seconds from a fault, or earlier, to the end of the job."""

FAULTS = {
    "load": r"^rank 1: load went wrong$",
    "step 2": r"^rank 1: the second step went wrong$",
    "non-finite": r"^rank [01]: non-finite values at step 1 of 3 \(block 2\); no video was written",
    "decode video": r"^rank 0: decode video went wrong\nthe latents are kept: solgen decode .*clip.latents.safetensors",
    "decoding helper": r"^rank 1: decode video went wrong$",
    "SIGKILL": r"^rank 1 was ended by SIGKILL; is there enough memory\?$",
}
"""Message of every fault."""

COMMAND = [sys.executable, "-m", "solgen", "generate", "--preset", "demo", "-p", "a red ball"]
SMALL = ["--width", "64", "--height", "64", "--gpus", "2", "-o"]


def infinite_model(folder: Path) -> Path:
    """A copy of the demo model with an infinite weight in block 2."""
    copy = Path(shutil.copytree(demo_model_path(), folder / "model"))
    weights = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["transformer_blocks.2.ff.net.2.weight"][0, 0] = float("inf")
    save_file(tensors, weights)
    return copy


@pytest.fixture
def break_down(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Run a request on two ranks with a fault of `FAULTS`, and look at what it leaves."""
    monkeypatch.setenv("DIFFUSERS_VERBOSITY", "critical")  # as the command line does
    output, pids = tmp_path / "out" / "clip.mp4", tmp_path / "pids"
    output.parent.mkdir()
    pids.mkdir()

    def run(kind: str) -> None:
        model = str(infinite_model(tmp_path)) if kind == "non-finite" else None
        options = Options(prompt="a red ball", preset="demo", width=64, height=64, steps=3, model=model)
        with pytest.raises(RankError) as error:
            launch(fail, kind, Job(resolve(options, seed=7), output), pids, num_ranks=2)
        assert time.time() - max(path.stat().st_mtime for path in pids.iterdir()) < LIMIT
        assert re.search(FAULTS[kind], str(error.value))
        assert error.value.exit_code == 1
        assert not error.value.__context__ or error.value.__suppress_context__
        # The caller prints the message; ranks and agent print nothing of their own.
        assert "rror" not in "".join(capfd.readouterr())
        kept = [path.name for path in output.parent.iterdir()]
        if kind != "decoding helper":  # then rank 0 may be ended before it has kept them
            assert kept == (["clip.latents.safetensors"] if kind == "decode video" else [])
        assert set(kept) <= {"clip.latents.safetensors"}
        assert multiprocessing.active_children() == []
        assert len(list(pids.iterdir())) == 2
        assert not any(Path("/proc", path.read_text()).exists() for path in pids.iterdir())

    return run


@pytest.mark.parametrize("kind", FAULTS)
def test_a_failing_rank_ends_the_job(kind: str, break_down: Callable[[str], None]) -> None:
    break_down(kind)


def test_a_killed_rank_of_eight_ends_the_other_seven(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError, match=r"^rank 5 was ended by SIGKILL; is there enough memory\?$"):
        launch(lose, 5, tmp_path, num_ranks=8)
    killed = (tmp_path / "5").stat().st_mtime
    assert time.time() - killed < LIMIT
    assert "".join(capfd.readouterr()) == ""
    assert len(list(tmp_path.iterdir())) == 8
    assert not any(Path("/proc", path.read_text()).exists() for path in tmp_path.iterdir())


def wait_for_group(group: int) -> None:
    """Every process of the group is gone, at the latest a moment after its leader."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("processes are left behind")


def test_an_interrupt_ends_every_rank(tmp_path: Path) -> None:
    command = [*COMMAND, "--steps", "1000", *SMALL, str(tmp_path / "clip.mp4")]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(3)]
        assert lines[2].startswith("encode"), lines
        begun = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does on Ctrl-C
        out, err = process.communicate(timeout=LIMIT)
    assert time.monotonic() - begun < LIMIT
    assert (process.returncode, out, err) == (130, "", "error: interrupted\n")
    wait_for_group(process.pid)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_ranks_import_is_told_once(tmp_path: Path) -> None:
    command = [*COMMAND, "--steps", "1000", *SMALL, str(tmp_path / "clip.mp4")]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True) as process:
        while len(ranks := ranks_of(process.pid)) < 2:
            assert process.poll() is None
        # Both import torch, for a second yet; none has taken the signal over.
        blocked = [re.search(r"SigBlk:\s*(\w+)", Path("/proc", rank, "status").read_text()) for rank in ranks]
        assert all(mask and int(mask[1], 16) & 1 << (signal.SIGINT - 1) for mask in blocked)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out, err) == (130, "", "error: interrupted\n")
    wait_for_group(process.pid)


def ranks_of(agent: int) -> list[str]:
    """Ranks that import torch, among the processes that a launch and its imports start and end."""
    found = []
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        with suppress(OSError):
            rank = Path("/proc", child)
            if b"spawn_main" in (rank / "cmdline").read_bytes() and b"libc10" in (rank / "maps").read_bytes():
                found.append(child)
    return found


def test_a_second_signal_does_not_end_the_clean_up(tmp_path: Path) -> None:
    cleaned = tmp_path / "cleaned"
    program = f"from tests.parallel.exchanging import interrupted_twice; interrupted_twice({str(cleaned)!r})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == -signal.SIGINT
    assert result.stderr.strip().endswith("KeyboardInterrupt")
    assert cleaned.exists()


def test_a_full_disk_ends_every_rank(tmp_path: Path) -> None:
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    script = f'mount -t tmpfs -o size=64k tmpfs {tmp_path} && "$@"; code=$?; ls -A {tmp_path}; exit $code'
    if shutil.which("unshare") is None or subprocess.run([*mount, script, "sh", "true"], check=False).returncode:
        pytest.skip("this machine lets nobody mount a small file system")
    command = [*COMMAND, "--steps", "1", "--seed", "1", *SMALL, str(tmp_path / "clip.mp4")]
    with subprocess.Popen(
        [*mount, script, "sh", *command], stdout=-1, stderr=-1, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("load")
        begun = time.monotonic()
        out, err = process.communicate(timeout=LIMIT)
    assert time.monotonic() - begun < LIMIT
    assert process.returncode == 1
    assert out == ""  # no path of a clip, and `ls` finds no file
    wait_for_group(process.pid)
    *progress, last = [line for line in err.splitlines() if not line.startswith("the latents are kept")]
    assert "error: rank 0: " in last
    assert "No space left on device; free some space" in last
    assert not any("rror" in line for line in progress)
