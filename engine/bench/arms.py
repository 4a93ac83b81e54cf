"""The attention operators under comparison, each as one call on the same query, key and value."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from solgen.engine.bench.clock import Stage
from solgen.kernels.block_sparse import block_sparse
from solgen.kernels.sol_attn1 import SolAttn1Config, sol_attn1
from solgen.kernels.sol_attn2 import SolAttn2Config, SolAttn2Details, fastest_impl, sol_attn2

ARMS = ("dense", "fp8", "block-sparse", "sol-attn1", "sol-attn2")
"""Every arm, by its `--attention` name; `dense` is cuDNN on a GPU."""

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Config = SolAttn1Config | SolAttn2Config | None


@dataclass(frozen=True)
class Arm:
    """One operator with its settings.

    Attributes:
        name: As on the command line.
        config: Settings of the operator, None for dense attention.
        impl: Implementation of Sol-Attn2 and fp8; None takes the fastest.
    """

    name: str
    config: Config
    impl: str | None = None

    def call(self, inputs: Inputs) -> Callable[[Stage], torch.Tensor]:
        """The complete call as users make it, without details; it enters the stages it has."""
        if self.name == "dense":
            return lambda stage: _dense(*inputs, stage)
        if not inputs[0].is_cuda:
            return lambda stage: self._on_cpu(inputs, stage)
        forward, options = self._forward(inputs[0])
        common: dict[str, Any] = {"config": self.config, "video_rows": None, "scale": None, "details": False}
        return lambda stage: forward(*inputs, **common, **options, stage=stage)

    def details(self, inputs: Inputs) -> tuple[torch.Tensor, SolAttn2Details | None]:
        """Output and route of one call."""
        if self.name == "dense":
            return _dense(*inputs, nullcontext), None
        operator: Any = {"sol-attn1": sol_attn1, "block-sparse": block_sparse}.get(self.name, sol_attn2)
        options = {"impl": self.impl} if operator is sol_attn2 else {}
        output, details = operator(*inputs, config=self.config, details=True, **options)
        return output, details

    def _on_cpu(self, inputs: Inputs, stage: Stage) -> torch.Tensor:
        with stage("attention"):
            return self.details(inputs)[0]

    def _forward(self, query: torch.Tensor) -> tuple[Callable[..., Any], dict[str, Any]]:
        if self.name == "sol-attn1":
            from solgen.kernels.sol_attn1.triton.forward import sol_attn1_forward

            return sol_attn1_forward, {}
        if self.name == "block-sparse":
            from solgen.kernels.block_sparse.triton.forward import block_sparse_forward

            return block_sparse_forward, {}
        from solgen.kernels.sol_attn2.triton.forward import sol_attn2_forward

        assert isinstance(self.config, SolAttn2Config)
        return sol_attn2_forward, {"impl": self.impl or fastest_impl(query, self.config)}


def _dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stage: Stage) -> torch.Tensor:
    backends = [SDPBackend.CUDNN_ATTENTION] if query.is_cuda else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with stage("attention"), sdpa_kernel(backends):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)
