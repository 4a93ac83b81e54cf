"""The Triton forward of block-sparse attention against float64 attention over the route it reports."""

import math

import pytest
import torch

pytest.importorskip("triton")

from solgen.kernels.block_sparse.triton import attention
from solgen.kernels.block_sparse.triton.forward import block_sparse_forward
from solgen.kernels.sol_attn2 import SolAttn2Config
from solgen.kernels.sol_attn2.density import log_shares

SCALE = 128**-0.5


@pytest.fixture
def dtype(device):
    """Triton's interpreter multiplies the bit patterns of bf16 numbers, so fp16 stands in there."""
    return torch.float16 if device.type == "cpu" else torch.bfloat16


def attend(query, key, value, keep):
    """Softmax attention of rows [M, D] over the keys in `keep` [M, N], and its natural-log denominators."""
    scores = (SCALE * query @ key.t()).masked_fill(~keep, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0.0)).exp()
    return weights @ value, lse.squeeze(-1)


def check(query, key, value, config, *, video_rows=None, heads=None):
    """Output, row sums and route of one call; returns the route."""
    arguments = {"config": config, "video_rows": video_rows, "scale": None}
    output, details = block_sparse_forward(query, key, value, **arguments, details=True)
    assert torch.equal(output, block_sparse_forward(query, key, value, **arguments, details=False))
    num_rows, device = query.shape[2], query.device
    rows = torch.arange(0, num_rows, max(1, num_rows // 500), device=device)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]) if heads is None else heads:
            keep = details.route[b, h][rows // 64].repeat_interleave(64, dim=1)[:, :num_rows]
            q, k, v = query[b, h, rows].double(), key[b, h].double(), value[b, h].double()
            want, lse = attend(q, k, v, keep)
            error = (output[b, h, rows].double() - want).norm() / want.norm().clamp(min=1e-9)
            # Weights and output are rounded once each to the inputs' type.
            assert error <= (4e-3 if query.dtype == torch.bfloat16 else 6e-4)
            assert torch.equal(details.lse[b, h, rows].isneginf(), lse.isneginf())
            assert (details.lse[b, h, rows].double() - lse).nan_to_num(0.0).abs().max() < 2e-3
    return details.route


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 63, 65, 260, 1001])
def test_output_and_row_sums(device, dtype, packed_qkv, num_rows):
    query, key, value = packed_qkv(num_rows, 1 if num_rows > 500 else 2, device, dtype)
    config = SolAttn2Config(epsilon=0.3)
    route = check(query, key, value, config)
    shares = log_shares(query, key)
    near = (shares - config.epsilon).abs() < 1e-3
    assert torch.equal(route | near, (shares > config.epsilon) | near)


@pytest.mark.gpu
@pytest.mark.parametrize("epsilon", [-math.inf, math.inf], ids=["all blocks", "no block"])
def test_the_ends_of_the_threshold(device, dtype, packed_qkv, epsilon):
    route = check(*packed_qkv(200, 1, device, dtype), SolAttn2Config(epsilon=epsilon))
    assert route.all() == (epsilon < 0)
    assert route.any() == (epsilon < 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [SolAttn2Config(epsilon=9.0, sink=True), SolAttn2Config(top_k=0.4)], ids=["sink", "top_k"]
)
def test_text_rows_sinks_and_fixed_fractions(device, dtype, packed_qkv, config):
    query, key, value = packed_qkv(64 * 7 + 4, 1, device, dtype)
    video_rows = torch.ones(64 * 7 + 4, dtype=torch.bool, device=device)
    video_rows[450:] = video_rows[70] = False
    route = check(query, key, value, config, video_rows=video_rows)[0, 0]
    assert route[[1, 7]].all()
    assert route[0].sum() == (2 if config.sink else 3)


@pytest.mark.gpu
def test_batches_and_strides_the_copy_engine_cannot_read(device, dtype):
    generator = torch.Generator(device).manual_seed(0)
    inputs = [torch.randn(2, 130, 2, 129, generator=generator, device=device).to(dtype) for _ in range(3)]
    check(*(x[..., 1:].transpose(1, 2) for x in inputs), SolAttn2Config(epsilon=0.0))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [4095, 35_345, 219_524])
def test_long_sequences(large, packed_qkv, num_rows):
    inputs = packed_qkv(num_rows, 3, large)
    first = check(*inputs, SolAttn2Config(epsilon=0.2), heads=[2])
    assert torch.equal(first, check(*inputs, SolAttn2Config(epsilon=0.2), heads=[]))


def test_in_the_interpreter(run_in_interpreter):
    run_in_interpreter()


def test_machine_code(compile_sm90):
    tiles = dict.fromkeys(("k_desc", "v_desc"), "tensordesc<bf16[1, 1, 64, 128]>")
    types = {"p_q": "*bf16", "p_counts": "*i32", "p_blocks": "*i16", "p_order": "*i32", "p_out": "*bf16"}
    types |= {"p_lse": "*fp32", "octaves": "fp32"}
    constants = {"p_lse": None, "LSE": False, "STAGES": attention.STAGES}
    code = compile_sm90(attention._attention_kernel, tiles | types, constants, num_warps=4)
    assert code.stack_bytes == 0
    # Full blocks and the short last block: 8 products of 16 channels, then 4 of 16 keys.
    assert code.count("HGMMA.64x64x16") == 16
    assert code.count("HGMMA.64x128x16") == 8
    assert code.count("UTMALDG") >= 4
