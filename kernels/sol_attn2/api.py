"""Public entry of Sol-Attn2: checks its arguments and hands the call to one implementation."""

from contextlib import nullcontext
from typing import Literal, overload

import torch

from solgen.kernels.sol_attn2.config import SolAttn2Config
from solgen.kernels.sol_attn2.details import SolAttn2Details, Stage
from solgen.kernels.sol_attn2.norm_rope import NormRope
from solgen.kernels.sol_attn2.reference.forward import sol_attn2_reference
from solgen.kernels.sol_attn2.validation import IMPLS, validate_finite, validate_gpu, validate_inputs

Impl = Literal["reference", "triton", "gluon"]


@overload
def sol_attn2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: SolAttn2Config,
    video_rows: torch.Tensor | None = None,
    norm: NormRope | None = None,
    scale: float | None = None,
    impl: Impl | None = None,
    details: Literal[False] = False,
    stage: Stage = nullcontext,
) -> torch.Tensor: ...


@overload
def sol_attn2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: SolAttn2Config,
    video_rows: torch.Tensor | None = None,
    norm: NormRope | None = None,
    scale: float | None = None,
    impl: Impl | None = None,
    details: Literal[True],
    stage: Stage = nullcontext,
) -> tuple[torch.Tensor, SolAttn2Details]: ...


def sol_attn2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: SolAttn2Config,
    video_rows: torch.Tensor | None = None,
    norm: NormRope | None = None,
    scale: float | None = None,
    impl: Impl | None = None,
    details: bool = False,
    stage: Stage = nullcontext,
) -> torch.Tensor | tuple[torch.Tensor, SolAttn2Details]:
    """Sparse attention that keeps the blocks a router selects and compresses the others into one tail block.

    Args:
        query: [B, H, N, 128], float64, float32, bfloat16 or float16, any strides; no causal mask.
        key: Like `query`.
        value: Like `query`.
        config: Router, tail and precision.
        video_rows: True where a row is video, [N] bool; None means all. Query blocks of 64 rows with any text
            or audio row attend to every key block.
        norm: RMSNorm and rotary angles that query and key still lack, as they come from the projections: on a GPU they
            are normed while they are quantised and nothing of 16 bit is written. None if they are as they are compared.
        scale: Softmax scale, 128^-0.5 by default.
        impl: Who computes it. An explicit choice never falls back to another; None takes the fastest that
            covers the inputs.
        details: Also return row sums, route and density.
        stage: Entered around every part of the call, see `Stage`.

    Returns:
        The output, [B, H, N, 128] in the inputs' dtype, and with `details` a `SolAttn2Details`.

    Raises:
        ValueError: if the arguments do not form a call, `impl` does not cover them, or (reference) an input
            or a router score is not finite.
    """
    validate_inputs(query, key, value, video_rows)
    if norm is not None:
        norm.check(query)
    if impl is not None and impl not in IMPLS:
        raise ValueError(f"impl is {impl!r}; expected None or one of {', '.join(IMPLS)}")
    chosen = impl or fastest_impl(query, config)
    if chosen == "reference":
        validate_finite(query=query, key=key, value=value)
        if norm is not None:
            query, key = norm.apply(query, key)
        output, report = sol_attn2_reference(
            query, key, value, config=config, video_rows=video_rows, scale=scale, stage=stage
        )
        return (output, report) if details else output
    validate_gpu(query, config, chosen)
    # Triton is imported only when it is used: CPU installations may not have it.
    from solgen.kernels.sol_attn2.triton.forward import sol_attn2_forward

    return sol_attn2_forward(
        query,
        key,
        value,
        config=config,
        video_rows=video_rows,
        scale=scale,
        impl=chosen,
        details=details,
        stage=stage,
        norm=norm,
    )


def fastest_impl(query: torch.Tensor, config: SolAttn2Config) -> Impl:
    """Who computes a call that names nobody: Gluon on Hopper, else Triton, the reference where neither applies."""
    uncovered = query.dtype == torch.float64 or config.precision != "fp8" or config.tail == "whole"
    if not query.is_cuda or uncovered:
        return "reference"
    return "gluon" if torch.cuda.get_device_capability(query.device)[0] == 9 else "triton"
