"""Layers that pass through two slots compute what they always did; their weights are whole again afterwards."""

import copy
import os
from pathlib import Path

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor, nn

from solgen.engine.adapters.branch import add_branches
from solgen.engine.adapters.merge import Delta
from solgen.engine.loader import load_conditioner
from solgen.engine.memory import available_memory, check_host_memory
from solgen.engine.offload import LayerStream, stream_layers
from solgen.engine.repository import open_repository
from solgen.errors import InputError, SetupError
from solgen.presets.demo import demo_model_path
from solgen.presets.schema import Memory, Model, load_preset
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
        for name, rows in (("attn.to_q", 1024), ("ff.net.2", 192)):
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


def test_a_host_without_room_is_refused_by_the_headers() -> None:
    repository = open_repository(Model(source="demo"), "t2va")
    conditioner = load_conditioner(repository.folders["text_encoder"], device=CPU, dtype=torch.bfloat16)
    layers = sum(parameter.nbytes for parameter in conditioner.model.language_model.layers.parameters())
    model = MiniMaxH3Transformer3DModel.from_pretrained(repository.folders["transformer"], dtype=torch.bfloat16)
    named = model.transformer_blocks.named_parameters()
    blocks = sum(parameter.nbytes for name, parameter in named if "adaln" not in name)

    def check(offload: str, available: int | None, ranks: int = 1) -> None:
        check_host_memory(Memory(offload=offload), repository, "t2va", num_ranks=ranks, available=available)

    check("none", 0)
    check("layers", None)
    check("text-encoder", layers)
    check("layers", layers + 2 * blocks, ranks=2)
    with pytest.raises(SetupError, match=r"--offload text-encoder keeps 0.0 GiB .* 0.0 GiB are available"):
        check("text-encoder", layers - 1)
    with pytest.raises(SetupError, match="for 2 process"):
        check("layers", layers + 2 * blocks - 1, ranks=2)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux says how much memory is left")
def test_memory_that_is_left_is_part_of_what_there_is() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    left = available_memory()
    assert left is not None
    assert 0 < left <= total
