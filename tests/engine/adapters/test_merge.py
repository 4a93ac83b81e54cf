"""The sum: in FP32, rounded once, linear in strength, bounded in memory, and measured."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from solgen.engine.adapters.merge import Delta, merge_into
from tests.engine.adapters.spellings import BLOCKS

NAME = f"{BLOCKS[0]}.ff.net.2"


def low_rank(rows: int, columns: int, rank: int, size: float, seed: int = 0) -> Delta:
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(rows, rank, generator=generator) * size / rank**0.5
    return Delta(1.0, up, torch.randn(rank, columns, generator=generator))


def test_several_adapters_are_summed_before_the_one_rounding(write, merged, weights, factors) -> None:
    first = write("diffusers")
    second = write("native", change=lambda t: t.update({k: v * 2 for k, v in t.items() if "lora_B" in k}))
    result = merged((first, 0.5), (second, -0.25))
    down, up = (tensor.float() for tensor in factors[NAME])
    change = (up @ down) * 0.5 + (up * 2 @ down) * -0.25
    assert torch.equal(result[f"{NAME}.weight"], (weights[f"{NAME}.weight"].float() + change).to(torch.bfloat16))


def test_strength_is_linear(write, merged, weights) -> None:
    path = write()
    base = weights[f"{NAME}.weight"].float()
    whole, half = (merged((path, s), dtype=torch.float32)[f"{NAME}.weight"] - base for s in (1.0, 0.5))
    torch.testing.assert_close(whole, 2 * half, rtol=0, atol=4e-7)


def test_a_weight_of_several_chunks_is_the_formula(tmp_path: Path) -> None:
    weight = torch.randn(3000, 4096, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    delta = low_rank(3000, 4096, 8, 0.01)
    expected = weight.double() + delta.up.double() @ delta.down.double()
    merge_into(weight, [delta])
    # One rounding: half an ulp of bf16 from the exact sum, and FP32's own error beside it.
    assert ((weight.double() - expected).abs() <= expected.abs() * 2.0**-8 * 1.001 + 1e-7).all()
    different = (weight != expected.to(torch.bfloat16)).double().mean()
    assert different < 1e-4


def test_the_share_that_survives_is_measured() -> None:
    """Far below half an ulp nothing moves; well above, all of it survives."""
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    shares = {size: merge_into(weight.clone(), [low_rank(512, 512, 4, size)]).share for size in (1e-5, 1e-3, 1e-1)}
    assert shares[1e-5] < 0.1
    assert shares[1e-5] < shares[1e-3]
    assert shares[1e-1] == pytest.approx(1, abs=0.01)
    assert merge_into(weight.float(), [low_rank(512, 512, 4, 1e-5)]).share == pytest.approx(1, abs=0.02)


def test_a_low_share_is_warned_about_by_layer_group(write, opened, pristine) -> None:
    tiny = write(change=lambda t: t.update({k: v * 1e-3 for k, v in t.items() if "lora_B" in k and ".attn." in k}))
    overlay = opened(tiny)
    overlay.apply(pristine(torch.bfloat16))
    assert overlay.kept["attention"] < 0.1
    assert overlay.kept["FFN"] > 0.95
    assert any("survived rounding in attention; --lora-mode branch" in note for note in overlay.notes)
    assert not any("FFN" in note for note in overlay.notes)


def test_strength_zero_is_no_adapter(write, transformer_folder) -> None:
    from solgen.engine.adapters.overlay import open_overlay
    from solgen.engine.adapters.source import parse_sources
    from solgen.presets.schema import Lora

    assert open_overlay(parse_sources((f"{write()}:0",)), transformer_folder, "t2va", Lora()) is None


def test_a_merge_of_a_large_layer_needs_little_memory_beside_it() -> None:
    """A quarter of the 5376 x 28672 layer: the peak of a process grows by less than 1.5 times the weight."""
    program = """
import resource, torch
from solgen.engine.adapters.merge import Delta, merge_into
rows, columns, rank = 28672 // 4, 5376, 64
merge_into(torch.zeros(64, 64, dtype=torch.bfloat16), [Delta(1.0, torch.ones(64, 4), torch.ones(4, 64))])
weight = torch.full((rows, columns), 0.5, dtype=torch.bfloat16)
deltas = [Delta(1.0, torch.rand(rows, rank), torch.rand(rank, columns))]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
merge_into(weight, deltas)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / weight.nbytes)
"""
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert float(result.stdout) < 1.5
