"""The structured inputs: seeded, smooth along cubes, and from diffuse to peaked."""

import torch

from solgen.kernels.sol_attn2 import SolAttn2Config, sol_attn2
from solgen.kernels.structured import Structure, head_gains, positions, structured_qkv


def test_the_same_seed_gives_the_same_heads_whatever_their_number():
    few, many = (structured_qkv(heads, 300, seed=3) for heads in (2, 4))
    assert all(torch.equal(a[:, 0], b[:, 0]) for a, b in zip(few, many, strict=True))
    again = structured_qkv(2, 300, seed=4)
    assert not torch.equal(again[0], few[0])
    assert few[0].dtype == torch.bfloat16
    assert few[0].shape == (1, 2, 300, 128)


def test_blocks_are_cubes():
    place = positions(64 * 130)
    cubes = place.view(130, 64, 3)
    assert (cubes.amax(1) - cubes.amin(1) == 3).all()
    assert len(place.unique(dim=0)) == len(place)


def test_keys_of_a_cube_are_alike():
    _, key, _ = structured_qkv(1, 64 * 70, seed=0, dtype=torch.float32)
    blocks = key[0, 0].view(70, 64, 128)
    assert blocks.var(1).mean() < 0.7 * blocks.flatten(0, 1).var(0).mean()


def test_gains_span_the_range_and_peaked_heads_need_fewer_blocks():
    gains = head_gains(12, Structure())
    assert min(gains) < 0.4
    assert max(gains) > 2.0
    query, key, value = structured_qkv(12, 64 * 40, seed=0, dtype=torch.float32)
    chosen = [gains.index(min(gains)), gains.index(max(gains))]
    inputs = (x[:, chosen] for x in (query, key, value))
    route = sol_attn2(*inputs, config=SolAttn2Config(tail="none", epsilon=0.0), details=True)[1].route
    diffuse, peaked = route.float().mean((0, 2, 3))
    assert peaked < diffuse


def test_the_massive_channel_moves_keys_and_queries():
    query, key, _ = structured_qkv(1, 640, seed=0, dtype=torch.float32, structure=Structure(channel_mean=10.0))
    assert abs(key[..., 5].mean() - 10) < 1.5
    assert query[..., 5].mean() > 2
