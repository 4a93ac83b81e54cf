"""Fused ops and the eager forms that they replace, in pairs on the same inputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.nn import functional

from solgen.kernels.fused import (
    gated_residual,
    gated_residual_norm,
    norm_pack,
    qk_norm_rope,
    rms_norm_modulate,
    swiglu,
)

Tensors = tuple[torch.Tensor, ...]
Form = Callable[..., Any]

EPS = 1e-5
TABLE_ROWS = 9
"""Rows of an AdaLN table: three timesteps of three modalities."""

ROTARY = 96
"""Rotated channels of a head."""

RANKS = 2
"""Ranks that heads are packed for."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of MiniMax-H3's blocks.

    Attributes:
        width: Channels of the residual stream.
        inner: Channels of the feed-forward.
        heads: Attention heads.
        head: Channels of a head.
    """

    width: int = 5376
    inner: int = 14_336
    heads: int = 56
    head: int = 128


@dataclass(frozen=True)
class Pair:
    """One fused op beside its eager form.

    Attributes:
        name: What it computes.
        fused: The op; takes `rowwise` and `fixed` by name.
        eager: The same as the stock model computes it.
        reference: The same, rounding where `fused` rounds; float64 inputs give the exact result.
        rowwise: Inputs with a row for every row of the sequence.
        fixed: The other tensors.
        bytes: Read and written at least: every input and output once.
    """

    name: str
    fused: Form
    eager: Form
    reference: Form
    rowwise: dict[str, torch.Tensor]
    fixed: dict[str, torch.Tensor]
    bytes: int

    def run(self, form: Form) -> Tensors:
        """Outputs of one form."""
        return _tuple(form(**self.rowwise, **self.fixed))

    def expected(self, rows: slice, *, exact: bool) -> Tensors:
        """The reference's outputs for some rows; `exact` in float64."""
        rowwise = {name: tensor[rows] for name, tensor in self.rowwise.items()}
        given = rowwise | self.fixed
        if exact:
            given = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
        return _tuple(self.reference(**given))


def make_pairs(rows: int, sizes: Sizes, seed: int, device: torch.device) -> Iterator[Pair]:
    """The ops of one block on random bf16 inputs, one after the other, so that only one's inputs are alive."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    width, heads = sizes.width, sizes.heads * sizes.head
    shift, scale, gate = normal(TABLE_ROWS, 3 * width).chunk(3, dim=1)
    weight = 1 + 0.1 * normal(width)
    index = torch.randint(0, TABLE_ROWS, (rows,), generator=generator, device=device)
    stream = 2 * rows * width  # bytes of the residual stream
    modulation = {"weight": weight, "scale": scale, "shift": shift}
    yield Pair(
        "norm + modulation",
        *_forms(partial(rms_norm_modulate, eps=EPS), _norm_modulate),
        {"x": normal(rows, width), "index": index},
        modulation,
        2 * stream,
    )
    residuals = {"residual": normal(rows, width), "branch": normal(rows, width), "index": index}
    yield Pair("gated residual", *_forms(gated_residual, _gated_residual), residuals, {"gate": gate}, 3 * stream)
    yield Pair(
        "gated residual + norm + modulation",
        *_forms(partial(gated_residual_norm, eps=EPS), _gated_residual_norm),
        residuals,
        {"gate": gate, **modulation},
        4 * stream,
    )
    del residuals
    packed = {"x": normal(rows, 2 * sizes.inner)}
    yield Pair("SwiGLU", *_forms(swiglu, _swiglu), packed, {}, 6 * rows * sizes.inner)
    del packed
    query, key, value = normal(rows, 3, sizes.heads, sizes.head).unbind(1)
    turns = torch.rand(rows, ROTARY // 2, generator=generator, device=device) * 60
    weights = {name: 1 + 0.1 * normal(sizes.head) for name in ("query_weight", "key_weight")}
    yield Pair(
        "qk-norm + rotary + packing",
        *_forms(_norm_pack, _norm_rope_copy),
        {"query": query, "key": key, "value": value, "cos": turns.cos(), "sin": turns.sin()},
        weights,
        12 * rows * heads + 4 * rows * ROTARY,
    )
    turns = torch.cat([turns, turns], dim=1)
    yield Pair(
        "qk-norm + rotary",
        *_forms(partial(qk_norm_rope, eps=EPS), _norm_rope),
        {"query": query, "key": key, "cos": turns.cos(), "sin": turns.sin()},
        weights,
        8 * rows * heads + 8 * rows * ROTARY,
    )
    del query, key, turns
    yield Pair(
        "QKV as one product",
        functional.linear,
        _three_products,
        _three_products,
        {"input": normal(rows, width)},
        {"weight": normal(3 * heads, width) / width**0.5},
        stream + 6 * heads * (rows + width),
    )


def _forms(op: Form, eager: Form) -> tuple[Form, Form, Form]:
    """A fused op, its eager form and its reference."""
    return op, eager, partial(op, impl="reference")


def _tuple(outputs: Any) -> Tensors:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _norm_modulate(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    normed = functional.rms_norm(x, weight.shape, weight, EPS)
    return normed * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index)


def _gated_residual(
    residual: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    return residual + gate.index_select(0, index) * branch


def _gated_residual_norm(
    residual: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, index: torch.Tensor, **modulation: torch.Tensor
) -> Tensors:
    hidden = _gated_residual(residual, branch, gate, index)
    return hidden, _norm_modulate(hidden, index=index, **modulation)


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    value, gate = x.chunk(2, dim=-1)
    return value * functional.silu(gate)


def _norm_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> Tensors:
    def rotate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = functional.rms_norm(x, weight.shape, weight, EPS)
        rotary, rest = x[..., :ROTARY], x[..., ROTARY:]
        wide_cos, wide_sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
        first, second = rotary.chunk(2, dim=-1)
        rotary = rotary * wide_cos + torch.cat((-second, first), dim=-1) * wide_sin
        return torch.cat((rotary, rest), dim=-1).contiguous()

    return rotate(query, query_weight), rotate(key, key_weight)


def _norm_pack(impl: Literal["reference"] | None = None, **inputs: torch.Tensor) -> torch.Tensor:
    """[n, P, ...], so that rows come first."""
    return norm_pack(**inputs, eps=EPS, ranks=RANKS, impl=impl).transpose(0, 1)


def _norm_rope_copy(value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    cos, sin = (torch.cat([table, table], dim=1) for table in (cos, sin))
    rows, heads, width = value.shape
    packed = value.new_empty(RANKS, rows, heads // RANKS, 3, width)
    for index, tensor in enumerate((*_norm_rope(cos=cos, sin=sin, **inputs), value)):
        packed[..., index, :] = tensor.unflatten(1, (RANKS, -1)).transpose(0, 1)
    return packed.transpose(0, 1)


def _three_products(input: torch.Tensor, weight: torch.Tensor) -> Tensors:
    return tuple(functional.linear(input, part) for part in weight.chunk(3))
