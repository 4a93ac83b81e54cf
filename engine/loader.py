"""From a checked repository to a loaded pipeline, component by component."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from solgen.engine.components import CONDITIONER_LAYERS, WEIGHTED, first_line
from solgen.engine.pipeline import H3Pipeline, empty_pipeline, transformer_name
from solgen.engine.processor import H3Processor
from solgen.engine.repository import Repository
from solgen.errors import InputError, SetupError, SolgenError
from solgen.presets.schema import Task


def load_pipeline(
    repository: Repository, task: Task, *, device: torch.device, dtype: torch.dtype, denoiser_only: bool = False
) -> H3Pipeline:
    """Read every component of the task. FP32 islands follow each component's `_keep_in_fp32_modules`.

    Args:
        repository: From `open_repository`, with the adapters of the request.
        task: Decides the components.
        device: Where they end up.
        dtype: Type of everything outside the islands.
        denoiser_only: Leave out the conditioner and the VAEs, which one rank of several uses for all.

    Raises:
        SetupError: naming the component that cannot be loaded.
    """
    with _named("its index", repository.path):
        pipeline = empty_pipeline(task, repository.path)
    loaded: dict[str, Any] = {}
    for name, folder in repository.folders.items():
        if denoiser_only and name in WEIGHTED and name != transformer_name(task):
            continue
        with _named(name, folder):
            if name == "processor":
                loaded[name] = H3Processor.from_folders(folder, repository.folders["tokenizer"])
            elif name == "text_encoder":
                loaded[name] = load_conditioner(folder, device=device, dtype=dtype)
            else:
                loaded[name] = _load(pipeline, name, device, dtype)
        if name == transformer_name(task) and repository.overlay is not None:
            repository.overlay.apply(loaded[name])
    pipeline.update_components(**loaded)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_decoders(repository: Repository, *, device: torch.device, dtype: torch.dtype) -> H3Pipeline:
    """A pipeline with only the two VAEs, for decoding kept latents.

    Raises:
        SetupError: naming the component that cannot be loaded.
    """
    with _named("its index", repository.path):
        pipeline = empty_pipeline("t2va", repository.path)
    loaded = {}
    for name in ("vae", "audio_vae"):
        with _named(name, repository.folders[name]):
            loaded[name] = _load(pipeline, name, device, dtype)
    pipeline.update_components(**loaded)
    return pipeline


def load_conditioner(folder: Path, *, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Read the Qwen3-VL conditioner without the layers and the output head that H3 never uses.

    Raises:
        InputError: if the weights lack a tensor, which transformers would fill with noise.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.utils import logging

    config = Qwen3VLConfig.from_pretrained(folder)
    config.text_config.num_hidden_layers = min(config.text_config.num_hidden_layers, CONDITIONER_LAYERS)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the layers left out would be listed as unexpected
    logging.disable_progress_bar()
    try:
        model, report = Qwen3VLForConditionalGeneration.from_pretrained(
            folder, config=config, dtype=dtype, output_loading_info=True
        )
    finally:
        logging.set_verbosity(verbosity)
    if missing := set(report["missing_keys"]) - {"lm_head.weight"}:
        raise InputError(f"{folder} lacks tensor {min(missing)!r}; download it again")
    model.lm_head = torch.nn.Identity()
    return model.to(device).eval()


def _load(pipeline: H3Pipeline, name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A component by diffusers' own loader, ready to run."""
    component = pipeline.get_component_spec(name).load(**({"dtype": dtype} if name in WEIGHTED else {}))
    return component.to(device).eval() if isinstance(component, torch.nn.Module) else component


@contextmanager
def _named(name: str, folder: Path) -> Iterator[None]:
    """Say which component could not be loaded, whatever a library raised."""
    try:
        yield
    except (SolgenError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise SetupError(f"cannot load {name} from {folder}: {first_line(error)}; download it again") from error
