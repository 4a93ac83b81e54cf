"""Triton's file cache for ranks that start together: the first to want a kernel compiles it, the others wait for it."""

import fcntl
import time
from typing import Any, TextIO

from triton.runtime.cache import FileCacheManager

LONGEST_WAIT = 120.0
"""Seconds that a rank waits for another's compilation before it compiles itself; Gluon's kernels take some ten."""

BETWEEN = 0.02
"""Seconds between two looks."""


class WaitingCacheManager(FileCacheManager):
    """One kernel's entry of the cache on this machine, named by TRITON_CACHE_MANAGER.

    `triton.compile` looks for the group of files that a compilation leaves, and puts one there when it is done. Who
    finds none holds the entry's lock until then, or until the process ends; a process is never locked out by itself.

    Source: the interface is `CacheManager` of triton/runtime/cache.py.
    """

    _lock: TextIO | None = None

    def get_group(self, filename: str) -> Any:
        """The group; one without `filename`, or None, makes the caller compile it."""
        found = super().get_group(filename)
        if (found and filename in found) or self.lock_path is None:
            return found
        deadline = time.monotonic() + LONGEST_WAIT
        try:
            self._lock = open(self.lock_path, "w")  # noqa: SIM115, held until the group is there
            while not self._locked() and time.monotonic() < deadline:
                time.sleep(BETWEEN)
        except OSError:
            return found  # without locks every rank compiles, as with Triton's own cache
        found = super().get_group(filename)
        if found and filename in found:
            self._lock.close()
        return found

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        """Add the group, and let the others have it."""
        path = super().put_group(filename, group)
        if self._lock is not None:
            self._lock.close()
        return path

    def _locked(self) -> bool:
        assert self._lock is not None
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
