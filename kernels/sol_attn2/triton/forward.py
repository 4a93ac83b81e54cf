"""Sol-Attn2 on a GPU: prepare, route, tail and attention of head groups of bounded size.

No stage waits for the device and every grid depends on shapes alone, so a call can be captured in a CUDA graph.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Literal

import torch

from solgen.kernels.sol_attn2.config import BLOCK, HEAD_DIM, SLOTS, SolAttn2Config
from solgen.kernels.sol_attn2.details import SolAttn2Details, Stage
from solgen.kernels.sol_attn2.norm_rope import NormRope
from solgen.kernels.sol_attn2.reference.blocks import mixed_blocks
from solgen.kernels.sol_attn2.triton.histogram import add_share_histogram
from solgen.kernels.sol_attn2.triton.norm_prepare import norm_prepare
from solgen.kernels.sol_attn2.triton.operands import Operands, Tail
from solgen.kernels.sol_attn2.triton.prepare import pool_rows, prepare
from solgen.kernels.sol_attn2.triton.route import block_masses, poison, select
from solgen.kernels.sol_attn2.triton.tail import compress

GROUP_BYTES = 6 * 2**30
"""Device memory that the operands, routes and surrogates of one head group may take."""


def head_bytes(num_blocks: int) -> int:
    """Largest working set of one head, in bytes."""
    operands = num_blocks * BLOCK * HEAD_DIM * 3 * 5 // 4  # codes, and FP16 means of 8 rows
    lists = num_blocks * num_blocks * (2 + 1 / 8 + 16 / 3)  # bitmask and lists; shared loads and turns of Gluon's trios
    masses = num_blocks * num_blocks * 4
    surrogates = num_blocks * SLOTS * HEAD_DIM * 5  # codes, and unquantised keys and untransposed values
    return operands + math.ceil(lists) + max(masses, surrogates)


def head_groups(batch: int, heads: int, num_blocks: int) -> Iterator[tuple[int, slice]]:
    """Batch entry and heads of every group: as few groups as GROUP_BYTES allows, of nearly equal size."""
    groups = -(-heads // max(1, GROUP_BYTES // head_bytes(num_blocks)))
    edges = [heads * i // groups for i in range(groups + 1)]
    for b in range(batch):
        for start, stop in pairwise(edges):
            yield b, slice(start, stop)


def sol_attn2_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: SolAttn2Config,
    video_rows: torch.Tensor | None,
    scale: float | None,
    impl: Literal["triton", "gluon"],
    details: bool,
    stage: Stage = nullcontext,
    norm: NormRope | None = None,
) -> torch.Tensor | tuple[torch.Tensor, SolAttn2Details]:
    """Sol-Attn2 of [B, H, N, 128] views with unit stride along the channels; see `sol_attn2`.

    The output is [B, N, H, 128] in memory, so that the output projection reads it without a copy. Query blocks with
    a router score that is not finite come out as NaN: their route would be arbitrary, and no check waits for the
    device here.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    batch, heads, num_rows, head_dim = query.shape
    output = query.new_empty(batch, num_rows, heads, head_dim).transpose(1, 2)

    def operands(b: int, group: slice) -> Operands:
        heads = [x[b : b + 1, group] for x in (query, key, value)]
        return prepare(*heads, config=config) if norm is None else norm_prepare(*heads, norm=norm, config=config)

    report = attend_groups(
        operands,
        output,
        config=config,
        video_rows=video_rows,
        scale=scale,
        impl=impl,
        details=details,
        stage=stage,
    )
    return output if report is None else (output, report)


def attend_groups(
    operands_of: Callable[[int, slice], Operands],
    output: torch.Tensor,
    *,
    config: SolAttn2Config,
    video_rows: torch.Tensor | None,
    scale: float | None,
    impl: Literal["triton", "gluon"],
    details: bool,
    stage: Stage = nullcontext,
) -> SolAttn2Details | None:
    """Route, tail and attention of quantised inputs.

    Args:
        operands_of: The operands of a batch entry's heads; called once for every group.
        output: [B, H, N, D], written.
        config: Router and tail.
        video_rows: As in `sol_attn2`.
        scale: As in `sol_attn2`.
        impl: Of the attention kernel.
        details: Whether to return a report.
        stage: As in `sol_attn2`.
    """
    assert config.tail != "whole", "only the reference has the whole tail"
    if impl == "gluon":
        from solgen.kernels.sol_attn2.gluon.attention import attend
    else:
        from solgen.kernels.sol_attn2.triton.attention import attend
    batch, heads, num_rows, head_dim = output.shape
    softmax_scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    mixed = mixed_blocks(video_rows, num_rows, output.device)
    lse = torch.empty(batch, heads, num_rows, dtype=torch.float32, device=output.device) if details else None
    kept: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    for b, group in head_groups(batch, heads, mixed.numel()):
        out = output[b, group]
        with stage("prepare"):
            operands = operands_of(b, group)
        with stage("route"):
            masses = block_masses(
                operands.q_units,
                operands.k_units,
                num_rows,
                scale=softmax_scale,
                mean=config.top_k is not None,
            )
            routing = select(masses, mixed, config=config)
            del masses
        tail: Tail | None = None
        if config.tail != "none":
            with stage("tail"):
                tail = compress(operands, routing.route, config=config, scale=softmax_scale)
        with stage("attention"):
            attend(
                operands,
                routing.route,
                tail,
                out,
                lse[b, group] if lse is not None else None,
                scale=softmax_scale,
                offset=config.offset,
                tail_kind=config.tail,
            )
            poison(routing.failed, out)
        if details:
            kept.append(torch.stack([routing.kept_video.sum(), routing.route.counts.sum()]))
            masks.append(routing.route.mask)
    if lse is None:
        return None
    kept_video, kept_all = torch.stack(kept).sum(0).double()
    pairs = batch * heads * mixed.numel() ** 2
    eligible = (~mixed).sum().double() ** 2 * (batch * heads)
    packed = torch.cat(masks).unflatten(0, (batch, heads))
    return SolAttn2Details(lse, packed, (kept_video / eligible).float(), (kept_all / pairs).float())


def add_shares(
    histogram: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    video_rows: torch.Tensor | None,
    scale: float | None,
) -> None:
    """Count the shares of all eligible pairs of one call into `histogram`; see `density.share_histogram`."""
    batch, heads, num_rows, head_dim = query.shape
    mixed = mixed_blocks(video_rows, num_rows, query.device)
    softmax_scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    for b, group in head_groups(batch, heads, mixed.numel()):
        q_units, k_units = (pool_rows(x[b : b + 1, group]) for x in (query, key))
        add_share_histogram(histogram, block_masses(q_units, k_units, num_rows, scale=softmax_scale), mixed)
