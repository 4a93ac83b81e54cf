"""What the processes of a run agree on before and after the work; a process alone agrees with itself."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from solgen.errors import SetupError, SolgenError
from solgen.parallel.world import World

T = TypeVar("T")

LONGEST_WAIT = timedelta(hours=2)
"""How long a rank waits for another: it may be decoding, or have one clip more. Failures do not wait for it."""


class LostRankError(SolgenError):
    """A collective failed because another rank is gone; that rank's own message says why."""


@contextmanager
def joined(world: World) -> Iterator[None]:
    """Meet the other processes: NCCL between GPUs, gloo between CPUs and for Python objects.

    From here on a kernel that several of them want is compiled once on a machine, unless TRITON_CACHE_MANAGER is set.

    Raises:
        SetupError: if this process has no GPU of its own on a machine with GPUs.
    """
    if world.size == 1:
        yield
        return
    os.environ.setdefault("TRITON_CACHE_MANAGER", "solgen.parallel.compile_once:WaitingCacheManager")
    backend = "gloo"
    if torch.cuda.is_available():
        require_gpus(world.local_rank + 1)
        torch.cuda.set_device(world.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    with collective():
        dist.init_process_group(backend, timeout=LONGEST_WAIT)
    yield
    # Not after an exception: the others are not there any more to say goodbye to.
    dist.destroy_process_group()


def share(world: World, produce: Callable[[], T]) -> T:
    """Run `produce` on rank 0 and return its result on every rank; what it raises ends every rank, told once."""
    with together(world):
        value = produce() if world.rank == 0 else None
    return value if world.size == 1 else broadcast(value, None)  # type: ignore[return-value]


@contextmanager
def together(world: World) -> Iterator[None]:
    """Leave the body together: the lowest rank that failed raises its error, the others exit with its code."""
    failed: SolgenError | None = None
    try:
        yield
    except SolgenError as error:
        if world.size == 1:
            raise
        failed = error
    if world.size == 1:
        return
    codes: list[int | None] = [None] * world.size
    with collective():
        dist.all_gather_object(codes, None if failed is None else failed.exit_code)
    first = next((rank for rank, code in enumerate(codes) if code is not None), None)
    if first == world.rank and failed is not None:
        raise failed
    if first is not None:
        raise SystemExit(codes[first])


def gather(world: World, value: T) -> list[T]:
    """Every rank's value in rank order, on rank 0; an empty list elsewhere. Waits for all ranks."""
    if world.size == 1:
        return [value]
    values: list[Any] | None = [None] * world.size if world.rank == 0 else None
    with collective():
        dist.gather_object(value, values)
    return values or []


def require_gpus(count: int) -> None:
    """Refuse more processes than visible GPUs; a machine without GPUs takes any number.

    Raises:
        SetupError: with the number there are.
    """
    if torch.cuda.is_available() and count > (visible := torch.cuda.device_count()):
        raise SetupError(
            f"{count} GPUs were asked for and {visible} are visible; use at most {visible}, or set CUDA_VISIBLE_DEVICES"
        )


@contextmanager
def collective() -> Iterator[None]:
    """Tell a rank that is gone from a bug.

    Raises:
        LostRankError: in place of what the backend raises.
    """
    try:
        yield
    except RuntimeError as error:
        first = (str(error).splitlines() or [""])[0]
        raise LostRankError(f"an exchange between ranks failed, as it does when one is gone: {first}") from error


def broadcast(value: T, group: dist.ProcessGroup | None) -> T:
    """The value of the group's first rank, on all of them; tensors on its GPU arrive on the receiver's."""
    first = dist.get_rank(group) == 0
    message: list[Any] = [None]
    if first:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        message[0] = buffer.getvalue()
    with collective():
        dist.broadcast_object_list(message, group=group, group_src=0, device=torch.device("cpu"))
    if first:
        return value

    gpus = range(torch.cuda.device_count())
    here = {f"cuda:{gpu}": f"cuda:{torch.cuda.current_device()}" for gpu in gpus}
    # Only other ranks of this run write to the group, hence a full unpickler.
    return torch.load(io.BytesIO(message[0]), map_location=here, weights_only=False)
