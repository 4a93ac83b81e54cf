"""Attention of the transformer blocks: dense or sparse, with heads exchanged between ranks."""

import dataclasses
import math
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from diffusers.models.transformers.transformer_minimax_h3 import (
    MiniMaxH3Attention,
    MiniMaxH3Transformer3DModel,
    _apply_rotary_emb,
)

from solgen.engine.dense import Dense, choose_dense, dense_attention
from solgen.engine.exchange import BACKENDS, OperandExchange, send_heads
from solgen.engine.linear import shared_rows
from solgen.errors import InputError
from solgen.kernels.block_sparse import block_sparse
from solgen.kernels.block_sparse.validation import choose_impl
from solgen.kernels.sol_attn1 import SolAttn1Config, sol_attn1
from solgen.kernels.sol_attn2 import (
    NonFiniteError,
    NormRope,
    SolAttn2Config,
    SolAttn2Details,
    fastest_impl,
    sol_attn2,
)
from solgen.kernels.sol_attn2.config import HEAD_DIM
from solgen.kernels.sol_attn2.density import share_histogram, solve_epsilon
from solgen.kernels.sol_attn2.details import Stage
from solgen.kernels.sol_attn2.wire import attend_operands
from solgen.parallel.ulysses import Ulysses
from solgen.presets.schema import Attention, Parallel


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


def attend(
    run: AttentionRun,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    norm: NormRope | None = None,
) -> tuple[torch.Tensor, SolAttn2Details]:
    """One call of the request's sparse operator on [B, H, N, 128] views; the output has their shape.

    Only Sol-Attn2 takes queries and keys that lack their `norm`.
    """
    settings, rows = run.settings, run.video_rows
    if settings.backend in ("sol-attn1", "block-sparse"):
        impl = choose_impl(query, run.impl)
        run.computed_by = impl
        with run.stage("attention"):
            if settings.backend == "block-sparse":
                return block_sparse(query, key, value, config=run.config, video_rows=rows, impl=impl, details=True)
            config = SolAttn1Config(tau=settings.tau, threshold=settings.threshold, sink=settings.sink)
            return sol_attn1(query, key, value, config=config, video_rows=rows, impl=impl, details=True)
    run.computed_by = run.impl or fastest_impl(query, run.config)
    return sol_attn2(
        query, key, value, config=run.config, video_rows=rows, norm=norm, impl=run.impl, details=True, stage=run.stage
    )


QueryAndKey = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Computes this rank's queries and keys, [1, n, H, D]."""


