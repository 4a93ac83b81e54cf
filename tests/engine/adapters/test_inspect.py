"""`solgen lora inspect`: what a file is, and whether it would be applied."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from solgen.__main__ import main
from solgen.engine.adapters.inspect import IN_SCOPE, h3_shapes, inspect_adapter
from solgen.engine.adapters.source import Source
from solgen.presets.schema import Lora
from tests.engine.adapters.conftest import HYPERFLOW


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]):
    """Report of `solgen lora inspect --json` on the demo model, and the exit code."""

    def run(path: Path, *arguments: str) -> tuple[int, dict]:
        with pytest.raises(SystemExit) as stop:
            main(["lora", "inspect", str(path), "--model", "demo", "--json", *arguments])
        return stop.value.code, json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(
    ("style", "producer", "qkv", "ffn"),
    [
        ("diffusers", "diffusers", "split", "[value; gate]"),
        ("peft", "PEFT", "split", "[value; gate]"),
        ("peft dump", "PEFT", "split", "[value; gate]"),
        ("fastvideo", "fastvideo-lora-v2", "split", "[value; gate]"),
        ("native", "unknown, MiniMax's names", "fused, thirds", "[gate; value], swapped"),
        ("diffsynth", "DiffSynth-Studio", "fused, rows per head (DiffSynth)", "[gate; value], swapped"),
        ("kohya", "kohya or musubi-tuner", "fused, thirds", "[gate; value], swapped"),
        ("ai-toolkit", "ai-toolkit or ComfyUI", "fused, thirds", "[gate; value], swapped"),
        ("comfyui", "ai-toolkit or ComfyUI", "fused, block-diagonal", "[gate; value], swapped"),
    ],
)
def test_layouts_are_told_apart(style: str, producer: str, qkv: str, ffn: str, write, inspect) -> None:
    code, report = inspect(write(style))
    assert (code, report["verdict"]) == (0, "ok")
    assert (report["producer"], report["QKV"], report["FFN"]) == (producer, qkv, ffn)
    assert report["ranks"] == {"attention": [6], "FFN": [6], "refiner": [6]}
    assert report["coverage"] == "18 of 42 attention and FFN modules, 0 other parameters"


def test_the_contract_and_the_gate_are_shown(hyperflow, inspect) -> None:
    _, report = inspect(hyperflow())
    assert report["contract"] == "3 denoiser calls, video shift 10, audio shift 2, t2va/fl2va/ref2va"
    assert report["two-time gate"] == 0.25
    assert report["scale (alpha / rank)"] == {"metadata": [1.0]}
    assert report["coverage"].endswith("4 other parameters")


def test_a_file_that_would_be_refused_says_why(write, inspect) -> None:
    path = write(change=lambda t: t.update({"transformer_blocks.9.norm1.diff": torch.ones(1)}))
    code, report = inspect(path)
    assert code == 2
    assert "transformer_blocks.9.norm1.diff" in report["verdict"]
    code, report = inspect(path, "--set", "lora.allow_unmatched=true")
    assert (code, report["unmatched"]) == (0, ["transformer_blocks.9.norm1.diff"])


def test_without_a_model_the_shapes_are_minimax_h3s(write, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["lora", "inspect", str(write())])
    assert stop.value.code == 2
    out = capsys.readouterr().out
    assert "producer: diffusers\n" in out
    assert "is [5376, 7168]" in out or "is [7168, 5376]" in out


def pairs_of(modules: dict[str, tuple[int, int]], ranks: dict[str, int], prefix: str = "") -> dict[str, torch.Tensor]:
    """Zero factors for modules of given shapes; rank 1, or that of the first part of `ranks` in the name."""
    tensors = {}
    for name, (rows, columns) in modules.items():
        rank = next((rank for part, rank in ranks.items() if part in name), 1)
        tensors[f"{prefix}{name}.lora_A.weight"] = torch.zeros(rank, columns, dtype=torch.bfloat16)
        tensors[f"{prefix}{name}.lora_B.weight"] = torch.zeros(rows, rank, dtype=torch.bfloat16)
    return tensors


def test_hyperflows_316_modules_at_full_size_are_all_found(tmp_path: Path) -> None:
    """The published file's names and counts, at rank 1."""
    shapes = h3_shapes()
    modules = {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.removesuffix(".weight").endswith(IN_SCOPE) or re.fullmatch(r"time_embedder\.linear_\d\.weight", name)
    }
    modules |= {f"endpoint_{name}": shape for name, shape in modules.items() if name.startswith("time_embedder")}
    assert len(modules) == 316
    path = tmp_path / "hyperflow.safetensors"
    save_file(pairs_of(modules, {}, "transformer."), path, metadata=HYPERFLOW)
    report = inspect_adapter(Source(path.name, path=path), shapes, Lora())
    assert report["verdict"] == "ok"
    assert report["pairs"] == 316
    assert report["coverage"] == "312 of 312 attention and FFN modules, 4 other parameters"


def test_a_native_file_of_259_modules_and_two_ranks_at_full_size(tmp_path: Path) -> None:
    """208 fused modules, 50 AdaLN and the final AdaLN, as MiniMax's own names count them."""
    layers = {"attn.qkv_proj": (21504, 5376), "attn.out_proj": (5376, 7168), "mlp.fc1": (28672, 5376)}
    layers["mlp.fc2"] = (5376, 14336)
    blocks = [f"blocks.{i}" for i in range(50)] + [f"token_refiner.blocks.{i}" for i in range(2)]
    modules = {f"{block}.{layer}": shape for block in blocks for layer, shape in layers.items()}
    modules |= {f"blocks.{i}.adaln_proj.linear": (96768, 2688) for i in range(50)}
    modules["final_layer.adaln_proj.linear"] = (10752, 2688)
    path = tmp_path / "turbo.safetensors"
    save_file(pairs_of(modules, {"adaln": 1, "": 2}), path)
    report = inspect_adapter(Source(path.name, path=path), h3_shapes(), Lora())
    assert (report["verdict"], report["pairs"]) == ("ok", 259)
    assert report["ranks"] == {"attention": [2], "FFN": [2], "refiner": [2], "AdaLN": [1], "embedders, heads": [1]}
    assert report["scale (alpha / rank)"] == {"rank": [1.0]}
    assert report["coverage"] == "312 of 312 attention and FFN modules, 51 other parameters"
