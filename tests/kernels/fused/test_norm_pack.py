"""Queries, keys and values packed for ranks: the kernel against `qk_norm_rope` and copies, bit for bit."""

import pytest
import torch

pytest.importorskip("triton")

from solgen.kernels.fused import norm_pack, qk_norm_rope
from solgen.kernels.fused.norm_pack import PAIRS, _norm_pack_kernel
from tests.kernels.fused.cases import poisoned

PARTS = {2: "queries and keys", 3: "queries, keys and values"}


def projections(rows, heads, device, dtype, *, pad=8):
    """Query, key and value [rows, heads, 128] as views of one packed QKV with NaN around them."""
    width = 3 * (heads + 1) * 128
    packed = poisoned(rows, width, device, dtype, seed=3, stride=width + pad, offset=pad)
    packed = packed.unflatten(1, (3, heads + 1, 128))
    packed[:, :, heads] = float("nan")
    return packed[:, :, :heads].unbind(1)


def angles(rows, device, pairs=48):
    """Cosines and sines [rows, pairs], each half of a table of twice the width, whose other half is NaN."""
    turns = poisoned(rows, pairs, device, torch.float32, seed=5)
    turns[::3] = 0.0  # sines of zero, whose products have a sign
    return (torch.cat([table, table * float("nan")], 1)[:, :pairs] for table in (turns.cos(), turns.sin()))


def check(query, key, value, ranks, pairs=48):
    """Every bit of the buffer; -0 and 0 differ, and what one NaN is from another."""
    rows, heads, width = query.shape
    weights = poisoned(2, width, query.device, query.dtype, seed=2)
    cos, sin = angles(rows, query.device, pairs)
    doubled = (torch.cat([table, table], 1) for table in (cos, sin))
    tensors = [*qk_norm_rope(query, key, *weights, *doubled, eps=1e-5, impl="triton")]
    if value is not None:
        tensors.append(value)
    packed = norm_pack(query, key, value, *weights, cos, sin, eps=1e-5, ranks=ranks, impl="triton")
    assert packed.shape == (ranks, rows, heads // ranks, len(tensors), width)
    assert packed.dtype == query.dtype
    assert packed.is_contiguous()
    bits = {2: torch.int16, 4: torch.int32}[query.element_size()]
    for t, expected in enumerate(tensors):
        for rank, theirs in enumerate(expected.chunk(ranks, dim=1)):
            assert torch.equal(packed[rank, :, :, t].view(bits), theirs.view(bits)), (t, rank)
    return packed


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Buffers are NaN before they are written."""
    deterministic, fill = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("rows", "heads"), [(1, 8), (17, 4), (63, 8), (65, 8)])
def test_bits_are_those_of_the_op_and_copies(device, narrow, rows, heads, ranks):
    check(*projections(rows, heads, device, narrow), ranks)


@pytest.mark.gpu
def test_every_type(device):
    """In the interpreter bf16 is cut off by both alike."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check(*projections(21, 14, device, dtype), 2)


@pytest.mark.gpu
def test_more_rows_than_programs(device, narrow):
    """The last program's pairs belong to several rows, and some to none."""
    assert 201 * 14 % PAIRS
    check(*projections(201, 14, device, narrow), 2)


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [32, 64])
def test_other_shares_of_rotated_channels(device, narrow, pairs):
    check(*projections(5, 4, device, narrow), 2, pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_without_values(device, narrow, ranks):
    query, key, _ = projections(65, 8, device, narrow)
    check(query, key, None, ranks)


@pytest.mark.gpu
def test_views_of_their_own_strides(device, narrow):
    """Every second head of one, an odd row stride of another, and a projection of its own."""
    query, _, _ = projections(9, 8, device, narrow, pad=3)
    _, key, _ = projections(9, 4, device, narrow)
    value = poisoned(9, 4 * 128, device, narrow, seed=7).unflatten(1, (4, 128))
    check(query[:, ::2], key, value, 4)


@pytest.mark.gpu
def test_values_keep_what_they_are(device, narrow):
    query, key, value = projections(3, 4, device, narrow)
    value[0] = float("nan")
    value[1, :, ::2], value[1, :, 1::2] = float("inf"), -0.0
    packed = check(query, key, value, 2)
    assert packed[:, 0, :, 2].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("parts", PARTS, ids=PARTS.get)
def test_no_rows(device, narrow, parts):
    query, key, value = projections(0, 4, device, narrow)
    check(query, key, value if parts == 3 else None, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1001, 41_536, 110_000])
