"""`solgen bench merge`: how long an adapter over every linear layer of the blocks takes to merge, file to weights.

Writes a random adapter in diffusers' names, opens it as `--lora` does, and merges it into random weights where these
lie. One layer is then held against W + B A of its old weights in float64.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors import safe_open
from safetensors.torch import save_file

from solgen.engine.adapters.adapter import open_adapter
from solgen.engine.adapters.inspect import IN_SCOPE
from solgen.engine.adapters.overlay import Overlay, collect_deltas
from solgen.engine.adapters.source import Source
from solgen.engine.bench.record import record
from solgen.engine.dummy import DummyRepository, RandomWeights, check_memory
from solgen.engine.machine import pick_device, synchronize
from solgen.errors import InputError, SolgenError
from solgen.presets.demo import demo_transformer
from solgen.presets.schema import Lora, load_preset

DTYPE = torch.bfloat16

MOST_TURNED = 1e-4
"""Share of a layer that may round to the neighbour of what float64 rounds to: sums lie within 1e-6 of a tie."""


@dataclass(frozen=True)
class MergeSettings:
    """What is measured.

    Attributes:
        preset: Decides the model's size: the released one's, or the demo's.
        rank: Of every pair of factors; alpha is the same.
        seed: Of the factors.
    """

    preset: str = "5s"
    rank: int = 256
    seed: int = 0


def bench_merge(settings: MergeSettings, note: Callable[[str], None]) -> dict[str, Any]:
    """Measure one merge; `note` is told about progress.

    Raises:
        SolgenError: without the GPU or memory that the model needs, or if the merged layer is wrong.
    """
    if settings.rank < 1:
        raise InputError(f"--rank {settings.rank}; expected 1 or more")
    demo = load_preset(settings.preset).model.source == "demo"
    device = pick_device(settings.preset)
    repository = DummyRepository(
        path=Path(),
        source="random weights",
        folders={},
        digests={},
        config=demo_transformer() if demo else {},
        two_times=False,
        text_rows=1,
    )
    weights = RandomWeights(repository, device, DTYPE)
    check_memory(weights, device)
    transformer = weights.transformer(projections=False)
    layers = [name for name, _ in transformer.named_modules() if name.endswith(IN_SCOPE)]
    note(f"an adapter of rank {settings.rank} over {len(layers)} layers")
    with tempfile.TemporaryDirectory() as folder:
        path = write_adapter(Path(folder) / "adapter.safetensors", transformer, layers, settings)
        began = time.perf_counter()
        shapes = {name: tuple(parameter.shape) for name, parameter in transformer.named_parameters()}
        overlay = Overlay((open_adapter(Source(str(path), path=path), shapes, Lora()),), "merge", Path(folder))
        opened = time.perf_counter()
        before = transformer.get_parameter(f"{layers[0]}.weight").clone()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        used = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        synchronize(device)
        start = time.perf_counter()
        overlay.apply(transformer)
        synchronize(device)
        merged = time.perf_counter()
        turned = check_layer(transformer, layers[0], before, overlay)
        size = path.stat().st_size
    beside = torch.cuda.max_memory_allocated(device) - used if device.type == "cuda" else None
    return record(device) | {
        "settings": asdict(settings),
        "layers": len(layers),
        "parameters": sum(transformer.get_parameter(f"{name}.weight").numel() for name in layers),
        "adapter_bytes": size,
        "open_s": opened - began,
        "merge_s": merged - start,
        "bytes_beside": beside,
        "turned": turned,
    }


def write_adapter(
    path: Path, transformer: MiniMaxH3Transformer3DModel, layers: list[str], settings: MergeSettings
) -> Path:
    """A bf16 adapter over some layers, changes of about a hundredth of their weights."""
    device = transformer.device
    generator = torch.Generator(device).manual_seed(settings.seed)
    tensors = {}
    for name in layers:
        rows, columns = transformer.get_parameter(f"{name}.weight").shape
        shapes = {"lora_A": (settings.rank, columns), "lora_B": (rows, settings.rank)}
        for factor, shape in shapes.items():
            deviation = 0.1 * (columns * settings.rank) ** -0.25
            values = torch.empty(shape, dtype=DTYPE, device=device).normal_(std=deviation, generator=generator)
            tensors[f"transformer.{name}.{factor}.weight"] = values.cpu()
    save_file(tensors, path)
    return path


def check_layer(transformer: MiniMaxH3Transformer3DModel, name: str, before: torch.Tensor, overlay: Overlay) -> float:
    """Share of a merged layer that is not W + B A rounded from float64.

    Raises:
        SolgenError: if that is more than near-ties explain, or any element is further off than its neighbour.
    """
    after = transformer.get_parameter(f"{name}.weight")
    exact = before.double()
    with safe_open(overlay.adapters[0].header.path, framework="pt") as file:
        (delta,) = collect_deltas(overlay.adapters, [file], f"{name}.weight", before.device)
    assert delta.down is not None
    up, down = delta.factor * delta.up.double(), delta.down.double()
    exact += up @ down
    wanted = exact.to(DTYPE)
    turned = float((after != wanted).double().mean())
    step = 2.0**-7 * torch.maximum(wanted.double().abs(), after.double().abs())
    # Where both terms nearly cancel, FP32's own error is wider than a step.
    step += (down.shape[0] + 1) * 2.0**-24 * (before.double().abs() + up.abs() @ down.abs())
    if turned > MOST_TURNED or bool(((after.double() - wanted.double()).abs() > step).any()):
        raise SolgenError(
            f"{name} is not W + B A after the merge: {turned:.2%} of it differ; there is no use in timing it"
        )
    return turned
