"""The Triton forward of Sol-Attn 1.0 against the reference on its own route, and the route against the scores."""

import math
import re

import pytest
import torch

pytest.importorskip("triton")

import triton

from solgen.kernels.sol_attn1 import SolAttn1Config
from solgen.kernels.sol_attn1.reference import Head
from solgen.kernels.sol_attn1.thresholds import score_moments
from solgen.kernels.sol_attn1.triton import attention, route
from solgen.kernels.sol_attn1.triton.forward import sol_attn1_forward
from solgen.kernels.sol_attn2.reference.blocks import mixed_blocks

SCALE = 128**-0.5


@pytest.fixture
def dtype(device):
    """Triton's interpreter multiplies the bit patterns of bf16 numbers, so fp16 stands in there."""
    return torch.float16 if device.type == "cpu" else torch.bfloat16


def check(query, key, value, config, *, video_rows=None, heads=None):
    """Hold a call to the two error rules of the kernels, on the route it reports; returns the route."""
    arguments = {"config": config, "video_rows": video_rows, "scale": None}
    output, details = sol_attn1_forward(query, key, value, **arguments, details=True)
    assert torch.equal(output, sol_attn1_forward(query, key, value, **arguments, details=False))
    assert output.isfinite().all()
    mixed = mixed_blocks(video_rows, query.shape[2], query.device)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]) if heads is None else heads:
            inputs = [x[b, h].contiguous() for x in (query, key, value)]
            check_head(inputs, mixed, config, output[b, h], details.lse[b, h], details.route[b, h])
    return details.route


def check_head(inputs, mixed, config, output, lse, kept):
    """Rows of some query blocks of one head by both rules, and its route."""
    blocks = torch.arange(0, len(kept), max(1, len(kept) // 8), device=kept.device)
    rows = (blocks[:, None] * 64 + torch.arange(64, device=kept.device)).flatten()
    rows = rows[rows < len(output)]
    head = Head(*inputs, mixed, SCALE)
    exact = Head(*(x.double() for x in inputs), mixed, SCALE)
    exact.k_means, exact.v_sums = head.k_means.double(), head.v_sums.double()
    want, want_lse = (x.flatten(0, 1)[: len(rows)] for x in exact.attend(blocks, kept[blocks]))
    same = head.attend(blocks, kept[blocks], round_weights=True)[0].flatten(0, 1)[: len(rows)]
    same, got = same.to(output.dtype).double(), output[rows].double()
    own = (same - want).norm()
    assert (got - want).norm() <= 2 * own + 1e-6 * want.norm()
    assert (got - same).norm() <= 3e-3 * same.norm() + 0.15 * own
    assert (lse[rows].double() - want_lse).abs().max() < 2e-3
    check_route(head, kept, config)


def check_route(head, kept, config):
    """The route follows the scores, except within 1e-3 deviations of the threshold."""
    moments = score_moments(head.q_means, head.k_means, threshold=config.threshold, scale=SCALE)
    scores = (SCALE * head.q_means @ head.k_means.t() - moments[0][:, None]) / moments[1][:, None]
    near = (scores - config.tau).abs() < 1e-3
    assert torch.equal(kept | near, head.select(config) | near)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 63, 65, 260, 1001])
def test_output_route_and_row_sums(device, dtype, packed_qkv, num_rows):
    query, key, value = packed_qkv(num_rows, 1 if num_rows > 500 else 2, device, dtype)
    kept = check(query, key, value, SolAttn1Config(tau=0.8))
    block = torch.arange(kept.shape[-1], device=device)
    assert kept[..., (block[:, None] - block).abs() <= 1].all()


@pytest.mark.gpu
@pytest.mark.parametrize("threshold", ["diag", "exact"])
@pytest.mark.parametrize("sink", [False, True], ids=["no sink", "sink"])
def test_text_rows_and_both_thresholds(device, dtype, packed_qkv, sink, threshold):
    query, key, value = packed_qkv(64 * 7 + 4, 1, device, dtype)
    video_rows = torch.ones(64 * 7 + 4, dtype=torch.bool, device=device)
    video_rows[450:] = video_rows[70] = False
    config = SolAttn1Config(tau=0.5, threshold=threshold, sink=sink)
    kept = check(query, key, value, config, video_rows=video_rows)
    assert kept[0, 0, [1, 7]].all()
    assert kept[0, 0, :, [1, 7]].all() == sink


