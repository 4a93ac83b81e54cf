"""Adapters as branches: W x + sum of strength alpha / rank B (A x), with the weights as they are."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from solgen.engine.adapters.merge import Delta


class BranchLinear(nn.Module):
    """A linear layer with low-rank branches beside it; the exact form that a merge rounds.

    It stands where the layer stood, so every attention processor and norm around it works unchanged. It has no
    `weight`: code that fuses weights must not overlook the branches. Factors are in the layer's own type and frozen;
    `requires_grad_` trains them.
    """

    def __init__(self, base: nn.Linear, deltas: Sequence[Delta]) -> None:
        super().__init__()
        self.base = base
        self.factors = [delta.factor for delta in deltas]
        self.downs = nn.ParameterList()
        self.ups = nn.ParameterList()
        for delta in deltas:
            assert delta.down is not None
            self.downs.append(nn.Parameter(delta.down.to(base.weight.dtype), requires_grad=False))
            self.ups.append(nn.Parameter(delta.up.to(base.weight.dtype), requires_grad=False))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        output = self.base(hidden_states)
        for factor, down, up in zip(self.factors, self.downs, self.ups, strict=True):
            branch = functional.linear(functional.linear(hidden_states, down), up)
            output = torch.add(output, branch, alpha=factor)
        return output


def add_branches(model: nn.Module, module: str, deltas: Sequence[Delta]) -> None:
    """Put branches beside one linear layer of a model.

    Args:
        model: Changed in place.
        module: Name of the layer.
        deltas: Low-rank changes of its weight.
    """
    layer = model.get_submodule(module)
    assert isinstance(layer, nn.Linear)
    model.set_submodule(module, BranchLinear(layer, deltas))
