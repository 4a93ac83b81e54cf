"""Sol-Attn 1.0 on a GPU: block statistics, route and attention. No stage waits for the device."""

import math
from contextlib import nullcontext

import torch

from solgen.kernels.block_sparse.triton.attention import tileable
from solgen.kernels.sol_attn1.config import SolAttn1Config
from solgen.kernels.sol_attn1.thresholds import row_thresholds
from solgen.kernels.sol_attn1.triton.attention import attend
from solgen.kernels.sol_attn1.triton.route import pool_blocks, select
from solgen.kernels.sol_attn2.details import SolAttn2Details, Stage, unpack_route
from solgen.kernels.sol_attn2.reference.blocks import mixed_blocks


def sol_attn1_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: SolAttn1Config,
    video_rows: torch.Tensor | None,
    scale: float | None,
    details: bool,
    stage: Stage = nullcontext,
) -> torch.Tensor | tuple[torch.Tensor, SolAttn2Details]:
    """Sol-Attn 1.0 of fp16 or bf16 [B, H, N, 128]; see `sol_attn1`. The output is [B, N, H, 128] in memory."""
    query, key, value = (tileable(x) for x in (query, key, value))
    batch, heads, num_rows, head_dim = query.shape
    softmax_scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    mixed = mixed_blocks(video_rows, num_rows, query.device)
    output = query.new_empty(batch, num_rows, heads, head_dim).transpose(1, 2)
    lse = torch.empty(batch, heads, num_rows, dtype=torch.float32, device=query.device) if details else None
    routes = []
    for b in range(batch):
        with stage("prepare"):
            q_means = pool_blocks(query[b], mean=True, dtype=torch.float32)
            k_means = pool_blocks(key[b], mean=True, dtype=key.dtype)
            v_sums = pool_blocks(value[b], mean=False, dtype=value.dtype)
        with stage("route"):
            thresholds = row_thresholds(
                q_means, k_means.float(), tau=config.tau, threshold=config.threshold, scale=softmax_scale
            )
            route = select(q_means, k_means, thresholds, mixed, scale=softmax_scale, sink=config.sink)
        with stage("attention"):
            attend(
                query,
                key,
                value,
                k_means,
                v_sums,
                route,
                output[b],
                lse[b] if lse is not None else None,
                batch=b,
                scale=softmax_scale,
            )
        if details:
            routes.append(unpack_route(route.mask, mixed.numel()))
    if lse is None:
        return output
    kept = torch.stack(routes)
    return output, SolAttn2Details.from_route(lse, kept, mixed)
