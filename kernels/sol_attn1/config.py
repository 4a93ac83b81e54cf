"""Settings of the Sol-Attn 1.0 operator."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SolAttn1Config:
    """One setting of the operator.

    Attributes:
        tau: Standard deviations above a row's mean block score at which a block becomes exact.
        threshold: The row's standard deviation from the channel variances of the block keys alone ("diag"), or from
            their full second moment ("exact").
        sink: Make every key block that holds a text or audio row exact, for all query blocks.
    """

    tau: float = 1.0
    threshold: Literal["diag", "exact"] = "diag"
    sink: bool = False

    def __post_init__(self) -> None:
        if math.isnan(self.tau):
            raise ValueError("tau is NaN; expected a number of standard deviations, or -inf (all exact) or inf")
        if self.threshold not in ("diag", "exact"):
            raise ValueError(f"threshold {self.threshold!r} is not one of diag, exact")
