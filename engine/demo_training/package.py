"""From trained models to a repository that the pipeline loads, all weights in bfloat16."""

import copy
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel

from solgen.engine.demo_training.conditioner import Conditioner
from solgen.engine.demo_training.repository import write_repository


def write_model(
    folder: Path,
    transformer: MiniMaxH3Transformer3DModel,
    vae: AutoencoderKLMiniMaxH3,
    audio_vae: AutoencoderKLMiniMaxH3Audio,
    conditioner: Conditioner,
) -> None:
    """Write a repository, replacing a folder that is there.

    Every weight has been bfloat16 since its stage ended. What must run in float32 is stored as that in the transformer,
    as in the released one; loading widens it in the autoencoders, where the space is better spent.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    models = [copy.deepcopy(model).cpu() for model in (transformer, vae, audio_vae, conditioner.model)]
    islands = set(transformer._keep_in_fp32_modules)
    for model in models:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if model is not models[0] or islands.isdisjoint(name.split(".")):
                tensor.data = tensor.data.to(torch.bfloat16)
    models[3].config.dtype = "bfloat16"
    write_repository(folder, *models)
