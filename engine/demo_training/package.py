"""From trained models to a repository that the pipeline loads, all weights in bfloat16."""

import copy
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel

from solgen.engine.demo_training.conditioner import Conditioner
from solgen.presets.demo.build import write_repository


def write_model(
    folder: Path,
    transformer: MiniMaxH3Transformer3DModel,
    vae: AutoencoderKLMiniMaxH3,
    audio_vae: AutoencoderKLMiniMaxH3Audio,
    conditioner: Conditioner,
) -> None:
    """Write a repository, replacing a folder that is there.

    Every weight has been bfloat16 since its stage ended; loading widens what must run in float32.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    models = [copy.deepcopy(model).cpu() for model in (transformer, vae, audio_vae, conditioner.model)]
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.to(torch.bfloat16)
    models[3].config.dtype = "bfloat16"
    write_repository(folder, *models)
