"""Block-sparse 16-bit attention on Sol-Attn2's route, without a tail."""

from solgen.kernels.block_sparse.api import block_sparse

__all__ = ["block_sparse"]
