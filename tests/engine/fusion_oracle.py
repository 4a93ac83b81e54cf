"""Transformer blocks of MiniMax-H3 in float64, written from the formulas, a few rows at a time."""

import math

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch.nn.functional import linear, silu

ROWS = 2048
"""Rows worked on at once, so that float64 activations of a long sequence fit beside it."""


def make_transformer(device, dtype, **sizes) -> MiniMaxH3Transformer3DModel:
    """A random transformer; no gate is zero and no weight of a norm is one."""
    with torch.device(device):
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            model = MiniMaxH3Transformer3DModel(**sizes).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter.uniform_(0.5, 1.5)
    return model


def make_inputs(model: MiniMaxH3Transformer3DModel, rows: int):
    """What the model hands to its blocks: residual stream, time embeddings, AdaLN index, angles; and timestep index."""
    parameter = next(model.transformer_blocks.parameters())
    generator = torch.Generator(parameter.device).manual_seed(rows)
    options = {"generator": generator, "device": parameter.device}
    config = model.config
    hidden = torch.randn(1, rows, config.hidden_size, **options)
    hidden[..., 7] *= 20  # a massive channel, as trained models have
    temb = torch.randn(3, config.time_embed_dim, **options)
    timestep = torch.randint(0, 3, (rows,), **options)
    index = 3 * timestep + torch.randint(0, 3, (rows,), **options)
    angles = torch.rand(rows, 3 * config.rope_freq_dim, **options) * 60
    angles = torch.cat([angles, angles], dim=1)
    return hidden.to(parameter.dtype), temb, index, (angles.cos(), angles.sin()), timestep


def run_blocks(model, hidden, temb, index, angles, timestep):
    """Outputs of the block stack and of the output norm, by whatever forwards the modules have."""
    with torch.no_grad():
        for block in model.transformer_blocks:
            hidden = block(hidden, temb, index, angles)
        return hidden, model.norm_out(hidden, temb, timestep)


@torch.no_grad()
def exact_blocks(model, hidden, temb, index, angles, timestep):
    """The same in float64."""
    rows, temb = hidden[0].double(), temb.double()
    for block in model.transformer_blocks:
        rows = _block(block, rows, _tables(block.adaln_proj.linear, temb, 6), index, [x.double() for x in angles])
    shift, scale = _tables(model.norm_out.linear, temb, 2)
    normed = [
        _norm(part, model.norm_out.norm) * (1 + scale[chosen]) + shift[chosen]
        for part, chosen in zip(rows.split(ROWS), timestep.split(ROWS), strict=True)
    ]
    return rows[None], torch.cat(normed)[None]


def _tables(layer, temb, count):
    """AdaLN tables; the block's layer holds those of three modalities for every timestep."""
    packed = linear(silu(temb), layer.weight.double(), layer.bias.double())
    width = layer.out_features // (3 if count == 6 else 1)
    return packed.reshape(-1, width).chunk(count, dim=1)


def _norm(rows, norm):
    return rows / (rows.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


def _rotate(heads, cos, sin):
    half = cos.shape[1] // 2
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _block(block, rows, tables, index, angles):
    shift, scale, gate, ff_shift, ff_scale, ff_gate = tables
    attn, parts = block.attn, index.split(ROWS)
    weights = [layer.weight.double() for layer in (attn.to_q, attn.to_k, attn.to_v)]
    heads = rows.new_empty(3, len(rows), attn.heads, attn.head_dim)
    for start, part in enumerate(rows.split(ROWS)):
        here = slice(start * ROWS, start * ROWS + len(part))
        normed = _norm(part, block.norm1) * (1 + scale[index[here]]) + shift[index[here]]
        query, key, value = (linear(normed, weight).unflatten(1, (attn.heads, -1)) for weight in weights)
        turns = [table[here] for table in angles]
        heads[0, here] = _rotate(_norm(query, attn.norm_q), *turns)
        heads[1, here] = _rotate(_norm(key, attn.norm_k), *turns)
        heads[2, here] = value
    attended = torch.empty_like(heads[0])
    for head in range(attn.heads):
        query, key, value = heads[:, :, head]
        for start in range(0, len(rows), ROWS):
            scores = query[start : start + ROWS] @ key.t() / math.sqrt(attn.head_dim)
            attended[start : start + ROWS, head] = scores.softmax(dim=1) @ value
    del heads
    out, up, down = (layer.weight.double() for layer in (attn.to_out[0], block.ff.net[0].proj, block.ff.net[2]))
    results = []
    for part, seen, chosen in zip(rows.split(ROWS), attended.split(ROWS), parts, strict=True):
        part = part + gate[chosen] * linear(seen.flatten(1), out)
        normed = _norm(part, block.norm2) * (1 + ff_scale[chosen]) + ff_shift[chosen]
        raised, gating = linear(normed, up).chunk(2, dim=1)
        results.append(part + ff_gate[chosen] * linear(raised * silu(gating), down))
    return torch.cat(results)
