"""Adapters laid over tensors on their way from disk: the same bits as laid over a loaded model, AdaLN included."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from solgen.__main__ import main
from solgen.engine.adaln import AdaLNTables, projection_names
from solgen.engine.adapters.overlay import open_overlay
from solgen.engine.generate import generate
from solgen.engine.streaming import stream_projections, stream_transformer
from solgen.presets.schema import Lora
from tests.engine.adapters.spellings import ADALN, HIDDEN, RANK, TIME

CPU = torch.device("cpu")


def adaln(tensors: dict[str, Tensor], size: float = 0.1) -> None:
    """Also change the AdaLN projections of two blocks and of the output norm."""
    generator = torch.Generator().manual_seed(31)
    rows = {"transformer_blocks.1.adaln_proj.linear": ADALN, "transformer_blocks.5.adaln_proj.linear": ADALN}
    for name, count in (rows | {"norm_out.linear": 2 * HIDDEN}).items():
        tensors[f"transformer.{name}.lora_A.weight"] = torch.randn(RANK, TIME, generator=generator) * size
        tensors[f"transformer.{name}.lora_B.weight"] = torch.randn(count, RANK, generator=generator) * size


@pytest.fixture
def everything(hyperflow, write) -> Callable[[bool], Path]:
    """An adapter of attention, FFN and AdaLN, of both time embedders if asked."""

    def make(two_times: bool) -> Path:
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        path = hyperflow() if two_times else write(name="plain.safetensors")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        adaln(tensors)
        save_file(tensors, path, metadata=metadata)
        return path

    return make


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("two_times", [False, True])
@pytest.mark.parametrize("mode", ["merge", "branch"])
def test_a_streamed_model_is_the_loaded_one(
    mode: str, two_times: bool, dtype: torch.dtype, everything, opened, pristine, transformer_folder: Path
) -> None:
    path = everything(two_times)
    expected, overlay = pristine(dtype), opened((path, 0.7), mode=mode)
    overlay.apply(expected)
    streamed = opened((path, 0.7), mode=mode)
    given = {"device": CPU, "dtype": dtype}
    model = stream_transformer(transformer_folder, streamed, **given, with_adaln=False, blocks_on=CPU)
    names = projection_names(model)
    for name, layer in zip(names, stream_projections(transformer_folder, streamed, **given)(names), strict=True):
        model.set_submodule(name, layer)
    found, wanted = model.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert streamed.kept == pytest.approx(overlay.kept, rel=1e-9)
    assert streamed.kept.keys() == overlay.kept.keys()
    whole = stream_transformer(
        transformer_folder, opened((path, 0.7), mode=mode), **given, with_adaln=True, blocks_on=CPU
    )
    assert all(torch.equal(whole.state_dict()[name], tensor) for name, tensor in wanted.items())


def test_a_merged_checkpoint_brings_its_second_embedder(hyperflow, opened, pristine, tmp_path: Path) -> None:
    path, output = hyperflow(), tmp_path / "merged"
    with pytest.raises(SystemExit) as stop:
        main(["lora", "merge", "--model", "demo", "--lora", str(path), "-o", str(output)])
    assert stop.value.code == 0
    expected = pristine(torch.bfloat16)
    opened(path).apply(expected)
    folder = output / "transformer"
    overlay = open_overlay([], folder, "t2va", Lora(ignore_contract=True))
    model = stream_transformer(folder, overlay, device=CPU, dtype=torch.bfloat16, with_adaln=True, blocks_on=CPU)
    found, wanted = model.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    assert any("endpoint" in name for name in wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("mode", ["merge", "branch"])
def test_tables_of_an_adapted_model_leave_the_latents_alone(mode: str, everything, small_job, listener) -> None:
    """The tables of a two-time model are built from its pairs, with the adapter's change of the projections."""
    path = everything(True)

    def run(name: str, *sets: str) -> dict:
        job = small_job(f"{name}.mp4", *sets, steps=None, lora=(str(path),), lora_mode=mode, attention="dense")
        return generate([job], listener)[0]

    tables, modules = run("tables"), run("modules", "memory.tables=off")
    assert tables["latents_sha256"] == modules["latents_sha256"]
    assert tables["adapters"]["kept"] == pytest.approx(modules["adapters"]["kept"])
    assert tables["adaln"]["table_bytes"] > 0
    assert modules["adaln"]["table_bytes"] is None


def test_a_change_of_adaln_that_is_rounded_away_is_told_once(write, opened, transformer_folder: Path) -> None:
    """AdaLN is merged after the other layers, when its tables are built, and again for another schedule."""
    overlay = opened(write(change=lambda tensors: adaln(tensors, 1e-3)))
    given = {"device": CPU, "dtype": torch.bfloat16}
    model = stream_transformer(transformer_folder, overlay, **given, with_adaln=False, blocks_on=CPU)
    assert not any("AdaLN" in note for note in overlay.untold())
    tables = AdaLNTables(model, stream_projections(transformer_folder, overlay, **given))
    shares = []
    for time in (0.25, 0.5):
        tables.prepare([(torch.tensor([time]), torch.zeros(24, dtype=torch.long))])
        shares.append(overlay.kept)
    assert sum("survived rounding in AdaLN" in note for note in overlay.untold()) == 1
    assert shares[0] == shares[1]
