"""AdaLN tables are the projections' own output, bit for bit, and are never looked up for anything else."""

import copy
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor, nn

from solgen.engine.adaln import AdaLNTables, Plan, Projections, projection_names
from solgen.engine.adapters.two_time import add_endpoint, use_two_times
from solgen.engine.generate import generate
from solgen.errors import SolgenError
from solgen.presets.demo import demo_model_path, demo_transformer
from tests.engine.packed import packed

DTYPES = [torch.bfloat16, torch.float32]
ONE_TIME = [torch.tensor([0.0]), torch.tensor([0.25, 0.5]), torch.tensor([0.25, 0.75, 0.999])]
TWO_TIMES = [
    torch.tensor([[0.0, 0.25], [0.0, 0.5]]),
    torch.tensor([[0.25, 1.0], [0.5, 1.0], [0.999, 0.999], [1.0, 1.0]]),
]


def load(dtype: torch.dtype, *, two_times: bool = False) -> MiniMaxH3Transformer3DModel:
    mapped = MiniMaxH3Transformer3DModel.from_pretrained(demo_model_path() / "transformer", dtype=dtype).eval()
    # Out of the file's memory map: products of a single row round by the alignment of the weights.
    model = copy.deepcopy(mapped)
    if two_times:
        add_endpoint(model)
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for parameter in model.endpoint_time_embedder.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        use_two_times(model, 0.25)
    return model


def plan(timesteps: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(times, torch.zeros(24, dtype=torch.long)) for times in timesteps]


def own(model: MiniMaxH3Transformer3DModel):
    """The model's projections, kept apart from it."""
    layers = {name: copy.deepcopy(model.get_submodule(name)) for name in projection_names(model)}
    return lambda names: (layers[name] for name in names)


def build_tables(model: MiniMaxH3Transformer3DModel, calls: Plan, projections: Projections) -> AdaLNTables:
    """Tables of a model, prepared for a schedule."""
    tables = AdaLNTables(model, projections)
    assert tables.prepare(calls)
    return tables


@torch.no_grad()
def modulation(model: MiniMaxH3Transformer3DModel, times: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """What every AdaLN projection returns in a call, and the call's two outputs."""
    seen: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _module, _args, output, name=name: seen.__setitem__(name, output)
        )
        for name in projection_names(model)
    ]
    seen["video"], seen["audio"] = model(**packed(times, dtype))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("timesteps", [ONE_TIME, TWO_TIMES], ids=["one time", "two times"])
def test_every_block_and_call_has_the_projections_bits(dtype: torch.dtype, timesteps: list[Tensor]) -> None:
    stock = load(dtype, two_times=timesteps is TWO_TIMES)
    tabled = copy.deepcopy(stock)
    tables = build_tables(tabled, plan(timesteps), own(stock))
    for times in (*timesteps, timesteps[0]):
        expected, found = modulation(stock, times, dtype), modulation(tabled, times, dtype)
        assert len(expected) == 6 + 1 + 2
        for name, output in expected.items():
            assert output.dtype == found[name].dtype
            assert torch.equal(output, found[name]), name
    rows = sum(map(len, timesteps))
    assert tables.nbytes == rows * (6 * 6 * 3 + 2) * demo_transformer()["hidden_size"] * dtype.itemsize
    assert not any("adaln" in name or "norm_out.linear" in name for name, _ in tabled.named_parameters())


def test_timesteps_that_were_not_prepared_are_refused() -> None:
    model = load(torch.float32)
    tables = build_tables(model, plan(ONE_TIME), own(model))
    one_bit_off = torch.nextafter(ONE_TIME[1], torch.ones(2))
    for times in (one_bit_off, ONE_TIME[1].flip(0), ONE_TIME[1][:1], torch.cat([ONE_TIME[1], torch.ones(1)])):
        with pytest.raises(SolgenError, match="no AdaLN table for timesteps .*3 calls of another schedule"):
            model(**packed(times))
    assert tables.call is None
    modulation(model, ONE_TIME[1], torch.float32)


def test_a_table_is_not_looked_up_outside_of_its_call() -> None:
    model = load(torch.float32)
    build_tables(model, plan(ONE_TIME), own(model))
    block = model.transformer_blocks[2]
    with pytest.raises(SolgenError, match="transformer_blocks.2.adaln_proj.linear is a table"):
        block.adaln_proj(torch.zeros(1, 64))

    def more_rows(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0].repeat(2, 1),)

    handle = block.adaln_proj.register_forward_pre_hook(more_rows)
    with pytest.raises(SolgenError, match="holds 2 timesteps of this call, 4 were asked"):
        modulation(model, ONE_TIME[1], torch.float32)
    handle.remove()
    # The call that failed is over.
    with pytest.raises(SolgenError, match="is a table"):
        block.adaln_proj(torch.zeros(2, 64))