class BlockAttention:
    """Attention of one transformer block behind diffusers' processor interface.

    The projections, norms and rotary angles are those of `MiniMaxH3AttnProcessor`. With several ranks it is given
    this rank's rows and attends over all rows with this rank's heads.
    """

    _attention_backend = None
    _parallel_config = None

    def __init__(self, block: int, run: AttentionRun, *, sparse: bool) -> None:
        self.block = block
        self.run = run
        self.sparse = sparse

    def __call__(
        self,
        attn: MiniMaxH3Attention,
        hidden_states: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend over the packed sequence; `hidden_states` is [1, n, hidden] with this rank's n rows."""
        run = self.run
        with run.stage("shared rows"):
            rows = shared_rows(hidden_states, attn.to_q, attn.to_k, attn.to_v)
        value = attn.to_v(rows).unflatten(-1, (attn.heads, -1))

        def project() -> tuple[torch.Tensor, torch.Tensor]:
            query, key = (projection(rows).unflatten(-1, (attn.heads, -1)) for projection in (attn.to_q, attn.to_k))
            return query, key

        def query_and_key() -> tuple[torch.Tensor, torch.Tensor]:
            return self._norm_and_rotate(attn, *project(), rotary_emb)

        dense = not self.sparse or (run.step < run.settings.dense_steps and run.histogram is None)
        if run.norms_in_operator and not dense:
            output = self._operate(*project(), value, dense, _norm_of(attn, rotary_emb))
        elif run.ulysses is None:
            output = self._operate(*query_and_key(), value, dense)
        elif run.parallel.wire == "fp8" and not dense and run.histogram is None:
            output = self._attend_operands(run.ulysses, query_and_key, value)
        elif run.fused:
            output = self._attend_heads(run.ulysses, project, value, dense, _norm_of(attn, rotary_emb))
        else:
            output = self._attend_heads(run.ulysses, query_and_key, value, dense)
        return attn.to_out[1](attn.to_out[0](output.flatten(2, 3)))

    def _attend_heads(
        self,
        ulysses: Ulysses,
        query_and_key: QueryAndKey,
        value: torch.Tensor,
        dense: bool,
        norm: NormRope | None = None,
    ) -> torch.Tensor:
        """Attention [1, n, H, D] of this rank's rows; `norm` is what its queries and keys lack once they are there."""
        if self.run.parallel.overlap:
            values = ulysses.start_to_heads(value)
            query, key = send_heads(ulysses, *query_and_key(), norm=norm)()
            (value,) = values()
        else:
            query, key, value = send_heads(ulysses, *query_and_key(), value, norm=norm)()
        return ulysses.to_rows(self._operate(query, key, value, dense))

    def _attend_operands(self, ulysses: Ulysses, query_and_key: QueryAndKey, value: torch.Tensor) -> torch.Tensor:
        """As `_attend_heads`, sparse, with Sol-Attn2's operands and an FP8 output on the wire."""
        run = self.run
        exchange = OperandExchange(ulysses, run.config, run.stage)
        if run.parallel.overlap:
            sent = exchange.send_values(value)
            query, key = query_and_key()
        else:
            query, key = query_and_key()
            sent = exchange.send_values(value)
        operands = exchange.operands(query, key, sent)
        with run.stage("operator"):
            output = self._booked(
                lambda: attend_operands(
                    operands,
                    config=run.config,
                    dtype=value.dtype,
                    video_rows=run.video_rows,
                    impl=run.impl,
                    stage=run.stage,
                ),
                len(operands.q_codes),
                value.dtype,
            ).transpose(1, 2)
            run.computed_by = run.impl or fastest_impl(operands.q_codes, run.config)
        return exchange.to_rows(output, sent)

    def _operate(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dense: bool,
        norm: NormRope | None = None,
    ) -> torch.Tensor:
        """Attention over all rows with this rank's heads, [1, N, h, D]; `norm` is what queries and keys lack."""
        with self.run.stage("operator"):
            if not dense:
                heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
                return self._attend(*heads, norm=norm).transpose(1, 2)
            with self.run.stage("dense"):
                return dense_attention(query, key, value, self.run.dense)

    def _norm_and_rotate(
        self,
        attn: MiniMaxH3Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and key [1, n, H, D] as attention compares them."""
        if self.run.fused:
            # Triton is imported only when it is used: CPU installations may not have it.
            from solgen.kernels.fused import qk_norm_rope

            assert rotary_emb is not None
            weights = attn.norm_q.weight, attn.norm_k.weight
            query, key = qk_norm_rope(query[0], key[0], *weights, *rotary_emb, eps=attn.norm_q.eps)
            return query[None], key[None]
        query, key = attn.norm_q(query), attn.norm_k(key)
        if rotary_emb is not None:
            query, key = _apply_rotary_emb(query, *rotary_emb), _apply_rotary_emb(key, *rotary_emb)
        return query, key

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, norm: NormRope | None
    ) -> torch.Tensor:
        """The sparse operator on [1, H, N, 128] views; books its density."""
        run = self.run
        if run.histogram is not None:
            run.histogram += share_histogram(query, key, video_rows=run.video_rows)
        return self._booked(lambda: attend(run, query, key, value, norm), query.shape[1], query.dtype)

    def _booked(
        self, call: Callable[[], tuple[torch.Tensor, SolAttn2Details]], heads: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Output of a sparse call, [1, heads, N, 128]; books its density."""
        run = self.run
        try:
            output, details = call()
        except NonFiniteError:
            if run.ulysses is None:
                raise
            # The other ranks' heads may be finite: they wait for this output, and see in it what happened.
            shape = (1, heads, run.video_rows.numel(), HEAD_DIM)
            return torch.full(shape, torch.nan, dtype=dtype, device=run.video_rows.device)
        run.densities[run.step][self.block] = details.density
        run.kept[self.block] = details.density_all
        return output


def _norm_of(attn: MiniMaxH3Attention, rotary_emb: tuple[torch.Tensor, torch.Tensor] | None) -> NormRope:
    """What the projections' queries and keys lack; the model's tables hold every angle twice, once for either half."""
    assert rotary_emb is not None
    cos, sin = (table[:, : table.shape[1] // 2] for table in rotary_emb)
    return NormRope(attn.norm_q.weight, attn.norm_k.weight, cos, sin, attn.norm_q.eps)


def install_attention(transformer: MiniMaxH3Transformer3DModel, run: AttentionRun) -> None:
    """Give every transformer block the attention that the request asks for."""
    for index, block in enumerate(transformer.transformer_blocks):
        sparse = run.settings.backend != "dense" and not run.settings.is_dense_block(index)
        block.attn.set_processor(BlockAttention(index, run, sparse=sparse))


def solve_density(run: AttentionRun) -> None:
    """Set epsilon to the threshold that keeps the preset's `density` of the pairs the calibration call saw."""
    assert run.histogram is not None
    assert run.settings.density is not None
    if run.ulysses is not None:
        run.ulysses.sum(run.histogram)
    epsilon = solve_epsilon(run.histogram, run.settings.density)
    run.config = dataclasses.replace(run.config, epsilon=epsilon, top_k=None)
    run.histogram = None
