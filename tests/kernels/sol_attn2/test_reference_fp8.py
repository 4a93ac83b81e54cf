"""Quantisation, ExpCast and the tail's own pivot in the FP8 reference."""

import math

import pytest
import torch

from solgen.kernels.sol_attn2 import SolAttn2Config, sol_attn2
from solgen.kernels.sol_attn2.reference.blocks import make_blocks, mixed_blocks
from solgen.kernels.sol_attn2.reference.expcast import decode, power_of_two, probabilities, sticky_pivots
from solgen.kernels.sol_attn2.reference.fp8 import Fp8Head
from solgen.kernels.sol_attn2.reference.quantise import quantise
from tests.kernels.sol_attn2.dense_oracle import dense_attention, make_inputs

EXPCAST_OCTAVES = 0.5 / 8 + 0.35 / 8
"""Largest error of log2 of a normal byte: half a code, the bias 55.65 - 56, and the chord below 2^u, 0.0861 octaves,
which only raises: log2(value) - u lies in [-0.85 / 8, 0.15 / 8 + 0.0861], both within 0.107."""


def relative_error(output, expected):
    return float((output - expected).norm() / expected.norm())


def test_byte_table_is_e4m3():
    codes = torch.arange(127, dtype=torch.uint8)
    assert torch.equal(decode(codes), codes.view(torch.float8_e4m3fn).float())
    assert decode(torch.tensor([0.0, 56, 88, 120])).tolist() == [0.0, 1.0, 16.0, 256.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_codes_end_at_120_and_round_to_even(dtype):
    positions = torch.tensor([-1e30, -0.51, -0.5, 0.5, 0.51, 1.5, 119.5, 120.4, 127.0, 1e30], dtype=dtype)
    codes = torch.tensor([0.0, 0, 0, 0, 1, 2, 120, 120, 120, 120])
    assert torch.equal(probabilities(positions, "linear"), decode(codes).to(dtype))


def test_bytes_follow_powers_of_two():
    octaves = torch.linspace(-5.9, 8.0, 20001, dtype=torch.float64)
    error = probabilities(8 * octaves + 55.65, "linear").log2() - octaves
    assert error.min() >= -0.85 / 8
    assert error.max() <= 0.15 / 8 + 0.0861


def test_powers_of_two_are_exact():
    exponents = torch.arange(-126, 128)
    assert power_of_two(exponents.float()).tolist() == [2.0**e for e in exponents.tolist()]


@pytest.mark.parametrize("offset", [0, 4, 7])
def test_pivots_never_lag_by_more_than_the_headroom(offset):
    top = 6 * torch.randn(2, 64, 40, generator=torch.Generator().manual_seed(0))
    top[:, :, 17] = -math.inf
    pivots = sticky_pivots(top, offset)
    assert torch.equal(pivots, pivots.ceil())
    assert (top <= pivots + 8 - offset).all()
    moves = pivots[..., 1:] != pivots[..., :-1]
    assert (moves == (top[..., 1:] > pivots[..., :-1] + 8 - offset)).all()
    assert torch.equal(pivots[..., 0], top[..., 0].ceil())


def test_quantised_values_lie_within_half_a_step():
    values = torch.randn(5, 64, 128, generator=torch.Generator().manual_seed(0))
    codes, scale = quantise(values, (1, 2))
    assert torch.equal(scale.flatten(), values.abs().amax((1, 2)) / 448)
    assert codes.abs().amax((1, 2)).tolist() == [448.0] * 5
    assert ((codes * scale - values).abs() <= torch.maximum(values.abs() * 2**-4, 2**-10 * scale) * (1 + 1e-6)).all()


def test_values_beyond_a_given_scale_saturate():
    codes, _ = quantise(torch.tensor([[460.0, 1e6, -1e6, 1.0]]), (0, 1), torch.tensor([[1.0]]))
    assert codes.tolist() == [[448.0, 448.0, -448.0, 1.0]]


@pytest.mark.parametrize("fill", [0.0, 1e-42, 2.0**-75], ids=["zero", "denormal", "below-the-floor"])
def test_vanishing_groups_stay_zero_and_outliers_stay_in_their_group(fill):
    values = torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(0))
    plain_codes, plain_scale = quantise(values, (1, 2))
    values[1] = fill
    values[2, 5, 7] = 1e4
    codes, scale = quantise(values, (1, 2))
    assert (codes[1] == 0).all()
    assert scale.isfinite().all()
    assert torch.equal(codes[[0, 3]], plain_codes[[0, 3]])
    assert torch.equal(scale[[0, 3]], plain_scale[[0, 3]])


