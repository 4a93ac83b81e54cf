"""The parts of a denoiser call: which modules are timed, and how their spans add up to the call.

Modules outside the blocks, the blocks themselves and, inside a block, the attention, its projections and the
feed-forward layers are timed; a row that has no module of its own is what is left of the module around it.
"""

from collections.abc import Iterator
from typing import Any

from diffusers import MiniMaxH3Transformer3DModel
from torch import nn

from solgen.engine.profile.recorder import Total

EDGES = (
    "rope proj_in audio_proj_in context_embedder time_proj time_embedder token_refiner norm_out proj_out audio_proj_out"
).split()
"""Modules of the transformer outside its blocks."""

OPERATOR = (
    ("prepare", "prepare: quantise, pool"),
    ("route", "route"),
    ("tail", "tail"),
    ("attention", "kernel"),
    ("dense", "dense blocks"),
)
"""Stages of the attention operator and the rows they are shown as."""

ATTENTION = "attention"
COMMUNICATION = "communication"
PROJECTIONS = "QKV and out projections"
FFN = "FFN"
ELEMENTWISE = "norms, modulation, residuals"
ENDS = "embeddings, refiner, heads"
UNATTRIBUTED = "unattributed"


def timed_modules(transformer: MiniMaxH3Transformer3DModel) -> list[tuple[str, nn.Module]]:
    """Modules to watch, with the names that `breakdown` reads."""
    return [("call", transformer), *_timed(transformer)]


def _timed(transformer: MiniMaxH3Transformer3DModel) -> Iterator[tuple[str, nn.Module]]:
    for name in EDGES:
        yield "ends", getattr(transformer, name)
    for block in transformer.transformer_blocks:
        yield "block", block
        yield "adaln", block.adaln_proj
        yield "attention module", block.attn
        for name in ("to_q", "to_k", "to_v"):
            yield "qkv", getattr(block.attn, name)
        yield "out", block.attn.to_out[0]
        yield "swiglu module", block.ff.net[0]
        yield "up", block.ff.net[0].proj
        yield "down", block.ff.net[2]


def breakdown(totals: dict[str, Total]) -> list[dict[str, Any]]:
    """Split a measured call into parts that add up to it.

    Args:
        totals: Spans of one call by name.

    Returns:
        Rows with `name`, `ms`, `calls` (spans in the call; of the block for what is left of it) and `part_of`: the
        row of which it is a part, or None. Rows without `part_of` add up to the call.
    """

    def ms(*names: str) -> float:
        return sum(totals[name].ms for name in names if name in totals)

    def count(name: str) -> int:
        return totals[name].count if name in totals else 0

    exchange = ms("heads", "rows")
    projections, operator = ms("shared rows", "qkv", "out"), ms("operator")
    bookkeeping = operator - ms(*(name for name, _ in OPERATOR))
    swiglu = ms("swiglu module") - ms("up") if count("swiglu module") else 0.0
    feed_forward = ms("up", "down") + swiglu
    rotary = ms("attention module") - projections - operator - ms("heads")
    elementwise = ms("block") - ms("attention module") - feed_forward + rotary
    blocks = count("block")
    rows: list[tuple[str, float, int, str | None]] = [
        (ATTENTION, operator, blocks, None),
        *((label, ms(name), count(name), ATTENTION) for name, label in OPERATOR),
        ("densities", bookkeeping, count("operator"), ATTENTION),
        (PROJECTIONS, projections, blocks, None),
        ("FP8 rows that QKV share", ms("shared rows"), count("shared rows"), PROJECTIONS),
        ("QKV", ms("qkv"), count("qkv"), PROJECTIONS),
        ("out", ms("out"), count("out"), PROJECTIONS),
        (FFN, feed_forward, blocks, None),
        ("up", ms("up"), count("up"), FFN),
        ("SwiGLU", swiglu, blocks, FFN),
        ("down", ms("down"), count("down"), FFN),
        (ELEMENTWISE, elementwise, blocks, None),
        ("AdaLN projections", ms("adaln"), count("adaln"), ELEMENTWISE),
        ("qk norms, rotary", rotary, blocks, ELEMENTWISE),
        ("norms, modulation, residuals of the rows", elementwise - rotary - ms("adaln"), blocks, ELEMENTWISE),
        (COMMUNICATION, exchange, count("heads") + count("rows"), None),
        (ENDS, ms("ends"), 1, None),
        (UNATTRIBUTED, ms("call") - ms("block", "ends", "rows"), 1, None),
    ]
    return [{"name": name, "ms": value, "calls": calls, "part_of": whole} for name, value, calls, whole in rows]
