"""The complete Triton call against the FP8 reference and the exact operator (float64)."""

import dataclasses
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton")

from solgen.kernels.sol_attn2.config import SolAttn2Config
from solgen.kernels.sol_attn2.reference.forward import sol_attn2_reference
from solgen.kernels.sol_attn2.triton import forward
from solgen.kernels.sol_attn2.triton.forward import head_bytes, head_groups, sol_attn2_forward


def run(query, key, value, config, **options):
    defaults = {"video_rows": None, "scale": None, "impl": "triton", "details": True}
    return sol_attn2_forward(query, key, value, config=config, **(defaults | options))


def check(query, key, value, config, video_rows=None):
    """Both error rules: near the reference, and no further from the exact operator than twice its error."""
    output, details = run(query, key, value, config, video_rows=video_rows)
    expected, report = sol_attn2_reference(
        query.float(), key.float(), value.float(), config=config, video_rows=video_rows, scale=None
    )
    exact, _ = sol_attn2_reference(
        query.double(),
        key.double(),
        value.double(),
        config=dataclasses.replace(config, precision="exact"),
        video_rows=video_rows,
        scale=None,
    )
    output, expected = output.double(), expected.double()
    reference_error = (expected - exact).norm()
    rounding = 2.0**-8 * exact.norm()  # a bfloat16 output
    assert (output - exact).norm() <= 2 * reference_error + rounding
    assert (output - expected).norm() <= 3e-3 * expected.norm() + 0.15 * reference_error
    assert torch.equal(details.route, report.route)
    assert torch.allclose(details.density, report.density, equal_nan=True)
    assert torch.allclose(details.density_all, report.density_all)
    # The kernels know the quantised query only: s q . k_mean carries its E4M3 steps. And a mean summed in another
    # order may turn a code of the key that dominates a row: one step of E4M3, 2^-3 of a channel.
    query, key = query.float().abs(), key.float()
    mean = key.mean(2, keepdim=True)
    step = 2**-3 * (query * (key - mean).abs().amax(2, keepdim=True)).amax(-1)
    slack = 0.02 + 2**-4 * (query * mean.abs()).sum(-1) / 128**0.5
    difference = (details.lse - report.lse).abs()
    assert (difference <= slack + step / 128**0.5).all()
    assert (difference > slack).float().mean() <= 1e-3  # ties are rare
    assert difference.median() <= 2**-10  # the FP16 means and weights behind the surrogates, rounded either way
    return output


@pytest.mark.gpu
@pytest.mark.parametrize("tail", ["slots", "anchors", "none"])
@pytest.mark.parametrize("num_rows", [1, 201])
def test_output_follows_the_reference(device, packed_qkv, num_rows, tail):
    check(*packed_qkv(num_rows, 1, device), SolAttn2Config(tail=tail, epsilon=-0.5))


@pytest.mark.gpu
def test_text_rows_and_fixed_fraction(device, packed_qkv):
    video_rows = torch.ones(200, dtype=torch.bool, device=device)
    video_rows[70] = False
    check(*packed_qkv(200, 1, device), SolAttn2Config(top_k=0.5), video_rows)


@pytest.mark.gpu
def test_memory_layout_stages_and_groups(device, packed_qkv, monkeypatch):
    query, key, value = packed_qkv(70, 3, device)
    config, stages = SolAttn2Config(), []

    @contextmanager
    def stage(name):
        stages.append(name)
        yield

    whole = run(query, key, value, config, details=False, stage=stage)
    assert whole.transpose(1, 2).is_contiguous()
    assert stages == ["prepare", "route", "tail", "attention"]
    monkeypatch.setattr(forward, "GROUP_BYTES", head_bytes(2))
    assert [group for _, group in head_groups(1, 3, 2)] == [slice(0, 1), slice(1, 2), slice(2, 3)]
    split, _ = run(query, key, value, config)
    assert torch.equal(split, whole)


@pytest.mark.gpu
def test_values_that_are_not_finite_are_not_hidden(device, packed_qkv):
    query, key, value = packed_qkv(200, 2, device)
    query = query.clone()
    query[0, 1, 70, 3] = float("nan")
    output = run(query, key, value, SolAttn2Config(), details=False)
    assert output[0, 1, 64:128].isnan().all()
    assert output[0, 0].isfinite().all()
    assert output[0, 1, :64].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [4095, 20_000])
@pytest.mark.parametrize("tail", ["slots", "anchors"])
def test_long_sequences(large, packed_qkv, num_rows, tail):
    check(*packed_qkv(num_rows, 1, large), SolAttn2Config(tail=tail))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [110_000, 219_524])
def test_every_row_is_written_and_two_runs_agree(large, packed_qkv, num_rows):
    inputs = packed_qkv(num_rows, 2, large)
    config = SolAttn2Config(epsilon=0.2)
    first, details = run(*inputs, config)
    assert first.isfinite().all()
    assert details.lse.isfinite().all()
    assert torch.equal(first, run(*inputs, config, details=False))


@pytest.mark.gpu
def test_capture_in_a_cuda_graph(large, packed_qkv):
    inputs = packed_qkv(3000, 2, large)
    config = SolAttn2Config()
    expected = run(*inputs, config, details=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(*inputs, config, details=False)
    output.fill_(float("nan"))
    graph.replay()
    assert torch.equal(output, expected)


@pytest.mark.slow
def test_in_the_interpreter(run_in_interpreter):
    run_in_interpreter()
