"""HyperFlow's two-time conditioning: e_t + gate (e_r - e_t), where r is the time that the step ends at.

Timesteps become pairs [n, 2] of (t, r). Rows that no step moves, such as keyframes and references, have r = t.
"""

import copy

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.modeling_utils import get_parameter_dtype
from torch import Tensor, nn


class PairFeatures(nn.Module):
    """Sinusoidal features of (t, r) pairs, [n, 2] -> [n, 2, C], by the model's own features of single times."""

    def __init__(self, single: nn.Module) -> None:
        super().__init__()
        self.single = single

    def forward(self, times: Tensor) -> Tensor:
        """Features of `times` [n, 2]."""
        assert times.ndim == 2, "a two-time model takes pairs (t, r)"
        return self.single(times.flatten()).unflatten(0, times.shape)


class TwoTimeEmbedder(nn.Module):
    """The time embedder of a two-time model, [n, 2, C] -> [n, D].

    Attributes:
        start: Embeds t.
        endpoint: Embeds r.
        gate: Share of the difference between the two.
    """

    def __init__(self, start: nn.Module, endpoint: nn.Module, gate: float) -> None:
        super().__init__()
        self.start = start
        self.endpoint = endpoint
        self.gate = gate

    def forward(self, features: Tensor) -> Tensor:
        """Embedding of (t, r) from the features of both."""
        start = self.start(features[:, 0])
        return start + self.gate * (self.endpoint(features[:, 1]) - start)


def add_endpoint(transformer: MiniMaxH3Transformer3DModel) -> None:
    """Give a transformer the second embedder that a two-time adapter changes: a copy of the first, unused so far."""
    transformer.endpoint_time_embedder = copy.deepcopy(transformer.time_embedder)


def use_two_times(transformer: MiniMaxH3Transformer3DModel, gate: float) -> None:
    """Make a transformer with both embedders take (t, r) pairs as its timesteps."""
    transformer.time_proj = PairFeatures(transformer.time_proj)
    transformer.time_embedder = TwoTimeEmbedder(transformer.time_embedder, transformer.endpoint_time_embedder, gate)
    del transformer.endpoint_time_embedder


def takes_two_times(transformer: MiniMaxH3Transformer3DModel) -> bool:
    """Whether its timesteps are (t, r) pairs."""
    return isinstance(transformer.time_embedder, TwoTimeEmbedder)


def time_embedding(transformer: MiniMaxH3Transformer3DModel, times: Tensor) -> Tensor:
    """The embedding that every AdaLN projection reads; a table of their outputs is built from it.

    Args:
        transformer: With one time embedder or two.
        times: [n], or pairs (t, r) [n, 2] for a two-time model, fp32 within 0 to 1.

    Returns:
        [n, D] in the type of the time embedder, as the transformer itself computes it.
    """
    features = transformer.time_proj(times)
    return transformer.time_embedder(features.to(get_parameter_dtype(transformer.time_embedder)))


def pair_times(start: tuple[Tensor, Tensor], endpoint: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Join two assignments of times to rows into one of distinct pairs.

    Args:
        start: Distinct values of t [a], and the index of every row into them [N].
        endpoint: The same for r [b], [N].

    Returns:
        Distinct pairs (t, r) [n, 2] and the index of every row into them [N].
    """
    (starts, start_index), (ends, end_index) = start, endpoint
    codes, index = torch.unique(start_index * len(ends) + end_index, return_inverse=True)
    return torch.stack([starts[codes // len(ends)], ends[codes % len(ends)]], dim=1), index
