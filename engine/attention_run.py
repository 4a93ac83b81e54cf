"""What the attention processors of one request share, and the settings that are refused before."""

import dataclasses
import math
import statistics
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch

from solgen.engine.dense import Dense, choose_dense
from solgen.engine.exchange import BACKENDS
from solgen.errors import InputError
from solgen.kernels.sol_attn2 import SolAttn2Config
from solgen.kernels.sol_attn2.density import solve_epsilon
from solgen.kernels.sol_attn2.details import Stage
from solgen.parallel.ulysses import Ulysses
from solgen.presets.schema import Attention, Parallel

ROUTED = ("sol-attn2", "block-sparse")
"""Backends that keep the blocks of Sol-Attn2's router."""


@dataclass
class AttentionRun:
    """What the attention processors of one request share.

    Attributes:
        settings: The preset's attention table.
        config: Sol-Attn2's settings made from it; replaced once when a density is solved for.
        video_rows: Rows that may be sparse, [N] bool, on the device.
        dense: Kernel of the dense blocks.
        ulysses: Exchanges with the ranks that share the sequence; None when there are none.
        fused: Whether the norms and angles of queries and keys are one kernel, or part of the operator.
        parallel: How the ranks exchange.
        step: Denoiser call in progress, from 0.
        densities: Per finished or running call, kept share of the eligible block pairs by block number, 0-d
            tensors that stay on the device until `density_table`.
        kept: Of the call in progress, kept share of all block pairs by block number, as `densities`; text and audio
            count here.
        histogram: Counts of log shares while a density is being solved for, else None.
        computed_by: Implementation that ran, None while every block is dense.
        stage: Entered around "shared rows", what the projections read, and around every "operator"; within it,
            around "dense" or the parts of a sparse call.
    """

    settings: Attention
    config: SolAttn2Config
    video_rows: torch.Tensor
    dense: Dense
    ulysses: Ulysses | None = None
    fused: bool = False
    parallel: Parallel = field(default_factory=Parallel)
    step: int = 0
    densities: list[dict[int, torch.Tensor]] = field(default_factory=list)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    histogram: torch.Tensor | None = None
    computed_by: str | None = None
    stage: Stage = nullcontext

    @classmethod
    def start(
        cls,
        settings: Attention,
        video_rows: torch.Tensor,
        ulysses: Ulysses | None = None,
        *,
        fused: bool = False,
        parallel: Parallel | None = None,
    ) -> "AttentionRun":
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
        dense = choose_dense(settings.dense, video_rows.device)
        return cls(settings, config, video_rows, dense, ulysses, fused, parallel or Parallel())

    @property
    def impl(self) -> Literal["reference", "triton", "gluon"] | None:
        """Implementation asked for, None to take the fastest."""
        return None if self.settings.impl == "auto" else self.settings.impl

    def begin_step(self, step: int) -> None:
        """Mark the start of denoiser call `step`."""
        self.step = step
        self.kept = {}
        del self.densities[step:]
        self.densities += [{} for _ in range(step + 1 - len(self.densities))]

    def density_table(self) -> list[dict[str, float]]:
        """Measured density of every (step, block) that was sparse, over all heads; the record's one device sync."""
        values = iter(self._over_heads([value for row in self.densities for value in row.values()]))
        return [{str(block): next(values) for block in row} for row in self.densities]

    def kept_share(self) -> float | None:
        """Kept share of all block pairs in the last call, mean over its sparse blocks; None if all were dense."""
        shares = self._over_heads(list(self.kept.values()))
        return statistics.fmean(shares) if shares else None

    def _over_heads(self, shares: list[torch.Tensor]) -> list[float]:
        """Means over all heads of shares of this rank's."""
        if not shares:
            return []
        means = torch.stack(shares).double()
        if self.ulysses is not None:
            # Every rank holds as many heads, so the mean over ranks is the mean over heads.
            means = self.ulysses.sum(means) / len(self.ulysses.rows)
        return means.float().tolist()

    @property
    def norms_in_operator(self) -> bool:
        """Whether sparse calls of Sol-Attn2 get queries and keys as the projections leave them.

        Ranks exchange heads in between, and a calibration call looks at normed ones.
        """
        backend = self.settings.backend
        return self.fused and backend in BACKENDS and self.ulysses is None and self.histogram is None

    @property
    def solves_density(self) -> bool:
        """Whether a calibration call has to find the router's threshold."""
        return self.settings.density is not None and self.settings.backend in ROUTED


def solve_density(run: AttentionRun) -> None:
    """Set epsilon to the threshold that keeps the preset's `density` of the pairs the calibration call saw."""
    assert run.histogram is not None
    assert run.settings.density is not None
    if run.ulysses is not None:
        run.ulysses.sum(run.histogram)
    epsilon = solve_epsilon(run.histogram, run.settings.density)
    run.config = dataclasses.replace(run.config, epsilon=epsilon, top_k=None)
    run.histogram = None


def check_attention(settings: Attention, device: torch.device, num_blocks: int) -> None:
    """Refuse settings that the machine or the model cannot serve, before weights are read.

    Args:
        settings: The preset's attention table.
        device: Where the model will run.
        num_blocks: Transformer blocks of the model.

    Raises:
        InputError: one line.
        SetupError: if the dense kernel that was asked for is not there.
    """
    backend, impl = settings.backend, settings.impl
    if settings.dense != "auto":
        choose_dense(settings.dense, device)
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
