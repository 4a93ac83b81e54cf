"""Stages of a request: how long each took, and who is told while it runs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from solgen.engine.machine import synchronize


class Listener(Protocol):
    """Shows progress, on rank 0."""

    def start(self, stage: str, total: int | None) -> None:
        """A stage begins; `total` parts are expected, or it is not divided."""

    def advance(self) -> None:
        """One part of the stage is done."""

    def finish(self, stage: str, seconds: float) -> None:
        """The stage ended."""

    def note(self, text: str) -> None:
        """A line the user should read."""


class Silent:
    """A listener that shows nothing: that of every rank but 0."""

    def start(self, stage: str, total: int | None) -> None:
        """Nothing."""

    def advance(self) -> None:
        """Nothing."""

    def finish(self, stage: str, seconds: float) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


class Stages:
    """Times stages with a device sync at each end, so that no work is booked to a later one."""

    def __init__(self, device: torch.device, listener: Listener) -> None:
        self.device = device
        self.listener = listener
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Run one stage; yields the call that marks one part done. Repeated names add up."""
        self.listener.start(name, total)
        synchronize(self.device)
        started = time.perf_counter()
        yield self.listener.advance
        synchronize(self.device)
        seconds = time.perf_counter() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.listener.finish(name, seconds)
