"""The public entry: arguments it refuses, and dispatch."""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch

from solgen.kernels.sol_attn2 import NormRope, SolAttn2Config, SolAttn2Details, sol_attn2
from solgen.kernels.sol_attn2.details import pack_route, unpack_route
from tests.kernels.sol_attn2.dense_oracle import make_inputs

CONFIG = SolAttn2Config()


def test_details_come_on_request():
    inputs = make_inputs(130, heads=2, batch=3, dtype=torch.float32)
    output = sol_attn2(*inputs, config=CONFIG)
    again, details = sol_attn2(*inputs, config=CONFIG, details=True)
    assert torch.equal(output, again)
    assert isinstance(details, SolAttn2Details)
    assert output.shape == (3, 2, 130, 128)
    assert details.lse.shape == (3, 2, 130)
    assert details.route.shape == (3, 2, 3, 3)
    assert details.route.dtype == torch.bool
    assert details.density.shape == details.density_all.shape == ()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_inputs_are_refused(number, bad):
    inputs = make_inputs(100)
    inputs[number][0, 0, 99, 127] = bad
    with pytest.raises(ValueError, match=f"{('query', 'key', 'value')[number]} holds NaN or infinite"):
        sol_attn2(*inputs, config=CONFIG)


@pytest.mark.parametrize("config", [CONFIG, SolAttn2Config(top_k=0.5)], ids=["epsilon", "top_k"])
def test_overflowing_router_scores_are_refused(config):
    query, key, value = make_inputs(100, dtype=torch.float32)
    query[0, 0, :8] = 1e5  # a mean beyond FP16
    with pytest.raises(ValueError, match="router scores are not finite"):
        sol_attn2(query, key, value, config=config)


def _refused(match, query=None, key=None, value=None, **arguments):
    query_, key_, value_ = make_inputs(100, dtype=torch.float32)
    with pytest.raises(ValueError, match=match):
        sol_attn2(
            query_ if query is None else query,
            key_ if key is None else key,
            value_ if value is None else value,
            **{"config": CONFIG, **arguments},
        )


def test_malformed_calls_are_refused():
    _refused("shapes", key=torch.zeros(1, 1, 99, 128))
    _refused("shapes", *[torch.zeros(1, 100, 128)] * 3)
    _refused("head width is 64", *[torch.zeros(1, 1, 100, 64)] * 3)
    _refused("at least one", *[torch.zeros(1, 1, 0, 128)] * 3)
    _refused("dtypes", value=torch.zeros(1, 1, 100, 128, dtype=torch.bfloat16))
    _refused("dtypes", *[torch.zeros(1, 1, 100, 128, dtype=torch.int32)] * 3)
    _refused("video_rows", video_rows=torch.ones(99, dtype=torch.bool))
    _refused("video_rows", video_rows=torch.ones(100))
    _refused("impl is 'cuda'", impl="cuda")


@pytest.mark.parametrize("impl", ["triton", "gluon"])
def test_explicit_gpu_choice_does_not_fall_back(impl):
    _refused(f'impl "{impl}" got tensors on cpu', impl=impl)


def make_norm(rows, **changes):
    generator = torch.Generator().manual_seed(rows)
    weights = torch.randn(2, 128, generator=generator)
    turns = torch.rand(rows, 48, generator=generator) * 6.3
    given = {"query_weight": weights[0], "key_weight": weights[1], "cos": turns.cos(), "sin": turns.sin(), "eps": 1e-5}
    return NormRope(**given | changes)


def test_the_reference_norms_and_rotates_what_lacks_it():
    query, key, value = make_inputs(70, heads=2, batch=2, dtype=torch.float32)
    norm = make_norm(70)
    cos, sin = (torch.cat([table, table], 1) for table in (norm.cos, norm.sin))

    def applied(x, weight):
        u = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * weight
        first, second, rest = u.split([48, 48, 32], dim=-1)
        turned = torch.cat([first, second], -1) * cos + torch.cat([-second, first], -1) * sin
        return torch.cat([turned, rest], -1)

    pytest.importorskip("triton")
    for got, expected in zip(
        norm.apply(query, key), (applied(query, norm.query_weight), applied(key, norm.key_weight)), strict=True
    ):
        torch.testing.assert_close(got, expected)
    output = sol_attn2(query, key, value, config=CONFIG, norm=norm)
    assert torch.equal(output, sol_attn2(*norm.apply(query, key), value, config=CONFIG))


def test_a_norm_that_does_not_fit_is_refused():
    good = make_norm(100)
    for change, message in (
        ({"query_weight": torch.ones(96)}, r"query_weight is \(96,\)"),
        ({"key_weight": torch.ones(256)[::2]}, r"key_weight is \(128,\); expected contiguous"),
        ({"cos": good.cos[:, :40]}, "40 pairs of channels are turned"),
        ({"sin": good.sin[:99]}, r"sin is torch.float32 \(99, 48\)"),
        ({"sin": good.sin.double()}, "sin is torch.float64"),
        ({"cos": good.cos.t().contiguous().t()}, "unit stride along the pairs"),
        ({"eps": 0.0}, "eps is 0.0"),
    ):
        _refused(message, norm=make_norm(100, **change))


def test_configurations_are_checked():
    for name, value in {
        "offset": 8,
        "top_k": 0.0,
        "tail": "mean",
        "precision": "fp4",
        "shadow": "cubic",
        "epsilon": math.nan,
    }.items():
        with pytest.raises(ValueError, match=name):
            SolAttn2Config(**{name: value})
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.epsilon = 0.0


def test_the_reference_does_not_import_triton():
    program = (
        "import sys, torch; from solgen.kernels.sol_attn2 import SolAttn2Config, sol_attn2; "
        "x = torch.randn(1, 1, 70, 128); sol_attn2(x, x, x, config=SolAttn2Config()); "
        "assert not [m for m in sys.modules if m.startswith('solgen.kernels.sol_attn2.triton')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("num_blocks", [1, 31, 32, 33, 100])
def test_routes_pack_and_unpack(num_blocks):
    route = torch.rand(2, 3, num_blocks, num_blocks, generator=torch.Generator().manual_seed(num_blocks)) < 0.5
    packed = pack_route(route)
    assert packed.dtype == torch.int32
    assert packed.shape == (2, 3, num_blocks, -(-num_blocks // 32))
    assert torch.equal(unpack_route(packed, num_blocks), route)
    assert bool(packed[0, 0, 0, 0] & 1) == bool(route[0, 0, 0, 0])
