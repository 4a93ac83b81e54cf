"""The checkpoint path: what is looked for, what is refused, what is left unread."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from solgen.engine.loader import load_conditioner, load_pipeline, open_repository
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


@pytest.mark.parametrize("component", ["transformer", "vae", "audio_vae", "text_encoder"])
def test_a_cut_shard_is_found_before_loading(component: str, model_copy: Path) -> None:
    (weights,) = (model_copy / component).glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(InputError, match=f"{component}.*its header promises"):
        opened(model_copy)


def test_only_51_layers_of_a_deeper_conditioner_are_read(model_copy: Path) -> None:
    """A longer stack on disk gives the same hidden state 50."""
    from safetensors.torch import load_file, save_file

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
        "from solgen.engine.loader import open_repository\nfrom solgen.errors import SetupError\n"
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
        "from solgen.engine.loader import open_repository\nfrom solgen.presets.schema import Model\n"
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
    assert issubclass(SetupError, Exception)
