"""Deals the rows of the packed sequence out to the ranks around the transformer's block stack, from outside.

The same places as diffusers' `_cp_plan` of MiniMax-H3: rows are dealt out at the first block and collected behind
the two output heads, everything indexed by row follows. Embeddings and the text refiner run on every rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import nn

from solgen.parallel.ulysses import Ulysses


@contextmanager
def sharded(transformer: MiniMaxH3Transformer3DModel, ulysses: Ulysses | None) -> Iterator[None]:
    """Give every rank its rows while the body runs; with `ulysses` None nothing changes."""
    if ulysses is None:
        yield
        return

    def deal_angles(_module: nn.Module, _inputs: Any, angles: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(ulysses.local(table, 0) for table in angles)

    def deal_rows(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_states, *others = inputs
        return ulysses.local(hidden_states, 1), *others

    def deal_indices(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_states, time_embedding, indices, *others = inputs
        return hidden_states, time_embedding, ulysses.local(indices, 0), *others

    def collect(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return ulysses.gather(output)

    blocks = transformer.transformer_blocks
    handles = [
        transformer.rope.register_forward_hook(deal_angles),
        blocks[0].register_forward_pre_hook(deal_rows),
        *(module.register_forward_pre_hook(deal_indices) for module in (*blocks, transformer.norm_out)),
        *(head.register_forward_hook(collect) for head in (transformer.proj_out, transformer.audio_proj_out)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
