"""The reference operator: route, tail and joint attention of every head in plain PyTorch.

Differentiable by autograd: the route and the slots are constants, rounding passes gradients straight through,
and under "fp8" the probabilities are the forward's bytes with the slope of `config.shadow` (specification
section 5).
"""

import math
from contextlib import nullcontext

import torch
from torch.utils.checkpoint import checkpoint

from solgen.kernels.sol_attn2.config import SLOTS, SolAttn2Config
from solgen.kernels.sol_attn2.details import SolAttn2Details, Stage
from solgen.kernels.sol_attn2.reference.blocks import Blocks, make_blocks, mixed_blocks
from solgen.kernels.sol_attn2.reference.exact import ExactHead
from solgen.kernels.sol_attn2.reference.fp8 import Fp8Head
from solgen.kernels.sol_attn2.reference.router import router_means, select_blocks
from solgen.kernels.sol_attn2.reference.selection import Selection, selections
from solgen.kernels.sol_attn2.reference.tail import NUM_ANCHORS, Surrogates, arrange_slots, compress
from solgen.kernels.sol_attn2.reference.whole_tail import compress_whole


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision of the sums: float64 for float64 inputs, else FP32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sol_attn2_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: SolAttn2Config,
    video_rows: torch.Tensor | None,
    scale: float | None,
    stage: Stage = nullcontext,
) -> tuple[torch.Tensor, SolAttn2Details]:
    """Sol-Attn2 of query, key and value [B, H, N, 128]; see `solgen.kernels.sol_attn2.api.sol_attn2`.

    Works on one head and a bounded number of score tiles at a time, forward and backward.
    """
    batch, heads, num_rows, head_dim = query.shape
    dtype = working_dtype(query.dtype)
    mixed = mixed_blocks(video_rows, num_rows, query.device)
    blocks = make_blocks(num_rows, mixed, dtype)
    softmax_scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    results = [
        attend_head(q.to(dtype), k.to(dtype), v.to(dtype), blocks, softmax_scale, config, stage)
        for q, k, v in zip(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), strict=True)
    ]
    outputs, lses, routes = (torch.stack(part).unflatten(0, (batch, heads)) for part in zip(*results, strict=True))
    return outputs.to(query.dtype), SolAttn2Details.from_route(lses, routes, mixed)


def attend_head(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Blocks,
    scale: float,
    config: SolAttn2Config,
    stage: Stage = nullcontext,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output [N, D], natural-log denominators [N] and route [NB, NB] of one head's [N, D] inputs."""
    with stage("prepare"):
        q_rows, k_rows, v_rows = blocks.split(query), blocks.split(key), blocks.split(value)
        q_units, k_units, v_units = (router_means(rows, blocks, config.precision) for rows in (q_rows, k_rows, v_rows))
        head = (
            Fp8Head(q_rows, k_rows, v_rows, blocks, scale, config)
            if config.precision == "fp8"
            else ExactHead(q_rows, k_rows, v_rows, blocks, scale)
        )
    recompute = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    units = q_units, k_units, v_units
    return attend_quantised(head, units, blocks, scale, config, stage, whole_rows=(k_rows, v_rows), recompute=recompute)


def attend_quantised(
    head: Fp8Head | ExactHead,
    units: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    blocks: Blocks,
    scale: float,
    config: SolAttn2Config,
    stage: Stage = nullcontext,
    *,
    whole_rows: tuple[torch.Tensor, torch.Tensor] | None = None,
    recompute: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `attend_head`, from the quantised head and the unit means [NB, 8, D] of query, key and value.

    `whole_rows` are keys and values [NB, 64, D] for the whole tail; `recompute` repeats chunks in the backward.
    """
    q_units, k_units, v_units = units
    with stage("route"):
        kept = select_blocks(q_units, k_units, blocks, scale, config)
        chunks = list(selections(kept))
    with stage("tail"):
        if config.tail != "none":
            num_anchors = NUM_ANCHORS[config.tail]
            anchors = blocks.group_means(q_units, num_anchors)
        if config.tail in ("slots", "anchors"):
            slots = arrange_slots(k_units, v_units, blocks, SLOTS // num_anchors)

    def surrogates(rows: torch.Tensor) -> Surrogates:
        if config.tail == "whole":
            assert whole_rows is not None
            return compress_whole(anchors[rows], kept[rows], *whole_rows, blocks, scale)
        return compress(anchors[rows], kept[rows], slots, scale, config.precision)

    def attend(selection: Selection) -> tuple[torch.Tensor, torch.Tensor]:
        has_tail = config.tail != "none" and selection.width < blocks.num_blocks
        with stage("tail"):
            tail = surrogates(selection.rows) if has_tail else None
        with stage("attention"):
            return head.attend(selection, tail)

    parts = [checkpoint(attend, chunk, use_reentrant=False) if recompute else attend(chunk) for chunk in chunks]
    order = torch.cat([chunk.rows for chunk in chunks]).argsort()
    output, lse = (torch.cat(part)[order].flatten(0, 1)[: blocks.num_rows] for part in zip(*parts, strict=True))
    return output, lse, kept
