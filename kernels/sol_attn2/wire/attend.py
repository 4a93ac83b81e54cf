"""Sol-Attn2 of operands that are there already."""

import math
from contextlib import nullcontext

import torch

from solgen.kernels.sol_attn2.api import Impl, fastest_impl
from solgen.kernels.sol_attn2.config import HEAD_DIM, UNITS, SolAttn2Config
from solgen.kernels.sol_attn2.details import SolAttn2Details, Stage
from solgen.kernels.sol_attn2.reference.blocks import make_blocks, mixed_blocks
from solgen.kernels.sol_attn2.reference.forward import attend_quantised
from solgen.kernels.sol_attn2.reference.operands import QuantisedHead
from solgen.kernels.sol_attn2.triton.operands import Operands
from solgen.kernels.sol_attn2.validation import IMPLS, validate_gpu


def attend_operands(
    operands: Operands,
    *,
    config: SolAttn2Config,
    dtype: torch.dtype,
    video_rows: torch.Tensor | None = None,
    impl: Impl | None = None,
    stage: Stage = nullcontext,
) -> tuple[torch.Tensor, SolAttn2Details]:
    """Route, tail and attention; what `sol_attn2` does with the operands it makes.

    Args:
        operands: Of G heads and N rows.
        config: As the operands were made; precision "fp8", any tail but "whole".
        dtype: Of the output.
        video_rows: As in `sol_attn2`.
        impl: As in `sol_attn2`.
        stage: As in `sol_attn2`.

    Returns:
        The output [1, G, N, 128], and what the call reports.

    Raises:
        ValueError: if `impl` or the operands do not cover the call, or (reference) a router score is not finite.
    """
    if config.precision != "fp8" or config.tail == "whole":
        raise ValueError(f'operands got precision "{config.precision}", tail "{config.tail}"; expected fp8, not whole')
    if impl is not None and impl not in IMPLS:
        raise ValueError(f"impl is {impl!r}; expected None or one of {', '.join(IMPLS)}")
    codes, num_rows = operands.q_codes, operands.num_rows
    chosen = impl or fastest_impl(codes, config)
    if chosen == "reference":
        return _reference(operands, config, dtype, video_rows, stage)
    validate_gpu(codes[None], config, chosen)
    from solgen.kernels.sol_attn2.triton.forward import attend_groups

    output = torch.empty(1, num_rows, len(codes), HEAD_DIM, dtype=dtype, device=codes.device).transpose(1, 2)
    details = attend_groups(
        lambda _, group: operands.heads(group),
        output,
        config=config,
        video_rows=video_rows,
        scale=None,
        impl=chosen,
        details=True,
        stage=stage,
    )
    assert details is not None
    return output, details


def _reference(
    operands: Operands, config: SolAttn2Config, dtype: torch.dtype, video_rows: torch.Tensor | None, stage: Stage
) -> tuple[torch.Tensor, SolAttn2Details]:
    num_rows, scale = operands.num_rows, 1.0 / math.sqrt(HEAD_DIM)
    mixed = mixed_blocks(video_rows, num_rows, operands.q_codes.device)
    blocks = make_blocks(num_rows, mixed, torch.float32)
    results = []
    for index in range(len(operands.q_codes)):
        head = QuantisedHead(operands, index, blocks, scale, config)
        units = (
            operands.q_units[index].float().unflatten(0, (-1, UNITS)),
            operands.k_units[index].float().unflatten(0, (-1, UNITS)),
            operands.v_units[index].float().unflatten(0, (-1, UNITS)),
        )
        results.append(attend_quantised(head, units, blocks, scale, config, stage))
    outputs, lses, routes = (torch.stack(part)[None] for part in zip(*results, strict=True))
    return outputs.to(dtype), SolAttn2Details.from_route(lses, routes, mixed)
