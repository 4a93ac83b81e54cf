"""Whether host memory has room for what `--offload` keeps there; without, the system would end the process."""

import re
from collections.abc import Callable
from pathlib import Path

from solgen.engine.adaln import is_projection
from solgen.engine.adapters.overlay import weight_headers
from solgen.engine.components import CONDITIONER_LAYERS
from solgen.engine.pipeline import transformer_name
from solgen.engine.repository import Repository
from solgen.errors import SetupError
from solgen.presets.schema import Memory, Task


def check_host_memory(
    memory: Memory, repository: Repository, task: Task, *, num_ranks: int, available: int | None
) -> None:
    """Refuse offloading that this host has no memory for, by the weight headers.

    Args:
        memory: The preset's memory table.
        repository: Checked.
        task: Decides the transformer.
        num_ranks: Processes on this host; each keeps the blocks, one the conditioner.
        available: From `available_memory`; None lets everything pass.

    Raises:
        SetupError: with both sizes.
    """
    needed = 0
    if memory.offload != "none":
        needed += _bytes(repository.folders["text_encoder"], _waits_in_conditioner)
    if memory.offload == "layers":
        needed += num_ranks * _bytes(repository.folders[transformer_name(task)], _waits_in_transformer)
    if available is not None and needed > available:
        raise SetupError(
            f"--offload {memory.offload} keeps {needed / 2**30:.1f} GiB in host memory for {num_ranks} process(es), "
            f"{available / 2**30:.1f} GiB are available; use --offload none, or fewer GPUs"
        )


def available_memory() -> int | None:
    """Bytes that a process of this machine or container may still take; None where Linux does not say.

    Sources: MemAvailable of proc(5), and memory.max less what is used without the file cache (cgroup v2).
    """
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
        available = 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return min(available, limit - int(used["anon"]))
    except (OSError, KeyError, ValueError):  # no group, or "max"
        return available


def _waits_in_conditioner(name: str) -> bool:
    layer = re.search(r"\blayers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) < CONDITIONER_LAYERS


def _waits_in_transformer(name: str) -> bool:
    return name.startswith("transformer_blocks.") and not is_projection(name.rpartition(".")[0])


def _bytes(folder: Path, waits: Callable[[str], bool]) -> int:
    """Stored bytes of the tensors that wait on the host."""
    offsets = (entry["data_offsets"] for name, entry in weight_headers(folder).items() if waits(name))
    return sum(end - begin for begin, end in offsets)
