"""Attention of the transformer blocks: diffusers' dense processor, or a sparse operator in its place."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from diffusers.models.transformers.transformer_minimax_h3 import (
    MiniMaxH3Attention,
    MiniMaxH3AttnProcessor,
    MiniMaxH3Transformer3DModel,
    _apply_rotary_emb,
)

from solgen.errors import InputError
from solgen.kernels.block_sparse import block_sparse
from solgen.kernels.block_sparse.validation import choose_impl
from solgen.kernels.sol_attn1 import SolAttn1Config, sol_attn1
from solgen.kernels.sol_attn2 import SolAttn2Config, SolAttn2Details, fastest_impl, sol_attn2
from solgen.kernels.sol_attn2.density import share_histogram, solve_epsilon
from solgen.presets.schema import Attention


@dataclass
class AttentionRun:
    """What the attention processors of one request share.

    Attributes:
        settings: The preset's attention table.
        config: Sol-Attn2's settings made from it; replaced once when a density is solved for.
        video_rows: Rows that may be sparse, [N] bool, on the device.
        step: Denoiser call in progress, from 0.
        densities: Per finished or running call, kept share of the eligible block pairs by block number, 0-d
            tensors that stay on the device until `density_table`.
        histogram: Counts of log shares while a density is being solved for, else None.
        computed_by: Implementation that ran, None while every block is dense.
    """

    settings: Attention
    config: SolAttn2Config
    video_rows: torch.Tensor
    step: int = 0
    densities: list[dict[int, torch.Tensor]] = field(default_factory=list)
    histogram: torch.Tensor | None = None
    computed_by: str | None = None

    @classmethod
    def start(cls, settings: Attention, video_rows: torch.Tensor) -> "AttentionRun":
        """Begin a request. `video_rows` is [N] bool in the order of the packed sequence."""
        config = SolAttn2Config(
            epsilon=settings.epsilon,
            top_k=settings.top_k,
            tail=settings.tail,
            offset=settings.offset,
            smooth_key=settings.smooth_key,
            smooth_value=settings.smooth_value,
            sink=settings.sink,
        )
        if settings.backend == "fp8":
            config = dataclasses.replace(config, epsilon=-math.inf, top_k=None, tail="none")
        return cls(settings, config, video_rows)

    @property
    def impl(self) -> Literal["reference", "triton", "gluon"] | None:
        """Implementation asked for, None to take the fastest."""
        return None if self.settings.impl == "auto" else self.settings.impl

    def begin_step(self, step: int) -> None:
        """Mark the start of denoiser call `step`."""
        self.step = step
        del self.densities[step:]
        self.densities.append({})

    def density_table(self) -> list[dict[str, float]]:
        """Measured density of every (step, block) that was sparse; the one device sync of the record."""
        return [{str(block): float(value) for block, value in row.items()} for row in self.densities]

    @property
    def solves_density(self) -> bool:
        """Whether a calibration call has to find the router's threshold."""
        return self.settings.density is not None and self.settings.backend in ROUTED


ROUTED = ("sol-attn2", "block-sparse")
"""Backends that keep the blocks of Sol-Attn2's router."""


def check_attention(settings: Attention, device: torch.device, num_blocks: int) -> None:
    """Refuse settings that the machine or the model cannot serve, before weights are read.

    Args:
        settings: The preset's attention table.
        device: Where the model will run.
        num_blocks: Transformer blocks of the model.

    Raises:
        InputError: one line.
    """
    backend, impl = settings.backend, settings.impl
    if backend == "dense":
        return
    listed = [part for part in settings.dense_blocks.split(",") if part]
    if beyond := [part for part in listed if int(part.split("-")[-1]) >= num_blocks]:
        raise InputError(
            f"attention.dense_blocks lists {beyond[0]}, the model has blocks 0-{num_blocks - 1}; "
            "set attention.dense_blocks to blocks that exist"
        )
    if impl in ("triton", "gluon") and device.type != "cuda":
        raise InputError(f"attention.impl {impl} runs on a CUDA GPU, this run is on the {device.type}; use auto")
    if impl == "gluon" and backend in ("sol-attn1", "block-sparse"):
        raise InputError(f"attention.impl gluon does not offer {backend}; use triton or auto")
    if backend == "sol-attn1" and settings.density is not None:
        raise InputError("--density solves Sol-Attn2's threshold; sol-attn1 takes --set attention.tau=TAU")


def attend(
    run: AttentionRun, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, SolAttn2Details]:
    """One call of the request's sparse operator on [B, H, N, 128] views; the output has their shape."""
    settings, rows = run.settings, run.video_rows
    if settings.backend in ("sol-attn1", "block-sparse"):
        impl = choose_impl(query, run.impl)
        run.computed_by = impl
        if settings.backend == "block-sparse":
            return block_sparse(query, key, value, config=run.config, video_rows=rows, impl=impl, details=True)
        config = SolAttn1Config(tau=settings.tau, threshold=settings.threshold, sink=settings.sink)
        return sol_attn1(query, key, value, config=config, video_rows=rows, impl=impl, details=True)
    run.computed_by = run.impl or fastest_impl(query, run.config)
    return sol_attn2(query, key, value, config=run.config, video_rows=rows, impl=run.impl, details=True)


class SparseProcessor:
    """A sparse operator behind diffusers' attention-processor interface, for one transformer block.

    The projections, norms and rotary angles are those of `MiniMaxH3AttnProcessor`.
    """

    _attention_backend = None
    _parallel_config = None

    def __init__(self, block: int, run: AttentionRun) -> None:
        self.block = block
        self.run = run
        self.dense = MiniMaxH3AttnProcessor()

    def __call__(
        self,
        attn: MiniMaxH3Attention,
        hidden_states: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend over the packed sequence; `hidden_states` is [B, N, hidden]."""
        run = self.run
        if run.step < run.settings.dense_steps and run.histogram is None:
            return self.dense(attn, hidden_states, rotary_emb, attention_mask)
        query, key, value = (
            projection(hidden_states).unflatten(-1, (attn.heads, -1))
            for projection in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = attn.norm_q(query), attn.norm_k(key)
        if rotary_emb is not None:
            query, key = _apply_rotary_emb(query, *rotary_emb), _apply_rotary_emb(key, *rotary_emb)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if run.histogram is not None:
            run.histogram += share_histogram(query, key, video_rows=run.video_rows)
        output, details = attend(run, query, key, value)
        run.densities[run.step][self.block] = details.density
        output = output.transpose(1, 2).flatten(2, 3)
        return attn.to_out[1](attn.to_out[0](output))


def install_attention(transformer: MiniMaxH3Transformer3DModel, run: AttentionRun) -> None:
    """Give every transformer block the attention that the request asks for.

    Dense blocks keep diffusers' own processor, so a dense run is the stock model.
    """
    for index, block in enumerate(transformer.transformer_blocks):
        sparse = run.settings.backend != "dense" and not run.settings.is_dense_block(index)
        block.attn.set_processor(SparseProcessor(index, run) if sparse else MiniMaxH3AttnProcessor())


def solve_density(run: AttentionRun) -> None:
    """Set epsilon to the threshold that keeps the preset's `density` of the pairs the calibration call saw."""
    assert run.histogram is not None
    assert run.settings.density is not None
    epsilon = solve_epsilon(run.histogram, run.settings.density)
    run.config = dataclasses.replace(run.config, epsilon=epsilon, top_k=None)
    run.histogram = None
