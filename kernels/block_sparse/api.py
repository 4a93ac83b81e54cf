"""Public entry of block-sparse attention: checks its arguments and hands the call to one implementation."""

from typing import Literal, overload

import torch

from solgen.kernels.block_sparse.reference import block_sparse_reference
from solgen.kernels.block_sparse.validation import Impl, choose_impl
from solgen.kernels.sol_attn2.config import SolAttn2Config
from solgen.kernels.sol_attn2.details import SolAttn2Details
from solgen.kernels.sol_attn2.validation import validate_finite, validate_inputs


@overload
def block_sparse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: SolAttn2Config,
    video_rows: torch.Tensor | None = None,
    scale: float | None = None,
    impl: Impl | None = None,
    details: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def block_sparse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: SolAttn2Config,
    video_rows: torch.Tensor | None = None,
    scale: float | None = None,
    impl: Impl | None = None,
    details: Literal[True],
) -> tuple[torch.Tensor, SolAttn2Details]: ...


def block_sparse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: SolAttn2Config,
    video_rows: torch.Tensor | None = None,
    scale: float | None = None,
    impl: Impl | None = None,
    details: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, SolAttn2Details]:
    """Softmax attention over the key blocks that Sol-Attn2's router keeps, in 16-bit precision; no tail.

    A row that keeps no block gets output 0.

    Args:
        query: [B, H, N, 128], float64, float32, bfloat16 or float16, any strides; no causal mask.
        key: Like `query`.
        value: Like `query`.
        config: Only epsilon, top_k and sink are read.
        video_rows: True where a row is video, [N] bool; None means all. Query blocks of 64 rows with any text
            or audio row attend to every key block.
        scale: Softmax scale, 128^-0.5 by default; positive.
        impl: Who computes it. An explicit choice never falls back to another; None takes the fastest that
            covers the inputs.
        details: Also return row sums, route and density.

    Returns:
        The output, [B, H, N, 128] in the inputs' dtype, and with `details` a `SolAttn2Details`.

    Raises:
        ValueError: if the arguments do not form a call, `impl` does not cover them, or (reference) an input is not
            finite.
    """
    validate_inputs(query, key, value, video_rows)
    if choose_impl(query, impl) == "reference":
        validate_finite(query=query, key=key, value=value)
        output, report = block_sparse_reference(query, key, value, config=config, video_rows=video_rows, scale=scale)
        return (output, report) if details else output
    # Triton is imported only when it is used: CPU installations may not have it.
    from solgen.kernels.block_sparse.triton.forward import block_sparse_forward

    return block_sparse_forward(query, key, value, config=config, video_rows=video_rows, scale=scale, details=details)