@pytest.mark.gpu
@pytest.mark.parametrize("tau", [-math.inf, math.inf], ids=["all exact", "band only"])
def test_the_ends_of_the_threshold(device, dtype, packed_qkv, tau):
    kept = check(*packed_qkv(270, 1, device, dtype), SolAttn1Config(tau=tau))
    assert kept.all() == (tau < 0)


@pytest.mark.gpu
def test_batches_and_strides_the_copy_engine_cannot_read(device, dtype):
    generator = torch.Generator(device).manual_seed(0)
    inputs = [torch.randn(2, 130, 2, 129, generator=generator, device=device).to(dtype) for _ in range(3)]
    check(*(x[..., 1:].transpose(1, 2) for x in inputs), SolAttn1Config(tau=0.0))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [4095, 35_345, 219_524])
def test_long_sequences(large, packed_qkv, num_rows):
    query, key, value = packed_qkv(num_rows, 3, large)
    first = check(query, key, value, SolAttn1Config(tau=1.2816), heads=[2])
    assert torch.equal(first, check(query, key, value, SolAttn1Config(tau=1.2816), heads=[]))


def test_in_the_interpreter(run_in_interpreter):
    run_in_interpreter()


def product_loops(sass):
    """Instructions of every innermost loop with tensor-core products, in order of address."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?) *;", sass, re.MULTILINE)
    code = [(int(address, 16), text) for address, text in lines]
    spans = [(int(found[1], 16), at) for at, text in code if (found := re.match(r"@!?U?P\d+ BRA (0x[0-9a-f]+)", text))]
    loops = [[text for at, text in code if start <= at <= end] for start, end in sorted(spans) if start < end]
    return [loop for loop in loops if sum("HGMMA" in text for text in loop) == 12]


def test_machine_code_of_the_attention_kernel(compile_sm90, monkeypatch):
    compile_any = triton.compile
    limit = {"maxnreg": attention.REGISTERS}
    monkeypatch.setattr(
        triton, "compile", lambda *args, options, **more: compile_any(*args, options=options | limit, **more)
    )
    tiles = dict.fromkeys(("k_desc", "v_desc", "kc_desc", "vc_desc"), "tensordesc<bf16[1, 1, 64, 128]>")
    types = {"p_q": "*bf16", "p_mask": "*i32", "p_counts": "*i32", "p_blocks": "*i16", "p_order": "*i32"}
    types |= {"p_out": "*bf16", "p_lse": "*fp32", "octaves": "fp32"}
    constants = {"p_lse": None, "LSE": False, "STAGES": attention.STAGES}
    code = compile_sm90(attention._attention_kernel, tiles | types, constants, num_warps=4)
    # Atoms, full blocks and the short last block: 8 products of 16 channels, then 4 of 16 keys.
    assert code.count("HGMMA.64x64x16") == 24
    assert code.count("HGMMA.64x128x16") == 12
    assert code.count("UTMALDG") >= 6
    # Addresses may spill, once a program; the loop over exact blocks keeps everything in registers.
    assert code.stack_bytes <= 64
    atoms, blocks = product_loops(code.sass)
    assert not [text for text in blocks if re.search(r"\b(LDL|STL)\b", text)]
    assert len([text for text in atoms if re.search(r"\b(LDL|STL)\b", text)]) <= 6


def test_machine_code_of_the_route_kernel(compile_sm90):
    types = {"p_q": "*fp32", "p_k": "*bf16", "p_threshold": "*fp32", "p_mixed": "*i1", "p_mask": "*i32"}
    types |= {"p_counts": "*i32", "p_blocks": "*i16", "scale": "fp32"}
    code = compile_sm90(route._route_kernel, types, {"SINK": False}, num_warps=4)
    assert code.stack_bytes == 0
    assert code.count("HGMMA") > 0
