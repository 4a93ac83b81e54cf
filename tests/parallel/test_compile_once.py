"""Ranks that want the same kernel at once: one compiles it, and a compilation that ends early blocks nobody."""

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

from solgen.parallel import compile_once
from solgen.parallel.compile_once import WaitingCacheManager
from solgen.parallel.launch import launch
from tests.parallel.compiling import compile_together, compile_wrongly

KERNEL = "kernel.json"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def holder(cache: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has begun to compile the kernel of "key"."""
    command = [sys.executable, "-c", "from tests.parallel.compiling import hold; hold('key')"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holding\n"
            with open(cache / "key" / "lock", "w") as lock, pytest.raises(BlockingIOError):
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield process
        finally:
            process.kill()


def test_one_of_four_ranks_compiles(tmp_path: Path) -> None:
    found = launch(compile_together, str(tmp_path), num_ranks=4)
    assert sorted(found) == [False, True, True, True]
    assert launch(compile_together, str(tmp_path), num_ranks=2) == [True, True]


def test_who_was_killed_blocks_nobody(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert WaitingCacheManager("key").get_group(KERNEL) is None


def test_who_never_ends_blocks_nobody_for_ever(holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_once, "LONGEST_WAIT", 0.0)
    manager = WaitingCacheManager("key")
    assert manager.get_group(KERNEL) is None
    manager.put_group(KERNEL, {KERNEL: manager.put("{}", KERNEL)})
    assert holder.poll() is None
    assert WaitingCacheManager("key").get_group(KERNEL)


def test_a_failed_compilation_can_be_tried_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its exception, and with it the entry, is still there."""
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "solgen.parallel.compile_once:WaitingCacheManager")
    kept = []
    for _ in range(2):
        with pytest.raises(Exception, match="on purpose") as error:
            compile_wrongly()
        kept.append(error)
    assert list(cache.glob("*/lock"))


def test_the_others_find_what_one_made(cache: Path) -> None:
    first = WaitingCacheManager("key")
    assert first.get_group(KERNEL) is None
    group = {name: first.put("{}", name) for name in (KERNEL, "kernel.cubin")}
    first.put_group(KERNEL, group)
    for _ in range(2):
        assert WaitingCacheManager("key").get_group(KERNEL) == group
    # Without the file that was asked for, the group has to be made anew.
    Path(group[KERNEL]).unlink()
    again = WaitingCacheManager("key")
    assert KERNEL not in again.get_group(KERNEL)
    again.put_group(KERNEL, group | {KERNEL: again.put("{}", KERNEL)})
    assert WaitingCacheManager("key").get_group(KERNEL) == group


def test_without_a_lock_everybody_compiles(cache: Path) -> None:
    managers = [WaitingCacheManager("key") for _ in range(2)]
    (cache / "key" / "lock").mkdir()
    assert [manager.get_group(KERNEL) for manager in managers] == [None, None]
    for manager in managers:
        manager.put_group(KERNEL, {KERNEL: manager.put("{}", KERNEL)})
