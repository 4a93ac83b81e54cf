"""What each component of a MiniMax-H3 repository must be, judged before a weight is read.

A model is built from its config without memory (on PyTorch's meta device) and compared with the weight headers.
"""

import inspect
import math
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)

from solgen.engine.json_file import read_object
from solgen.errors import InputError

CONDITIONER_LAYERS = 51
"""Layers of the conditioner that are read: H3 takes hidden state 50, before the final norm."""

CLASSES: dict[str, tuple[str, ...]] = {
    "text_encoder": ("transformers.Qwen3VLForConditionalGeneration",),
    "tokenizer": tuple(
        f"transformers.{name}"
        for name in ("Qwen2Tokenizer", "Qwen2TokenizerFast", "AutoTokenizer", "PreTrainedTokenizerFast")
    ),
    "processor": ("transformers.Qwen3VLProcessor",),
    "vae": ("diffusers.AutoencoderKLMiniMaxH3",),
    "audio_vae": ("diffusers.AutoencoderKLMiniMaxH3Audio",),
    "scheduler": ("diffusers.MiniMaxH3Scheduler",),
    "audio_scheduler": ("diffusers.MiniMaxH3Scheduler",),
    "transformer": ("diffusers.MiniMaxH3Transformer3DModel",),
    "transformer_ref": ("diffusers.MiniMaxH3Transformer3DModel",),
}
"""Classes that the index may give to a component."""

WEIGHTED = ("text_encoder", "transformer", "transformer_ref", "vae", "audio_vae")
"""Components that have weights."""

MODELS = {
    "vae": AutoencoderKLMiniMaxH3,
    "audio_vae": AutoencoderKLMiniMaxH3Audio,
    "transformer": MiniMaxH3Transformer3DModel,
    "transformer_ref": MiniMaxH3Transformer3DModel,
}
"""Class of every component of diffusers' own that has weights."""

_BLOCKS = "transformer_blocks."


def check_component(name: str, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse a component whose config cannot be built or does not fit its weights.

    Args:
        name: Its name in the index; tokenizer and processor are judged where they are read.
        folder: Its folder.
        shapes: Shape of every tensor in its weight headers; {} for one without weights.

    Raises:
        InputError: one line that names the file.
    """
    if name == "text_encoder":
        _check_conditioner(folder, shapes)
    elif name.endswith("scheduler"):
        _build(MiniMaxH3Scheduler, folder / "scheduler_config.json")
    elif model_class := MODELS.get(name):
        model = _build(model_class, folder / "config.json")
        if "latents_std" in model.config:
            _check_latents(model.config, folder / "config.json")
        _check_tensors(model, folder, shapes)


def num_blocks(folder: Path) -> int:
    """Transformer blocks by a transformer's config, which need not spell out the released model's number."""
    released = inspect.signature(MiniMaxH3Transformer3DModel).parameters["num_layers"].default
    return read_object(folder / "config.json").get("num_layers", released)


def num_heads(folder: Path) -> int:
    """Attention heads by a transformer's config, as `num_blocks`."""
    released = inspect.signature(MiniMaxH3Transformer3DModel).parameters["num_attention_heads"].default
    return read_object(folder / "config.json").get("num_attention_heads", released)


def prompt_limit(folder: Path) -> int:
    """Tokens that a conditioner reads at most."""
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig.from_dict(read_object(folder / "config.json")).text_config.max_position_embeddings


def first_line(error: Exception) -> str:
    """What a library says, cut to a line."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _build(cls: Any, path: Path) -> Any:
    """An object of a diffusers class, without memory for its tensors."""
    config = read_object(path)
    nulls = [key for key in inspect.signature(cls).parameters if config.get(key, ...) is None]
    if nulls:
        raise InputError(f"{path}: {nulls[0]} is null; download it again")
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the audio VAE uses the old weight_norm
            return cls.from_config(config)
    except Exception as error:
        raise _no_description(path, cls.__name__, error) from error


def _check_tensors(model: torch.nn.Module, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse weights that lack a tensor of the model, hold more blocks than it has, or are of another shape."""
    expected = model.state_dict()
    if missing := expected.keys() - shapes.keys():
        raise InputError(f"{folder} lacks tensor {min(missing)!r} that its config.json promises; download it again")
    if beyond := [name for name in shapes.keys() - expected.keys() if name.startswith(_BLOCKS)]:
        raise InputError(f"{folder} holds tensor {min(beyond)!r} that its config.json leaves out; download it again")
    _check_shapes(expected, folder, shapes)


def _check_shapes(expected: dict[str, torch.Tensor], folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    for name in expected.keys() & shapes.keys():
        if tuple(expected[name].shape) != shapes[name]:
            raise InputError(
                f"{folder}: tensor {name!r} has shape {list(shapes[name])}, its config.json says "
                f"{list(expected[name].shape)}; download it again"
            )


def _check_latents(config: Any, path: Path) -> None:
    """Refuse statistics that would turn every latent into nothing."""
    for name in ("latents_mean", "latents_std"):
        values, channels = config[name], config["latent_channels"]
        numbers = isinstance(values, list | tuple) and all(isinstance(v, int | float) for v in values)
        if not numbers or len(values) != channels or not all(map(math.isfinite, values)):
            raise InputError(f"{path}: {name} is not a list of {channels} finite numbers; download it again")
    if min(config["latents_std"]) <= 0:
        raise InputError(f"{path}: latents_std holds {min(config['latents_std'])}, expected numbers above 0")


def _check_conditioner(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    path = folder / "config.json"
    table = read_object(path)
    if not isinstance(table.get("text_config"), dict):
        raise InputError(f"{path} has no text_config, expected the config of a Qwen3-VL; download it again")
    try:
        config = Qwen3VLConfig.from_dict(table)
        layers = config.text_config.num_hidden_layers
        config.text_config.num_hidden_layers = min(layers, CONDITIONER_LAYERS)
        with torch.device("meta"):
            model = Qwen3VLForConditionalGeneration(config)
    except Exception as error:
        raise _no_description(path, "Qwen3-VL", error) from error
    stored = {int(match[1]) for name in shapes if (match := re.search(r"\blayers\.(\d+)\.", name))}
    if layers < CONDITIONER_LAYERS or not stored.issuperset(range(CONDITIONER_LAYERS)):
        raise InputError(
            f"{folder}: config.json says {layers} layers, the weights hold {len(stored)}; "
            f"MiniMax-H3 reads {CONDITIONER_LAYERS} of its conditioner. Download it again"
        )
    _check_shapes(model.state_dict(), folder, shapes)


def _no_description(path: Path, what: str, error: Exception) -> InputError:
    return InputError(f"{path} does not describe a {what} ({first_line(error)}); download it again")
