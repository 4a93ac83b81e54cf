"""Inputs and the dense oracle of the Sol-Attn2 tests."""

import math

import pytest
import torch


@pytest.fixture
def make_inputs():
    """Random query, key and value, [B, H, N, D]."""

    def make(num_rows, heads=1, *, batch=1, head_dim=128, dtype=torch.float64, seed=0):
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, heads, num_rows, head_dim)
        return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))

    return make


@pytest.fixture
def dense_attention():
    """Softmax attention without a mask."""

    def attend(query, key, value, scale=None):
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        return (scale * query @ key.transpose(-1, -2)).softmax(-1) @ value

    return attend
