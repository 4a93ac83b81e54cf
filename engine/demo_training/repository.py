"""Write the demo model as a diffusers repository that `MiniMaxH3ModularPipeline` loads like the real one."""

import json
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Blocks,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from safetensors.torch import save_file
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from solgen.engine.demo_training import configs
from solgen.engine.demo_training.tokenizer import build_tokenizer


def write_repository(
    folder: Path,
    transformer: MiniMaxH3Transformer3DModel,
    vae: AutoencoderKLMiniMaxH3,
    audio_vae: AutoencoderKLMiniMaxH3Audio,
    conditioner: Qwen3VLForConditionalGeneration,
) -> None:
    """Write models as they are, the tokenizer and the settings into an existing folder, and the index last."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    tokenizer.save_pretrained(folder / "processor")
    _write_json(folder / "processor" / "preprocessor_config.json", configs.IMAGE_PROCESSOR)
    _write_json(folder / "processor" / "video_preprocessor_config.json", configs.VIDEO_PROCESSOR)
    MiniMaxH3Scheduler(shift=12.0).save_pretrained(folder / "scheduler")
    MiniMaxH3Scheduler(shift=3.0).save_pretrained(folder / "audio_scheduler")
    transformer.save_pretrained(folder / "transformer")
    vae.save_pretrained(folder / "vae")
    audio_vae.save_pretrained(folder / "audio_vae")
    _save_conditioner(conditioner, folder / "text_encoder")

    _write_json(folder / "modular_model_index.json", _index())


def conditioner_config(tokenizer: Qwen2Tokenizer) -> Qwen3VLConfig:
    """Shape of the conditioner, which knows the control tokens of a tokenizer."""
    ids = tokenizer.convert_tokens_to_ids
    return Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        dtype="bfloat16",
        text_config=configs.CONDITIONER_TEXT,
        vision_config=configs.CONDITIONER_VISION,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def _save_conditioner(model: Qwen3VLForConditionalGeneration, folder: Path) -> None:
    """Save in transformers' layout; its own `save_pretrained` draws a progress bar for a second's work."""
    model.config.save_pretrained(folder)
    tensors = model.state_dict()
    del tensors["lm_head.weight"]  # tied to the embedding
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _index() -> dict[str, Any]:
    """Return the content of modular_model_index.json: one folder per component, one for both partitions."""
    index: dict[str, Any] = {
        "_class_name": "MiniMaxH3ModularPipeline",
        "_blocks_class_name": "MiniMaxH3Blocks",
        **configs.INDEX,
    }
    for spec in MiniMaxH3Blocks().expected_components:
        if spec.default_creation_method == "from_pretrained":
            type_hint = [spec.type_hint.__module__.partition(".")[0], spec.type_hint.__name__]
            location = {
                "type_hint": type_hint,
                "pretrained_model_name_or_path": None,  # beside this file
                "subfolder": "transformer" if spec.name == "transformer_ref" else spec.name,
                "variant": None,
                "revision": None,
            }
            index[spec.name] = [*type_hint, location]
    return index


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
