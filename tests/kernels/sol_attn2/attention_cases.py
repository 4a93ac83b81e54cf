"""Inputs for the FP8 attention kernels, and what they should compute.

Two oracles over the same codes: `exact` is the float64 softmax over kept tokens and surrogates, `fp8` replaces its
exponentials by ExpCast bytes (spec section 4). Both work on chosen query blocks of one head.
"""

import math
from dataclasses import dataclass

import torch

from solgen.kernels.sol_attn2.triton.operands import VALUE_ORDER, Operands, Route, Tail

POISON_BYTES = 4096
CODES_PER_NAT = 8 / math.log(2)


@dataclass(frozen=True)
class Case:
    """One call of an attention kernel; kept is the route as [G, NB, NB] bool."""

    operands: Operands
    route: Route
    tail: Tail | None
    kept: torch.Tensor
    scale: float
    tail_kind: str


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor between bytes of 0xFF: NaN in every float format, -1 in every integer format."""
    raw = tensor.contiguous().view(torch.uint8).flatten()
    buffer = torch.full((raw.numel() + 2 * POISON_BYTES,), 0xFF, dtype=torch.uint8, device=tensor.device)
    inside = buffer[POISON_BYTES : POISON_BYTES + raw.numel()]
    inside.copy_(raw)
    return inside.view(tensor.dtype).view(tensor.shape)


def quantised(values: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes and their scale, one for the elements along `dims`."""
    scale = (values.abs().amax(dims, keepdim=True) / 448).clamp(min=2.0**-64)
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale.squeeze(dims)


