"""How peaked dense attention is: the share of a row's mass that its heaviest tenth of the key blocks holds."""

import math

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor

from solgen.engine.demo_training.dataset import Group
from solgen.engine.demo_training.flow import Flow, shifted
from solgen.engine.demo_training.forward import Layout, rotate
from solgen.engine.packing import cube_token_order

BLOCK = 64
"""Rows of a key block."""


def top_tenth_share(query: Tensor, key: Tensor) -> Tensor:
    """Mean over rows of the softmax mass in the heaviest ceil(blocks / 10) key blocks.

    Args:
        query: [H, N, D] float32, rotated and in block order.
        key: [H, N, D] likewise; the last block may be short.

    Returns:
        [H] float32; 0.1 for even attention over many blocks, 1 where a tenth holds everything.
    """
    shares = []
    for q, k in zip(query, key, strict=True):
        mass = (q @ k.T / math.sqrt(q.shape[-1])).softmax(-1)
        blocks = torch.stack([part.sum(-1) for part in mass.split(BLOCK, -1)], -1)
        shares.append(blocks.topk(math.ceil(blocks.shape[-1] / 10), -1).values.sum(-1).mean())
    return torch.stack(shares)


@torch.no_grad()
def block_peaks(
    flow: Flow,
    model: MiniMaxH3Transformer3DModel,
    task: str,
    group: Group,
    latent_grid: tuple[int, int, int],
    position: float,
) -> Tensor:
    """`top_tenth_share` of every block and head on the first clip of a group, noised to a position of the schedule.

    Args:
        flow: Holds the clips.
        model: Whose attention is measured.
        task: Of the group.
        group: Clips of one layout.
        latent_grid: Latent frames, height and width.
        position: In [0, 1], 1 pure noise.

    Returns:
        [blocks, heads] float32.
    """
    pool, clips = flow.pool, group.clips[:1]
    random = torch.Generator(flow.device).manual_seed(0)
    sigma = shifted(torch.tensor([position], device=flow.device))
    noised = []
    for rows, level in zip((pool.video, pool.audio), sigma[0], strict=True):
        clean = rows[clips].float()
        noised.append(torch.lerp(clean, torch.randn(clean.shape, generator=random, device=flow.device), level))
    seen: list[Tensor] = []
    norms = [norm for block in model.transformer_blocks for norm in (block.attn.norm_q, block.attn.norm_k)]
    handles = [norm.register_forward_hook(lambda _module, _args, output: seen.append(output[0])) for norm in norms]
    try:
        conditions = flow.conditions(task, clips, random)
        flow.predict(model, (noised[0], noised[1]), conditions, group.text[:1], sigma, group.layout)
    finally:
        for handle in handles:
            handle.remove()
    order = _cube_order(group.layout, latent_grid).to(flow.device)
    tables = flow.tables[id(group.layout)]
    cos, sin = tables.cos, tables.sin
    rotated = [rotate(rows.float(), cos, sin)[order].transpose(0, 1) for rows in seen]
    pairs = zip(rotated[::2], rotated[1::2], strict=True)
    return torch.stack([top_tenth_share(query, key) for query, key in pairs]).cpu()


def _cube_order(layout: Layout, latent_grid: tuple[int, int, int]) -> Tensor:
    """Packed positions in the order in which the engine cuts blocks."""
    frames, height, width = latent_grid
    frame_rows = height // 2 * width // 2
    text, condition, audio, video = torch.arange(sum(layout.parts)).split(layout.parts)
    order = cube_token_order(
        torch.cat([condition, video]),
        audio,
        text,
        target_grid=(frames, height // 2, width // 2),
        condition_grids=[(1, height // 2, width // 2)] * (layout.num_condition // frame_rows),
    )
    return order.order
