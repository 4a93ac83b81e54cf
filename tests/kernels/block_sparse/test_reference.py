"""The reference of block-sparse attention in float64: dense, masked and empty rows, and Sol-Attn2's route."""

import math

import pytest
import torch

from solgen.kernels.block_sparse import block_sparse
from solgen.kernels.sol_attn2 import SolAttn2Config, sol_attn2
from tests.kernels.sol_attn2.dense_oracle import dense_attention, make_inputs


@pytest.mark.parametrize("num_rows", [1, 63, 65, 324, 1001])
def test_all_blocks_equal_dense(num_rows):
    inputs = make_inputs(num_rows, heads=2)
    output, details = block_sparse(*inputs, config=SolAttn2Config(epsilon=-math.inf), details=True)
    assert (output - dense_attention(*inputs)).abs().max() < 1e-13
    assert details.density == 1


def test_softmax_over_the_kept_blocks_on_the_route_of_sol_attn2():
    query, key, value = make_inputs(64 * 9 + 5, heads=2)
    config = SolAttn2Config(epsilon=0.01)
    output, details = block_sparse(query, key, value, config=config, details=True)
    assert torch.equal(details.route, sol_attn2(query, key, value, config=config, details=True)[1].route)
    keep = details.route.repeat_interleave(64, 2).repeat_interleave(64, 3)[..., : 64 * 9 + 5, : 64 * 9 + 5]
    scores = (query @ key.transpose(-1, -2) / math.sqrt(128)).masked_fill(~keep, -torch.inf)
    empty = ~keep.any(-1, keepdim=True)
    expected = scores.softmax(-1).masked_fill(empty, 0.0) @ value
    assert (output - expected).abs().max() < 1e-13
    assert torch.equal(details.lse.isneginf(), empty.squeeze(-1))
    assert 0 < details.density < 1


def test_malformed_calls_are_refused():
    inputs = make_inputs(70)
    with pytest.raises(ValueError, match="impl is 'gluon'"):
        block_sparse(*inputs, config=SolAttn2Config(), impl="gluon")
    with pytest.raises(ValueError, match='impl "triton" got tensors on cpu'):
        block_sparse(*inputs, config=SolAttn2Config(), impl="triton")
