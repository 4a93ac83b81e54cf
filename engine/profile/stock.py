"""The stock call for comparison: diffusers' blocks as they come, with cuDNN attention on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.transformers import transformer_minimax_h3
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor
from torch import nn

from solgen.engine.adaln import is_projection
from solgen.engine.dummy import RandomWeights
from solgen.engine.profile.recorder import Recorder


def stock_dense(device: torch.device) -> str:
    """diffusers' name of the attention backend that the stock call runs on."""
    return AttentionBackendName._NATIVE_CUDNN if device.type == "cuda" else AttentionBackendName.NATIVE


@contextmanager
def stock_model(
    transformer: MiniMaxH3Transformer3DModel, device: torch.device, weights: RandomWeights | None
) -> Iterator[None]:
    """Run the transformer as diffusers does while the body runs.

    Args:
        transformer: Any attention processors it has are replaced and stay so.
        device: Where it is.
        weights: Source of AdaLN projections that tables have replaced; None for a model with files.
    """
    for block in transformer.transformer_blocks:
        processor = MiniMaxH3AttnProcessor()
        processor._attention_backend = stock_dense(device)
        block.attn.set_processor(processor)
    replaced = replaced_projections(transformer)
    try:
        for name in replaced:
            assert weights is not None, "nothing to make the projections from"
            transformer.set_submodule(name, weights.projection(name))
        yield
    finally:
        for name, module in replaced.items():
            transformer.set_submodule(name, module)


def replaced_projections(transformer: MiniMaxH3Transformer3DModel) -> dict[str, nn.Module]:
    """What stands in the place of AdaLN projections, by their names."""
    modules = transformer.named_modules()
    return {name: module for name, module in modules if is_projection(name) and not isinstance(module, nn.Linear)}


@contextmanager
def timed_attention(recorder: Recorder) -> Iterator[None]:
    """Time the attention that diffusers' processor dispatches, which no module surrounds."""
    dispatch = transformer_minimax_h3.dispatch_attention_fn

    def timed(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs["backend"] is None:  # the text refiner's
            return dispatch(*args, **kwargs)
        with recorder.span("operator"), recorder.span("dense"):
            return dispatch(*args, **kwargs)

    transformer_minimax_h3.dispatch_attention_fn = timed
    try:
        yield
    finally:
        transformer_minimax_h3.dispatch_attention_fn = dispatch
