"""Block-sparse attention on a GPU: pooled units, Sol-Attn2's route and 16-bit attention, by head groups."""

import math
from contextlib import nullcontext

import torch

from solgen.kernels.block_sparse.triton.attention import attend, tileable
from solgen.kernels.sol_attn2.config import SolAttn2Config
from solgen.kernels.sol_attn2.details import SolAttn2Details, Stage, unpack_route
from solgen.kernels.sol_attn2.reference.blocks import mixed_blocks
from solgen.kernels.sol_attn2.triton.forward import head_groups
from solgen.kernels.sol_attn2.triton.prepare import pool_rows
from solgen.kernels.sol_attn2.triton.route import block_masses, poison, select


def block_sparse_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: SolAttn2Config,
    video_rows: torch.Tensor | None,
    scale: float | None,
    details: bool,
    stage: Stage = nullcontext,
) -> torch.Tensor | tuple[torch.Tensor, SolAttn2Details]:
    """Block-sparse attention of fp16 or bf16 [B, H, N, 128]; see `block_sparse`.

    The output is [B, N, H, 128] in memory. Query blocks with a router score that is not finite come out as NaN.
    """
    query, key, value = (tileable(x) for x in (query, key, value))
    batch, heads, num_rows, head_dim = query.shape
    softmax_scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    mixed = mixed_blocks(video_rows, num_rows, query.device)
    output = query.new_empty(batch, num_rows, heads, head_dim).transpose(1, 2)
    lse = torch.empty(batch, heads, num_rows, dtype=torch.float32, device=query.device) if details else None
    routes = []
    for b, group in head_groups(batch, heads, mixed.numel()):
        q, k, v = (x[b : b + 1, group] for x in (query, key, value))
        with stage("prepare"):
            q_units, k_units = pool_rows(q), pool_rows(k)
        with stage("route"):
            masses = block_masses(q_units, k_units, num_rows, scale=softmax_scale, mean=config.top_k is not None)
            routing = select(masses, mixed, config=config)
            del masses
        with stage("attention"):
            out = output[b, group]
            attend(q, k, v, routing.route, out, lse[b, group] if lse is not None else None, scale=softmax_scale)
            poison(routing.failed, out)
        if details:
            routes.append(unpack_route(routing.route.mask, mixed.numel()))
    if lse is None:
        return output
    kept = torch.cat(routes).unflatten(0, (batch, heads))
    return output, SolAttn2Details.from_route(lse, kept, mixed)
