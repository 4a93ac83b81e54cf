"""Block-sparse attention in plain PyTorch, in float64 for float64 inputs and FP32 otherwise."""

import math

import torch

from solgen.kernels.sol_attn2.config import SolAttn2Config
from solgen.kernels.sol_attn2.details import SolAttn2Details
from solgen.kernels.sol_attn2.reference.blocks import make_blocks, mixed_blocks
from solgen.kernels.sol_attn2.reference.exact import ExactHead
from solgen.kernels.sol_attn2.reference.forward import working_dtype
from solgen.kernels.sol_attn2.reference.router import router_means, select_blocks
from solgen.kernels.sol_attn2.reference.selection import selections


def block_sparse_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: SolAttn2Config,
    video_rows: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, SolAttn2Details]:
    """Softmax over the kept blocks of query, key and value [B, H, N, 128]; see `block_sparse`."""
    num_rows, head_dim = query.shape[-2:]
    dtype = working_dtype(query.dtype)
    mixed = mixed_blocks(video_rows, num_rows, query.device)
    blocks = make_blocks(num_rows, mixed, dtype)
    softmax_scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    results = []
    for rows in zip(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), strict=True):
        q, k, v = (blocks.split(x.to(dtype)) for x in rows)
        q_units, k_units = (router_means(x, blocks, "fp8") for x in (q, k))
        kept = select_blocks(q_units, k_units, blocks, softmax_scale, config)
        head, chunks = ExactHead(q, k, v, blocks, softmax_scale), list(selections(kept))
        order = torch.cat([chunk.rows for chunk in chunks]).argsort()
        parts = [head.attend(chunk, None) for chunk in chunks]
        output, lse = (torch.cat(part)[order].flatten(0, 1)[:num_rows] for part in zip(*parts, strict=True))
        results.append((output, lse, kept))
    outputs, lses, routes = (torch.stack(part).unflatten(0, query.shape[:2]) for part in zip(*results, strict=True))
    return outputs.to(query.dtype), SolAttn2Details.from_route(lses, routes, mixed)
