"""`solgen lora merge`: a model of its own, with a record, and no second merge."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from solgen.__main__ import main
from solgen.engine.adapters.header import file_sha256
from solgen.engine.adapters.merged import RECORD
from solgen.engine.generate import generate
from solgen.engine.request import Options, resolve
from solgen.errors import InputError
from solgen.presets.demo import demo_model_path


@pytest.fixture
def solgen(capsys: pytest.CaptureFixture[str]):
    """Run a command; returns exit code, stdout and stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        return (stop.value.code, *capsys.readouterr())

    return run


def merge(solgen, output: Path, *loras: Path | str, model: Path | str = "demo", extra: tuple[str, ...] = ()):
    given = [part for lora in loras for part in ("--lora", lora)]
    return solgen("lora", "merge", "--model", model, *given, "-o", output, *extra)


def test_the_weights_are_those_of_a_merge_while_loading(solgen, write, merged, tmp_path: Path) -> None:
    path, output = write("native"), tmp_path / "m1"
    code, out, _ = merge(solgen, output, f"{path}:0.5")
    assert (code, out) == (0, f"{output}\n")
    expected = merged((path, 0.5))
    index = json.loads((output / "transformer" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    stored = {}
    for shard in set(index["weight_map"].values()):
        stored |= load_file(output / "transformer" / shard)
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    record = json.loads((output / "transformer" / RECORD).read_text())
    assert record["adapters"][0]["sha256"] == file_sha256(path)
    assert record["adapters"][0]["strength"] == 0.5
    assert record["shards"] == {
        shard.name: file_sha256(shard) for shard in (output / "transformer").glob("*.safetensors")
    }


def test_a_file_that_the_index_does_not_name_is_no_part_of_the_model(solgen, write, tmp_path: Path) -> None:
    """A single file of an older download lies beside the shards and comes after them in the alphabet."""
    model, output = tmp_path / "model", tmp_path / "merged"
    shutil.copytree(demo_model_path(), model)
    (whole,) = (model / "transformer").glob("*.safetensors")
    tensors = load_file(whole)
    shards = {f"{whole.stem}-{number}-of-2{whole.suffix}": sorted(tensors)[number - 1 :: 2] for number in (1, 2)}
    for name, part in shards.items():
        save_file({tensor: tensors[tensor] for tensor in part}, whole.with_name(name))
    weight_map = {tensor: name for name, part in shards.items() for tensor in part}
    (model / "transformer" / f"{whole.name}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, whole)
    assert merge(solgen, output, write(), model=model)[0] == 0
    written = sorted((output / "transformer").glob("*.safetensors"))
    assert len(written) == 2
    kept = {name: tensor for file in written for name, tensor in load_file(file).items()}
    assert torch.equal(kept["proj_in.weight"], tensors["proj_in.weight"])


def test_the_merged_model_makes_clips_and_names_its_adapters(
    solgen, write, tmp_path: Path, small_job, listener
) -> None:
    path, output = write(), tmp_path / "m1"
    merge(solgen, output, path)
    job = small_job(model=str(output), attention="dense")
    (record,) = generate([job], listener)
    assert record["adapters"]["in_checkpoint"][0]["sha256"] == file_sha256(path)
    (plain,) = generate([small_job("plain.mp4", attention="dense")], listener)
    assert record["latents_sha256"] != plain["latents_sha256"]


def test_a_second_merge_is_refused_everywhere_and_another_adapter_is_not(
    solgen, write, tmp_path: Path, small_job, listener
) -> None:
    path, first = write(), tmp_path / "m1"
    merge(solgen, first, path)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = merge(solgen, tmp_path / "m2", path, model=first)
    assert (code, out) == (2, "")
    assert "diffusers.safetensors is already merged into this model (strength 1)" in err
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(InputError, match="already merged"):
        generate([small_job(model=str(first), lora=(str(path),))], listener)
    other = write("kohya", change=lambda t: t.update({k: v * 0.5 for k, v in t.items() if "alpha" not in k}))
    assert merge(solgen, tmp_path / "m2", other, model=first)[0] == 0
    record = json.loads((tmp_path / "m2" / "transformer" / RECORD).read_text())
    assert [entry["sha256"] for entry in record["adapters"]] == [file_sha256(path), file_sha256(other)]


def test_a_presets_own_adapter_that_the_model_holds_is_not_merged_again(
    solgen, write, tmp_path: Path, small_job, listener
) -> None:
    path, output = write(), tmp_path / "m1"
    merge(solgen, output, path)
    own = (f"adapter.repo={path.parent}", f"adapter.file={path.name}", f"adapter.sha256={file_sha256(path)[:8]}")
    (record,) = generate([small_job("clip.mp4", *own, model=str(output))], listener)
    assert record["adapters"]["files"] == []
    assert any("is merged into this model already" in note for note in listener.notes)


def test_a_two_time_adapter_keeps_its_second_embedder_and_terms(
    solgen, hyperflow, tmp_path: Path, small_job, listener
) -> None:
    path, output = hyperflow(), tmp_path / "m1"
    merge(solgen, output, path)
    record = json.loads((output / "transformer" / RECORD).read_text())
    assert record["gate"] == 0.25
    assert set(record["shards"]) == {
        "diffusion_pytorch_model-00001-of-00001.safetensors",
        "endpoint_time_embedder.safetensors",
    }
    request = resolve(Options(prompt="x", preset="demo", model=str(output)), seed=0)
    assert request.preset.sampler.positions == (1.0, 0.6, 0.25, 0.0)
    with pytest.raises(InputError, match="the merged model was made for sampler.steps 3"):
        resolve(Options(prompt="x", preset="demo", model=str(output), steps=5), seed=0)
    jobs = [
        small_job("merged.mp4", steps=None, model=str(output), attention="dense"),
        small_job("loaded.mp4", steps=None, lora=(str(path),), attention="dense"),
    ]
    latents = []
    for job in jobs:
        generate([job], listener, on_step=lambda step, video, audio: latents.append(video.clone()))
    # The checkpoint's weights were rounded to bf16; on a CPU those merged while loading were not.
    assert (latents[2] - latents[5]).norm() < 0.02 * latents[5].norm()


@pytest.mark.parametrize("lora", ["missing.safetensors", "x.safetensors:0"])
def test_nothing_is_left_of_a_merge_that_is_refused(lora: str, solgen, write, tmp_path: Path) -> None:
    write(name="x.safetensors")
    before = sorted(tmp_path.rglob("*"))
    code, _, err = merge(solgen, tmp_path / "m1", tmp_path / lora)
    assert code == 2
    assert err.startswith("error: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_existing_folder_is_kept(solgen, write, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    code, _, err = merge(solgen, tmp_path / "mine", write())
    assert code == 2
    assert "mine exists" in err


def test_a_merge_for_references_leaves_the_other_transformer_out(
    solgen, write, tmp_path: Path, model_copy: Path
) -> None:
    import shutil

    shutil.copytree(model_copy / "transformer", model_copy / "transformer_ref")
    path = model_copy / "modular_model_index.json"
    index = json.loads(path.read_text())
    index["transformer_ref"][2]["subfolder"] = "transformer_ref"
    path.write_text(json.dumps(index))
    output = tmp_path / "m1"
    assert merge(solgen, output, write(), model=model_copy, extra=("--task", "ref2va"))[0] == 0
    assert not (output / "transformer").exists()
    assert (output / "transformer_ref" / RECORD).is_file()
    assert "transformer" not in json.loads((output / "modular_model_index.json").read_text())
