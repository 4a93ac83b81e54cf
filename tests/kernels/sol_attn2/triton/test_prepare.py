"""Quantisation, pooling and statistics kernels against the reference: codes and scales bit for bit."""

import pytest
import torch

pytest.importorskip("triton")

from solgen.kernels.sol_attn2.config import SCALE_FLOOR, SolAttn2Config
from solgen.kernels.sol_attn2.reference.blocks import make_blocks, mixed_blocks
from solgen.kernels.sol_attn2.reference.quantise import quantise
from solgen.kernels.sol_attn2.reference.router import router_means
from solgen.kernels.sol_attn2.triton import prepare as kernels
from solgen.kernels.sol_attn2.triton import statistics
from solgen.kernels.sol_attn2.triton.operands import VALUE_ORDER, Operands
from solgen.kernels.sol_attn2.triton.prepare import prepare

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def check(query, key, value, config):
    """Every operand of the kernels against the reference's, given the kernels' means."""
    num_heads, num_rows = query.shape[1:3]
    operands = prepare(query, key, value, config=config)
    # The reference runs on the CPU: what is wanted does not depend on the GPU under test.
    query, key, value = (x.cpu() for x in (query, key, value))
    operands = Operands(**{name: x.cpu() if torch.is_tensor(x) else x for name, x in vars(operands).items()})
    blocks = make_blocks(num_rows, mixed_blocks(None, num_rows, query.device), torch.float32)
    real = (torch.arange(blocks.num_blocks * 64) < num_rows).view(-1, 64, 1)
    for head in range(num_heads):
        q, k, v = (blocks.split(x[0, head].float()) for x in (query, key, value))
        # FP32 sums in two orders: a relative error of 2^-24 an addition, on top of the magnitude summed.
        for mean, rows, smooth in (
            (operands.k_mean[head], k, config.smooth_key),
            (operands.v_mean[head], v, config.smooth_value),
        ):
            exact = rows.double().sum((0, 1)) / num_rows * smooth
            bound = rows.double().abs().sum((0, 1)) / num_rows * 2**-24 * (num_rows.bit_length() + 64)
            assert ((mean - exact).abs() <= bound).all()

        codes, scale = quantise(q, (1, 2))
        assert torch.equal(operands.q_codes[head].float(), codes.flatten(0, 1))
        assert torch.equal(operands.q_scale[head], scale.flatten())
        codes, scale = quantise((k - operands.k_mean[head]) * real, (1, 2))
        assert torch.equal(operands.k_codes[head].float(), codes.flatten(0, 1))
        assert torch.equal(operands.k_scale[head], scale.flatten())
        codes, scale = quantise((v - operands.v_mean[head]) * real, (0, 1, 2))
        stored = codes[:, VALUE_ORDER].transpose(1, 2)
        assert torch.equal(operands.v_codes[head].float(), stored)
        assert torch.equal(operands.v_scale[head], scale.flatten()[0])
        for units, rows in ((operands.q_units, q), (operands.k_units, k), (operands.v_units, v)):
            expected = router_means(rows, blocks, "fp8").flatten(0, 1)
            # Sums of 8 in two orders may round to neighbouring FP16 values.
            error = (units[head].float() - expected).abs()
            assert (error <= 2**-10 * expected.abs() + 2**-24).all()
            assert (error > 0).float().mean() < 1e-3
    return operands


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 64, 65, 201])
@pytest.mark.parametrize("smooth", [True, False], ids=["smooth", "plain"])
def test_operands_equal_the_reference(device, packed_qkv, num_rows, smooth):
    check(*packed_qkv(num_rows, 2, device), SolAttn2Config(smooth_key=smooth, smooth_value=smooth))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_input_dtype(device, packed_qkv, dtype):
    check(*packed_qkv(130, 1, device, dtype), SolAttn2Config())


@pytest.mark.gpu
def test_extreme_groups_stay_finite(device, packed_qkv):
    query, key, value = (x.clone() for x in packed_qkv(130, 3, device))
    query[0, 0, 64:128] = 0.0  # a zero block
    key[0, 1] = 0.0  # a zero head
    value[0, 1] = 0.0
    value[0, 2, 5, 7] = 1e4  # one outlier
    query[0, 2, :64] = 1e-30  # far below the scale floor
    operands = check(query, key, value, SolAttn2Config(smooth_key=False, smooth_value=False))
    assert operands.q_scale[0, 1] == operands.v_scale[1] == SCALE_FLOOR
    assert operands.q_codes[2, :64].float().abs().max() == 0


@pytest.mark.gpu
def test_batch_entries_follow_one_another(device, packed_qkv):
    first, second = (packed_qkv(70, 2, device, seed=seed) for seed in (1, 2))
    both = prepare(*(torch.cat(pair) for pair in zip(first, second, strict=True)), config=SolAttn2Config())
    for index, inputs in enumerate((first, second)):
        alone = prepare(*inputs, config=SolAttn2Config())
        assert torch.equal(both.k_codes[2 * index : 2 * index + 2].float(), alone.k_codes.float())
        assert torch.equal(both.v_codes[2 * index : 2 * index + 2].float(), alone.v_codes.float())


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1001, 4095, 110_000, 219_524])
def test_long_sequences(large, packed_qkv, num_rows):
    check(*packed_qkv(num_rows, 2, large), SolAttn2Config())


@pytest.mark.gpu
def test_offsets_beyond_32_bits(large):
    packed = torch.zeros(219_524, 21_504, dtype=torch.bfloat16, device=large)
    packed[-64:, -256:] = 1.0
    query, key, value = packed.unflatten(1, (3, 56, 128)).permute(1, 2, 0, 3).unsqueeze(1)
    operands = prepare(query[:, 54:], key[:, 54:], value[:, 54:], config=SolAttn2Config(smooth_value=False))
    assert operands.v_units[:, -8].float().min() == 1.0
    assert operands.q_units.float().abs().max() == 0.0


@pytest.mark.slow
def test_in_the_interpreter(run_in_interpreter):
    run_in_interpreter()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_kernels_neither_spill_nor_miscast(compile_sm90, dtype):
    types = {"p_x": f"*{dtype}", "p_mean": "*fp32", "p_scale": "*fp32", "p_units": "*fp16", "p_partial": "*fp32"}
    strides = {"stride_batch": "i64", "stride_head": "i64", "stride_row": "i64"}
    cast = {"SHIFT": True, "INTEGER": False, "D": 128}
    for kernel, codes, constants in (
        (kernels._quantize_rows_kernel, "*u8", cast),
        (kernels._quantize_values_kernel, "*u8", cast),
        (statistics._chunk_kernel, "", {"EXTREMES": True, "CHUNK": 1024, "D": 128}),
    ):
        code = compile_sm90(kernel, types | strides | {"p_codes": codes}, constants, num_warps=4)
        assert code.stack_bytes == 0
        assert code.stray_merges() == []
        assert bool(codes) == (code.count("F2FP.SATFINITE.E4M3") > 0)
