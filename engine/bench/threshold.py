"""Arms whose thresholds keep a wanted share of all block pairs, as exact quantiles of what the inputs show."""

import math
from collections.abc import Callable

import torch

from solgen.engine.bench.arms import ARMS, Arm, Config, Inputs
from solgen.engine.bench.oracle import Oracle
from solgen.errors import InputError
from solgen.kernels.sol_attn1 import SolAttn1Config
from solgen.kernels.sol_attn1.density import solve_tau
from solgen.kernels.sol_attn2 import SolAttn2Config
from solgen.kernels.sol_attn2.validation import IMPLS, validate_gpu

TAILS = ("slots", "anchors", "none")
"""Tails that every implementation has."""

MAX_SAMPLES = 2**24
"""Log shares that the threshold is a quantile of; query blocks are thinned out evenly above that."""

CPU_BLOCKS = 64
"""Query blocks of every head that are looked at on a CPU."""


def make_arms(names: tuple[str, ...], inputs: Inputs, *, density: float, tail: str, impl: str | None) -> list[Arm]:
    """Arms with thresholds solved so that the sparse ones keep `density` of all block pairs.

    Raises:
        InputError: for what is not an arm, a density, a tail or an implementation that these inputs can have.
    """
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise InputError(f"--attention {unknown[0]} is not an operator; choose from {', '.join(ARMS)}")
    _check_options(inputs[0], density=density, tail=tail, impl=impl)
    epsilon = solve_share(*inputs[:2], density=density) if {"block-sparse", "sol-attn2"} & set(names) else 0.0
    configs: dict[str, Callable[[], Config]] = {
        "dense": lambda: None,
        "fp8": lambda: SolAttn2Config(epsilon=-math.inf, tail="none"),
        "block-sparse": lambda: SolAttn2Config(epsilon=epsilon, tail="none"),
        "sol-attn1": lambda: SolAttn1Config(tau=_tau(inputs, density)),
        "sol-attn2": lambda: SolAttn2Config(epsilon=epsilon, tail=tail),  # type: ignore[arg-type]
    }
    return [Arm(name, configs[name](), impl) for name in names]


def _check_options(query: torch.Tensor, *, density: float, tail: str, impl: str | None) -> None:
    if not 0 < density <= 1:
        raise InputError(f"--density {density:g}; expected a share above 0 and at most 1")
    if tail not in TAILS:
        raise InputError(f"--tail {tail}; expected one of {', '.join(TAILS)}")
    if impl not in (None, *IMPLS):
        raise InputError(f"--impl {impl}; expected one of {', '.join(IMPLS)}")
    if impl in (None, "reference"):
        return
    try:
        validate_gpu(query, SolAttn2Config(), impl)
    except ValueError as error:
        raise InputError(f"--{error}") from error


def _tau(inputs: Inputs, density: float) -> float:
    try:
        return solve_tau(*inputs[:2], density=density)
    except ValueError as error:  # too few blocks
        raise InputError(f"sol-attn1: {error}") from error


@torch.no_grad()
def solve_share(query: torch.Tensor, key: torch.Tensor, *, density: float) -> float:
    """Epsilon as an exact quantile of the log shares; a histogram's bins are too wide for random inputs.

    On a CPU the quantile is taken over a few query blocks of every head.
    """
    values = torch.cat([_sampled_shares(q, k, query.shape[1]) for q, k in zip(query[0], key[0], strict=True)])
    return float(values.kthvalue(max(1, round((1 - density) * values.numel()))).values)


def _sampled_shares(query: torch.Tensor, key: torch.Tensor, heads: int) -> torch.Tensor:
    num_blocks = -(-len(query) // 64)
    if not query.is_cuda:
        blocks = torch.linspace(0, num_blocks - 1, min(CPU_BLOCKS, num_blocks)).long()
        return Oracle(query, key, key).shares(blocks).flatten()
    from solgen.kernels.sol_attn2.triton.prepare import pool_rows
    from solgen.kernels.sol_attn2.triton.route import block_masses

    q_units, k_units = (pool_rows(x[None, None]) for x in (query, key))
    masses = block_masses(q_units, k_units, len(query), scale=query.shape[-1] ** -0.5)[0]
    shares = masses - masses.logsumexp(-1, keepdim=True) + math.log(num_blocks)
    return shares[:: max(1, math.ceil(heads * num_blocks**2 / MAX_SAMPLES))].flatten()
