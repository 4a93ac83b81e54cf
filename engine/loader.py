"""From a checked repository to a loaded pipeline, component by component."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel

from solgen.engine.adaln import AdaLNTables
from solgen.engine.adapters.overlay import Overlay
from solgen.engine.components import CONDITIONER_LAYERS, MODELS, WEIGHTED, first_line
from solgen.engine.offload import stream_layers
from solgen.engine.pipeline import H3Pipeline, empty_pipeline, transformer_name
from solgen.engine.processor import H3Processor
from solgen.engine.repository import Repository
from solgen.engine.streaming import stream_model, stream_projections, stream_transformer
from solgen.errors import InputError, SetupError, SolgenError
from solgen.presets.schema import Memory, Task


def load_pipeline(
    repository: Repository,
    task: Task,
    *,
    device: torch.device,
    dtype: torch.dtype,
    memory: Memory | None = None,
    follows: bool = False,
) -> H3Pipeline:
    """Read every component of the task. FP32 islands follow each component's `_keep_in_fp32_modules`.

    Args:
        repository: From `open_repository`, with the adapters of the request.
        task: Decides the components.
        device: Where they end up.
        dtype: Type of everything outside the islands.
        memory: What waits in host memory, and whether `tables` stand in for the AdaLN projections; by default
            everything is on the device and nothing is replaced.
        follows: Leave out the conditioner and the audio VAE, which one rank of several uses for all.

    Raises:
        SetupError: naming the component that cannot be loaded.
    """
    memory = memory or Memory(tables=False)
    with _named("its index", repository.path):
        pipeline = empty_pipeline(task, repository.path)
    pipeline.device_in_use = device
    loaded: dict[str, Any] = {}
    for name, folder in repository.folders.items():
        if follows and name in ("text_encoder", "audio_vae"):
            continue
        with _named(name, folder):
            if name == "processor":
                loaded[name] = H3Processor.from_folders(folder, repository.folders["tokenizer"])
            elif name == "text_encoder":
                loaded[name] = load_conditioner(folder, device=device, dtype=dtype, offload=memory.offload != "none")
            elif name == transformer_name(task):
                loaded[name], pipeline.tables = load_transformer(
                    folder, repository.overlay, device=device, dtype=dtype, memory=memory
                )
            else:
                loaded[name] = _load(pipeline, name, folder, device, dtype)
    pipeline.update_components(**loaded)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_transformer(
    folder: Path, overlay: Overlay | None, *, device: torch.device, dtype: torch.dtype, memory: Memory
) -> tuple[MiniMaxH3Transformer3DModel, AdaLNTables | None]:
    """Read a transformer with its adapters, and put tables and streamed blocks in place as `memory` asks.

    Returns:
        The transformer, and its tables if it has any; they are to be prepared before the first call.
    """
    layers = memory.offload == "layers"
    transformer = stream_transformer(
        folder,
        overlay,
        device=device,
        dtype=dtype,
        with_adaln=not memory.tables,
        blocks_on=torch.device("cpu") if layers else device,
    )
    tables = None
    if memory.tables:
        tables = AdaLNTables(transformer, stream_projections(folder, overlay, device=device, dtype=dtype))
    if layers:
        stream_layers(transformer.transformer_blocks, device)
    return transformer, tables


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
            loaded[name] = _load(pipeline, name, repository.folders[name], device, dtype)
    pipeline.update_components(**loaded)
    return pipeline


def load_conditioner(
    folder: Path, *, device: torch.device, dtype: torch.dtype, offload: bool = False
) -> torch.nn.Module:
    """Read the Qwen3-VL conditioner without the layers and the output head that H3 never uses.

    Args:
        folder: Its folder.
        device: Where it runs.
        dtype: Type of its weights.
        offload: Keep its layers in host memory, and pass them through the device while it runs.

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
            folder, config=config, dtype=dtype, output_loading_info=True, device_map={"": "cpu" if offload else device}
        )
    finally:
        logging.set_verbosity(verbosity)
    if missing := set(report["missing_keys"]) - {"lm_head.weight"}:
        raise InputError(f"{folder} lacks tensor {min(missing)!r}; download it again")
    model.lm_head = torch.nn.Identity()
    if offload:
        layers = model.model.language_model.layers
        stream_layers(layers, device)
        # The rest is small and stays on the device.
        model.model.language_model.layers = torch.nn.ModuleList()
        model.to(device)
        model.model.language_model.layers = layers
    return model.eval()


def _load(pipeline: H3Pipeline, name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """A component that needs no more than its weights."""
    if name in WEIGHTED:
        return stream_model(MODELS[name], folder, device=device, dtype=dtype)
    return pipeline.get_component_spec(name).load()


@contextmanager
def _named(name: str, folder: Path) -> Iterator[None]:
    """Say which component could not be loaded, whatever a library raised."""
    try:
        yield
    except (SolgenError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise SetupError(f"cannot load {name} from {folder}: {first_line(error)}; download it again") from error
