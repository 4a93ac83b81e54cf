"""The checkpoint path: what is looked for, what is refused, what is left unread."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from solgen.engine.components import num_blocks
from solgen.engine.loader import load_conditioner, load_decoders, load_pipeline
from solgen.engine.repository import open_repository
from solgen.errors import InputError, SetupError
from solgen.presets.schema import Model

CPU = torch.device("cpu")


def opened(path: Path, task: str = "t2va"):
    return open_repository(Model(source=str(path)), task)


def edit(path: Path, change) -> None:
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def test_a_repository_names_its_parts(model_copy: Path) -> None:
    repository = opened(model_copy)
    assert repository.path == model_copy
    assert {"text_encoder", "transformer", "vae", "audio_vae", "processor", "tokenizer"} <= set(repository.folders)
    assert set(repository.digests) == {"text_encoder", "transformer", "vae", "audio_vae"}
    assert repository.prompt_limit() > 7000


def test_ref2va_takes_the_transformer_that_the_index_points_to(model_copy: Path) -> None:
    (model_copy / "transformer").rename(model_copy / "elsewhere")
    edit(
        model_copy / "modular_model_index.json",
        lambda index: index["transformer_ref"][2].update(subfolder="elsewhere"),
    )
    assert opened(model_copy, "ref2va").folders["transformer_ref"] == model_copy / "elsewhere"
    with pytest.raises(InputError, match="transformer is missing"):
        opened(model_copy, "t2va")


def test_broken_repositories_are_refused(model_copy: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder, and not a Hub name"):
        opened(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no modular_model_index.json"):
        opened(tmp_path / "empty")
    edit(model_copy / "modular_model_index.json", lambda index: index.pop("vae"))
    with pytest.raises(InputError, match="does not list vae, which t2va needs"):
        opened(model_copy)
    (model_copy / "modular_model_index.json").write_text("{")
    with pytest.raises(InputError, match="not readable JSON"):
        opened(model_copy)


def write(text: str):
    return lambda path: path.write_text(text)


def change(**changes: object):
    return lambda path: edit(path, lambda table: table.update(changes))


def leave_out(key: str):
    return lambda path: edit(path, lambda table: table.pop(key))


def change_text(**changes: object):
    return lambda path: edit(path, lambda table: table["text_config"].update(changes))


def change_entry(component: str, **changes: object):
    return lambda path: edit(path, lambda index: index[component][2].update(changes))


def drop_tensors(part: str):
    def drop(path: Path) -> None:
        save_file({k: t for k, t in load_file(path).items() if part not in k}, path, metadata={"format": "pt"})

    return drop


CONDITIONER, TRANSFORMER = "text_encoder/config.json", "transformer/config.json"
VAE, AUDIO_VAE = "vae/config.json", "audio_vae/config.json"
INDEX = "modular_model_index.json"
BREAKAGES = [
    *((file, Path.unlink, "cannot read .*{file}: No such file") for file in (CONDITIONER, TRANSFORMER, VAE, AUDIO_VAE)),
    *((file, write("{"), "{file} is not readable JSON") for file in (CONDITIONER, TRANSFORMER, VAE, INDEX)),
    *((file, write("[]"), "{file} is not a JSON object") for file in (CONDITIONER, TRANSFORMER, AUDIO_VAE, INDEX)),
    (CONDITIONER, leave_out("text_config"), "{file} has no text_config"),
    (CONDITIONER, change(text_config=[]), "{file} has no text_config"),
    (CONDITIONER, change_text(max_position_embeddings=None), "{file} does not describe .*max_position_embeddings"),
    (CONDITIONER, change_text(num_attention_heads=None), "{file} does not describe .*num_attention_heads"),
    (CONDITIONER, change_text(num_hidden_layers=50), "text_encoder: config.json says 50 layers, the weights hold 51"),
    (CONDITIONER, change_text(head_dim=32), "text_encoder: tensor .* has shape .*, its config.json says"),
    ("text_encoder/model.safetensors", drop_tensors(".layers.50."), "says 51 layers, the weights hold 50; .* reads 51"),
    (TRANSFORMER, change(num_attention_heads=None), "{file}: num_attention_heads is null"),
    (TRANSFORMER, change(num_layers="six"), "{file} does not describe a MiniMaxH3Transformer3DModel"),
    (TRANSFORMER, change(num_layers=7), "transformer lacks tensor 'transformer_blocks.6.*config.json promises"),
    (TRANSFORMER, change(num_layers=5), "transformer holds tensor 'transformer_blocks.5.*config.json leaves out"),
    (TRANSFORMER, change(num_attention_heads=4), "transformer: tensor .* has shape .*, its config.json says"),
    (VAE, change(latents_mean=None), "{file}: latents_mean is null"),
    (VAE, change(latents_std=[1.0]), "{file}: latents_std is not a list of 24 finite numbers"),
    (AUDIO_VAE, change(latents_std=None), "{file}: latents_std is null"),
    (AUDIO_VAE, leave_out("latents_mean"), "{file}: latents_mean is not a list of 32 finite numbers"),
    (AUDIO_VAE, change(latents_std=[0.0] * 32), "{file}: latents_std holds 0.0, expected numbers above 0"),
    (VAE, change(decoder_num_layers=5), "vae lacks tensor 'decoder"),
    ("scheduler/scheduler_config.json", Path.unlink, "cannot read .*{file}: No such file"),
    ("audio_scheduler/scheduler_config.json", write(""), "{file} is not readable JSON"),
    ("scheduler/scheduler_config.json", change(shift=-1), "{file} does not describe a MiniMaxH3Scheduler"),
    *(
        (INDEX, leave_out(name), f"{{file}} does not list {name}, which t2va needs")
        for name in ("tokenizer", "scheduler", "audio_scheduler", "processor", "transformer")
    ),
    (INDEX, change(vae=5), "{file} does not list vae"),
    (INDEX, change_entry("vae", type_hint=["diffusers", "AutoencoderKL"]), "vae is .*expected diffusers.Autoencoder"),
    (INDEX, change_entry("scheduler", type_hint=["nolib", "MiniMaxH3Scheduler"]), "scheduler is .*expected diffusers"),
    (INDEX, change_entry("tokenizer", type_hint=["transformers", "Nothing"]), "tokenizer is .*Qwen2Tokenizer"),
    (INDEX, change_entry("transformer", subfolder=5), "the subfolder of transformer is 5"),
    (INDEX, change(canvas_short_edge=None), "{file}: canvas_short_edge is None"),
]


@pytest.mark.parametrize(("file", "breakage", "message"), BREAKAGES, ids=[f"{f}-{m[:40]}" for f, _, m in BREAKAGES])
def test_a_broken_part_is_named_before_loading(file: str, breakage, message: str, model_copy: Path) -> None:
    breakage(model_copy / file)
    with pytest.raises(InputError, match=message.format(file=file)) as error:
        opened(model_copy)
    assert "\n" not in str(error.value)


def test_what_else_an_index_lists_is_left_alone(model_copy: Path) -> None:
    index = model_copy / INDEX
    change(upscaler=["nolib", "Upscaler", {"subfolder": "upscaler"}], transformer_ref=["nolib", "Other", {}])(index)
    edit(index, lambda table: table.update(vae=[None, None, table["vae"][2]]))
    assert "upscaler" not in opened(model_copy).folders
    with pytest.raises(InputError, match=r"transformer_ref is \['nolib', 'Other'\]"):
        opened(model_copy, "ref2va")


def test_a_config_may_leave_the_defaults_out(model_copy: Path) -> None:
    edit(model_copy / CONDITIONER, lambda config: config["text_config"].pop("max_position_embeddings"))
    assert opened(model_copy).prompt_limit() == 128_000
    leave_out("num_layers")(model_copy / TRANSFORMER)
    assert num_blocks(model_copy / "transformer") == 50


def test_a_component_may_lie_in_any_folder(model_copy: Path) -> None:
    for name in ("processor", "tokenizer"):
        (model_copy / name).rename(model_copy / f"my_{name}")
        change_entry(name, subfolder=f"my_{name}")(model_copy / INDEX)
    pipeline = load_pipeline(opened(model_copy), "t2va", device=CPU, dtype=torch.float32)
    assert pipeline.processor.tokenizer("a")["input_ids"] == pipeline.tokenizer("a")["input_ids"]


def test_what_a_library_raises_names_the_component(model_copy: Path) -> None:
    repository = opened(model_copy)
    (model_copy / VAE).unlink()
    for load in (partial(load_pipeline, task="t2va"), load_decoders):
        with pytest.raises(
            SetupError, match=f"cannot load vae from {model_copy / 'vae'}: .*download it again"
        ) as error:
            load(repository, device=CPU, dtype=torch.float32)
        assert "\n" not in str(error.value)


def test_the_conditioner_is_not_filled_with_noise(model_copy: Path) -> None:
    drop_tensors("layers.3.mlp.up_proj")(model_copy / "text_encoder" / "model.safetensors")
    with pytest.raises(InputError, match=r"text_encoder lacks tensor '.*layers.3.mlp.up_proj.weight'"):
        load_conditioner(model_copy / "text_encoder", device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("component", ["transformer", "vae", "audio_vae", "text_encoder"])
def test_a_cut_shard_is_found_before_loading(component: str, model_copy: Path) -> None:
    (weights,) = (model_copy / component).glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(InputError, match=f"{component}.*its header promises"):
        opened(model_copy)


def test_only_51_layers_of_a_deeper_conditioner_are_read(model_copy: Path) -> None:
    """A longer stack on disk gives the same hidden state 50."""
    folder = model_copy / "text_encoder"
    token_ids = torch.tensor([[3, 5, 8]])

    def hidden(model):
        with torch.no_grad():
            return model.model(input_ids=token_ids, output_hidden_states=True).hidden_states[50]

    expected = hidden(load_conditioner(folder, device=CPU, dtype=torch.float32))
    tensors = load_file(folder / "model.safetensors")
    more = {
        name.replace(".layers.50.", ".layers.51."): t.clone() for name, t in tensors.items() if ".layers.50." in name
    }
    assert more
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", lambda config: config["text_config"].update(num_hidden_layers=52))
    deeper = load_conditioner(folder, device=CPU, dtype=torch.float32)
    assert len(deeper.model.language_model.layers) == 51
    assert torch.equal(hidden(deeper), expected)


def test_fp32_islands_survive_bf16_loading(model_copy: Path) -> None:
    repository = opened(model_copy)
    pipeline = load_pipeline(repository, "t2va", device=CPU, dtype=torch.bfloat16)
    transformer = pipeline.transformer
    assert transformer.proj_in.weight.dtype == torch.float32
    assert transformer.time_embedder.linear_1.weight.dtype == torch.float32
    assert transformer.proj_out.weight.dtype == torch.float32
    assert transformer.transformer_blocks[0].attn.to_q.weight.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in pipeline.audio_vae.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in pipeline.vae.encoder.parameters()} == {torch.float32}


def test_offline_without_a_copy_says_so(tmp_path: Path) -> None:
    """In a process of its own: the Hub's library reads its environment once."""
    program = (
        "from solgen.engine.repository import open_repository\nfrom solgen.errors import SetupError\n"
        "from solgen.presets.schema import Model\n"
        "try:\n    open_repository(Model(source='nobody/nothing'), 't2va')\n"
        "except SetupError as error:\n    print(error)\n"
    )
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    assert "nobody/nothing is not complete in the Hub cache" in result.stdout
    assert result.stdout.count("\n") == 1


def test_offline_with_a_cached_copy_loads_it(model_copy: Path, tmp_path: Path) -> None:
    """The cache layout of huggingface_hub: refs name a commit, snapshots hold its files."""
    cache = tmp_path / "hub" / "models--somebody--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    (cache / "snapshots").mkdir()
    model_copy.rename(cache / "snapshots" / ("0" * 40))
    program = (
        "from solgen.engine.repository import open_repository\nfrom solgen.presets.schema import Model\n"
        "print(open_repository(Model(source='somebody/tiny'), 't2va').path.name)"
    )
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.strip() == "0" * 40, result.stderr
