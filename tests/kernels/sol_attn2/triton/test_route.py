"""The router's kernels against the reference: shares by their rounding, routes bit for bit away from the threshold."""

import dataclasses
import math

import pytest
import torch

pytest.importorskip("triton")

from solgen.kernels.sol_attn2.config import SolAttn2Config
from solgen.kernels.sol_attn2.density import empty_histogram, log_shares, share_histogram
from solgen.kernels.sol_attn2.details import unpack_route
from solgen.kernels.sol_attn2.reference.blocks import make_blocks, mixed_blocks
from solgen.kernels.sol_attn2.reference.router import block_mean_scores, select_blocks
from solgen.kernels.sol_attn2.triton import route as kernels
from solgen.kernels.sol_attn2.triton.forward import add_shares
from solgen.kernels.sol_attn2.triton.prepare import pool_rows
from solgen.kernels.sol_attn2.triton.route import block_masses, poison, select

SCALE = 128**-0.5
SIZES = [1, 63, 65, 321]


def normalised(masses):
    return masses - masses.logsumexp(-1, keepdim=True)


def reference_units(query, head):
    blocks = make_blocks(query.shape[2], mixed_blocks(None, query.shape[2], query.device), torch.float32)
    return blocks, pool_rows(query)[head].float().view(blocks.num_blocks, 8, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", SIZES)
def test_shares_and_routes_equal_the_reference(device, packed_qkv, num_rows):
    query, key, _ = packed_qkv(num_rows, 2, device)
    config = SolAttn2Config()
    num_blocks = -(-num_rows // 64)
    masses = block_masses(pool_rows(query), pool_rows(key), num_rows, scale=SCALE)
    expected = log_shares(query, key)[0] - math.log(num_blocks)
    assert (normalised(masses) - expected).abs().max() < 1e-4
    routing = select(masses, mixed_blocks(None, num_rows, device), config=config)
    assert not routing.failed.any()
    kept = expected > config.epsilon - math.log(num_blocks)
    near = (expected - config.epsilon + math.log(num_blocks)).abs() < 1e-3
    assert torch.equal(unpack_route(routing.route.mask, routing.route.counts.shape[1]) | near, kept | near)
    assert near.float().mean() < 0.01
    check_lists(routing)


def check_lists(routing):
    """Mask, counts and lists of one route say the same."""
    kept = unpack_route(routing.route.mask, routing.route.counts.shape[1])
    assert torch.equal(kept.sum(-1).int(), routing.route.counts)
    for row, blocks in zip(kept.flatten(0, 1), routing.route.blocks.flatten(0, 1), strict=True):
        listed = row.nonzero().flatten()
        assert torch.equal(blocks[: len(listed)].long(), listed)


@pytest.mark.gpu
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("top_k", [None, 0.3])
def test_mixed_blocks_sinks_and_fixed_fractions(device, packed_qkv, sink, top_k):
    num_rows = 64 * 5 + 4
    query, key, _ = packed_qkv(num_rows, 1, device)
    video_rows = torch.ones(num_rows, dtype=torch.bool, device=device)
    video_rows[70] = video_rows[300:] = False
    mixed = mixed_blocks(video_rows, num_rows, device)
    config = SolAttn2Config(sink=sink, top_k=top_k)
    q_units, k_units = pool_rows(query), pool_rows(key)
    masses = block_masses(q_units, k_units, num_rows, scale=SCALE, mean=top_k is not None)
    routing = select(masses, mixed, config=config)
    blocks = dataclasses.replace(reference_units(query, 0)[0], mixed=mixed)
    means = [reference_units(x, 0)[1] for x in (query, key)]
    kept = select_blocks(*means, blocks, SCALE, config)
    assert torch.equal(unpack_route(routing.route.mask, routing.route.counts.shape[1])[0], kept)
    check_lists(routing)
    eligible = kept & ~mixed[:, None] & ~mixed[None, :]
    assert routing.kept_video.sum() == eligible.sum()
    if top_k is not None:
        assert (masses[0] - block_mean_scores(*means, blocks, SCALE)).abs().max() < 1e-5


@pytest.mark.gpu
def test_equal_scores_keep_the_earlier_blocks(device):
    masses = torch.tensor([1.0, 2.0, 0.0, 1.0, 1.0, -3.0, 2.0], device=device).expand(1, 7, 7).contiguous()
    mixed = torch.zeros(7, dtype=torch.bool, device=device)
    routing = select(masses, mixed, config=SolAttn2Config(top_k=4 / 7))
    assert unpack_route(routing.route.mask, routing.route.counts.shape[1])[0].nonzero()[:4, 1].tolist() == [0, 1, 3, 6]


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_fails_its_query_blocks(device, packed_qkv, bad):
    query, key, value = (x.clone() for x in packed_qkv(300, 2, device))
    query[0, 0, 70, 3] = bad
    key[0, 1, 299, 3] = bad
    masses = block_masses(pool_rows(query), pool_rows(key), 300, scale=SCALE)
    failed = select(masses, mixed_blocks(None, 300, device), config=SolAttn2Config()).failed
    assert failed.tolist() == [[False, True, False, False, False], [True] * 5]
    out = value[0].clone()
    poison(failed, out)
    assert out[0, 64:128].isnan().all()
    assert out[1].isnan().all()
    assert torch.equal(out[0, 128:], value[0, 0, 128:])


@pytest.mark.gpu
def test_histogram_counts_like_the_reference(device, packed_qkv):
    query, key, _ = packed_qkv(64 * 3 + 5, 2, device)
    video_rows = torch.ones(64 * 3 + 5, dtype=torch.bool, device=device)
    video_rows[:3] = False
    counts, expected = empty_histogram(device), share_histogram(query, key, video_rows=video_rows)
    for _ in range(2):
        add_shares(counts, query, key, video_rows=video_rows, scale=None)
    assert counts.sum() == 2 * expected.sum() == 2 * 2 * 3 * 3
    # A share within rounding of a bin's edge may fall into the next bin.
    assert (counts.cumsum(0) - 2 * expected.cumsum(0)).abs().max() <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2112, 4095, 110_000, 219_524])
