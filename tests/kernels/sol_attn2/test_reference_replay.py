"""The FP8 reference against a sequential replay: online tiles, stored bytes, and the backward in closed form.

The replay works on one head in float64 with the reference's quantised operands and route. It visits the tiles one by
one with rescaled accumulators, as a kernel does, and differentiates by the formulas of specification section 5.
"""

import math
from dataclasses import dataclass, field

import pytest
import torch

from solgen.kernels.sol_attn2 import SolAttn2Config
from solgen.kernels.sol_attn2.reference.blocks import make_blocks, mixed_blocks
from solgen.kernels.sol_attn2.reference.forward import sol_attn2_reference
from solgen.kernels.sol_attn2.reference.quantise import quantise
from solgen.kernels.sol_attn2.reference.router import router_means
from tests.kernels.sol_attn2.dense_oracle import make_inputs

TABLE = torch.arange(121, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
SCALE = 128**-0.5
CODES_PER_NAT = 8 / math.log(2)
NUM_ROWS = 64 * 5 + 37


@dataclass
class Sums:
    """Online sums of one query block, and what its backward needs of every tile."""

    offset: int
    shadow: str
    pivot: torch.Tensor | None = None
    total: torch.Tensor | float = 0.0
    values: torch.Tensor | float = 0.0
    tiles: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    moves: int = 0

    def add(self, x8, columns):
        """Take one tile of scores [64, T], in codes, and its value rows [T, D]."""
        top = x8.amax(-1) / 8
        if self.pivot is None:
            self.pivot = top.ceil()
        else:
            moved = torch.where(top > self.pivot + 8 - self.offset, top.ceil(), self.pivot)
            self.moves += int((moved != self.pivot).sum())
            down = 2.0 ** (self.pivot - moved)
            self.total, self.values = self.total * down, self.values * down[:, None]
            self.pivot = moved
        x = (x8 + (55.65 + 8 * self.offset - 8 * self.pivot[:, None])).float().double()
        weights = TABLE[x.round().clamp(0, 120).long()]
        self.total = self.total + weights.sum(-1)
        self.values = self.values + weights @ columns
        slope = 2.0 ** ((x / 8).floor().clamp(min=1) - 7) if self.shadow == "linear" else math.log(2) * weights
        self.tiles.append((weights, slope * ((x >= 0) & (x <= 120)), self.pivot))

    def final(self, tile):
        """Probabilities and slopes of a tile [64, T] under the last pivot."""
        weights, slope, pivot = self.tiles[tile]
        shift = (2.0 ** (pivot - self.pivot))[:, None]
        return weights * shift, slope * shift


def replay(query, key, value, kept, config, upstream):
    """Output [N, D] and gradients of query, key and value for `upstream` [N, D]."""
    blocks = make_blocks(NUM_ROWS, mixed_blocks(None, NUM_ROWS, query.device), torch.float64)
    rows = [blocks.split(x) for x in (query, key, value)]
    q_units, k_units, v_units = (router_means(x, blocks, "fp8").flatten(0, 1) for x in rows)
    zero = torch.zeros(128, dtype=torch.float64)
    mu = key.float().mean(0).double() if config.smooth_key else zero
    nu = value.float().mean(0).double() if config.smooth_value else zero
    q_codes, q_scale = quantise(rows[0], (1, 2))
    k_codes, k_scale = quantise(blocks.split(key - mu), (1, 2))
    v_codes, v_scale = quantise(blocks.split(value - nu), (0, 1, 2))
    q_hat, k_hat, v_hat = q_codes * q_scale, k_codes * k_scale, v_codes * v_scale
    counts, upstream = blocks.unit_counts.flatten(), blocks.split(upstream)
    output, moves = torch.zeros_like(rows[0]), 0
    d_q, d_k, d_v = (torch.zeros_like(x) for x in rows)

    for i in range(blocks.num_blocks):
        tokens, tail = Sums(config.offset, config.shadow), Sums(config.offset, config.shadow)
        tiles = kept[i].nonzero().flatten().tolist()
        for j in tiles:
            length = min(64, NUM_ROWS - 64 * j)
            factor = q_scale[i].double() * k_scale[j] * CODES_PER_NAT * SCALE
            tokens.add((q_codes[i] @ k_codes[j][:length].T) * factor, v_hat[j][:length])
        slots = [j for j in range(blocks.num_blocks) if not kept[i, j]] if config.tail == "slots" else []
        if slots:
            real = int(blocks.block_counts[i])
            anchor = (q_units[8 * i : 8 * i + 8] * counts[8 * i : 8 * i + 8, None]).sum(0) / real
            anchor_hat = q_hat[i].sum(0) / real
            unit_weights, log_mass = [], []  # six blocks in 64 slots: every block has its own
            for j in slots:
                units = slice(8 * j, 8 * j + 8)
                z = SCALE * k_units[units] @ anchor + counts[units].log()
                rounded = (z - z.max()).exp().half().double()
                log_mass.append(z.max() + rounded.sum().log())
                unit_weights.append(rounded / rounded.sum())
            pairs = list(zip(unit_weights, slots, strict=True))
            k_f = torch.stack([p @ k_units[8 * j : 8 * j + 8] for p, j in pairs])
            v_f = torch.stack([p @ v_units[8 * j : 8 * j + 8] for p, j in pairs])
            f_codes, f_scale = quantise((k_f - mu).half().double(), (0, 1))
            k_f_hat = f_codes * f_scale
            v_f_hat = quantise(v_f - nu, (0, 1), v_scale[0])[0] * v_scale[0]
            bias = torch.stack(log_mass) - SCALE * anchor @ mu - SCALE * k_f_hat @ anchor_hat
            factor = q_scale[i].double() * f_scale * CODES_PER_NAT * SCALE
            tail.add(((q_codes[i] @ f_codes.T) * factor + CODES_PER_NAT * bias).float().double(), v_f_hat)

        join = 1.0
        total, summed = tokens.total, tokens.values
        if slots and tiles:
            join = 2.0 ** (tail.pivot - tokens.pivot).clamp(-100, 100)
            total, summed = total + join * tail.total, summed + join[:, None] * tail.values
            join = join[:, None]
        elif slots:
            total, summed = tail.total, tail.values
        centred = summed / total[:, None]  # the output before the mean value is added back
        output[i] = centred + nu
        moves += tokens.moves

        along = (upstream[i] * centred).sum(-1, keepdim=True)
        for number, j in enumerate(tiles):
            weights, slope = tokens.final(number)
            length = weights.shape[1]
            d_s = math.log2(math.e) * slope * (upstream[i] @ v_hat[j][:length].T - along) / total[:, None]
            d_q[i] += SCALE * d_s @ k_hat[j][:length]
            d_k[j][:length] += SCALE * d_s.T @ q_hat[i]
            d_v[j][:length] += weights.T @ (upstream[i] / total[:, None])
        if slots:
            weights, slope = tail.final(0)
            d_s = join * math.log2(math.e) * slope * (upstream[i] @ v_f_hat.T - along) / total[:, None]
            g_b, g_v = d_s.sum(0), (join * weights).T @ (upstream[i] / total[:, None])
            g_k = SCALE * (d_s.T @ q_hat[i] - g_b[:, None] * anchor_hat)
            d_q[i] += SCALE * d_s @ k_f_hat
            d_anchor = -SCALE * (g_b @ k_f_hat + g_b.sum() * mu)
            for c, (p, j) in enumerate(pairs):
                units = slice(8 * j, 8 * j + 8)
                d_z = p * (g_b[c] + (k_units[units] - k_f[c]) @ g_k[c] + (v_units[units] - v_f[c]) @ g_v[c])
                per_row = 1 / counts[units].clamp(min=1)[:, None]
                d_k[j] += ((p[:, None] * g_k[c] + SCALE * d_z[:, None] * anchor) * per_row).repeat_interleave(8, 0)
                d_v[j] += (p[:, None] * g_v[c] * per_row).repeat_interleave(8, 0)
                d_anchor = d_anchor + SCALE * d_z @ k_units[units]
            d_q[i] += d_anchor / real
    return [x.flatten(0, 1)[:NUM_ROWS] for x in (output, d_q, d_k, d_v)], moves


@pytest.fixture
def inputs():
    """Blocks of unlike mass, scores that grow along the sequence so that pivots move, a common key and value."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = torch.randn(3, NUM_ROWS, 128, generator=generator, dtype=torch.float64)
    growth = torch.linspace(0.3, 2.5, NUM_ROWS, dtype=torch.float64)[:, None]
    centres = torch.randn(6, 128, generator=generator, dtype=torch.float64).repeat_interleave(64, dim=0)[:NUM_ROWS]
    return 1.5 * query + 0.7 * centres.roll(64, 0), key * growth + 0.2 * centres + 0.5, value + 1


@pytest.mark.parametrize("shadow", ["linear", "smooth"])
@pytest.mark.parametrize(
    ("tail", "epsilon", "offset", "smooth"),
    [
        ("none", -math.inf, 7, True),
        ("none", -math.inf, 4, False),
        ("slots", -0.5, 7, True),
        ("slots", -0.5, 4, False),
        ("slots", math.inf, 0, True),
    ],
    ids=["dense", "dense-unsmoothed", "slots", "slots-unsmoothed", "tail-only"],
)
def test_forward_and_backward_equal_the_replay(inputs, shadow, tail, epsilon, offset, smooth):
    config = SolAttn2Config(
        epsilon=epsilon, tail=tail, offset=offset, smooth_key=smooth, smooth_value=smooth, shadow=shadow
    )
    leaves = [x[None, None].clone().requires_grad_() for x in inputs]
    output, details = sol_attn2_reference(*leaves, config=config, video_rows=None, scale=None)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    gradients = torch.autograd.grad(output, leaves, upstream)
    expected, moves = replay(*inputs, details.route[0, 0], config, upstream[0, 0])
    # A code on a rounding edge may differ: FP32 values of scores whose float64 sums were taken in another order.
    for name, got, want in zip("oqkv", (output, *gradients), expected, strict=True):
        assert (got[0, 0] - want).norm() / want.norm() < 1e-12, name
    if tail == "none":
        assert moves > 0
    if epsilon == -0.5:
        assert 0.2 < float(details.density) < 0.8


def test_forward_is_the_same_with_and_without_gradients(inputs):
    config = SolAttn2Config(epsilon=0.0)
    leaves = [x[None, None].float().requires_grad_() for x in inputs]
    with_gradients = sol_attn2_reference(*leaves, config=config, video_rows=None, scale=None)[0]
    with torch.no_grad():
        without = sol_attn2_reference(*leaves, config=config, video_rows=None, scale=None)[0]
    assert torch.equal(with_gradients, without)


@pytest.mark.parametrize("tail", ["slots", "anchors", "whole", "none"])
@pytest.mark.parametrize("text_row", [None, 100], ids=["video", "mixed"])
def test_gradcheck_of_the_exact_reference(tail, text_row):
    num_rows = 64 * 2 + 21
    leaves = [x.requires_grad_() for x in make_inputs(num_rows, head_dim=3, seed=5)]
    video = torch.ones(num_rows, dtype=torch.bool)
    if text_row is not None:
        video[text_row] = False
    config = SolAttn2Config(epsilon=0.0, tail=tail, precision="exact")

    def attend(query, key, value):
        return sol_attn2_reference(query, key, value, config=config, video_rows=video, scale=None)[0]

    route = sol_attn2_reference(*leaves, config=config, video_rows=video, scale=None)[1].route
    assert route.any()
    assert not route.all()
    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


def test_anchor_tail_reaches_every_gradient(inputs):
    config = SolAttn2Config(epsilon=math.inf, tail="anchors")
    leaves = [x[None, None].clone().requires_grad_() for x in inputs]
    output = sol_attn2_reference(*leaves, config=config, video_rows=None, scale=None)[0]
    for gradient in torch.autograd.grad(output.square().sum(), leaves):
        assert gradient.isfinite().all()
        assert (gradient.abs().amax(-1) > 0).all()
