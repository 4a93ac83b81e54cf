"""Routes, densities and the threshold that gives a density."""

import math

import pytest
import torch

from solgen.kernels.sol_attn2 import SolAttn2Config, sol_attn2
from solgen.kernels.sol_attn2.density import (
    empty_histogram,
    log_shares,
    share_histogram,
    solve_epsilon,
)
from tests.kernels.sol_attn2.dense_oracle import make_inputs


def route_of(inputs, video_rows=None, **settings):
    config = SolAttn2Config(precision="exact", **settings)
    return sol_attn2(*inputs, config=config, video_rows=video_rows, details=True)[1]


@pytest.fixture
def video_rows():
    """Rows 200 to 209 of 420 are text: block 3 of 7."""
    video = torch.ones(420, dtype=torch.bool)
    video[200:210] = False
    return video


def test_infinite_thresholds_keep_all_or_nothing(video_rows):
    inputs = make_inputs(420)
    everything = route_of(inputs, video_rows, epsilon=-math.inf)
    assert everything.route.all()
    assert everything.density == 1
    nothing = route_of(inputs, video_rows, epsilon=math.inf)
    assert nothing.route.sum() == 7  # the text block keeps its row
    assert nothing.density == 0
    assert nothing.density_all == pytest.approx(1 / 7)


def test_a_share_at_the_threshold_is_not_kept():
    inputs = make_inputs(64)  # one block: its log share is exactly 0
    assert not route_of(inputs, epsilon=0.0).route.any()
    assert route_of(inputs, epsilon=-1e-9).route.all()


def test_share_of_a_partial_block_counts_its_tokens():
    _, key, _ = make_inputs(64 * 3 + 5)
    shares = log_shares(torch.zeros_like(key), key)
    counts = torch.tensor([64.0, 64, 64, 5], dtype=torch.float64)
    assert (shares[0, 0] - (counts / counts.sum() * 4).log()).abs().max() < 1e-12


def test_density_counts_pairs_of_all_video_blocks(video_rows):
    details = route_of(make_inputs(420, heads=3), video_rows, epsilon=0.0, sink=True)
    eligible = [0, 1, 2, 4, 5, 6]
    kept = details.route[:, :, eligible][..., eligible].double().mean()
    assert 0 < kept < 1
    assert details.density == pytest.approx(kept)
    assert details.density_all == pytest.approx(details.route.double().mean())


def test_sink_keeps_text_key_blocks_for_every_query(video_rows):
    inputs = make_inputs(420)
    plain = route_of(inputs, video_rows, epsilon=math.inf).route[0, 0]
    sunk = route_of(inputs, video_rows, epsilon=math.inf, sink=True).route[0, 0]
    assert plain.sum(0).tolist() == [1] * 7
    assert sunk.sum(0).tolist() == [1, 1, 1, 7, 1, 1, 1]


@pytest.mark.parametrize("fraction", [0.01, 0.28, 0.5, 1.0])
def test_top_k_keeps_the_best_block_means(fraction):
    inputs = make_inputs(64 * 9 + 20)
    route = route_of(inputs, top_k=fraction).route[0, 0]
    means = [torch.stack([block.mean(0) for block in x[0, 0].split(64)]) for x in inputs[:2]]
    scores = means[0] @ means[1].T
    count = max(1, round(10 * fraction))
    assert (route.sum(-1) == count).all()
    assert (scores.masked_fill(~route, math.inf).amin(-1) >= scores.masked_fill(route, -math.inf).amax(-1)).all()


def test_equal_top_k_scores_keep_the_earlier_blocks():
    _, key, value = make_inputs(640)
    route = route_of((torch.zeros_like(key), key, value), top_k=0.3).route[0, 0]
    assert route.nonzero()[:, 1].view(10, 3).tolist() == [[0, 1, 2]] * 10


def test_fp16_means_move_shares_by_less_than_their_rounding():
    inputs = make_inputs(64 * 12, dtype=torch.float64)
    shares = log_shares(*inputs[:2])
    exact = route_of(inputs, epsilon=0.0).route[0, 0]
    # A mean below 2 rounds by at most 2^-11; a score moves by 128^-0.5 sum(|q| + |k|) 2^-11, a share by twice that.
    units = [x[0, 0].unflatten(0, (-1, 8)).mean(1).abs().sum(-1).max() for x in inputs[:2]]
    bound = float(2 * 128**-0.5 * sum(units) * 2**-11)
    unsure = shares[0, 0].abs() < bound
    assert torch.equal((shares[0, 0] > 0)[~unsure], exact[~unsure])
    assert unsure.double().mean() < 0.5


@pytest.mark.parametrize("wanted", [0.05, 0.1, 0.5, 0.9])
def test_solved_threshold_reaches_the_density_within_a_bin(video_rows, wanted):
    calls = [[3 * x for x in make_inputs(420, heads=2, seed=seed)] for seed in range(3)]
    histogram = empty_histogram("cpu")
    for query, key, _ in calls:
        histogram += share_histogram(query, key, video_rows=video_rows)
    assert histogram.sum() == 3 * 2 * 6 * 6
    epsilon = solve_epsilon(histogram, wanted)
    config = SolAttn2Config(epsilon=epsilon)
    reached = [sol_attn2(*x, config=config, video_rows=video_rows, details=True)[1].density for x in calls]
    eligible = torch.tensor([0, 1, 2, 4, 5, 6])
    shares = torch.cat([log_shares(*x[:2])[:, :, eligible][..., eligible].flatten() for x in calls])
    near = ((shares - epsilon).abs() <= 0.01 * abs(epsilon) + 1e-5).double().mean()
    assert abs(float(torch.stack(reached).mean()) - wanted) <= float(near) + 1 / shares.numel()


def test_unstructured_inputs_have_bins_fine_enough_for_their_narrow_shares():
    """Shares of iid inputs lie within a few hundredths of a nat of uniform; a density still has its threshold."""
    query, key, _ = make_inputs(64 * 24, heads=4)
    epsilon = solve_epsilon(share_histogram(query, key), 0.1)
    assert 0 < epsilon < 0.2
    density = (log_shares(query, key) > epsilon).double().mean()
    assert abs(float(density) - 0.1) <= 2e-3


def test_full_density_solves_to_no_threshold():
    query, key, _ = make_inputs(420)
    assert solve_epsilon(share_histogram(query, key), 1.0) == -math.inf


def test_density_errors_name_the_problem():
    query, key, _ = make_inputs(64)
    with pytest.raises(ValueError, match="density is 0"):
        solve_epsilon(share_histogram(query, key), 0.0)
    with pytest.raises(ValueError, match="empty"):
        solve_epsilon(empty_histogram("cpu"), 0.1)
    with pytest.raises(ValueError, match="not finite"):
        share_histogram(query * 1e6, key)
