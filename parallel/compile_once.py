"""Triton's file cache for ranks that start together: the first to want a kernel compiles it, the others wait for it."""

import fcntl
from typing import Any, TextIO

from triton.runtime.cache import FileCacheManager


class WaitingCacheManager(FileCacheManager):
    """One kernel's entry of the cache on this machine, named by TRITON_CACHE_MANAGER.

    `triton.compile` looks for the group of files that a compilation leaves, and puts one there when it is done. Who
    finds none holds the entry's lock until then; the system lets it go with the process, or Python with this object,
    if the compilation fails.

    Source: the interface is `CacheManager` of triton/runtime/cache.py.
    """

    _lock: TextIO | None = None

    def get_group(self, filename: str) -> Any:
        """The group; None makes the caller compile it."""
        found = super().get_group(filename)
        if found or self.lock_path is None:
            return found
        try:
            self._lock = open(self.lock_path, "w")  # noqa: SIM115, held until the group is there
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError:
            return None  # without locks every rank compiles, as with Triton's own cache
        found = super().get_group(filename)
        if found:
            self._lock.close()
        return found

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        """Add the group, and let the others have it."""
        path = super().put_group(filename, group)
        if self._lock is not None:
            self._lock.close()
        return path
