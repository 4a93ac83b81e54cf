"""What all tests share.

Where several processes share the machine each has one thread: their pools would only wait for one another. GPUs are
there for `pytest -m gpu` alone: the other tests start more ranks than most machines have GPUs, and compare CPU results.
"""

import os
import re
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def wants_gpus(config: pytest.Config) -> bool:
    """Whether `-m` asks for the tests that need one."""
    return re.search(r"(?<!not )\bgpu\b", config.option.markexpr) is not None


def pytest_configure(config: pytest.Config) -> None:
    if not wants_gpus(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if wants_gpus(config) else "GPUs are hidden; pytest -m gpu runs the tests that need them"


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run `solgen generate` and return the one error line; asserts exit code and an untouched folder."""
    from tests.command_line import solgen

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 2, command: str = "generate") -> str:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert solgen(command, *arguments) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        return err

    return run