def test_long_sequences(large, packed_qkv, num_rows):
    query, key, _ = packed_qkv(num_rows, 1, large)
    num_blocks = -(-num_rows // 64)
    masses = block_masses(pool_rows(query), pool_rows(key), num_rows, scale=SCALE)
    expected = log_shares(query, key)[0]
    assert (normalised(masses) + math.log(num_blocks) - expected).abs().max() < 2e-4
    config = SolAttn2Config(epsilon=expected.flatten()[:1_000_000].quantile(0.9).item())
    routing = select(masses, mixed_blocks(None, num_rows, large), config=config)
    wrong = unpack_route(routing.route.mask, routing.route.counts.shape[1]) != (expected > config.epsilon)
    assert (expected[wrong] - config.epsilon).abs().amax() < 1e-3 if wrong.any() else True
    again = select(masses, mixed_blocks(None, num_rows, large), config=config)
    assert torch.equal(routing.route.mask, again.route.mask)


@pytest.mark.slow
def test_in_the_interpreter(run_in_interpreter):
    run_in_interpreter()


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_mass_kernel_pools_in_registers_on_tensor_cores(compile_sm90, mean, ragged):
    types = {"p_q": "*fp16", "p_k": "*fp16", "p_mass": "*fp32", "octaves": "fp32"}
    constants = {"MEAN": mean, "RAGGED": ragged, "ASM": True, "STAGES": 3}
    code = compile_sm90(kernels._masses_kernel, types, constants, num_warps=8)
    assert code.stack_bytes == 0
    assert code.count("HGMMA") >= 8
    assert code.count("WARPGROUP.DEPBAR") <= code.count("HGMMA") // 8  # products are not serialised
    assert code.count("SHFL") < 100  # two exchanges a pooled score, in two loops


@pytest.mark.parametrize("top_k", [False, True])
def test_select_kernel_does_not_spill(compile_sm90, top_k):
    types = {
        "p_mass": "*fp32",
        "p_mixed": "*i1",
        "p_mask": "*i32",
        "p_count": "*i32",
        "p_blocks": "*i16",
        "p_kept_video": "*i32",
        "p_failed": "*i1",
        "threshold": "fp32",
    }
    constants = {"TOP_K": top_k, "SINK": True, "WORDS": 128, "CHUNK": kernels.CHUNK}
    code = compile_sm90(kernels._select_kernel, types, constants, num_warps=8 if top_k else 2)
    assert code.stack_bytes == 0
