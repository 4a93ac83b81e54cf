"""Attention of the transformer blocks: dense or sparse, with heads exchanged between ranks."""

from collections.abc import Callable

import torch
from diffusers.models.transformers.transformer_minimax_h3 import (
    MiniMaxH3Attention,
    MiniMaxH3Transformer3DModel,
    _apply_rotary_emb,
)

from solgen.engine.attention_run import AttentionRun
from solgen.engine.dense import dense_attention
from solgen.engine.exchange import OperandExchange, send_heads
from solgen.engine.linear import shared_rows
from solgen.kernels.block_sparse import block_sparse
from solgen.kernels.block_sparse.validation import choose_impl
from solgen.kernels.sol_attn1 import SolAttn1Config, sol_attn1
from solgen.kernels.sol_attn2 import (
    NonFiniteError,
    NormRope,
    SolAttn2Details,
    fastest_impl,
    sol_attn2,
)
from solgen.kernels.sol_attn2.config import HEAD_DIM
from solgen.kernels.sol_attn2.density import share_histogram
from solgen.kernels.sol_attn2.wire import attend_operands
from solgen.parallel.ulysses import Ulysses


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
