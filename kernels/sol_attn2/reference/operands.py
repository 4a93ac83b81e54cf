"""Operands of the GPU stages made and attended with in plain PyTorch, rounding where the kernels round."""

import torch

from solgen.kernels.sol_attn2.config import BLOCK, HEAD_DIM, SolAttn2Config
from solgen.kernels.sol_attn2.reference.blocks import Blocks, make_blocks, mixed_blocks
from solgen.kernels.sol_attn2.reference.fp8 import Fp8Head
from solgen.kernels.sol_attn2.reference.quantise import quantise
from solgen.kernels.sol_attn2.reference.router import router_means
from solgen.kernels.sol_attn2.reference.tail import NUM_ANCHORS
from solgen.kernels.sol_attn2.triton.operands import VALUE_ORDER, Operands


class QuantisedHead(Fp8Head):
    """One head that arrives quantised."""

    def __init__(self, operands: Operands, head: int, blocks: Blocks, scale: float, config: SolAttn2Config) -> None:
        """Take head `head` of the operands, in FP32."""
        self.blocks, self.scale, self.config = blocks, scale, config
        self.key_mean, self.value_mean = operands.k_mean[head], operands.v_mean[head]
        self.q_codes = operands.q_codes[head].float().unflatten(0, (-1, BLOCK))
        self.k_codes = operands.k_codes[head].float().unflatten(0, (-1, BLOCK))
        self.v_codes = torch.empty_like(self.k_codes)
        self.v_codes[:, VALUE_ORDER] = operands.v_codes[head].float().transpose(1, 2)
        self.q_scale, self.k_scale = operands.q_scale[head, :, None, None], operands.k_scale[head, :, None, None]
        self.v_scale = operands.v_scale[head].view(1, 1, 1)
        if config.tail != "none":
            rows = self.q_codes * self.q_scale
            self.q_anchors = blocks.group_means(blocks.unit_means(rows), NUM_ANCHORS[config.tail])


def _blocks(x: torch.Tensor) -> tuple[torch.Tensor, Blocks]:
    """The rows of every head of [1, H, N, D] as fp32 blocks [H NB, 64, D], zero past the end, and their geometry."""
    num_rows = x.shape[2]
    mixed = mixed_blocks(None, num_rows, x.device)
    blocks = make_blocks(num_rows, mixed, torch.float32)
    split = torch.nn.functional.pad(x[0].float(), (0, 0, 0, blocks.padding)).reshape(-1, BLOCK, HEAD_DIM)
    counts = blocks.unit_counts.repeat(x.shape[1], 1)
    return split, Blocks(num_rows, len(split), counts, mixed.repeat(x.shape[1]))


def quantize_rows_reference(
    x: torch.Tensor, mean: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `solgen.kernels.sol_attn2.triton.prepare.quantize_rows`, of [1, H, N, D]."""
    heads = x.shape[1]
    rows, blocks = _blocks(x)
    units = router_means(rows, blocks, "fp8").half().view(heads, -1, HEAD_DIM)
    if mean is not None:
        rows = _shifted(rows, mean, x.shape[2])
    codes, scale = quantise(rows, (1, 2))
    return codes.to(torch.float8_e4m3fn).view(heads, -1, HEAD_DIM), scale.view(heads, -1), units


def quantize_values_reference(
    x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `solgen.kernels.sol_attn2.triton.prepare.quantize_values`, of [1, H, N, D]."""
    heads = x.shape[1]
    rows, blocks = _blocks(x)
    units = router_means(rows, blocks, "fp8").half().view(heads, -1, HEAD_DIM)
    rows = _shifted(rows, mean, x.shape[2])
    codes, _ = quantise(rows, (), scale.repeat_interleave(len(rows) // heads).view(-1, 1, 1))
    stored = codes[:, VALUE_ORDER].transpose(1, 2).to(torch.float8_e4m3fn)
    return stored.reshape(heads, -1, HEAD_DIM, BLOCK), units


def _shifted(rows: torch.Tensor, mean: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Blocks [H NB, 64, D] less their head's mean [H, D], zero past the end."""
    blocks = len(rows) // len(mean)
    real = (torch.arange(blocks * BLOCK, device=rows.device) < num_rows).view(1, -1, 1)
    heads = rows.view(len(mean), -1, HEAD_DIM)
    return ((heads - mean[:, None]) * real).view(-1, BLOCK, HEAD_DIM)
