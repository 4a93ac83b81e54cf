"""One small adapter in the spelling of every producer, from the same true factors."""

import torch
from torch import Tensor

from solgen.presets.demo import demo_transformer

RANK = 6
MODEL = demo_transformer()
HEAD_DIM, HIDDEN, TIME = MODEL["attention_head_dim"], MODEL["hidden_size"], MODEL["time_embed_dim"]
TIME_HIDDEN = MODEL["time_embed_hidden_dim"]
ADALN = 18 * HIDDEN
"""Rows of a block's AdaLN projection: six vectors for each of three modalities."""
BLOCKS = ("transformer_blocks.0", "transformer_blocks.5", "token_refiner.refiner_blocks.0")
QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
OTHERS = ("attn.to_out.0", "ff.net.0.proj", "ff.net.2")

Factors = dict[str, tuple[Tensor, Tensor]]
"""A and B by diffusers' module name."""

STYLES = ("diffusers", "peft", "peft dump", "fastvideo", "native", "diffsynth", "kohya", "ai-toolkit", "comfyui")


def spelled(style: str, factors: Factors) -> dict[str, Tensor]:
    """Tensors of an adapter as one producer would name and order them."""
    if style in ("diffusers", "peft", "peft dump", "fastvideo"):
        prefix = {"diffusers": "transformer.", "peft": "base_model.model."}.get(style, "")
        infix = ".default" if style == "peft dump" else ""
        pairs = factors
    else:
        pairs = native(factors, style)
        prefix = {"ai-toolkit": "diffusion_model.", "comfyui": "diffusion_model."}.get(style, "")
        infix = ".default" if style == "diffsynth" else ""
    tensors = {}
    for module, (down, up) in pairs.items():
        if style == "kohya":
            flat = "lora_unet_" + module.replace(".", "_")
            tensors |= {f"{flat}.lora_down.weight": down, f"{flat}.lora_up.weight": up}
            tensors[f"{flat}.alpha"] = torch.tensor(float(RANK))
        else:
            tensors[f"{prefix}{module}.lora_A{infix}.weight"] = down.clone()
            tensors[f"{prefix}{module}.lora_B{infix}.weight"] = up
    return tensors


def native(factors: Factors, style: str) -> Factors:
    """The factors in MiniMax's names, with fused QKV and [gate; value] in fc1."""
    pairs: Factors = {}
    for block in BLOCKS:
        name = block.replace("transformer_blocks", "blocks").replace("refiner_blocks", "blocks")
        q, k, v = (factors[f"{block}.{part}"] for part in QKV)
        if style == "comfyui":
            fused = torch.cat([q[0], k[0], v[0]]), torch.block_diag(q[1], k[1], v[1])
        elif style == "diffsynth":
            heads = [up.reshape(-1, HEAD_DIM, RANK) for _, up in (q, k, v)]
            fused = q[0], torch.stack(heads, dim=1).reshape(-1, RANK)
        else:
            fused = q[0], torch.cat([q[1], k[1], v[1]])
        value, gate = factors[f"{block}.ff.net.0.proj"][1].chunk(2)
        pairs[f"{name}.attn.qkv_proj"] = fused
        pairs[f"{name}.attn.out_proj"] = factors[f"{block}.attn.to_out.0"]
        pairs[f"{name}.mlp.fc1"] = factors[f"{block}.ff.net.0.proj"][0], torch.cat([gate, value])
        pairs[f"{name}.mlp.fc2"] = factors[f"{block}.ff.net.2"]
    return pairs