def value_tiles(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., 64, D] as tiles [..., D, 64] with columns in VALUE_ORDER."""
    order = VALUE_ORDER.to(codes.device)
    return codes.view(torch.uint8)[..., order, :].transpose(-1, -2).contiguous().view(codes.dtype)


def make_route(kept: torch.Tensor) -> Route:
    """Mask, counts and lists of a route [G, NB, NB]; list entries past the counts are -1."""
    num_blocks = kept.shape[-1]
    words = -(-num_blocks // 32)
    bits = torch.nn.functional.pad(kept, (0, words * 32 - num_blocks)).unflatten(-1, (words, 32))
    weights = 2 ** torch.arange(32, device=kept.device)
    mask = (bits * weights).sum(-1)
    mask = torch.where(mask >= 2**31, mask - 2**32, mask).int()
    counts = kept.sum(-1, dtype=torch.int32)
    blocks = (~kept).to(torch.uint8).argsort(dim=-1, stable=True)
    listed = torch.arange(num_blocks, device=kept.device) < counts.unsqueeze(-1)
    return Route(poisoned(mask), poisoned(counts), poisoned(torch.where(listed, blocks, -1).short()))


def make_tail(kept: torch.Tensor, v_scale: torch.Tensor, kind: str, spread: float, generator: torch.Generator) -> Tail:
    """Surrogates with the mass of what is not kept: small keys, small values, bias near the log of their tokens."""
    heads, num_blocks, _ = kept.shape
    device = kept.device
    shape = (heads, num_blocks, 64, 128)
    per_anchor = 64 if kind == "slots" else 8
    slot = torch.arange(num_blocks, device=device) * per_anchor // num_blocks
    one_hot = torch.nn.functional.one_hot(slot, per_anchor).float()
    tokens = 64 * (~kept).float() @ one_hot
    tokens = tokens.repeat(1, 1, 64 // per_anchor)
    empty = (tokens == 0).unsqueeze(-1)
    keys = (0.3 * spread * torch.randn(shape, generator=generator, device=device)).masked_fill(empty, 0.0)
    values = (0.2 * torch.randn(shape, generator=generator, device=device)).masked_fill(empty, 0.0)
    k_codes, k_scale = quantised(keys, (2, 3))
    v_codes = (values / v_scale.view(-1, 1, 1, 1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    noise = torch.randn(tokens.shape, generator=generator, device=device)
    return Tail(poisoned(k_codes), poisoned(k_scale), poisoned(value_tiles(v_codes)), poisoned(tokens.log() + noise))


def make_case(
    num_heads: int,
    num_rows: int,
    *,
    density: float = 0.3,
    tail_kind: str = "slots",
    spread: float = 1.0,
    kept: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Case:
    """Random codes of `num_heads` heads and a random route with rows that keep no, one and every block.

    Args:
        density: Share of kept pairs in the other rows.
        spread: Standard deviation of the scores in nats.
        kept: Another route, [G, NB, NB] bool.
    """
    generator = torch.Generator(device).manual_seed(seed)
    num_blocks = -(-num_rows // 64)

    def rows() -> torch.Tensor:
        real = torch.randn(num_heads, num_rows, 128, generator=generator, device=device)
        return torch.nn.functional.pad(real, (0, 0, 0, num_blocks * 64 - num_rows)).unflatten(1, (num_blocks, 64))

    q_codes, q_scale = quantised(rows() * spread, (2, 3))
    k_codes, k_scale = quantised(rows(), (2, 3))
    v_codes, v_scale = quantised(rows(), (1, 2, 3))
    if kept is None:
        kept = torch.rand(num_heads, num_blocks, num_blocks, generator=generator, device=device) < density
        kept[:, num_blocks // 2] = True
        kept[:, num_blocks // 3] = False
        kept[:, num_blocks // 3, -1] = True
        if tail_kind != "none":
            kept[:, 0] = False
    kept = kept.to(device)
    nothing = torch.empty(0, dtype=torch.float16, device=device)
    operands = Operands(
        q_codes=poisoned(q_codes.flatten(1, 2)),
        q_scale=poisoned(q_scale),
        k_codes=poisoned(k_codes.flatten(1, 2)),
        k_scale=poisoned(k_scale),
        v_codes=poisoned(value_tiles(v_codes)),
        v_scale=poisoned(v_scale),
        q_units=nothing,
        k_units=nothing,
        v_units=nothing,
        k_mean=poisoned(0.1 * torch.randn(num_heads, 128, generator=generator, device=device)),
        v_mean=poisoned(0.1 * torch.randn(num_heads, 128, generator=generator, device=device)),
        num_rows=num_rows,
    )
    tail = None if tail_kind == "none" else make_tail(kept, v_scale, tail_kind, spread, generator)
    return Case(operands, make_route(kept), tail, kept, 128**-0.5, tail_kind)


def rows_of(tiles: torch.Tensor) -> torch.Tensor:
    """Value codes [..., D, 64] as float64 rows [..., 64, D] in token order."""
    inverse = VALUE_ORDER.argsort().to(tiles.device)
    return tiles.double()[..., inverse].transpose(-1, -2)


def sticky(tile_max: torch.Tensor, offset: int) -> torch.Tensor:
    """Pivots of every tile, visited in order, from row maxima in octaves [R, 64, K]."""
    pivot = tile_max[..., 0].ceil()
    pivots = [pivot]
    for top in tile_max.unbind(-1)[1:]:
        pivot = torch.where(top > pivot + (8 - offset), top.ceil(), pivot)
        pivots.append(pivot)
    return torch.stack(pivots, -1)


def decode(position: torch.Tensor) -> torch.Tensor:
    """Float64 values of the bytes of unrounded codes."""
    return position.round().clamp(0, 120).to(torch.uint8).view(torch.float8_e4m3fn).double()


def oracle(
    case: Case, head: int, query_blocks: list[int], *, fp8: bool, offset: int = 7
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [R, 64, D] and natural-log denominators [R, 64] of some query blocks of one head, float64."""
    ops = case.operands
    outputs, denominators = [], []
    for i in query_blocks:
        q = ops.q_codes[head].double().unflatten(0, (-1, 64))[i]
        q_factor = float(ops.q_scale[head, i]) * case.scale
        scores, values = [q.new_empty(64, 0)], [q.new_empty(0, 128)]
        weights, pivot = [q.new_empty(64, 0)], None
        listed = case.kept[head, i].nonzero().flatten()
        if len(listed):
            k = ops.k_codes[head].unflatten(0, (-1, 64))[listed].double()
            dots = q @ k.transpose(-1, -2)  # [K, 64, 64]
            hidden = listed[:, None] * 64 + torch.arange(64, device=q.device) >= ops.num_rows
            factor = (q_factor * CODES_PER_NAT * ops.k_scale[head, listed]).float().view(-1, 1, 1)
            codes = (dots * factor).masked_fill(hidden.unsqueeze(1), -math.inf)
            pivots = sticky((codes.amax(-1).float() / 8).T, offset)  # [64, K]
            bias = (55.65 + 8 * (offset - pivots)).float().T.unsqueeze(-1)
            pivot = pivots[:, -1]
            weight = decode((codes + bias).float()) * 2.0 ** (pivots - pivot[:, None]).double().T.unsqueeze(-1)
            scores.append((codes / CODES_PER_NAT).transpose(0, 1).flatten(1))
            weights.append(weight.transpose(0, 1).flatten(1))
            values.append(rows_of(ops.v_codes[head, listed]).flatten(0, 1))
        if case.tail is not None:
            dots = q @ case.tail.k_codes[head, i].double().T
            bias = (case.tail.bias[head, i] * CODES_PER_NAT).float().double()
            factor = (q_factor * CODES_PER_NAT * case.tail.k_scale[head, i]).float().double()
            codes = (dots * factor + bias).float()
            if case.tail_kind == "anchors":
                anchor = torch.arange(64, device=q.device) // 8
                codes = codes.masked_fill(anchor[:, None] != anchor, -math.inf)
            own = (codes.amax(-1) / 8).ceil().clamp(min=-(2.0**20))
            pivot = own if pivot is None else pivot
            join = 2.0 ** (own - pivot).clamp(-100, 100).double()
            scores.append(codes.double() / CODES_PER_NAT)
            weights.append(decode(codes + (55.65 + 8 * (offset - own)).float()[:, None]) * join[:, None])
            values.append(rows_of(case.tail.v_codes[head, i]))
        score, weight, value = torch.cat(scores, 1), torch.cat(weights, 1), torch.cat(values)
        if not score.shape[1]:
            outputs.append(torch.zeros(64, 128, dtype=torch.float64, device=q.device))
            denominators.append(torch.full((64,), -math.inf, dtype=torch.float64, device=q.device))
            continue
        if fp8:
            lse = (pivot.double() - offset) * math.log(2) + weight.sum(1).log()
            share = weight / weight.sum(1, keepdim=True)
        else:
            lse = score.logsumexp(1)
            share = (score - lse[:, None]).exp()
        shift = q_factor * q @ ops.k_mean[head].double()
        outputs.append(share @ value * ops.v_scale[head].double() + ops.v_mean[head].double())
        denominators.append(lse + shift)
    return torch.stack(outputs), torch.stack(denominators)


