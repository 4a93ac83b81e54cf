"""From a model's name to a loaded pipeline: found, checked by header, then read component by component."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from solgen.engine.adapters.overlay import Overlay
from solgen.engine.pipeline import H3Pipeline, empty_pipeline, transformer_name
from solgen.engine.processor import H3Processor
from solgen.engine.shards import check_weights
from solgen.errors import InputError, SetupError
from solgen.presets.schema import Model, Task

INDEX = "modular_model_index.json"

CONDITIONER_LAYERS = 51
"""Layers of the conditioner that are read: H3 takes hidden state 50, before the final norm."""

WEIGHTED = ("text_encoder", "transformer", "transformer_ref", "vae", "audio_vae")
"""Components that have weights."""


@dataclass(frozen=True)
class Repository:
    """A checked local copy of a model.

    Attributes:
        path: Folder with the index.
        source: Name or path the user gave.
        folders: Sub-folder of every component the task needs.
        digests: SHA-256 of the weight headers by component.
        overlay: Adapters for the task's transformer, applied while it loads.
    """

    path: Path
    source: str
    folders: dict[str, Path]
    digests: dict[str, str]
    overlay: Overlay | None = None

    def num_blocks(self, task: Task) -> int:
        """Transformer blocks of the task's model."""
        return int(json.loads((self.folders[transformer_name(task)] / "config.json").read_text())["num_layers"])

    def prompt_limit(self) -> int:
        """Tokens the conditioner reads at most."""
        config = json.loads((self.folders["text_encoder"] / "config.json").read_text())
        return int(config["text_config"]["max_position_embeddings"])


def open_repository(model: Model, task: Task) -> Repository:
    """Find a model and check what the task needs of it; a local path makes no network call.

    Args:
        model: Source and revision.
        task: Decides between `transformer` and `transformer_ref`.

    Raises:
        InputError: for a missing folder or a broken file, named.
        SetupError: if the Hub or its cache cannot provide a file.
    """
    if model.source == "demo":
        from solgen.presets.demo import demo_model_path

        path = demo_model_path()
    elif Path(model.source).expanduser().is_dir():
        path = Path(model.source).expanduser()
    elif model.source.count("/") == 1 and not model.source.startswith((".", "/", "~")):
        path = _download(model, task)
    else:
        raise InputError(f"--model {model.source}: no such folder, and not a Hub name of the form owner/name")
    folders = {name: path / folder for name, folder in _component_folders(_read_index(path), task).items()}
    for name, folder in folders.items():
        if not folder.is_dir():
            raise InputError(f"{folder} is missing ({name} of {model.source}); download the model again")
    digests = {name: check_weights(folders[name]) for name in WEIGHTED if name in folders}
    return Repository(path, model.source, folders, digests)


def load_pipeline(repository: Repository, task: Task, *, device: torch.device, dtype: torch.dtype) -> H3Pipeline:
    """Read every component of the task. FP32 islands follow each component's `_keep_in_fp32_modules`.

    Args:
        repository: From `open_repository`, with the adapters of the request.
        task: Decides the components.
        device: Where they end up.
        dtype: Type of everything outside the islands.
    """
    pipeline = empty_pipeline(task, repository.path)
    loaded: dict[str, Any] = {"processor": H3Processor.from_folder(repository.path)}
    for name in repository.folders:
        if name == "text_encoder":
            loaded[name] = load_conditioner(repository.folders[name], device=device, dtype=dtype)
        elif name != "processor":
            component = pipeline.get_component_spec(name).load(**({"dtype": dtype} if name in WEIGHTED else {}))
            loaded[name] = component.to(device).eval() if isinstance(component, torch.nn.Module) else component
            if name == transformer_name(task) and repository.overlay is not None:
                repository.overlay.apply(loaded[name])
    pipeline.update_components(**loaded)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_decoders(repository: Repository, *, device: torch.device, dtype: torch.dtype) -> H3Pipeline:
    """A pipeline with only the two VAEs, for decoding kept latents."""
    pipeline = empty_pipeline("t2va", repository.path)
    names = ("vae", "audio_vae")
    loaded = {name: pipeline.get_component_spec(name).load(dtype=dtype).to(device).eval() for name in names}
    pipeline.update_components(**loaded)
    return pipeline


def load_conditioner(folder: Path, *, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Read the Qwen3-VL conditioner without the layers and the output head that H3 never uses."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.utils import logging

    config = Qwen3VLConfig.from_pretrained(folder)
    config.text_config.num_hidden_layers = min(config.text_config.num_hidden_layers, CONDITIONER_LAYERS)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the layers left out would be listed as unexpected
    logging.disable_progress_bar()
    try:
        model = Qwen3VLForConditionalGeneration.from_pretrained(folder, config=config, dtype=dtype)
    finally:
        logging.set_verbosity(verbosity)
    model.lm_head = torch.nn.Identity()
    return model.to(device).eval()


def _read_index(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} has no {INDEX}; expected a MiniMax-H3 repository in diffusers format") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path / INDEX} is not readable JSON; download it again") from error


def _component_folders(index: dict[str, Any], task: Task) -> dict[str, str]:
    """Sub-folder of every component of a task that the repository stores."""
    other = transformer_name("t2va" if task == "ref2va" else "ref2va")
    folders = {}
    for name, entry in index.items():
        if name != other and isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict):
            folders[name] = entry[2].get("subfolder") or name
    if missing := {"text_encoder", "processor", "vae", "audio_vae", transformer_name(task)} - folders.keys():
        raise InputError(f"{INDEX} does not list {min(missing)}, which {task} needs")
    return folders


def _download(model: Model, task: Task) -> Path:
    """Fetch what the task needs from the Hub, or from its cache with HF_HUB_OFFLINE=1."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    name = model.source
    try:
        index = Path(hf_hub_download(name, INDEX, revision=model.revision))
        folders = _component_folders(_read_index(index.parent), task).values()
        patterns = [INDEX, *(f"{folder}/*" for folder in folders)]
        return Path(snapshot_download(name, revision=model.revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise SetupError(
            f"{name} is gated; accept its licence at https://huggingface.co/{name} and run hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"no model {name} on the Hub, or it is private; check the name or run hf auth login"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise SetupError(
            f"{name} is not complete in the Hub cache and the Hub cannot be reached; "
            "download it with network access, or unset HF_HUB_OFFLINE"
        ) from error
    except EntryNotFoundError as error:
        raise InputError(f"{name} has no {INDEX}; expected a MiniMax-H3 repository in diffusers format") from error
    except (HfHubHTTPError, OSError) as error:
        raise SetupError(f"cannot download {name}: {str(error).splitlines()[0]}") from error
