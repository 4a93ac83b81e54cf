"""Ranks that want the same kernel at once: one compiles it, and a compilation that ends early blocks nobody."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from solgen.parallel.compile_once import WaitingCacheManager
from solgen.parallel.launch import launch
from tests.parallel.compiling import compile_together

KERNEL = "kernel.json"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_one_of_four_ranks_compiles(tmp_path: Path) -> None:
    found = launch(compile_together, str(tmp_path), num_ranks=4)
    assert sorted(found) == [False, True, True, True]
    assert launch(compile_together, str(tmp_path), num_ranks=2) == [True, True]


def test_who_was_killed_blocks_nobody(cache: Path) -> None:
    command = [sys.executable, "-c", "from tests.parallel.compiling import hold; hold('key')"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        with open(cache / "key" / "lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.kill()
    assert WaitingCacheManager("key").get_group(KERNEL) is None


def test_a_compilation_that_failed_blocks_nobody(cache: Path) -> None:
    manager = WaitingCacheManager("key")
    assert manager.get_group(KERNEL) is None
    del manager
    assert WaitingCacheManager("key").get_group(KERNEL) is None


def test_the_others_find_what_one_made(cache: Path) -> None:
    first = WaitingCacheManager("key")
    assert first.get_group(KERNEL) is None
    group = {KERNEL: first.put("{}", KERNEL)}
    first.put_group(KERNEL, group)
    for _ in range(2):
        assert WaitingCacheManager("key").get_group(KERNEL) == group
    # A group whose files are gone is none.
    Path(group[KERNEL]).unlink()
    assert not WaitingCacheManager("key").get_group(KERNEL)


def test_without_a_lock_everybody_compiles(cache: Path) -> None:
    managers = [WaitingCacheManager("key") for _ in range(2)]
    (cache / "key" / "lock").mkdir()
    assert [manager.get_group(KERNEL) for manager in managers] == [None, None]
    for manager in managers:
        manager.put_group(KERNEL, {KERNEL: manager.put("{}", KERNEL)})
