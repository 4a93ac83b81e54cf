"""The pieces of training against diffusers' own: one forward, one encoder, one preprocessing; and exact resuming."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2VLImageProcessorPil

from solgen.engine.demo_training import shapes
from solgen.engine.demo_training.conditioner import Conditioner, picture_patches
from solgen.engine.demo_training.forward import Layout, RowTables, advance_block, velocity
from solgen.engine.demo_training.loop import Stage, deterministic, train
from solgen.engine.demo_training.package import write_model
from solgen.engine.demo_training.recipe import SMOKE
from solgen.engine.demo_training.run import train_demo
from solgen.engine.demo_training.video_vae import encode_means
from solgen.errors import InputError

TINY = shapes.TRANSFORMER | {"hidden_size": 96, "ffn_dim": 32, "num_layers": 2, "num_attention_heads": 1}


def test_batched_forward_is_the_models_own() -> None:
    model = shapes.new_transformer(0, TINY)
    random = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=random)
    layout = Layout.build(torch.tensor([1] * 5 + [0] * 6 + [1] * 7), ("first", "last"), (7, 4, 4), 37)
    text_end, condition_end = layout.num_text, layout.num_text + layout.num_condition
    audio_end, end = condition_end + layout.num_audio, sum(layout.parts)
    video = torch.randn(2, layout.num_condition + layout.num_video, 96, generator=random)
    audio = torch.randn(2, layout.num_audio, 32, generator=random)
    text = torch.randn(2, layout.num_text, 32, generator=random)
    times = torch.tensor([[0.1, 0.3, 0.999], [0.4, 0.6, 0.999]])
    tables = RowTables.build(model, layout, torch.device("cpu"))
    with torch.no_grad():
        found = velocity(model, video, audio, text, times, layout, tables)
        for item in range(2):
            picture, sound = model(
                hidden_states=video[item, None],
                audio_hidden_states=audio[item, None],
                encoder_hidden_states=text[item, None],
                timestep=times[item],
                timestep_indices=layout.times,
                token_tags=layout.tags,
                position_ids=layout.position_ids,
                video_indices=torch.cat([torch.arange(text_end, condition_end), torch.arange(audio_end, end)]),
                audio_indices=torch.arange(condition_end, audio_end),
                text_indices=torch.arange(text_end),
                return_dict=False,
            )
            torch.testing.assert_close(found[0][item], picture[0, layout.num_condition :], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found[1][item], sound[0], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_compiled_block_is_the_block() -> None:
    """One program for every length: outputs and gradients follow the eager block's."""
    device, compiled = torch.device("cuda"), torch.compile(advance_block, dynamic=True)
    model = shapes.new_transformer(0).to(device)
    random = torch.Generator(device).manual_seed(1)
    for words in (5, 9, 12):
        layout = Layout.build(torch.ones(words, dtype=torch.long), (), (12, 8, 8), 65)
        tables = RowTables.build(model, layout, device)
        sizes = (2, layout.num_video, 96), (2, layout.num_audio, 32), (2, words, 32), (2, 3)
        inputs = [torch.rand(shape, generator=random, device=device) for shape in sizes]
        found = []
        for advance in (advance_block, compiled):
            model.zero_grad()
            picture, sound = velocity(model, *inputs, layout, tables, advance)
            (picture.square().mean() + sound.square().mean()).backward()
            gradient = model.transformer_blocks[0].adaln_proj.linear.weight.grad
            assert gradient is not None
            found.append((picture.detach(), sound.detach(), gradient.clone()))
        for eager, fused in zip(*found, strict=True):
            assert (fused - eager).norm() <= 1e-4 * eager.norm()  # float32 sums in other orders


