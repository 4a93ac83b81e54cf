"""The unquantised reference against dense attention and against the specification written as loops."""

import math
from itertools import product

import pytest
import torch

from solgen.kernels.sol_attn2 import SolAttn2Config, sol_attn2
from solgen.kernels.sol_attn2.reference.forward import sol_attn2_reference
from tests.kernels.sol_attn2.dense_oracle import dense_attention, make_inputs

KEEP_ALL = SolAttn2Config(epsilon=-math.inf, tail="none", precision="exact")


@pytest.mark.parametrize(
    ("num_rows", "heads"),
    [(1, 14), (7, 7), (63, 1), (64, 1), (65, 7), (127, 14), (1001, 1), pytest.param(4095, 1, marks=pytest.mark.slow)],
)
def test_all_blocks_kept_equals_dense(num_rows, heads):
    inputs = make_inputs(num_rows, heads)
    output, details = sol_attn2(*inputs, config=KEEP_ALL, details=True)
    assert (output - dense_attention(*inputs)).abs().max() < 1e-12
    scores = inputs[0] @ inputs[1].transpose(-1, -2) / math.sqrt(128)
    assert (details.lse - scores.logsumexp(-1)).abs().max() < 1e-12
    assert details.route.all()


def test_last_block_of_any_length_equals_dense():
    for tokens in range(1, 64):
        inputs = make_inputs(64 + tokens)
        output = sol_attn2(*inputs, config=KEEP_ALL)
        assert (output - dense_attention(*inputs)).abs().max() < 1e-12, tokens


