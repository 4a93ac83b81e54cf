"""Sol-Attn 1.0: block-sparse 16-bit attention with one mean atom for every block that is not exact."""

from solgen.kernels.sol_attn1.api import sol_attn1
from solgen.kernels.sol_attn1.config import SolAttn1Config

__all__ = ["SolAttn1Config", "sol_attn1"]
