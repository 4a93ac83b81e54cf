"""Times spans of a denoiser call, with CUDA events on a GPU and a clock on a CPU; nothing waits for the device."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from solgen.engine.machine import synchronize
from solgen.engine.moment import Moment, milliseconds, moment

FLIGHT = "in flight"
"""Name of the spans of exchanges from their begin to their end."""


@dataclass
class Total:
    """All spans of one name: their time in milliseconds, and how many they were."""

    ms: float = 0.0
    count: int = 0


class Recorder:
    """Spans by name. Those of modules are opened and closed by hooks; any others by `span`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, Moment, Moment]] = []
        self._handles: list[Any] = []
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body."""
        start = moment(self._device)
        yield
        self._spans.append((name, start, moment(self._device)))

    def span_if_watching(self, name: str) -> AbstractContextManager[None]:
        """`span` while modules are watched, else nothing."""
        return self.span(name) if self._handles else nullcontext()

    def flight(self, work: dist.Work) -> None:
        """Time an exchange between ranks to its end, as "in flight", while modules are watched."""
        if not self._handles:
            return
        start = moment(self._device)
        if self._device.type != "cuda":
            work.get_future().add_done_callback(lambda _: self._spans.append((FLIGHT, start, moment(self._device))))
            return
        with torch.cuda.stream(self._aside):
            work.wait()
            self._spans.append((FLIGHT, start, moment(self._device)))

    @contextmanager
    def watching(self, modules: list[tuple[str, nn.Module]]) -> Iterator[None]:
        """Time modules under the names beside them while the body runs."""
        try:
            for name, module in modules:
                self._watch(name, module)
            yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def totals(self) -> dict[str, Total]:
        """What was recorded since the last time, by name. Waits for the device."""
        synchronize(self._device)
        totals: dict[str, Total] = defaultdict(Total)
        for name, start, end in self._spans:
            totals[name].ms += milliseconds(start, end)
            totals[name].count += 1
        self._spans = []
        return totals

    def _watch(self, name: str, module: nn.Module) -> None:
        started: list[Moment] = []

        def before(_module: nn.Module, _args: Any) -> None:
            started.append(moment(self._device))

        def after(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._spans.append((name, started.pop(), moment(self._device)))

        self._handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
