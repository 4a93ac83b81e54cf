"""Layers that pass through two slots compute what they always did; their weights are whole again afterwards."""

import copy

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor, nn

from solgen.engine.adapters.branch import add_branches
from solgen.engine.adapters.merge import Delta
from solgen.engine.loader import load_conditioner
from solgen.engine.offload import LayerStream, stream_layers
from solgen.errors import InputError
from solgen.presets.demo import demo_model_path
from solgen.presets.schema import load_preset
from tests.engine.packed import packed

CPU = torch.device("cpu")
TIMES = torch.tensor([0.25, 0.5])


def load() -> MiniMaxH3Transformer3DModel:
    mapped = MiniMaxH3Transformer3DModel.from_pretrained(demo_model_path() / "transformer", dtype=torch.float32)
    return copy.deepcopy(mapped).eval()  # out of the file's memory map, whose alignment decides about rounding


class Adds(nn.Module):
    """A layer with a matrix, a vector and a buffer, of a size of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.matrix = nn.Parameter(torch.randn(3 + number, 5, generator=generator))
        self.small = nn.Parameter(torch.randn(7, 2, generator=generator).to(torch.bfloat16))
        self.vector = nn.Parameter(torch.randn(5, generator=generator))
        self.register_buffer("constant", torch.tensor(float(number)))

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.isnan().any():
            raise ValueError("not a number")
        return inputs + self.matrix.sum(0) * self.vector + self.small.float().sum() + self.constant


@torch.no_grad()
def test_a_transformer_computes_the_same_bits_in_every_call() -> None:
    stock, streamed = load(), load()
    stream_layers(streamed.transformer_blocks, CPU)
    for times in (TIMES, TIMES[:1], TIMES):
        for mine, theirs in zip(streamed(**packed(times)), stock(**packed(times)), strict=True):
            assert torch.equal(mine, theirs)
    found = streamed.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in stock.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_layers_may_run_in_any_order(count: int) -> None:
    layers = nn.ModuleList(Adds(number) for number in range(count))
    stock = copy.deepcopy(layers)
    stream_layers(layers, CPU)
    order = [*range(count), *range(count), *reversed(range(count)), 0, 0, count - 1, count // 2, count - 1]
    inputs = torch.ones(5)
    for number in order:
        assert torch.equal(layers[number](inputs), stock[number](inputs))


@torch.no_grad()
def test_a_layer_that_fails_gets_its_weights_back() -> None:
    layers = nn.ModuleList(Adds(number) for number in range(4))
    stock = copy.deepcopy(layers)
    stream_layers(layers, CPU)
    at_rest = [parameter.data_ptr() for parameter in layers.parameters()]
    with pytest.raises(ValueError, match="not a number"):
        layers[1](torch.full((5,), torch.nan))
    assert [parameter.data_ptr() for parameter in layers.parameters()] == at_rest
    assert torch.equal(layers[2](torch.ones(5)), stock[2](torch.ones(5)))


@torch.no_grad()
def test_a_running_layer_reads_the_slot_and_vectors_stay_where_they_are() -> None:
    """What fuses over the border of two layers reads the next one's vectors while this one runs."""
    layers = nn.ModuleList(Adds(number) for number in range(3))
    stream = LayerStream(layers, CPU)
    at_rest = {name: parameter.data_ptr() for name, parameter in layers.named_parameters()}
    seen: dict[str, int] = {}
    layers[1].register_forward_pre_hook(
        lambda layer, _args: seen.update((name, p.data_ptr()) for name, p in layers.named_parameters())
    )
    layers[0](torch.ones(5))
    layers[1](torch.ones(5))
    moved = {name for name, place in seen.items() if place != at_rest[name]}
    assert moved == {"1.matrix", "1.small"}
    slots = [range(slot.bytes.data_ptr(), slot.bytes.data_ptr() + slot.bytes.numel()) for slot in stream._slots]
    assert any(seen["1.matrix"] in slot for slot in slots)


@torch.no_grad()
def test_branches_of_adapters_pass_too() -> None:
    stock = load()
    generator = torch.Generator().manual_seed(1)
    for block in range(6):
        for name, rows in (("attn.to_q", 1024), ("ff.net.2", 128)):
            columns = stock.get_submodule(f"transformer_blocks.{block}.{name}").in_features
            delta = Delta(0.5, torch.randn(rows, 4, generator=generator), torch.randn(4, columns, generator=generator))
            add_branches(stock, f"transformer_blocks.{block}.{name}", [delta])
    streamed = copy.deepcopy(stock)
    stream_layers(streamed.transformer_blocks, CPU)
    for mine, theirs in zip(streamed(**packed(TIMES)), stock(**packed(TIMES)), strict=True):
        assert torch.equal(mine, theirs)


@torch.no_grad()
def test_the_conditioner_passes_its_layers() -> None:
    folder, tokens = demo_model_path() / "text_encoder", torch.tensor([[3, 5, 8, 13]])
    hidden = []
    for offload in (False, True):
        model = load_conditioner(folder, device=CPU, dtype=torch.float32, offload=offload)
        hidden.append(model.model(input_ids=tokens, output_hidden_states=True).hidden_states[50])
    assert torch.equal(*hidden)


def test_what_cannot_be_offloaded_is_refused(small_job) -> None:
    with pytest.raises(InputError, match="offload"):
        small_job(offload="disk")
    with pytest.raises(InputError, match="without their AdaLN projections"):
        load_preset("demo", ("--set", {"memory": {"offload": "layers", "tables": "off"}}))
