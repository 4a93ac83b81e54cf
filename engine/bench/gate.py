"""The correctness gate: no arm is timed whose output or route is wrong on the very inputs of the benchmark."""

import math
from dataclasses import asdict, dataclass

import torch

from solgen.engine.bench.arms import Arm, Inputs
from solgen.engine.bench.oracle import Oracle, real_rows
from solgen.kernels.sol_attn1 import SolAttn1Config
from solgen.kernels.sol_attn1.reference import Head
from solgen.kernels.sol_attn1.thresholds import score_moments
from solgen.kernels.sol_attn2 import SolAttn2Details
from solgen.kernels.sol_attn2.density import log_shares
from solgen.kernels.sol_attn2.reference.blocks import mixed_blocks

NEAR = 1e-3
"""Distance to the threshold, in nats (Sol-Attn 1.0: deviations), within which a block may fall on either side."""

BF16_ROUNDING = 2.0**-9
"""Relative error that storing the output as bf16 may add."""


@dataclass(frozen=True)
class Verdict:
    """Errors of one arm on sampled query blocks, as relative Frobenius norms.

    Attributes:
        error: Kernel against the float64 operator on the kernel's route.
        reference_error: The same of a reference that rounds where the kernel rounds.
        rule_a: error / (2 reference_error + output rounding); at most 1.
        rule_b: Distance of kernel and reference / (3e-3 + 0.15 reference_error); at most 1.
        misrouted: Block pairs of the sampled head on the wrong side of the threshold by more than NEAR.
        density: Kept share of all block pairs, NaN for dense attention.
    """

    error: float
    reference_error: float
    rule_a: float
    rule_b: float
    misrouted: int
    density: float

    @property
    def passed(self) -> bool:
        """Whether the arm may be timed."""
        return self.rule_a <= 1 and self.rule_b <= 1 and self.misrouted == 0

    def row(self) -> dict[str, float | int | bool]:
        """JSON-ready fields."""
        return asdict(self) | {"passed": self.passed}


@torch.no_grad()
def check(arm: Arm, inputs: Inputs) -> Verdict:
    """Judge one call of an arm on four query blocks of the first and the last head."""
    output, details = arm.details(inputs)
    heads, num_rows = output.shape[1:3]
    num_blocks = -(-num_rows // 64)
    blocks = torch.tensor([0, num_blocks // 3, 2 * num_blocks // 3, num_blocks - 1], device=output.device).unique()
    rows = real_rows(blocks, num_rows)
    got, exact, rounded = [], [], []
    for h in sorted({0, heads - 1}):
        oracle = Oracle(*(x[0, h] for x in inputs))
        everything = torch.ones(len(blocks), num_blocks, dtype=torch.bool, device=output.device)
        kept = everything if details is None else details.route[0, h, blocks]
        exact.append(oracle.expected(arm, blocks, kept, rounded=False))
        rounded.append(oracle.expected(arm, blocks, kept, rounded=True))
        got.append(output[0, h, rows].double())
    kernel, truth, reference = torch.cat(got), torch.cat(exact), torch.cat(rounded)
    own = float((reference - truth).norm() / truth.norm())
    error = float((kernel - truth).norm() / truth.norm())
    distance = float((kernel - reference).norm() / reference.norm())
    return Verdict(
        error=error,
        reference_error=own,
        rule_a=error / (2 * own + BF16_ROUNDING),
        rule_b=distance / (3e-3 + 0.15 * own),
        misrouted=0 if details is None else misrouted(arm, inputs, details),
        density=math.nan if details is None else float(details.density),
    )


def misrouted(arm: Arm, inputs: Inputs, details: SolAttn2Details) -> int:
    """Block pairs of the first head whose routing contradicts their score."""
    query, key, value = (x[0, 0] for x in inputs)
    kept = details.route[0, 0]
    if isinstance(arm.config, SolAttn1Config):
        head = Head(query, key, value, mixed_blocks(None, len(query), query.device), query.shape[-1] ** -0.5)
        mean, deviation = score_moments(head.q_means, head.k_means, threshold=arm.config.threshold, scale=head.scale)
        scores = (head.scale * head.q_means @ head.k_means.t() - mean[:, None]) / deviation[:, None]
        return int(((kept != head.select(arm.config)) & ((scores - arm.config.tau).abs() > NEAR)).sum())
    assert arm.config is not None
    shares = log_shares(query[None, None], key[None, None])[0, 0]
    wrong = kept != (shares > arm.config.epsilon)
    return int((wrong & ((shares - arm.config.epsilon).abs() > NEAR)).sum())