def test_scale_of_the_last_block_is_that_of_its_real_rows():
    query, key, value = (x[0, 0] for x in make_inputs(64 + 4, dtype=torch.float32))
    key[64:] *= 0.01
    key, value = key + 3, value + 3
    blocks = make_blocks(68, mixed_blocks(None, 68, key.device), torch.float32)
    rows = [blocks.split(x) for x in (query, key, value)]
    head = Fp8Head(*rows, blocks, 128**-0.5, SolAttn2Config())
    assert torch.equal(head.k_scale[1].flatten(), (key[64:] - head.key_mean).abs().max()[None] / 448)
    assert (head.k_codes[1, 4:] == 0).all()
    assert (head.v_codes[1, 4:] == 0).all()


def test_zero_head_and_zero_block_are_finite():
    query, key, value = make_inputs(300, heads=2, dtype=torch.float32)
    query[:, 0], key[:, 0], value[:, 0] = 0, 0, 0
    query[:, 1, 64:128], key[:, 1, 128:192] = 0, 0
    for epsilon in (-math.inf, 0.0, math.inf):
        output = sol_attn2(query, key, value, config=SolAttn2Config(epsilon=epsilon))
        assert (output[:, 0] == 0).all()
        assert output.isfinite().all()


def test_query_outlier_damages_only_its_block():
    query, key, value = make_inputs(320, dtype=torch.float32)
    config = SolAttn2Config(epsilon=0.0)
    plain = sol_attn2(query, key, value, config=config)
    query[0, 0, 70, 3] = 1e4
    output = sol_attn2(query, key, value, config=config)
    assert output.isfinite().all()
    others = [*range(64), *range(128, 320)]
    assert torch.equal(output[:, :, others], plain[:, :, others])


@pytest.mark.parametrize("seed", range(3))
def test_headroom_above_the_pivot_lowers_the_error(seed):
    inputs = make_inputs(1024, seed=seed, dtype=torch.float32)
    exact = dense_attention(*inputs)

    def error(offset):
        config = SolAttn2Config(epsilon=-math.inf, offset=offset)
        return relative_error(sol_attn2(*inputs, config=config), exact)

    assert error(4) < error(0)
    assert error(7) < error(0)


def test_smoothing_removes_a_common_mean():
    query, key, value = make_inputs(512, dtype=torch.float32)
    key[..., 3] += 30
    value += 4
    exact = dense_attention(query, key, value) - 4

    def error(**smooth):
        config = SolAttn2Config(epsilon=-math.inf, **smooth)
        return relative_error(sol_attn2(query, key, value, config=config) - 4, exact)

    assert error() < error(smooth_key=False)
    assert error() < error(smooth_value=False)


@pytest.mark.parametrize("tail", ["slots", "anchors"])
@pytest.mark.parametrize("smooth", [True, False])
def test_mass_at_the_anchor_survives_quantisation(tail, smooth):
    """Rows that equal their anchor read the tail's exact mass, whatever the error of the codes."""
    query, key, value = make_inputs(64 * 6 + 9)
    query = query[:, :, ::64].repeat_interleave(64, dim=2)[:, :, : 64 * 6 + 9] + 4  # codes of 4 are far from exact
    key = key + 4
    exact, fp8 = (
        sol_attn2(
            query,
            key,
            value,
            config=SolAttn2Config(epsilon=math.inf, tail=tail, precision=precision, smooth_key=smooth),
            details=True,
        )[1].lse
        for precision in ("exact", "fp8")
    )
    # With smoothing, the rows put s q_r . mu back from their codes.
    codes, scale = quantise(torch.nn.functional.pad(query[0, 0], (0, 0, 0, 55)).unflatten(0, (7, 64)), (1, 2))
    rows = (codes * scale).flatten(0, 1)[: query.shape[2]]
    shift = 128**-0.5 * (rows - query[0, 0]) @ key[0, 0].float().mean(0).double() if smooth else 0.0
    # FP16 means move a score by at most s |q|_1 |k|_max 2^-11, twice.
    means = 2 * 128**-0.5 * float(query.abs().sum(-1).max() * key.abs().max()) * 2**-11
    assert ((fp8 - exact)[0, 0] - shift).abs().max() < 0.107 * math.log(2) + means


