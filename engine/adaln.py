"""AdaLN tables: what every AdaLN projection returns in every call of a schedule, computed before the first.

13 of MiniMax-H3's 33 billion parameters are linear layers that read nothing but the time embedding
(diffusers `MiniMaxH3AdaLayerNormModulation`, `MiniMaxH3AdaLayerNormOut`). Their outputs for a schedule are a few
hundred rows. The layers are read one after the other, applied to the rows of one call at a time, as in the call
itself, so that the bits are those of the layer, and let go.

Merged adapters are part of the layers. An adapter's branch beside a layer is part of what is tabulated.

A table is found by the exact timesteps of a call: n values of t, or n pairs (t, r) of a two-time model.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.modeling_utils import get_parameter_dtype
from torch import Tensor, nn
from torch.nn import functional

from solgen.engine.adapters.two_time import time_embedding
from solgen.errors import SolgenError

Projections = Callable[[Sequence[str]], Iterable[nn.Module]]
"""Makes the AdaLN projections [n, D] -> [n, C] of these names, one by one; each is let go before the next."""

Plan = Sequence[tuple[Tensor, Tensor]]
"""Per call its distinct timesteps and the index of every row into them, `row_timestep_plan` of the pipeline."""

Key = tuple[tuple[int, ...], tuple[float, ...]]


class TableLinear(nn.Module):
    """Stands where an AdaLN projection stood. It has no `weight`: code that reads weights must not overlook it."""

    def __init__(self, tables: "AdaLNTables", name: str) -> None:
        super().__init__()
        self._tables = tables
        self._name = name

    def fill(self, outputs: Sequence[Tensor]) -> None:
        """Replace what it holds by the outputs [n, C] of every call."""
        for name in list(self._buffers):
            delattr(self, name)
        for call, output in enumerate(outputs):
            self.register_buffer(f"call_{call}", output, persistent=False)

    def forward(self, activation: Tensor) -> Tensor:
        """Output [n, C] of the call in progress.

        Raises:
            SolgenError: outside a call of the transformer, or for another number of timesteps than the call's.
        """
        call = self._tables.call
        if call is None:
            raise SolgenError(f"{self._name} is a table, which only a call of the whole transformer can look up")
        output = self.get_buffer(f"call_{call}")
        if len(output) != len(activation):
            raise SolgenError(f"{self._name} holds {len(output)} timesteps of this call, {len(activation)} were asked")
        return output


class AdaLNTables:
    """The tables of one transformer.

    Attributes:
        call: Which of the prepared calls is in progress; None outside of the transformer.
    """

    def __init__(self, transformer: MiniMaxH3Transformer3DModel, projections: Projections) -> None:
        """Replace every AdaLN projection by a table that is still empty.

        Args:
            transformer: Its projections may be on the meta device; they are not used.
            projections: Source of the real ones, asked whenever a schedule is new.
        """
        self.call: int | None = None
        self._transformer = transformer
        self._projections = projections
        self._calls: dict[Key, int] = {}
        for name in projection_names(transformer):
            transformer.set_submodule(name, TableLinear(self, name))
        transformer.register_forward_pre_hook(self._begin, with_kwargs=True)
        transformer.register_forward_hook(self._end, always_call=True)

    @torch.no_grad()
    def prepare(self, plan: Plan) -> bool:
        """Build the tables of a schedule, unless they are there already.

        Args:
            plan: Every call that will be made; the timesteps are fp32, [n] or [n, 2], on the transformer's device.

        Returns:
            Whether something was built.
        """
        timesteps = {_key(times): times for times, _ in plan}
        if timesteps.keys() <= self._calls.keys():
            return False
        self._calls = {}  # a build that fails leaves nothing that could be looked up
        # As in `MiniMaxH3AdaLayerNormModulation`: activated at the embedding's precision, cast afterwards.
        activations = [functional.silu(time_embedding(self._transformer, times)) for times in timesteps.values()]
        names = projection_names(self._transformer)
        built = 0
        for projection in self._projections(names):  # zip and enumerate would hold on to the one before
            dtype = get_parameter_dtype(projection)
            table = self._transformer.get_submodule(names[built])
            assert isinstance(table, TableLinear)
            table.fill([projection(activation.to(dtype)) for activation in activations])
            built += 1
            del projection
        assert built == len(names)
        self._calls = {key: call for call, key in enumerate(timesteps)}
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        modules = (self._transformer.get_submodule(name) for name in projection_names(self._transformer))
        return sum(buffer.nbytes for module in modules for buffer in module.buffers())

    def _begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        times = kwargs["timestep"] if "timestep" in kwargs else args[3]
        self.call = self._calls.get(_key(times))
        if self.call is None:
            raise SolgenError(
                f"no AdaLN table for timesteps {times.tolist()}: the tables hold {len(self._calls)} calls of another "
                "schedule and must be prepared for this one, or left out with --set memory.tables=off"
            )

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self.call = None


def projection_names(transformer: MiniMaxH3Transformer3DModel) -> list[str]:
    """Names of the linear layers that read the time embedding, in the order of a call."""
    blocks = range(len(transformer.transformer_blocks))
    return [*(f"transformer_blocks.{block}.adaln_proj.linear" for block in blocks), "norm_out.linear"]


def is_projection(name: str) -> bool:
    """Whether a module of the transformer is an AdaLN projection, by its name."""
    return name.endswith("adaln_proj.linear") or name == "norm_out.linear"


def _key(times: Tensor) -> Key:
    return tuple(times.shape), tuple(times.flatten().tolist())
