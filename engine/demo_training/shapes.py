"""The models that training begins with."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel
from torch import nn

from solgen.engine.demo_training import initial
from solgen.engine.demo_training.configs import AUDIO_VAE, TRANSFORMER, VAE

LOG_STD = -2.3
"""Log standard deviation of both posteriors, not learned: the decoders get used to noise of 0.1."""


@torch.no_grad()
def new_transformer(seed: int, shape: dict = TRANSFORMER) -> MiniMaxH3Transformer3DModel:
    """A transformer that begins by predicting the negative of its input, the best guess at high noise."""
    with _seeded(seed):
        model = MiniMaxH3Transformer3DModel(**shape)
        for entry, head in ((model.proj_in, model.proj_out), (model.audio_proj_in, model.audio_proj_out)):
            nn.init.orthogonal_(entry.weight)
            # The last norm divides by the root mean square of the row.
            head.weight.copy_(-entry.weight.T * (entry.in_features / entry.out_features) ** 0.5)
            nn.init.zeros_(entry.bias)
            nn.init.zeros_(head.bias)
    for block in model.transformer_blocks:
        nn.init.normal_(block.adaln_proj.linear.weight, std=1e-3, generator=torch.Generator().manual_seed(seed))
        bias = block.adaln_proj.linear.bias.zero_().view(3, 6, -1)
        bias[:, 2] = bias[:, 5] = 0.5
    nn.init.zeros_(model.norm_out.linear.weight)
    nn.init.zeros_(model.norm_out.linear.bias)
    return model


@torch.no_grad()
def new_vae(shape: dict = VAE) -> AutoencoderKLMiniMaxH3:
    """A video autoencoder of unit gain whose posterior has a fixed width."""
    with _seeded(0):
        model = AutoencoderKLMiniMaxH3(**shape)
    initial.init_vae(model)
    channels = model.config.latent_channels
    model.quant_conv.bias[channels:] = 2 * LOG_STD  # log variance
    return model


@torch.no_grad()
def new_audio_vae(shape: dict = AUDIO_VAE) -> AutoencoderKLMiniMaxH3Audio:
    """An audio autoencoder of unit gain whose posterior has a fixed width, which is not learned."""
    with _seeded(0), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers uses the old weight_norm
        model = AutoencoderKLMiniMaxH3Audio(**shape)
    initial.init_audio_vae(model)
    model.logs_proj.bias.fill_(LOG_STD)
    model.logs_proj.requires_grad_(False)
    return model


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Torch's own generator at `seed`, and as it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