def flushing_case():
    """One key block whose tokens the router keeps, below 63 blocks that outweigh it: 64 blocks, one row direction."""
    generator = torch.Generator().manual_seed(0)
    num_rows = 64 * 64
    direction = torch.zeros(128, dtype=torch.float64)
    direction[0] = 1
    query = (2 * math.sqrt(128) * direction).expand(num_rows, -1) + 0.01 * torch.randn(
        num_rows, 128, generator=generator, dtype=torch.float64
    )
    key = 0.01 * torch.randn(num_rows, 128, generator=generator, dtype=torch.float64)
    key[:64, 0] += 0.6  # 1.2 nats: above the others by more than epsilon
    value = torch.randn(num_rows, 128, generator=generator, dtype=torch.float64) * 0.1
    value[:64] += 10
    return tuple(x[None, None] for x in (query, key, value))


@pytest.mark.parametrize("offset", [0, 1])
def test_tail_does_not_push_tokens_out_of_range(offset):
    query, key, value = flushing_case()
    exact, details = sol_attn2(query, key, value, config=SolAttn2Config(precision="exact", epsilon=0.6), details=True)
    assert details.route[0, 0, :, 0].all()
    assert details.route.sum() == 64
    output, fp8_details = sol_attn2(query, key, value, config=SolAttn2Config(offset=offset, epsilon=0.6), details=True)
    assert torch.equal(fp8_details.route, details.route)
    # Under a pivot shared with the surrogates (each 64 tokens of score 0: 6 octaves) the tokens would sit this far
    # below it; with offset 0 the whole block's codes would be small or 0.
    tokens = (query @ key[:, :, :64].transpose(-1, -2)).amax() * 128**-0.5 / math.log(2)
    assert 6 - tokens > 4
    assert relative_error(output, exact) < 2**0.107 - 1 + 2**-4


def test_rows_past_the_end_do_not_set_the_pivot():
    query, key, value = make_inputs(10)
    query, key = query + 4, key - 4  # scores near -180 nats; a row past the end would score 0
    config = SolAttn2Config(epsilon=-math.inf, tail="none", smooth_key=False)
    output, details = sol_attn2(query, key, value, config=config, details=True)
    assert output.isfinite().all()
    assert details.lse.max() < -100


def test_row_outputs_follow_the_input_dtype():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        inputs = make_inputs(130, dtype=dtype)
        output, details = sol_attn2(*inputs, config=SolAttn2Config(epsilon=0.0), details=True)
        assert output.dtype == dtype
        assert details.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        wide = sol_attn2(*(x.float() for x in inputs), config=SolAttn2Config(epsilon=0.0))
        if dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(output, wide.to(dtype))


def test_fp32_and_float64_sums_agree():
    inputs = make_inputs(64 * 8 + 4, dtype=torch.float32)
    config = SolAttn2Config(epsilon=0.0)
    narrow, details = sol_attn2(*inputs, config=config, details=True)
    wide, wide_details = sol_attn2(*(x.double() for x in inputs), config=config, details=True)
    assert torch.equal(details.route, wide_details.route)
    # Rule (b) for implementations of the same rounding points, with the operator's own error.
    exact = sol_attn2(*(x.double() for x in inputs), config=SolAttn2Config(epsilon=0.0, precision="exact"))
    assert (narrow - wide).norm() <= 3e-3 * wide.norm() + 0.15 * (wide - exact).norm()
    assert (details.lse - wide_details.lse).abs().max() < 1e-3
