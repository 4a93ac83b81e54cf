"""How the process ends: help, interrupts, signals, a stdout that cannot be written."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ["generate", "--preset", "demo", "--width", "64", "--height", "64", "--steps", "1", "-p", "x", "-o", "clip.mp4"]


def start(*arguments: str, cwd: Path, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "solgen", *arguments]
    return subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("arguments", [[], ["presets"]])
def test_no_command_shows_the_help(arguments: list[str], tmp_path: Path) -> None:
    process = start(*arguments, cwd=tmp_path, stdout=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("Usage: solgen")
    assert out.count("\n") > 5


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGINT, "error: interrupted"),
        (signal.SIGTERM, "error: stopped by SIGTERM"),
        (signal.SIGHUP, "error: stopped by SIGHUP"),
    ],
)
def test_a_stopped_run_says_so_and_leaves_nothing(number: signal.Signals, message: str, tmp_path: Path) -> None:
    process = start(*SMALL, cwd=tmp_path, stdout=subprocess.DEVNULL)
    assert process.stderr is not None
    seen = []
    for line in process.stderr:  # stages report when they end; the next one has begun
        seen.append(line)
        if line.startswith("denoise"):
            process.send_signal(number)
            break
    seen += process.stderr.read().splitlines(keepends=True)
    assert process.wait(timeout=60) == 128 + number, seen
    assert seen[-1].strip() == message
    assert list(tmp_path.iterdir()) == []


def test_a_closed_or_full_stdout_is_no_bug(tmp_path: Path) -> None:
    closed = subprocess.run(
        ["sh", "-c", f"'{sys.executable}' -m solgen presets list >&-"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (closed.returncode, closed.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        process = start("presets", "list", cwd=tmp_path, stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == f"error: {os.strerror(errno.ENOSPC)}; free some space\n"