def loop_attention(query, key, value, video, config):
    """Specification sections 1 and 2 for one head [N, D], token by token; returns output and route."""
    num_rows, width = query.shape
    scale, num_blocks = width**-0.5, -(-num_rows // 64)
    blocks = [range(64 * j, min(64 * j + 64, num_rows)) for j in range(num_blocks)]
    units = [[range(u, min(u + 8, b.stop)) for u in range(b.start, b.stop, 8)] for b in blocks]

    def mean(rows, x):
        return x[list(rows)].mean(0)

    mass = torch.empty(num_blocks, num_blocks, dtype=torch.float64)
    for i, j in product(range(num_blocks), repeat=2):
        weighted = sum(
            len(a) * len(b) * math.exp(scale * float(mean(a, query) @ mean(b, key)))
            for a, b in product(units[i], units[j])
        )
        mass[i, j] = math.log(len(blocks[j])) + math.log(weighted / (len(blocks[i]) * len(blocks[j])))
    route = mass - mass.logsumexp(-1, keepdim=True) > config.epsilon - math.log(num_blocks)
    mixed = torch.tensor([not video[list(b)].all() for b in blocks])
    route |= mixed[:, None]

    anchors, slots = {"slots": (1, 64), "anchors": (8, 8), "none": (1, 0)}[config.tail]
    output = torch.empty_like(query)
    for row in range(num_rows):
        i = row // 64
        group = (row % 64) * anchors // 64
        served = [r for r in blocks[i] if (r % 64) * anchors // 64 == group]
        anchor = mean(served, query)
        weights, values = [], []
        for j in range(num_blocks):
            if route[i, j]:
                for token in blocks[j]:
                    weights.append(math.exp(scale * float(query[row] @ key[token])))
                    values.append(value[token])
        for slot in range(slots):
            folded = [j for j in range(num_blocks) if not route[i, j] and slots * j // num_blocks == slot]
            members = [unit for j in folded for unit in units[j]]
            if not members:
                continue
            w = key.new_tensor([len(u) * math.exp(scale * float(anchor @ mean(u, key))) for u in members])
            k = (w[:, None] * torch.stack([mean(u, key) for u in members])).sum(0) / w.sum()
            v = (w[:, None] * torch.stack([mean(u, value) for u in members])).sum(0) / w.sum()
            weights.append(float(w.sum()) * math.exp(scale * float((query[row] - anchor) @ k)))
            values.append(v)
        total = torch.tensor(weights, dtype=torch.float64)
        output[row] = (total[:, None] * torch.stack(values)).sum(0) / total.sum() if weights else 0.0
    return output, route


@pytest.mark.parametrize("tail", ["slots", "anchors", "none"])
@pytest.mark.parametrize(
    ("num_rows", "epsilon", "text_row"),
    [(196, 0.0, None), (193, 0.1, 100), (127, 0.02, None), (64 * 9 + 12, 0.05, 300), (40, 0.47, None)],
    ids=["last-4", "last-1-text", "last-63", "two-blocks-a-slot", "one-block"],
)
def test_matches_the_specification_in_loops(tail, num_rows, epsilon, text_row):
    query, key, value = make_inputs(num_rows, head_dim=4)
    query, key = 2 * query, 2 * key
    video = torch.ones(num_rows, dtype=torch.bool)
    if text_row is not None:
        video[text_row] = False
    config = SolAttn2Config(epsilon=epsilon, tail=tail, precision="exact")
    output, details = sol_attn2_reference(query, key, value, config=config, video_rows=video, scale=None)
    expected, route = loop_attention(query[0, 0], key[0, 0], value[0, 0], video, config)
    assert torch.equal(details.route[0, 0], route)
    assert (output[0, 0] - expected).abs().max() < 1e-12


@pytest.mark.parametrize(("tail", "blocks"), [("slots", 6), ("anchors", 6), ("slots", 64), ("whole", 5)])
def test_tail_is_exact_where_the_keys_of_a_slot_agree(tail, blocks):
    query, key, value = make_inputs(64 * blocks)
    per_slot = key[:, :, ::64] if tail != "whole" else key[:, :, :1].expand(-1, -1, blocks, -1)
    key = per_slot.repeat_interleave(64, dim=2)
    config = SolAttn2Config(epsilon=math.inf, tail=tail, precision="exact")
    output, details = sol_attn2(query, key, value, config=config, details=True)
    assert not details.route.any()
    assert (output - dense_attention(query, key, value)).abs().max() < 1e-12


def test_whole_tail_groups_by_projection_on_the_anchor():
    query, key, value = make_inputs(64)
    config = SolAttn2Config(epsilon=math.inf, tail="whole", precision="exact")
    output = sol_attn2(query, key, value, config=config)
    for rows in (slice(0, 32), slice(32, 64)):
        anchor = query[0, 0, rows].mean(0)
        projection = key[0, 0] @ anchor
        above = projection > projection.mean()
        counts = torch.stack((above.sum(), (~above).sum())).double()
        keys = torch.stack((key[0, 0][above].mean(0), key[0, 0][~above].mean(0)))
        values = torch.stack((value[0, 0][above].mean(0), value[0, 0][~above].mean(0)))
        weights = counts * (keys @ anchor / math.sqrt(128)).exp()
        expected = (weights @ values) / weights.sum()  # one surrogate alone: its value, for every row
        assert (output[0, 0, rows] - expected).abs().max() < 1e-12


def test_text_and_audio_query_blocks_are_dense():
    inputs = make_inputs(330)
    video = torch.ones(330, dtype=torch.bool)
    video[[70, 320]] = False  # blocks 1 and 5
    config = SolAttn2Config(epsilon=math.inf, tail="slots", precision="exact")
    output, details = sol_attn2(*inputs, config=config, video_rows=video, details=True)
    difference = (output - dense_attention(*inputs)).abs().amax((0, 1, 3))
    assert difference[64:128].max() < 1e-12
    assert difference[320:].max() < 1e-12
    assert difference[:64].min() > 1e-3
    assert details.route.sum(-1).tolist() == [[[0, 6, 0, 0, 0, 6]]]


def test_only_text_rows_is_dense():
    inputs = make_inputs(100)
    config = SolAttn2Config(epsilon=math.inf, precision="exact")
    output, details = sol_attn2(*inputs, config=config, video_rows=torch.zeros(100, dtype=torch.bool), details=True)
    assert (output - dense_attention(*inputs)).abs().max() < 1e-12
    assert details.density.isnan()
    assert details.density_all == 1


def test_row_that_keeps_nothing_without_tail_is_zero():
    for precision in ("exact", "fp8"):
        config = SolAttn2Config(epsilon=math.inf, tail="none", precision=precision)
        output, details = sol_attn2(*make_inputs(100), config=config, details=True)
        assert (output == 0).all()
        assert details.lse.isneginf().all()


@pytest.mark.parametrize("precision", ["exact", "fp8"])
def test_heads_and_batch_entries_are_independent(precision):
    inputs = make_inputs(200, heads=3, batch=2)
    config = SolAttn2Config(epsilon=0.0, precision=precision)
    output = sol_attn2(*inputs, config=config)
    permuted = sol_attn2(*(x[[1, 0]][:, [2, 0, 1]] for x in inputs), config=config)
    assert torch.equal(permuted, output[[1, 0]][:, [2, 0, 1]])


@pytest.mark.parametrize("precision", ["exact", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_views_into_poisoned_memory_give_the_same_bits(precision, dtype):
    inputs = make_inputs(150, heads=2, dtype=dtype)
    packed = torch.full((1, 170, 3, 4, 130), torch.nan, dtype=dtype)
    views = [packed[:, 9:159, part, 1:3, 1:129].transpose(1, 2) for part in range(3)]
    for view, source in zip(views, inputs, strict=True):
        view.copy_(source)
    config = SolAttn2Config(epsilon=0.0, precision=precision)
    first, second = sol_attn2(*inputs, config=config), sol_attn2(*views, config=config)
    assert torch.equal(first, second)
    assert torch.equal(first, sol_attn2(*inputs, config=config))
    assert first.isfinite().all()


def test_scale_multiplies_the_scores():
    query, key, value = make_inputs(150)
    config = SolAttn2Config(epsilon=0.0, precision="exact")
    doubled = sol_attn2(2 * query, key, value, config=config)
    assert (sol_attn2(query, key, value, config=config, scale=2 / math.sqrt(128)) - doubled).abs().max() < 1e-12
