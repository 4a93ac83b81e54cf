"""Write the demo model as a diffusers repository that `MiniMaxH3ModularPipeline` loads like the real one."""

import json
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Blocks,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from solgen.presets.demo import configs, weights
from solgen.presets.demo.tokenizer import build_tokenizer


def _store_dtypes(model: nn.Module) -> nn.Module:
    """Cast to bfloat16 except the modules that diffusers keeps in float32 (matched as it does, by path component)."""
    islands = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not islands & set(name.split(".")):
            tensor.data = tensor.data.to(torch.bfloat16)
    return model


def _conditioner(tokenizer) -> Qwen3VLForConditionalGeneration:
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config=configs.CONDITIONER_TEXT,
        vision_config=configs.CONDITIONER_VISION,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    model = Qwen3VLForConditionalGeneration(config)
    weights.init_conditioner(model)
    return model.to(torch.bfloat16)


def _index() -> dict:
    """modular_model_index.json: every component in its folder, both partitions in `transformer`."""
    entries = {}
    for spec in MiniMaxH3Blocks().expected_components:
        if spec.default_creation_method != "from_pretrained":
            continue
        library, name = spec.type_hint.__module__.split(".")[0], spec.type_hint.__name__
        location = {
            "type_hint": [library, name],
            "pretrained_model_name_or_path": None,
            "subfolder": "transformer" if spec.name == "transformer_ref" else spec.name,
            "variant": None,
            "revision": None,
        }
        entries[spec.name] = [library, name, location]
    return {
        "_blocks_class_name": "MiniMaxH3Blocks",
        "_class_name": "MiniMaxH3ModularPipeline",
        **configs.INDEX,
        **dict(sorted(entries.items())),
    }


def build(folder: Path) -> None:
    """Write every component into `folder`, the index last.

    Args:
        folder: An empty folder.
    """
    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):  # constructors draw numbers that are overwritten
        transformer = MiniMaxH3Transformer3DModel(**configs.TRANSFORMER)
        vae = AutoencoderKLMiniMaxH3(**configs.VAE)
        audio_vae = AutoencoderKLMiniMaxH3Audio(**configs.AUDIO_VAE)
        text_encoder = _conditioner(tokenizer)
    weights.init_transformer(transformer)
    weights.init_vae(vae)
    weights.init_audio_vae(audio_vae)

    for name, model in (("transformer", transformer), ("vae", vae), ("audio_vae", audio_vae)):
        _store_dtypes(model).save_pretrained(folder / name)
    text_encoder.save_pretrained(folder / "text_encoder")
    MiniMaxH3Scheduler(shift=12.0).save_pretrained(folder / "scheduler")
    MiniMaxH3Scheduler(shift=3.0).save_pretrained(folder / "audio_scheduler")

    tokenizer.save_pretrained(folder / "tokenizer")
    tokenizer.save_pretrained(folder / "processor")
    _write_json(folder / "processor" / "preprocessor_config.json", configs.IMAGE_PROCESSOR)
    _write_json(folder / "processor" / "video_preprocessor_config.json", configs.VIDEO_PROCESSOR)
    _write_json(folder / "modular_model_index.json", _index())


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
