"""`linear=fp8`: the projections and feed-forward layers of the sparse blocks in FP8, by rows.

Dense blocks keep their layers, as they keep exact attention. Adapters that are merged are quantised with the weights;
branches beside a layer stay as they are, and only the layer itself is quantised.
"""

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor, nn

from solgen.engine.adapters.branch import BranchLinear
from solgen.errors import InputError
from solgen.presets.schema import Preset

LAYERS = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")
"""Linear layers of a block."""

Quantised = tuple[Tensor, Tensor]
"""Codes [N, K] float8_e4m3fn and scales [N] fp32 of rows."""


class Fp8Linear(nn.Module):
    """A linear layer without bias whose weight is E4M3, with a scale an output channel.

    It has no `weight`: code that reads weights must not overlook the scales.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        # Triton is imported only when it is used: CPU installations may not have it.
        from solgen.kernels.fp8_linear.quantise import quantise_rows

        assert base.bias is None
        self.in_features, self.out_features = base.in_features, base.out_features
        codes, scales = quantise_rows(base.weight.detach())
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self._dtype: torch.dtype = base.weight.dtype

    def forward(self, hidden_states: Tensor | Quantised) -> Tensor:
        """Map [..., in], or rows that are quantised already, to [..., out]."""
        from solgen.kernels.fp8_linear.linear import fp8_linear, multiply_rows

        if isinstance(hidden_states, tuple):
            return multiply_rows(*hidden_states, self.codes, self.scales, dtype=self._dtype)[None]
        rows = fp8_linear(hidden_states.flatten(0, -2), self.codes, self.scales)
        return rows.unflatten(0, hidden_states.shape[:-1])


def shared_rows(hidden_states: Tensor, *layers: nn.Module) -> Tensor | Quantised:
    """The input [1, N, K] of several layers, quantised once if all of them would quantise it."""
    if not all(isinstance(layer, Fp8Linear) for layer in layers):
        return hidden_states
    from solgen.kernels.fp8_linear.quantise import quantise_rows

    return quantise_rows(hidden_states[0])


def check_linear(preset: Preset, device: torch.device) -> None:
    """Refuse FP8 layers that the machine cannot multiply, before weights are read.

    Raises:
        InputError: one line.
    """
    if preset.linear == "off":
        return
    if preset.memory.offload == "layers":
        raise InputError(
            "linear=fp8 makes codes of weights on the GPU, offload=layers keeps them off it; leave one out"
        )
    if device.type != "cuda":
        raise InputError(f"linear=fp8 runs on a CUDA GPU of sm_89 or newer, this run is on the {device.type}; use off")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise InputError(f"linear=fp8 needs sm_89 or newer, {name} is sm_{major}{minor}; use off")


@torch.no_grad()
def use_linear(transformer: MiniMaxH3Transformer3DModel, preset: Preset) -> None:
    """Replace the layers of the sparse blocks as the preset asks; a weight is let go as its codes are there."""
    if preset.linear == "off":
        return
    for index, block in enumerate(transformer.transformer_blocks):
        if preset.attention.is_dense_block(index):
            continue
        for name in LAYERS:
            if isinstance(block.get_submodule(name), BranchLinear):
                name += ".base"
            layer = block.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            block.set_submodule(name, Fp8Linear(layer))