def test_new_transformer_predicts_the_negative_of_noise() -> None:
    model = shapes.new_transformer(0)
    layout = Layout.build(torch.ones(6, dtype=torch.long), (), (7, 2, 2), 37)
    noise = torch.randn(1, layout.num_video, 96, generator=torch.Generator().manual_seed(0))
    audio = torch.randn(1, layout.num_audio, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        tables = RowTables.build(model, layout, torch.device("cpu"))
        found, _ = velocity(model, noise, audio, torch.zeros(1, 6, 32), torch.zeros(1, 3), layout, tables)
    assert (found + noise).square().mean() < 0.1


@pytest.mark.parametrize("frames", [22, 39])
def test_chunked_encoding_is_the_autoencoders_own(frames: int) -> None:
    vae = shapes.new_vae()
    pixels = torch.randn(2, 3, frames, 32, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = vae.encode(pixels, return_dict=False)[0]
        torch.testing.assert_close(encode_means(vae, pixels), expected.mean, rtol=1e-4, atol=1e-5)
    assert torch.allclose(expected.std, torch.tensor(shapes.LOG_STD).exp())


def test_picture_patches_are_qwens() -> None:
    pictures = torch.randint(256, (2, 3, 256, 320), generator=torch.Generator().manual_seed(0))
    processor = Qwen2VLImageProcessorPil(
        patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    images = [picture.permute(1, 2, 0).byte().numpy() for picture in pictures]
    expected = processor(images=images, return_tensors="pt")
    values, grid = picture_patches(pictures / 255)
    assert torch.equal(grid, expected["image_grid_thw"])
    torch.testing.assert_close(values, expected["pixel_values"], rtol=0, atol=1e-5)


def test_a_trained_model_fits_the_package(tmp_path: Path) -> None:
    models = shapes.new_transformer(0), shapes.new_vae(), shapes.new_audio_vae()
    write_model(tmp_path / "model", *models, Conditioner(torch.device("cpu")))
    sizes = [path.stat().st_size for path in (tmp_path / "model").rglob("*") if path.is_file()]
    assert sum(sizes) <= 22 * 2**20
    assert max(sizes) <= 16 * 2**20


class Killed(Exception):
    pass


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_killed_stage_resumes_bit_for_bit(tmp_path: Path, place: str) -> None:
    if place == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    device, stage = torch.device(place), Stage("tiny", steps=7, rate=1e-2, warmup=2, every=2)
    advance = torch.compile(advance_block, dynamic=True) if place == "cuda" else advance_block

    def run(folder: Path, die_at: int | None) -> dict[str, torch.Tensor]:
        folder.mkdir(exist_ok=True)
        model = shapes.new_transformer(3, TINY).to(device)
        layout = Layout.build(torch.ones(4, dtype=torch.long), (), (12, 8, 8), 65)
        tables = RowTables.build(model, layout, device)

        def loss(step: int, generator: torch.Generator) -> torch.Tensor:
            if step == die_at:
                raise Killed
            shape = (2, layout.num_video, 96), (2, layout.num_audio, 32), (2, 4, 32), (2, 3)
            video, audio, text, times = (torch.rand(s, generator=generator, device=device) for s in shape)
            with torch.autocast(place, torch.bfloat16, enabled=place == "cuda"):
                found = velocity(model, video, audio, text, times, layout, tables, advance)
            return found[0].square().mean() + found[1].square().mean()

        with deterministic():
            train(stage, model, loss, folder, seed=0, log=lambda _: None)
        return model.state_dict()

    whole = run(tmp_path / "whole", None)
    with pytest.raises(Killed):
        run(tmp_path / "parts", 5)
    parts = run(tmp_path / "parts", None)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not (tmp_path / "parts" / "tiny.ckpt").exists()
    records = [json.loads(line) for line in (tmp_path / "parts" / "curves.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(stage.steps))
    stored = load_file(tmp_path / "parts" / "tiny.safetensors")
    assert all(torch.equal(stored[name].float(), whole[name].float().cpu()) for name in whole)


@pytest.mark.slow
def test_smoke_recipe_runs_from_the_command_line_and_leaves_a_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "solgen", "train", "demo", "--smoke", "-o", str(tmp_path / "run")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "model" / "modular_model_index.json").is_file()
    assert (tmp_path / "run" / "report.json").is_file()
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "loss" not in again.stderr, "a finished stage was trained again"


@pytest.mark.slow
def test_a_later_stage_goes_on_from_what_this_run_has_trained(tmp_path: Path) -> None:
    """Not from the earlier run's weights of that stage."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    train_demo(SMOKE, first, torch.device("cpu"), lambda _: None)
    still = SMOKE.with_steps(dict.fromkeys(SMOKE.stages, 0) | {"flow": 2})
    model = train_demo(still, second, torch.device("cpu"), lambda _: None, start=first)
    trained = load_file(second / "flow.safetensors")
    packaged = load_file(model / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(trained[name].float(), packaged[name].float()) for name in trained)
    assert not all(torch.equal(trained[name], value) for name, value in load_file(first / "flow.safetensors").items())
    with pytest.raises(
        InputError, match=r"second holds a run of another recipe \(other vae, audio_vae, flow, distil\)"
    ):
        train_demo(SMOKE, second, torch.device("cpu"), lambda _: None)
    (second / "flow_small.safetensors").write_text("no weights")
    (tmp_path / "third").mkdir()
    with pytest.raises(InputError, match=r"flow_small.safetensors does not fit the model that is trained"):
        train_demo(still, tmp_path / "third", torch.device("cpu"), lambda _: None, start=second)


@pytest.mark.slow
def test_a_run_of_no_steps_from_a_model_is_that_model(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first = train_demo(SMOKE, tmp_path / "first", torch.device("cpu"), lambda _: None)
    still = SMOKE.with_steps(dict.fromkeys(SMOKE.stages, 0))
    second = train_demo(still, tmp_path / "second", torch.device("cpu"), lambda _: None, start=first)
    for component in ("transformer", "vae", "audio_vae"):
        name = Path(component) / "diffusion_pytorch_model.safetensors"
        expected, found = load_file(first / name), load_file(second / name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected), component
        configs = [json.loads((model / component / "config.json").read_text()) for model in (first, second)]
        assert configs[0] == configs[1]
