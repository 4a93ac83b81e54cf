"""Random weights of the demo model: lively enough to exercise every path, tame enough to watch and hear.

Every tensor has a generator of its own, seeded by its name, so that no tensor depends on another's shape.
"""

import hashlib
import math
from fnmatch import fnmatchcase

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel
from torch import Tensor, nn
from transformers import Qwen3VLForConditionalGeneration

from solgen.presets.demo.configs import SEED


@torch.no_grad()
def init_transformer(model: MiniMaxH3Transformer3DModel) -> None:
    """Make the transformer denoise towards a local average of the noise that it is given.

    A direction shared by all rows, which queries and keys see alike and values do not see, lets the rotary
    embedding favour rows that are near in (t, h, w), as in a trained model. The heads subtract the noise.
    """
    _fill(model, {"*.adaln_proj.linear.weight": 0.1, "norm_out.linear.weight": 0.1, "*.to_out.0.weight": 2.0})
    shared = _normal("shared", (model.config.hidden_size,))
    direction = shared / shared.norm()
    locality = _locality(model.config.attention_head_dim, model.config.rope_freq_dim)
    for block in model.transformer_blocks:
        bias = block.adaln_proj.linear.bias.view(3, 6, -1)  # modality; shift, scale, gate of attention, FFN
        bias[:, 0] = 2.5 * shared
        bias[:, 2] = 0.5
        bias[:, 5] = 0.2
        query, key, value = (getattr(block.attn, name).weight for name in ("to_q", "to_k", "to_v"))
        key.add_(_along(query - key, direction))
        value.sub_(_along(value, direction))
        block.attn.norm_q.weight.copy_(locality)
        block.attn.norm_k.weight.copy_(locality)
    for entry, head in ((model.proj_in, model.proj_out), (model.audio_proj_in, model.audio_proj_out)):
        entry.weight.copy_(_cosines(*entry.weight.shape))
        head.weight.sub_(1.3 * entry.weight.T)


def _along(rows: Tensor, direction: Tensor) -> Tensor:
    """Part of every row along a unit vector, without a matrix product, which rounds by number of threads."""
    return (rows * direction).sum(-1, keepdim=True) * direction


def _cosines(size: int, count: int) -> Tensor:
    """Orthonormal columns of a cosine transform, [size, count]; the transpose undoes them."""
    phase = (torch.arange(size)[:, None] + 0.5) * torch.arange(1, count + 1)
    return torch.cos(phase * torch.pi / size) * math.sqrt(2 / size)


def _locality(head_dim: int, num_frequencies: int) -> Tensor:
    """Gain of every query and key channel, [head_dim]: rotary periods of 35 to 200 units matter most.

    For comparison, a square frame is 32 units wide and a second is 40 units long.
    """
    index = torch.arange(num_frequencies)
    band = torch.where((index >= 3) & (index <= 6), 2.5, 0.2)
    return torch.cat([band.repeat(6), torch.full((head_dim - 6 * num_frequencies,), 0.2)])


@torch.no_grad()
def init_vae(model: AutoencoderKLMiniMaxH3) -> None:
    """Give the video VAE a nearly noiseless posterior and smooth patterns as pixels."""
    _fill(model, {"encoder.*.conv2.weight": 0.3, "quant_conv.weight": 2.5})
    channels = model.config.latent_channels
    model.quant_conv.weight[channels:] = 0.0
    model.quant_conv.bias[channels:] = -6.0  # log variance
    decoder = model.decoder
    for block in decoder.transformer_blocks:
        block.scale1.fill_(0.3)
        block.scale2.fill_(0.3)
    shape = (decoder.out_channels, decoder.patch_size_t, decoder.patch_size, decoder.patch_size)
    decoder.proj_out.weight.copy_(_waves(decoder.proj_out.in_features, shape).flatten(1).T)


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
    model.logs_proj.bias.fill_(-3.0)


@torch.no_grad()
def init_conditioner(model: Qwen3VLForConditionalGeneration, branch: float = 0.3) -> None:
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


def _waves(count: int, shape: tuple[int, int, int, int]) -> Tensor:
    """Coloured plane waves with long periods, about a tenth of one per patch, [count, C, T, H, W]."""
    channels, *extent = shape
    colour = _normal("wave/colour", (count, channels, 1, 1, 1))
    frequency = 0.1 * _normal("wave/frequency", (count, 3))
    phase = torch.pi * _normal("wave/phase", (count, 1, 1, 1))
    grid = torch.stack(torch.meshgrid(*(torch.arange(size) / size for size in extent), indexing="ij"), -1)
    angle = 2 * torch.pi * (frequency[:, None, None, None] * grid).sum(-1) + phase
    return colour * angle.cos()[:, None] / math.sqrt(count)
