"""Inputs and the dense oracle shared by the tests of the Sol-Attn2 reference."""

import math

import torch

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(
    num_rows: int,
    heads: int = 1,
    batch: int = 1,
    head_dim: int = 128,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    """Query, key and value [B, H, N, D] of standard normals."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, batch, heads, num_rows, head_dim)
    query, key, value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return query, key, value


def dense_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Softmax attention in float64."""
    scores = query.double() @ key.double().transpose(-1, -2) / math.sqrt(query.shape[-1])
    return scores.softmax(-1) @ value.double()