def test_a_new_schedule_is_built_and_an_old_one_kept() -> None:
    stock = load(torch.float32)
    tabled, asked = copy.deepcopy(stock), []
    source = own(stock)

    def projections(names: Sequence[str]) -> Iterator[nn.Module]:
        asked.append(len(names))
        yield from source(names)

    tables = AdaLNTables(tabled, projections)
    with pytest.raises(SolgenError, match="no AdaLN table"):
        tabled(**packed(ONE_TIME[0]))
    assert tables.prepare(plan(ONE_TIME))
    assert not tables.prepare(plan(ONE_TIME))
    assert not tables.prepare(plan(ONE_TIME[1:]))
    other = [torch.tensor([0.1, 0.2]), ONE_TIME[1]]
    assert tables.prepare(plan(other))
    assert asked == [7, 7]
    for times in other:
        expected, found = modulation(stock, times, torch.float32), modulation(tabled, times, torch.float32)
        assert all(torch.equal(output, found[name]) for name, output in expected.items())
    with pytest.raises(SolgenError, match="2 calls of another schedule"):
        tabled(**packed(ONE_TIME[2]))


def test_a_build_that_fails_leaves_nothing_to_look_up() -> None:
    model = load(torch.float32)
    source = own(model)
    tables = build_tables(model, plan(ONE_TIME), source)

    def broken(names: Sequence[str]) -> Iterator[nn.Module]:
        yield from source(names[:3])
        raise SolgenError("the disk is gone")

    tables._projections = broken
    with pytest.raises(SolgenError, match="the disk is gone"):
        tables.prepare(plan([torch.tensor([0.3])]))
    for times in (ONE_TIME[0], torch.tensor([0.3])):
        with pytest.raises(SolgenError, match="no AdaLN table"):
            model(**packed(times))


def test_one_projection_is_held_at_a_time() -> None:
    stock = load(torch.float32)
    names = projection_names(stock)
    made: list[weakref.ref] = []

    def projections(names: Sequence[str]) -> Iterator[nn.Module]:
        for name in names:
            assert all(layer() is None for layer in made)
            layer = copy.deepcopy(stock.get_submodule(name))
            made.append(weakref.ref(layer))
            yield layer
            del layer

    build_tables(copy.deepcopy(stock), plan(ONE_TIME), projections)
    assert len(made) == len(names)


def test_latents_have_the_same_bits_whatever_stays_in_memory(small_job, listener, picture) -> None:
    """Tables and offloaded layers against neither: with a keyframe's own timesteps, and two schedules in a command."""
    image = str(picture("a.png", (255, 0, 0)))

    def run(name: str, *sets: str, **options) -> list[dict]:
        given = {"image": image, "attention": "dense"} | options
        return generate([small_job(f"{name}-{steps}.mp4", *sets, steps=steps, **given) for steps in (1, 2)], listener)

    lean, plain = run("lean", offload="layers"), run("plain", "memory.tables=off")
    assert [record["latents_sha256"] for record in lean] == [record["latents_sha256"] for record in plain]
    # Picture and sound share the first call's timestep, the keyframe has its own; bf16 on a GPU.
    row = (6 * 6 * 3 + 2) * demo_transformer()["hidden_size"] * 4
    assert [record["adaln"]["table_bytes"] for record in lean] == [2 * row, 5 * row]
    assert {record["adaln"]["table_bytes"] for record in plain} == {None}
    assert lean[0]["request"]["settings"]["memory"] == {"offload": "layers", "tables": True}


@pytest.mark.gpu
def test_bf16_tables_at_full_width_on_a_gpu() -> None:
    """One block of MiniMax-H3's width: the same GEMM shapes give the same bits."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    with torch.device("cuda"):
        stock = MiniMaxH3Transformer3DModel(num_layers=1, num_refiner_layers=1).to(torch.bfloat16).eval()
        for island in (stock.proj_in, stock.audio_proj_in, stock.time_embedder, stock.proj_out, stock.audio_proj_out):
            island.float()
    layers = {name: stock.get_submodule(name) for name in projection_names(stock)}
    timesteps = [torch.tensor(times, device="cuda") for times in ([0.0], [0.25, 0.5], [0.25, 0.5, 0.999, 1.0])]
    outputs = []
    with torch.no_grad():
        for times in timesteps:
            features = stock.time_embedder(stock.time_proj(times))
            outputs.append([part.clone() for part in stock.transformer_blocks[0].adaln_proj(features)])
        tables = build_tables(stock, plan(timesteps), lambda names: (layers[name] for name in names))
        for call, (times, expected) in enumerate(zip(timesteps, outputs, strict=True)):
            tables.call = call
            found = stock.transformer_blocks[0].adaln_proj(stock.time_embedder(stock.time_proj(times)))
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
