"""What the tests let ranks compile; imported by name in every rank."""

import os
import signal
from typing import Any

import torch.distributed as dist
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from solgen.parallel.agree import gather, joined
from solgen.parallel.compile_once import WaitingCacheManager
from solgen.parallel.world import World


@triton.jit
def double(p_x):
    tl.store(p_x, 2 * tl.load(p_x))


@triton.jit
def wrong(p_x):
    tl.static_assert(False, "on purpose")


def compile_kernel(kernel: Any = double) -> None:
    """For an H200, which need not be there."""
    triton.compile(triton.compiler.ASTSource(kernel, {"p_x": "*fp32"}), target=GPUTarget("cuda", 90, 32))


def compile_wrongly() -> None:
    """Fail to compile."""
    compile_kernel(wrong)


def compile_together(cache: str) -> list[bool]:
    """Compile one kernel on all ranks at once: whether each found it in the cache."""
    os.environ["TRITON_CACHE_DIR"] = cache
    found: list[bool] = []

    def listen(*, cache_hit: bool, **_: Any) -> None:
        found.append(cache_hit)

    world = World.from_environment()
    with joined(world):
        triton.knobs.compilation.listener = listen
        dist.barrier()
        compile_kernel()
        return gather(world, found[0])


def hold(key: str) -> None:
    """Begin to compile the kernel of a key, tell so, and never end."""
    manager = WaitingCacheManager(key)
    assert manager.get_group("kernel.json") is None
    print("holding", flush=True)
    signal.pause()
