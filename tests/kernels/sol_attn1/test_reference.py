"""The reference of Sol-Attn 1.0 in float64: dense identities, the band, the mass of the atoms, the rule itself."""

import math

import pytest
import torch

from solgen.kernels.sol_attn1 import SolAttn1Config, sol_attn1
from solgen.kernels.sol_attn1.density import solve_tau
from solgen.kernels.sol_attn1.thresholds import row_thresholds
from tests.kernels.sol_attn2.dense_oracle import dense_attention, make_inputs

SCALE = 128**-0.5
SIZES = [1, 63, 65, 324, 1001]


def block_means(rows):
    """Means over the real rows of every block of [N, D]."""
    return torch.stack([part.mean(0) for part in rows.split(64)])


@pytest.mark.parametrize("num_rows", SIZES)
def test_all_blocks_exact_equals_dense(num_rows):
    inputs = make_inputs(num_rows, heads=2)
    output, details = sol_attn1(*inputs, config=SolAttn1Config(tau=-math.inf), details=True)
    assert (output - dense_attention(*inputs)).abs().max() < 1e-13
    scores = SCALE * inputs[0] @ inputs[1].transpose(-1, -2)
    assert (details.lse - scores.logsumexp(-1)).abs().max() < 1e-12
    assert details.density == details.density_all == 1


@pytest.mark.parametrize("num_rows", SIZES)
def test_only_the_band_is_exact_at_an_infinite_threshold(num_rows):
    inputs = make_inputs(num_rows)
    _, details = sol_attn1(*inputs, config=SolAttn1Config(tau=math.inf), details=True)
    block = torch.arange(-(-num_rows // 64))
    assert torch.equal(details.route[0, 0], (block[:, None] - block).abs() <= 1)


def test_atoms_are_exact_where_the_keys_of_a_block_are_equal():
    """A block of equal keys has one weight for all its values, so its atom loses nothing."""
    query, key, value = make_inputs(64 * 5 + 4)
    key = block_means(key[0, 0]).repeat_interleave(64, dim=0)[None, None, : key.shape[2]]
    output, details = sol_attn1(query, key, value, config=SolAttn1Config(tau=math.inf), details=True)
    assert (output - dense_attention(query, key, value)).abs().max() < 1e-13
    lse = (SCALE * query @ key.transpose(-1, -2)).logsumexp(-1)
    assert (details.lse - lse).abs().max() < 1e-12


def test_atoms_carry_the_count_and_the_sum_of_their_block():
    query, key, value = make_inputs(64 * 4 + 9)
    output, details = sol_attn1(query, key, value, config=SolAttn1Config(tau=math.inf), details=True)
    q, k, v = query[0, 0], key[0, 0], value[0, 0]
    for r in (0, 100, 264):
        numerator, denominator = 0.0, 0.0
        for j, (keys, values) in enumerate(zip(k.split(64), v.split(64), strict=True)):
            exact = abs(r // 64 - j) <= 1
            weights = (SCALE * (keys if exact else keys.mean(0).expand_as(keys)) @ q[r]).exp()
            numerator, denominator = numerator + weights @ values, denominator + weights.sum()
        assert (output[0, 0, r] - numerator / denominator).abs().max() < 1e-13
        assert abs(details.lse[0, 0, r] - denominator.log()) < 1e-12


@pytest.mark.parametrize("threshold", ["diag", "exact"])
def test_the_rule_in_base_two(threshold):
    """As published: base-2 logits, E[x^2] - m^2, 1e-6 under the root."""
    query, key, value = make_inputs(64 * 9 + 5)
    _, details = sol_attn1(query, key, value, config=SolAttn1Config(tau=0.7, threshold=threshold), details=True)
    q, k = block_means(query[0, 0]), block_means(key[0, 0])
    s2 = SCALE / math.log(2)
    mean, second = k.mean(0), k.t() @ k / len(k)
    if threshold == "diag":
        variance = (q.square() * (k.square().mean(0) - mean.square())).sum(1)
    else:
        variance = ((q @ second) * q).sum(1) - (q @ mean).square()
    limit = s2 * q @ mean + 0.7 * (s2**2 * variance + 1e-6).sqrt()
    block = torch.arange(len(q))
    expected = (s2 * q @ k.t() > limit[:, None]) | ((block[:, None] - block).abs() <= 1)
    assert torch.equal(details.route[0, 0], expected)


def test_exact_thresholds_are_the_moments_of_the_scores():
    q_means, k_means = torch.randn(2, 9, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = SCALE * q_means @ k_means.t()
    limits = row_thresholds(q_means, k_means, tau=1.5, threshold="exact", scale=SCALE)
    deviation = (scores.var(1, unbiased=False) + 1e-6 * math.log(2) ** 2).sqrt()
    assert torch.allclose(limits, scores.mean(1) + 1.5 * deviation)


@pytest.mark.parametrize("sink", [False, True])
def test_text_query_blocks_are_dense_and_sinks_exact(sink):
    inputs = make_inputs(64 * 6)
    video_rows = torch.ones(64 * 6, dtype=torch.bool)
    video_rows[330] = False
    config = SolAttn1Config(tau=math.inf, sink=sink)
    output, details = sol_attn1(*inputs, config=config, video_rows=video_rows, details=True)
    assert (output - dense_attention(*inputs))[0, 0, 320:].abs().max() < 1e-13
    assert details.route[0, 0, 5].all()
    assert details.route[0, 0, :, 5].all() == sink
    assert details.density == (5 + 4 + 4) / 25


@pytest.mark.parametrize("threshold", ["diag", "exact"])
@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_solved_tau_reaches_the_density(density, threshold):
    query, key, value = make_inputs(64 * 40 - 7, heads=2, dtype=torch.float32)
    video_rows = torch.ones(64 * 40 - 7, dtype=torch.bool)
    video_rows[-100:] = False
    tau = solve_tau(query, key, density=density, video_rows=video_rows, threshold=threshold)
    config = SolAttn1Config(tau=tau, threshold=threshold)
    details = sol_attn1(query, key, value, config=config, video_rows=video_rows, details=True)[1]
    assert abs(details.density - density) < 2e-3


def test_a_density_below_the_band_is_refused():
    query, key, _ = make_inputs(64 * 10)
    with pytest.raises(ValueError, match="0.28, the share of a block and its neighbours"):
        solve_tau(query, key, density=0.1)
    with pytest.raises(ValueError, match="density is 0"):
        solve_tau(query, key, density=0.0)


def test_malformed_calls_are_refused():
    inputs = make_inputs(70)
    with pytest.raises(ValueError, match="tau is NaN"):
        SolAttn1Config(tau=math.nan)
    with pytest.raises(ValueError, match="threshold 'mean'"):
        SolAttn1Config(threshold="mean")
    with pytest.raises(ValueError, match="impl is 'cuda'"):
        sol_attn1(*inputs, config=SolAttn1Config(), impl="cuda")
    with pytest.raises(ValueError, match='impl "triton" got tensors on cpu'):
        sol_attn1(*inputs, config=SolAttn1Config(), impl="triton")
    with pytest.raises(ValueError, match="shapes"):
        sol_attn1(inputs[0], inputs[1], inputs[2][..., :3, :], config=SolAttn1Config())
    inputs[1][0, 0, 3, 3] = math.inf
    with pytest.raises(ValueError, match="key holds NaN or infinite"):
        sol_attn1(*inputs, config=SolAttn1Config())