def check_rows(
    case: Case, head: int, query_blocks: list[int], out: torch.Tensor, lse: torch.Tensor, *, offset: int, peaked: bool
) -> None:
    """Hold some rows of a kernel's results to the two error rules of the numerics notes.

    (a) The error against float64 is at most twice the FP8 oracle's. (b) The distance to the FP8 oracle is at most 3e-3
    of it plus 0.15 of the oracle's own error; not asked of peaked rows, where the 14 bits of Hopper's FP8 sums move
    codes of large scores.
    """
    exact, _ = oracle(case, head, query_blocks, fp8=False)
    fp8, fp8_lse = oracle(case, head, query_blocks, fp8=True, offset=offset)
    rows = torch.cat([torch.arange(64 * i, 64 * i + 64) for i in query_blocks])
    real = (rows < case.operands.num_rows).to(out.device)
    rows = rows.to(out.device)[real]
    got, exact, fp8 = out[head][rows].double(), exact.flatten(0, 1)[real], fp8.flatten(0, 1)[real]
    assert got.isfinite().all()
    own = (fp8 - exact).norm()
    rounding = torch.finfo(out.dtype).eps / 2
    assert (got - exact).norm() <= 2 * own + rounding * exact.norm()
    assert peaked or (got - fp8).norm() <= 3e-3 * fp8.norm() + 0.15 * own

    have, want = lse[head][rows].double(), fp8_lse.flatten()[real]
    assert torch.equal(have.isfinite(), want.isfinite())
    difference = (have - want)[want.isfinite()].abs()
    if len(difference):  # one code is 0.087 nats, where one key holds the whole row
        assert difference.amax() <= 0.18
        assert difference.mean() <= 5e-3


def check_attend(attend, case: Case, *, offset: int = 7, peaked: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a kernel twice into poisoned strided outputs and check rows of up to three heads; output and LSE."""
    num_heads, num_blocks, _ = case.kept.shape
    num_rows, device = case.operands.num_rows, case.kept.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # Triton's interpreter truncates to bf16
    results = []
    for _ in range(2):
        buffer = torch.full((num_rows + 2, num_heads + 1, 128), math.nan, dtype=dtype, device=device)
        out = buffer[1:-1, :num_heads].transpose(0, 1)
        around = torch.full((num_heads * num_rows + 8,), math.nan, device=device)
        lse = around[4:-4].view(num_heads, num_rows)
        attend(
            case.operands,
            case.route,
            case.tail,
            out,
            lse,
            scale=case.scale,
            offset=offset,
            tail_kind=case.tail_kind,
        )
        assert buffer[[0, -1]].isnan().all()
        assert buffer[:, num_heads].isnan().all()
        assert around[[3, -4]].isnan().all()
        results.append((out, lse))
    (out, lse), (again, lse_again) = results
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    blocks = {0, 1, num_blocks // 3, num_blocks // 2, num_blocks - 2, num_blocks - 1}
    for head in sorted({0, num_heads // 2, num_heads - 1}):
        chosen = sorted(i for i in blocks if 0 <= i < num_blocks)
        check_rows(case, head, chosen, out, lse, offset=offset, peaked=peaked)
    return out, lse
