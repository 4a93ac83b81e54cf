"""Pinned layers on a real GPU. Needs torch alone: `pytest --noconftest` runs it where nothing else is installed."""

import pytest
import torch
from torch import Tensor, nn

from solgen.engine.offload import LayerStream, stream_layers


@pytest.mark.gpu
@torch.no_grad()
def test_pinned_layers_overlap_and_keep_their_bits_on_a_gpu() -> None:
    """Blocks of MiniMax-H3's width, without AdaLN projections to share; poisoned slots show a copy that is late."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    device = torch.device("cuda")

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(5376, 28672, bias=False, device=device, dtype=torch.bfloat16)
            self.down = nn.Linear(28672, 5376, bias=False, device=device, dtype=torch.bfloat16)
            self.norm = nn.RMSNorm(5376, device=device, dtype=torch.bfloat16)

        def forward(self, rows: Tensor) -> Tensor:
            return rows + self.down(nn.functional.silu(self.up(self.norm(rows))))

    before = torch.cuda.memory_allocated()
    layers = nn.ModuleList(Layer() for _ in range(5))
    rows = torch.randn(8192, 5376, device=device, dtype=torch.bfloat16)

    def run() -> Tensor:
        output = rows
        for layer in layers:
            output = layer(output)
        return output

    expected = run()
    stream = LayerStream(layers, device)
    for slot in stream._slots:
        slot.bytes.fill_(255)  # NaN in bf16
    torch.cuda.synchronize()
    for layer in layers:
        assert layer.up.weight.is_pinned()
        assert layer.norm.weight.is_cuda
    outputs = [run() for _ in range(3)]
    assert all(torch.equal(output, expected) for output in outputs)
    two_layers = 2 * layers[0].up.weight.nbytes + 2 * layers[0].down.weight.nbytes
    assert torch.cuda.memory_allocated() - before < two_layers + 6 * rows.nbytes


@pytest.mark.gpu
def test_page_locked_memory_is_given_back_on_a_gpu() -> None:
    """Registering the same addresses again would fail."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    for _ in range(20):
        layers = nn.ModuleList(nn.Linear(1000, 1001) for _ in range(3))
        stream_layers(layers, torch.device("cuda"))
        assert layers[0].weight.is_pinned()
        layers[0](torch.ones(1000, device="cuda"))
