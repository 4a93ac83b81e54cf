"""Times complete calls and their stages, with CUDA events on a GPU and a clock on a CPU."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from solgen.engine.moment import Moment, milliseconds, moment

FLUSH_BYTES = 2**29
FLUSH_TIMES = 4
"""Before a call, this much memory is filled this often: the L2 is emptied, and the host queues the call meanwhile."""

Stage = Callable[[str], AbstractContextManager[Any]]


class Clock:
    """Times of one arm.

    Attributes:
        calls: Milliseconds of every complete call read so far.
        stages: Milliseconds of every stage, summed over a call, one entry a call.
    """

    def __init__(self, device: torch.device) -> None:
        self.calls: list[float] = []
        self.stages: dict[str, list[float]] = defaultdict(list)
        self._device = device
        self._spans: list[tuple[str, Moment, Moment]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Book what runs inside under a name; stages must not overlap."""
        start = moment(self._device)
        yield
        self._spans.append((name, start, moment(self._device)))

    def run(self, call: Callable[[Stage], Any]) -> None:
        """Time one complete call and wait for it."""
        self._flush()
        self._spans = []
        start = moment(self._device)
        call(self.stage)
        end = moment(self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.calls.append(milliseconds(start, end))
        sums: dict[str, float] = defaultdict(float)
        for name, begin, finish in self._spans:
            sums[name] += milliseconds(begin, finish)
        for name, value in sums.items():
            self.stages[name].append(value)

    def median_ms(self) -> float:
        """Median complete call."""
        return statistics.median(self.calls)

    def stage_ms(self) -> dict[str, float]:
        """Median of every stage."""
        return {name: statistics.median(values) for name, values in self.stages.items()}

    def _flush(self) -> None:
        if self._device.type == "cuda":
            buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self._device)
            for _ in range(FLUSH_TIMES):
                buffer.zero_()


def alternate(
    arms: dict[str, Callable[[Stage], Any]], device: torch.device, *, runs: int, most: int, budget_ms: float
) -> dict[str, Clock]:
    """Time arms round by round, each once a round, so that clocks and temperature fall on all alike.

    Args:
        arms: Complete calls; each runs once untimed before the first round, to compile what it needs.
        runs: Rounds that every arm takes part in.
        most: Rounds of an arm whose calls so far took less than `budget_ms` in all.
    """
    for call in arms.values():
        Clock(device).run(call)
    clocks = {name: Clock(device) for name in arms}
    for done in range(most):
        for name, call in arms.items():
            if done < runs or sum(clocks[name].calls) < budget_ms:
                clocks[name].run(call)
    return clocks
