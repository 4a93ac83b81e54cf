"""Sol-Attn2: block-sparse FP8 attention with a compressed tail."""

from solgen.kernels.sol_attn2.api import fastest_impl, sol_attn2
from solgen.kernels.sol_attn2.config import SolAttn2Config
from solgen.kernels.sol_attn2.details import SolAttn2Details
from solgen.kernels.sol_attn2.norm_rope import NormRope
from solgen.kernels.sol_attn2.validation import NonFiniteError

__all__ = ["NonFiniteError", "NormRope", "SolAttn2Config", "SolAttn2Details", "fastest_impl", "sol_attn2"]
