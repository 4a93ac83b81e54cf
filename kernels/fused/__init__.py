"""Fused ops of MiniMax-H3's transformer blocks, bound by memory: each reads the packed sequence once."""

from solgen.kernels.fused.gated_residual import gated_residual, gated_residual_norm
from solgen.kernels.fused.norm_pack import norm_pack
from solgen.kernels.fused.qk_norm_rope import qk_norm_rope
from solgen.kernels.fused.rms_norm_modulate import rms_norm_modulate
from solgen.kernels.fused.swiglu import swiglu

__all__ = ["gated_residual", "gated_residual_norm", "norm_pack", "qk_norm_rope", "rms_norm_modulate", "swiglu"]
