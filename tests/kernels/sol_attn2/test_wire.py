"""Operands and outputs that travel between ranks: what arrives is what one rank makes of the same rows."""

import pytest
import torch

from solgen.kernels.sol_attn2 import NonFiniteError, SolAttn2Config, sol_attn2
from solgen.kernels.sol_attn2.triton.operands import Operands
from solgen.kernels.sol_attn2.wire import (
    OUTPUT_BYTES,
    PACKET_BYTES,
    attend_operands,
    channel_statistics,
    join_statistics,
    pack_output,
    pack_rows,
    pack_values,
    unpack_operands,
    unpack_output,
)

HEADS = 3


def inputs(num_rows: int, seed: int = 0) -> list[torch.Tensor]:
    """Query, key and value [1, H, N, 128] as transposed views, keys and values around a mean of their own."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(1, num_rows, HEADS, 3, 128, generator=generator)
    packed += 2 * torch.randn(1, 1, HEADS, 3, 128, generator=generator)
    return [x.transpose(1, 2) for x in packed.unbind(3)]


def sent(tensors: list[torch.Tensor], shares: tuple[int, ...], config: SolAttn2Config, heads: slice) -> Operands:
    """Operands of some heads, from ranks that hold `shares` of the rows."""
    query, key, value = (x.split(shares, dim=2) for x in tensors)
    num_rows = sum(shares)
    of_keys, of_values = (
        join_statistics(torch.stack([channel_statistics(x) for x in parts]), num_rows, smooth=smooth)
        for parts, smooth in ((key, config.smooth_key), (value, config.smooth_value))
    )
    rows = [pack_rows(q, k, of_keys.mean) for q, k in zip(query, key, strict=True)]
    values = [pack_values(v, of_values) for v in value]
    for share, row, part in zip(shares, rows, values, strict=True):
        assert row.shape == (HEADS, -(-share // 64) * PACKET_BYTES["rows"])
        assert part.shape == (HEADS, -(-share // 64) * PACKET_BYTES["values"])
    return unpack_operands(
        [row[heads] for row in rows],
        [part[heads] for part in values],
        num_rows=num_rows,
        key_mean=of_keys.mean[heads],
        value=of_values.heads(heads),
    )


SHARES = [(1,), (65,), (64, 1), (64, 64, 9), (192, 128, 52, 0), (0, 63), (1001,), (512, 489)]


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("smooth", [True, False], ids=["smooth", "plain"])
def test_arriving_operands_attend_as_the_rows_do(shares: tuple[int, ...], smooth: bool) -> None:
    tensors, num_rows = inputs(sum(shares)), sum(shares)
    config = SolAttn2Config(epsilon=0.1, smooth_key=smooth, smooth_value=smooth)
    video = torch.arange(num_rows) < num_rows - 20
    heads = slice(1, 3)
    output, details = attend_operands(
        sent(tensors, shares, config, heads), config=config, dtype=torch.float32, video_rows=video
    )
    expected, whole = sol_attn2(*(x[:, heads] for x in tensors), config=config, video_rows=video, details=True)
    assert torch.equal(details.route, whole.route)
    # The ranks' sums of keys and values are added in another order: an ulp of a mean, which moves few codes.
    assert (output - expected).norm() <= (1e-3 if smooth else 1e-6) * expected.norm()
    assert details.density == whole.density or whole.density.isnan()


@pytest.mark.parametrize("shares", [(64, 64, 9), (192, 128, 52, 0)], ids=str)
def test_any_split_makes_the_same_operands(shares: tuple[int, ...]) -> None:
    """Without means, nothing depends on the order of a sum."""
    tensors = inputs(sum(shares), seed=1)
    config = SolAttn2Config(smooth_key=False, smooth_value=False)
    found, alone = (sent(tensors, split, config, slice(0, 3)) for split in (shares, (sum(shares),)))
    for name, value in vars(alone).items():
        other = getattr(found, name)
        assert torch.equal(value.float(), other.float()) if torch.is_tensor(value) else value == other, name


@pytest.mark.parametrize("tail", ["anchors", "none"])
def test_every_tail(tail: str) -> None:
    tensors = inputs(300, seed=2)
    config = SolAttn2Config(epsilon=0.0, tail=tail, smooth_key=False, smooth_value=False)
    output, _ = attend_operands(sent(tensors, (128, 172), config, slice(0, 3)), config=config, dtype=torch.float32)
    expected = sol_attn2(*tensors, config=config)
    assert (output - expected).norm() <= 1e-6 * expected.norm()


def test_no_rows_have_no_statistics_and_extremes_survive() -> None:
    value = torch.zeros(1, 2, 70, 128)
    value[0, 1, 3, 5] = 1e4
    parts = torch.stack([channel_statistics(x) for x in value.split([64, 6, 0], dim=2)])
    found = join_statistics(parts, 70, smooth=True)
    assert found.scale[0] == 2.0**-64
    assert found.mean[1, 5] == pytest.approx(1e4 / 70)
    assert found.scale[1] == pytest.approx((1e4 - 1e4 / 70) / 448)


def test_a_score_that_is_not_finite_is_refused_and_other_tails_too() -> None:
    tensors = inputs(70)
    tensors[0][0, 0, 3, 3] = torch.nan
    config = SolAttn2Config()
    operands = sent(tensors, (64, 6), config, slice(0, 1))
    with pytest.raises(NonFiniteError):
        attend_operands(operands, config=config, dtype=torch.float32)
    with pytest.raises(ValueError, match="expected fp8, not whole"):
        attend_operands(operands, config=SolAttn2Config(tail="whole"), dtype=torch.float32)
    with pytest.raises(ValueError, match="expected CUDA"):
        attend_operands(operands, config=config, dtype=torch.float32, impl="triton")


@pytest.mark.parametrize("num_rows", [0, 1, 65, 201])
def test_the_output_comes_back_within_half_a_step(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    mean = 5 * torch.randn(4, 128, generator=generator)
    x = mean + torch.randn(num_rows, 4, 128, generator=generator) ** 3
    packets = torch.stack([pack_output(x[:, pair], mean[pair]) for pair in (slice(0, 2), slice(2, 4))])
    assert packets.shape == (2, num_rows, 2 * OUTPUT_BYTES)
    back = unpack_output(packets, mean, torch.float32)
    spread = x - mean
    # Half a step of E4M3: 2^-4 of the number, 2^-10 of the scale below the normal ones.
    step = (2**-4 * spread.abs()).maximum(2**-10 / 448 * spread.abs().amax(2, keepdim=True))
    rounding = 2**-21 * (x.abs() + mean.abs())
    assert ((back - x).abs() <= step * (1 + 2**-20) + rounding).all()


def test_output_that_is_not_finite_stays_so() -> None:
    x = torch.zeros(2, 1, 128)
    x[1, 0, 7] = torch.nan
    mean = torch.zeros(1, 128)
    back = unpack_output(pack_output(x, mean)[None], mean, torch.bfloat16)
    assert back[0].eq(0).all()
    assert back[1].isnan().any()
