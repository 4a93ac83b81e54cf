"""Moments of the device's work, and the time between two of them: CUDA events on a GPU, a clock on a CPU."""

import time

import torch

Moment = torch.cuda.Event | float


def moment(device: torch.device) -> Moment:
    """Now, in the order of the work queued on the device's current stream; waits for nothing."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Moment, end: Moment) -> float:
    """Time between two moments that have passed."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return 1e3 * (end - start)
    return float(start.elapsed_time(end))