def test_full_width(large, rows):
    """From 99,865 rows on, offsets into the packed projections and the buffer pass 2^31."""
    assert rows < 99_865 or rows * 3 * 56 * 128 > 2**31
    check(*projections(rows, 56, large, torch.bfloat16, pad=0), 2)


@pytest.mark.slow
def test_in_the_interpreter(run_in_interpreter):
    run_in_interpreter()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_reference_is_the_op_and_copies(dtype):
    query, key, value = torch.randn(3, 5, 6, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    weights = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    turns = torch.rand(5, 16, generator=torch.Generator().manual_seed(3), dtype=dtype) * 6.3
    cos, sin = turns.cos(), turns.sin()
    doubled = (torch.cat([table, table], 1) for table in (cos, sin))
    normed = qk_norm_rope(query, key, *weights, *doubled, eps=1e-5)
    for values in (value, None):
        packed = norm_pack(query, key, values, *weights, cos, sin, eps=1e-5, ranks=3)
        assert packed.is_contiguous()
        tensors = normed if values is None else (*normed, values)
        assert packed.shape == (3, 5, 2, len(tensors), 64)
        for head in range(6):
            for t, expected in enumerate(tensors):
                assert torch.equal(packed[head // 2, :, head % 2, t], expected[:, head])


def test_what_it_refuses():
    x, weight, table = torch.ones(4, 2, 128), torch.ones(128), torch.ones(4, 48)
    good = {"query": x, "key": x, "value": x, "query_weight": weight, "key_weight": weight, "cos": table, "sin": table}
    for change, message in (
        ({"key": x[:, :1]}, r"key is torch.float32 \(4, 1, 128\)"),
        ({"value": x[:3]}, r"value is torch.float32 \(3, 2, 128\)"),
        ({"value": x.half()}, r"value is torch.float16 .* expected torch.float32"),
        ({"query": x.transpose(1, 2).contiguous().transpose(1, 2)}, "unit stride along the channels"),
        ({"ranks": 3}, "2 heads for 3 ranks"),
        ({"ranks": 0}, "2 heads for 0 ranks"),
        ({"cos": torch.ones(4, 65), "sin": torch.ones(4, 65)}, "130 of 128 channels are rotated"),
        ({"sin": table[:3]}, r"sin has shape \(3, 48\)"),
        ({"key_weight": weight[:96]}, r"key_weight is \(96,\)"),
        ({"impl": "triton"}, "tensors on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            norm_pack(**(good | {"ranks": 2} | change), eps=1e-5)


@pytest.mark.gpu
def test_what_the_kernel_refuses(device):
    x, weight, table = (torch.ones(shape, device=device) for shape in ((4, 2, 128), (128,), (4, 48)))
    good = {"query": x, "key": x, "value": x, "query_weight": weight, "key_weight": weight, "cos": table, "sin": table}
    small = dict.fromkeys(("query", "key", "value"), x[..., :64].contiguous())
    small |= dict.fromkeys(("query_weight", "key_weight"), weight[:64])
    for change, message in (
        ({"cos": table[:, :16], "sin": table[:, :16]}, "16 pairs of 128 channels are turned"),
        (small | {"cos": table[:, :32], "sin": table[:, :32]}, "32 pairs of 64 channels are turned"),
        ({"cos": table.double()}, "angles are torch.float64, torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            norm_pack(**(good | change), eps=1e-5, ranks=2, impl="triton")


@pytest.mark.parametrize("tensors", [2, 3])
def test_machine_code(compile_sm90, tensors):
    types = {"p_cos": "*fp32", "p_sin": "*fp32", "eps": "fp32"}
    types |= dict.fromkeys(("p_query", "p_key", "p_value", "p_query_weight", "p_key_weight", "p_out"), "*bf16")
    constants = {"ALL_HEADS": 56, "HEADS": 28, "T": tensors, "ROTARY": 96, "D": 128, "PAIRS": PAIRS}
    if tensors == 2:
        constants["p_value"] = None
    code = compile_sm90(_norm_pack_kernel, types, constants, num_warps=4)
    assert code.stack_bytes == 0
    assert code.registers <= 72  # seven programs share a multiprocessor
    assert code.count("LDG") == code.count("LDG.E.128") == 2 * tensors + 8  # 4 of angles, 4 of weights
    assert code.count("STG") == code.count("STG.E.128") == 2 * tensors
    assert code.count("STS") == code.count("BAR") == 0
    assert code.count("SHFL") == 6  # the sums of squares
    assert code.count(r"F2F\.") == 0
