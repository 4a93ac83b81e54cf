"""The tail's kernels against the reference, by the rounding of their FP16 steps."""

import math

import pytest
import torch

pytest.importorskip("triton")

from solgen.kernels.sol_attn2.config import SLOTS, SolAttn2Config
from solgen.kernels.sol_attn2.details import unpack_route
from solgen.kernels.sol_attn2.reference.blocks import make_blocks, mixed_blocks
from solgen.kernels.sol_attn2.reference.tail import arrange_slots, at_anchors
from solgen.kernels.sol_attn2.reference.tail import compress as reference_compress
from solgen.kernels.sol_attn2.triton import tail as kernels
from solgen.kernels.sol_attn2.triton.operands import VALUE_ORDER
from solgen.kernels.sol_attn2.triton.prepare import prepare
from solgen.kernels.sol_attn2.triton.route import block_masses, select
from solgen.kernels.sol_attn2.triton.tail import compress

SCALE = 128**-0.5


def check(query, key, value, config):
    """Surrogates of every head against the reference on the kernels' own units and means."""
    num_rows, device = query.shape[2], query.device
    operands = prepare(query, key, value, config=config)
    mixed = mixed_blocks(None, num_rows, device)
    masses = block_masses(operands.q_units, operands.k_units, num_rows, scale=SCALE)
    route = select(masses, mixed, config=config).route
    tail = compress(operands, route, config=config, scale=SCALE)
    again = compress(operands, route, config=config, scale=SCALE)
    assert torch.equal(tail.bias, again.bias)
    assert torch.equal(tail.k_codes.view(torch.uint8), again.k_codes.view(torch.uint8))
    assert torch.equal(tail.v_codes.view(torch.uint8), again.v_codes.view(torch.uint8))

    blocks = make_blocks(num_rows, mixed, torch.float32)
    anchors_per_block = 8 if config.tail == "anchors" else 1
    order = VALUE_ORDER.argsort().to(device)
    for head in range(query.shape[1]):
        q, k, v = (
            units[head].float().view(-1, 8, 128) for units in (operands.q_units, operands.k_units, operands.v_units)
        )
        k_mean, v_mean, v_scale = operands.k_mean[head], operands.v_mean[head], operands.v_scale[head]
        anchors = blocks.group_means(q, anchors_per_block)
        slots = arrange_slots(k, v, blocks, SLOTS // anchors_per_block)
        kept = unpack_route(route.mask, route.counts.shape[1])[head]
        expected = reference_compress(anchors, kept, slots, SCALE, "fp8")
        empty = expected.log_mass.isneginf()
        assert torch.equal(tail.bias[head].isneginf(), empty)

        keys = (expected.keys - k_mean).masked_fill(empty.unsqueeze(-1), 0.0)
        largest = keys.abs().amax((1, 2))
        assert torch.allclose(tail.k_scale[head] * 448, largest, rtol=4e-3, atol=2e-3 * k.abs().max() / 448)
        codes = tail.k_codes[head].float()
        shown = codes * tail.k_scale[head].view(-1, 1, 1)
        # Half an E4M3 step (2^-4 relative, 2^-10 of the scale below the normals), and the FP16 roundings of means
        # as large as the largest key.
        slack = 4e-3 * k.abs().amax()
        step = (2**-4 * keys.abs()).clamp(min=2**-10 * tail.k_scale[head].view(-1, 1, 1))
        assert ((shown - keys).abs() <= step + slack).all()
        values = (expected.values - v_mean).masked_fill(empty.unsqueeze(-1), 0.0)
        shown_values = tail.v_codes[head].float()[:, :, order].transpose(1, 2) * v_scale
        step = (2**-4 * values.abs()).clamp(min=2**-10 * v_scale)
        assert ((shown_values - values).abs() <= step + 4e-3 * v.abs().amax()).all()
        assert not shown[empty].any()
        assert not shown_values[empty].any()

        # The mass at the dequantised anchor: bias + s qhat . khat + s qbar . k_mean = log S.
        rows = operands.q_codes[head].float().view(-1, 64, 128) * operands.q_scale[head].view(-1, 1, 1)
        q_anchors = blocks.group_means(blocks.unit_means(rows), anchors_per_block)
        mass = tail.bias[head] + SCALE * at_anchors(q_anchors, shown)
        mass = mass + SCALE * at_anchors(anchors, k_mean.expand_as(shown))
        error = (mass - expected.log_mass)[~empty].abs()
        if len(error):
            # FP16 anchors move a score by 2^-11 of sum |qbar_d (kbar - k_mean)_d|.
            spread = SCALE * anchors.abs().amax() * (k - k_mean).abs().sum(-1).amax()
            assert error.max() <= 2**-11 * spread + 1e-3
    return tail, route


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["slots", "anchors"])
@pytest.mark.parametrize("num_rows", [1, 65, 201])
def test_surrogates_equal_the_reference(device, packed_qkv, num_rows, kind):
    check(*packed_qkv(num_rows, 1, device), SolAttn2Config(tail=kind))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["slots", "anchors"])
def test_more_blocks_than_slots_and_a_short_last_block(large, packed_qkv, kind):
    check(*packed_qkv(64 * 69 + 4, 1, large), SolAttn2Config(tail=kind))


@pytest.mark.gpu
def test_rows_that_keep_everything_have_no_surrogates(device, packed_qkv):
    tail, route = check(*packed_qkv(130, 1, device), SolAttn2Config(epsilon=-math.inf))
    assert (route.counts == 3).all()
    assert tail.bias.isneginf().all()


@pytest.mark.gpu
def test_a_large_key_mean_does_not_touch_the_mass(device, packed_qkv):
    query, key, value = packed_qkv(130, 1, device)
    key = key.clone()
    key[..., 9] += 30.0
    check(query, key, value, SolAttn2Config())


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1001, 4095, 110_000, 219_524])
def test_long_sequences(large, packed_qkv, num_rows):
    check(*packed_qkv(num_rows, 1, large), SolAttn2Config())


@pytest.mark.slow
def test_in_the_interpreter(run_in_interpreter):
    run_in_interpreter()


@pytest.mark.parametrize("anchors", [1, 8])
def test_kernels_use_tensor_cores_and_do_not_spill(compile_sm90, anchors):
    halves = dict.fromkeys(("p_anchor", "p_k", "p_v", "p_key"), "*fp16")
    singles = ("p_k_mean", "p_v_mean", "p_v_scale", "p_log_mass", "p_q_scale", "p_k_scale", "p_bias")
    types = halves | dict.fromkeys(singles, "*fp32") | dict.fromkeys(("p_value", "p_q", "p_k_codes"), "*u8")
    types |= {"p_mask": "*i32", "p_v_codes": "*u8", "scale": "fp32", "log_last": "fp32"}
    constants = {"ANCHORS": anchors, "SLOTS": SLOTS // anchors, "INTEGER": False, "D": 128}
    constants |= {"ROWS": kernels.ROWS, "STEP": kernels.STEP, "STAGES": kernels.STAGES}
    code = compile_sm90(kernels._compress_kernel, types, constants, num_warps=4)
    assert code.stack_bytes == 0
    assert code.stray_merges() == []
    assert code.count("HGMMA") > 0
    assert code.count("WARPGROUP.DEPBAR") < code.count("HGMMA") // 2  # products are not serialised
    constants = {"ANCHORS": anchors, "INTEGER": False, "D": 128}
    code = compile_sm90(kernels._encode_kernel, types, constants, num_warps=4)
    assert code.stack_bytes == 0
    assert code.stray_merges() == []
