"""Small adapters on disk, and the demo transformer with them."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from solgen.engine.adapters.overlay import Overlay, open_overlay
from solgen.engine.adapters.source import Source
from solgen.presets.demo import demo_model_path
from solgen.presets.schema import Lora
from tests.engine.adapters.spellings import BLOCKS, OTHERS, QKV, RANK, TIME, TIME_HIDDEN, Factors, spelled

HYPERFLOW = {
    "hyperflow": "true",
    "hyperflow_version": "0.0-test",
    "hyperflow_gate": "0.25",
    "hyperflow_sigmas": "[1.0, 0.6, 0.25, 0.0]",
    "hyperflow_video_shift": "10.0",
    "hyperflow_audio_shift": "2.0",
    "lora_rank": "6",
    "lora_alpha": "6",
    "tasks": '["fl2va", "ref2va"]',
}
"""Header of a two-time adapter."""


@pytest.fixture(scope="session")
def transformer_folder() -> Path:
    return demo_model_path() / "transformer"


@pytest.fixture(scope="session")
def weights(transformer_folder: Path) -> dict[str, Tensor]:
    """Base weights as they lie on disk."""
    return load_file(next(transformer_folder.glob("*.safetensors")))


@pytest.fixture(scope="session")
def factors(weights: dict[str, Tensor]) -> Factors:
    """bf16 factors for every attention and FFN layer of three blocks; q, k and v share A, as fused forms need."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).to(torch.bfloat16)

    made: Factors = {}
    for block in BLOCKS:
        shared = normal(RANK, weights[f"{block}.attn.to_q.weight"].shape[1])
        for name in (*QKV, *OTHERS):
            rows, columns = weights[f"{block}.{name}.weight"].shape
            made[f"{block}.{name}"] = (shared if name in QKV else normal(RANK, columns)), normal(rows, RANK)
    return made


@pytest.fixture
def write(tmp_path: Path, factors: Factors) -> Callable[..., Path]:
    """Write the true adapter in a producer's spelling; `change` edits its tensors before they are saved."""

    def make(style: str = "diffusers", name: str = "", change=None, metadata: dict[str, str] | None = None) -> Path:
        tensors = spelled(style, factors)
        found = {"fastvideo": {"format": "fastvideo-lora-v2", "low_rank_tensors": str(len(tensors))}}.get(style, {})
        folder = tmp_path / "peft" if style == "peft" else tmp_path
        folder.mkdir(exist_ok=True)
        path = folder / ("adapter_model.safetensors" if style == "peft" else name or f"{style}.safetensors")
        if style == "peft":
            (folder / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": RANK}))
        if change:
            change(tensors)
        save_file({k: t.contiguous() for k, t in tensors.items()}, path, metadata=found | (metadata or {}))
        return path

    return make


@pytest.fixture(scope="session")
def pristine(transformer_folder: Path) -> Callable[[torch.dtype], MiniMaxH3Transformer3DModel]:
    """A fresh demo transformer of a type."""
    models = {
        dtype: MiniMaxH3Transformer3DModel.from_pretrained(transformer_folder, dtype=dtype).eval()
        for dtype in (torch.bfloat16, torch.float32)
    }
    return lambda dtype: copy.deepcopy(models[dtype])


@pytest.fixture
def opened(transformer_folder: Path) -> Callable[..., Overlay]:
    """Adapters opened for the demo transformer; paths, or (path, strength)."""

    def make(*files, folder: Path | None = None, task: str = "t2va", **settings) -> Overlay:
        given = [file if isinstance(file, tuple) else (file, 1.0) for file in files]
        sources = [Source(path.name, strength, path=path) for path, strength in given]
        overlay = open_overlay(sources, folder or transformer_folder, task, Lora(**settings))
        assert overlay is not None
        return overlay

    return make


@pytest.fixture
def merged(opened, pristine) -> Callable[..., dict[str, Tensor]]:
    """Weights of the demo transformer after a merge."""

    def make(*files, dtype: torch.dtype = torch.bfloat16, **settings) -> dict[str, Tensor]:
        overlay = opened(*files, **settings)
        transformer = pristine(dtype)
        overlay.apply(transformer)
        return transformer.state_dict()

    return make


@pytest.fixture
def hyperflow(write) -> Callable[..., Path]:
    """A two-time adapter of three calls with HyperFlow's header."""

    def make(name: str = "hyperflow.safetensors", **metadata: str) -> Path:
        def change(tensors: dict[str, Tensor]) -> None:
            generator = torch.Generator().manual_seed(21)
            for embedder in ("time_embedder", "endpoint_time_embedder"):
                for layer, (rows, columns) in {"linear_1": (TIME_HIDDEN, 256), "linear_2": (TIME, TIME_HIDDEN)}.items():
                    key = f"transformer.{embedder}.{layer}.lora_"
                    tensors[f"{key}A.weight"] = torch.randn(RANK, columns, generator=generator) * 0.1
                    tensors[f"{key}B.weight"] = torch.randn(rows, RANK, generator=generator) * 0.1

        return write(name=name, change=change, metadata=HYPERFLOW | metadata)

    return make
