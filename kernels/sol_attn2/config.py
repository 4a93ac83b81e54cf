"""Settings of the Sol-Attn2 operator, shared by every implementation of it."""

import math
from dataclasses import dataclass
from typing import Literal

BLOCK = 64
"""Tokens of a query or key block."""

UNIT = 8
"""Tokens of a unit, the pooling grain of router and tail."""

UNITS = BLOCK // UNIT
"""Units of a block."""

HEAD_DIM = 128
"""Channels of a head; every implementation is written for this width."""

SLOTS = 64
"""Surrogate tokens of a query block: the tail is one more key block."""

E4M3_MAX = 448.0
"""Largest finite E4M3 magnitude."""

SCALE_FLOOR = 2.0**-64
"""Smallest FP8 scale: an all-zero or denormal-only group quantises to zero instead of 0 / 0."""

EXPCAST_BIAS = 55.65
"""ExpCast code of 2^0 before rounding; 56 is the E4M3 byte of 1.0."""

EXPCAST_MAX = 120
"""Largest probability code, the byte of 256."""

JOIN_MAX = 100
"""Largest exponent, in octaves, of the factor that joins the tail's sum to the tokens' sum."""


@dataclass(frozen=True)
class SolAttn2Config:
    """One setting of the operator.

    Attributes:
        epsilon: Share threshold in nats: block j is kept for query block i when
            m_ij - L_i > epsilon - log N_B (page 001, "Threshold router").
        top_k: Fraction of key blocks each query block keeps by block-mean score instead (page 000); None
            routes by epsilon.
        tail: How blocks that are not kept enter the softmax: 64 token-order "slots", 8 "anchors" x 8
            surrogates, "none" (sparse only), or page 000's "whole" tail (reference only).
        precision: "fp8" quantises Q, K, V and forms probabilities by ExpCast; "exact" computes the same
            operator in the precision of its inputs (reference only).
        offset: ExpCast octaves above 1 at which a row's pivot sits, 0 to 7.
        smooth_key: Subtract each head's mean key before quantising (exact for the softmax).
        smooth_value: Subtract each head's mean value before quantising and add it back to the output.
        sink: Keep every key block that holds a text or audio row, for all query blocks.
        shadow: Slope of the probability curve in the backward: the "linear" E4M3 interpolation or "smooth".
    """

    epsilon: float = 0.47
    top_k: float | None = None
    tail: Literal["slots", "anchors", "none", "whole"] = "slots"
    precision: Literal["fp8", "exact"] = "fp8"
    offset: int = 7
    smooth_key: bool = True
    smooth_value: bool = True
    sink: bool = False
    shadow: Literal["linear", "smooth"] = "linear"

    def __post_init__(self) -> None:
        if math.isnan(self.epsilon):
            raise ValueError("epsilon is NaN; expected a threshold in nats, or -inf (keep all) or inf (keep none)")
        if not 0 <= self.offset <= 7:
            raise ValueError(f"offset {self.offset} is outside 0 to 7")
        if self.top_k is not None and not 0.0 < self.top_k <= 1.0:
            raise ValueError(f"top_k {self.top_k} is outside (0, 1]")
        for name, allowed in (
            ("tail", ("slots", "anchors", "none", "whole")),
            ("precision", ("fp8", "exact")),
            ("shadow", ("linear", "smooth")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(allowed)}")
