"""What the autoencoders' training begins with, and the frozen conditioner's random weights.

Every tensor has a generator of its own, seeded by its name, so that no tensor depends on another's shape.
"""

import hashlib
import math
from fnmatch import fnmatchcase

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio
from torch import Tensor, nn
from transformers import Qwen3VLForConditionalGeneration

SEED = 20260


@torch.no_grad()
def init_vae(model: AutoencoderKLMiniMaxH3) -> None:
    """Unit gain along the trunk, quiet branches, a posterior whose width the encoder does not decide."""
    _fill(model, {"encoder.*.conv2.weight": 0.3, "quant_conv.weight": 2.5, "decoder.proj_out.weight": 0.3})
    model.quant_conv.weight[model.config.latent_channels :] = 0.0
    for block in model.decoder.transformer_blocks:
        block.scale1.fill_(0.3)
        block.scale2.fill_(0.3)


@torch.no_grad()
def init_audio_vae(model: AutoencoderKLMiniMaxH3Audio) -> None:
    """Give the audio VAE unit gain along its trunk, quiet branches and sound at about -20 dBFS."""
    _fill(model)
    for name, parameter in model.named_parameters():
        if name.endswith("weight_g"):
            branch = fnmatchcase(name, "*.convs2.*") or fnmatchcase(name, "encoder.block.*.block.*.block.3.*")
            parameter.fill_(0.2 if branch else 1.0)
    last = model.decoder.conv_post
    last.weight_v.sub_(last.weight_v.mean(-1, keepdim=True))  # no direct current
    last.weight_g.fill_(0.4)
    model.logs_proj.weight.zero_()


@torch.no_grad()
def init_conditioner(model: Qwen3VLForConditionalGeneration, branch: float) -> None:
    """Keep 51 residual layers in range by quiet branches; the quieter, the more a row is its own token.

    Args:
        model: Changed in place.
        branch: Gain of what every attention and every feed-forward adds.
    """
    _fill(model, {"*.o_proj.weight": branch, "*.down_proj.weight": branch, "*embed_tokens.weight": math.sqrt(32)})


def _normal(name: str, shape: tuple[int, ...]) -> Tensor:
    """Unit normal numbers, fp32, that depend on nothing but the name, the shape and `SEED`."""
    digest = hashlib.sha256(f"{SEED}/{name}".encode()).digest()
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "little")))


def _fill(model: nn.Module, gains: dict[str, float] | None = None) -> None:
    """Give matrices and kernels variance gain^2 / fan in, zero the biases, leave other vectors as they are.

    Args:
        gains: Gain by pattern of the parameter's name; the first match counts, 1 without one.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim >= 2 and not name.endswith(("weight_g", "alpha")):
            gain = next((gain for pattern, gain in (gains or {}).items() if fnmatchcase(name, pattern)), 1.0)
            parameter.copy_(_normal(name, parameter.shape) * gain / math.sqrt(parameter[0].numel()))
