"""Fused blocks against stock ones and float64, and what they leave alone."""

import itertools

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("diffusers")

from diffusers import MiniMaxH3Transformer3DModel
from torch import nn

from solgen.engine.adapters.branch import add_branches
from solgen.engine.adapters.merge import Delta
from solgen.engine.attention import install_attention
from solgen.engine.attention_run import AttentionRun
from solgen.engine.fusion import check_fusion, fused, runs_fused
from solgen.engine.generate import generate
from solgen.engine.profile.breakdown import breakdown, timed_modules
from solgen.engine.profile.recorder import Recorder
from solgen.errors import InputError
from solgen.kernels.sol_attn2.density import empty_histogram
from solgen.parallel.ulysses import Ulysses
from solgen.presets.demo import demo_model_path
from solgen.presets.schema import Attention
from tests.engine.fusion_oracle import exact_blocks, make_inputs, make_transformer, run_blocks
from tests.parallel.on_ranks import packed

SMALL = {
    "num_attention_heads": 3,
    "hidden_size": 200,
    "num_layers": 3,
    "num_refiner_layers": 1,
    "ffn_dim": 304,
    "text_dim": 32,
    "time_embed_hidden_dim": 64,
    "time_embed_dim": 48,
}
CPU = torch.device("cpu")


def run_fused(model, *inputs):
    """The blocks as a dense request runs them; leaves the model as it was."""
    rows = torch.ones(inputs[0].shape[1], dtype=torch.bool, device=inputs[0].device)
    processors = model.attn_processors
    run = AttentionRun.start(Attention(backend="dense"), rows, fused=True)
    install_attention(model, run)
    try:
        with fused(model, True):
            return run_blocks(model, *inputs)
    finally:
        model.set_attn_processor(processors)


def error(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


@pytest.fixture(scope="module")
def small():
    return make_transformer(CPU, torch.float32, **SMALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 63, 301])
def test_error_is_no_larger_than_stock(rows: int, dtype: torch.dtype) -> None:
    model = make_transformer(CPU, dtype, **SMALL)
    inputs = make_inputs(model, rows)
    triples = zip(run_fused(model, *inputs), run_blocks(model, *inputs), exact_blocks(model, *inputs), strict=True)
    for ours, stock, exact in triples:
        assert ours.shape == stock.shape
        assert ours.dtype == stock.dtype == dtype
        assert error(ours, exact) <= 1.5 * error(stock, exact)
        assert error(stock, exact) < (0.05 if dtype == torch.bfloat16 else 1e-5)  # float64 is the same function


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("rows", "layers"), [(1, 2), (63, 2), (1001, 2), (110_000, 1)])
def test_error_is_no_larger_than_stock_at_full_size(rows: int, layers: int) -> None:
    model = make_transformer(torch.device("cuda"), torch.bfloat16, num_layers=layers, num_refiner_layers=1)
    inputs = make_inputs(model, rows)
    ours = run_fused(model, *inputs)
    assert all(map(torch.equal, ours, run_fused(model, *inputs)))
    stock = run_blocks(model, *inputs)
    for mine, theirs, exact in zip(ours, stock, exact_blocks(model, *inputs), strict=True):
        assert error(mine, exact) <= 1.5 * error(theirs, exact)


def test_every_block_returns_its_own_output(small) -> None:
    """Hooks see the residual stream behind every block, although its last sum is one op with the next norm."""
    inputs, seen = make_inputs(small, 65), []
    handles = [block.register_forward_hook(lambda *call: seen.append(call[2])) for block in small.transformer_blocks]
    try:
        run_fused(small, *inputs)
        run_blocks(small, *inputs)
    finally:
        for handle in handles:
            handle.remove()
    for ours, stock in zip(seen[:3], seen[3:], strict=True):
        assert error(ours, stock.double()) < 1e-6


def test_a_hook_may_change_what_passes_between_blocks(small) -> None:
    """The norm that the block before has made is not taken for rows that it does not belong to."""
    inputs = make_inputs(small, 5)
    plain = run_blocks(small, *inputs)[0]
    handle = small.transformer_blocks[1].register_forward_hook(lambda _module, _inputs, output: output.flip(1))
    try:
        ours, stock = run_fused(small, *inputs)[0], run_blocks(small, *inputs)[0]
    finally:
        handle.remove()
    assert error(ours, stock.double()) < 1e-6
    assert error(plain, stock.double()) > 0.1


def test_modules_inside_are_called_as_modules(small) -> None:
    """Once a block and call: linear layers, attention, feed-forward, AdaLN; so hooks and stand-ins work."""
    counts: dict[str, int] = {}

    def count(name):
        def hook(*_):
            counts[name] = counts.get(name, 0) + 1

        return hook

    expected = ["attn", "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff", "ff.net.0.proj", "ff.net.2"]
    expected += ["adaln_proj", "adaln_proj.linear", ""]
    names = [f"transformer_blocks.{block}.{name}".rstrip(".") for block in range(3) for name in expected]
    names += ["norm_out", "norm_out.linear"]
    handles = [small.get_submodule(name).register_forward_hook(count(name)) for name in names]
    try:
        run_fused(small, *make_inputs(small, 2))
    finally:
        for handle in handles:
            handle.remove()
    assert counts == dict.fromkeys(names, 1)


class Lookup(nn.Module):
    """AdaLN tables without a projection."""

    def __init__(self, tables) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, _temb):
        return self.tables


def test_lookups_and_branches_may_stand_in_for_layers() -> None:
    model = make_transformer(CPU, torch.float32, **SMALL)
    inputs = make_inputs(model, 40)
    plain = run_blocks(model, *inputs)[0]
    generator = torch.Generator().manual_seed(1)
    for block, layer in itertools.product(range(3), ("attn.to_q", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")):
        name = f"transformer_blocks.{block}.{layer}"
        rows, columns = model.get_submodule(name).weight.shape
        factors = torch.randn(rows, 2, generator=generator), torch.randn(2, columns, generator=generator) / 8
        add_branches(model, name, [Delta(1.0, *factors)])
    for block in model.transformer_blocks:
        with torch.no_grad():
            block.adaln_proj = Lookup([2 * table for table in block.adaln_proj(inputs[1])])
    ours, stock = run_fused(model, *inputs)[0], run_blocks(model, *inputs)[0]
    assert error(ours, stock.double()) < 1e-5
    assert error(plain, stock.double()) > 0.1


def test_nothing_stays_behind(small) -> None:
    inputs = make_inputs(small, 3)
    before = run_blocks(small, *inputs)
    run_fused(small, *inputs)
    with pytest.raises(RuntimeError, match="on purpose"), fused(small, True):
        raise RuntimeError("on purpose")
    assert not any("forward" in vars(module) for module in small.modules())
    assert all(map(torch.equal, before, run_blocks(small, *inputs)))
    with fused(small, False):
        assert all(map(torch.equal, before, run_blocks(small, *inputs)))


def test_the_parts_of_a_profiled_call_still_add_up() -> None:
    model = MiniMaxH3Transformer3DModel.from_pretrained(demo_model_path() / "transformer", dtype=torch.float32).eval()
    inputs, order = packed(model, 20)
    run = AttentionRun.start(Attention(backend="dense"), order.video_rows, fused=True)
    install_attention(model, run)
    recorder = Recorder(CPU)
    run.stage = recorder.span_if_watching
    with torch.no_grad(), fused(model, True), recorder.watching(timed_modules(model)):
        model(**inputs)
    totals = recorder.totals()
    wholes = [row["ms"] for row in breakdown(totals) if row["part_of"] is None]
    assert sum(wholes) == pytest.approx(totals["call"].ms, rel=1e-6)
    assert all(part >= 0 for part in wholes)


def demo_call(run_type=AttentionRun, *, fuse=True, histogram=None, spoil=False, **attention):
    """Outputs of one call of the demo model; `spoil` takes eps off the norms of queries and keys."""
    model = MiniMaxH3Transformer3DModel.from_pretrained(demo_model_path() / "transformer", dtype=torch.float32).eval()
    for block in model.transformer_blocks:
        block.attn.norm_q.eps = 0.0 if spoil else block.attn.norm_q.eps
    inputs, order = packed(model, 20)
    run = run_type.start(Attention(**({"dense_blocks": "0,5"} | attention)), order.video_rows, fused=fuse)
    run.begin_step(0)
    run.histogram = histogram
    install_attention(model, run)
    with torch.no_grad(), fused(model, fuse):
        return model(**inputs)


class NormedBefore(AttentionRun):
    """Norms queries and keys in an op of their own, as several ranks do."""

    norms_in_operator = False


@pytest.mark.parametrize("backend", ["sol-attn2", "fp8"])
def test_norms_inside_the_operator_change_no_bit(backend: str) -> None:
    inside, before = (demo_call(kind, backend=backend, epsilon=-0.5) for kind in (AttentionRun, NormedBefore))
    assert all(map(torch.equal, inside, before))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [63, 1001])
def test_norms_inside_the_operator_change_no_bit_on_a_gpu(rows: int) -> None:
    model = make_transformer(torch.device("cuda"), torch.bfloat16, num_layers=2, num_refiner_layers=1)
    inputs, outputs = make_inputs(model, rows), []
    for run_type in (AttentionRun, NormedBefore):
        settings = Attention(dense_blocks="", epsilon=-0.5)
        run = run_type.start(settings, torch.ones(rows, dtype=torch.bool, device="cuda"), fused=True)
        run.begin_step(0)
        install_attention(model, run)
        with fused(model, True):
            outputs.append(run_blocks(model, *inputs))
    assert all(map(torch.equal, *outputs))


def test_where_the_operator_norms() -> None:
    """The operator refuses norms without an eps: so it shows who hands them over."""
    for backend in ("sol-attn2", "fp8"):
        with pytest.raises(ValueError, match=r"eps is 0\.0"):
            demo_call(backend=backend, spoil=True)
    for apart in (
        {"fuse": False},
        {"backend": "dense"},
        {"backend": "block-sparse"},
        {"backend": "sol-attn1"},
        {"dense_steps": 1},
        {"dense_blocks": "0-5"},
        {"histogram": empty_histogram(CPU)},  # a calibration call sees normed queries and keys
    ):
        assert all(output.isfinite().all() for output in demo_call(spoil=True, **apart))
    rows = torch.ones(130, dtype=torch.bool)
    assert AttentionRun.start(Attention(), rows, fused=True).norms_in_operator
    assert not AttentionRun.start(Attention(), rows, Ulysses(None, 0, (64, 66)), fused=True).norms_in_operator


def test_when_a_request_runs_fused() -> None:
    assert [runs_fused(setting, CPU) for setting in ("auto", "off")] == [False, False]
    cuda = torch.device("cuda")
    assert [runs_fused(setting, cuda) for setting in ("auto", "on", "off")] == [True, True, False]
    for setting, device in (("auto", CPU), ("off", CPU), ("on", cuda)):
        check_fusion(setting, device)
    with pytest.raises(InputError, match="fusion=on needs a CUDA GPU and Triton, this run is on the cpu"):
        check_fusion("on", CPU)


def test_a_record_says_whether_the_blocks_ran_fused(small_job, listener) -> None:
    (record,) = generate([small_job()], listener)
    assert record["request"]["settings"]["fusion"] == "auto"
    assert record["fusion"] == "off"
    (record,) = generate([small_job("eager.mp4", "fusion=off")], listener)
    assert record["fusion"] == "off"


def test_fusion_that_cannot_be_had_is_refused_before_anything_loads(small_job, listener) -> None:
    with pytest.raises(InputError, match="use --set fusion=auto"):
        generate([small_job("clip.mp4", "fusion=on")], listener)
    assert listener.stages == []
    with pytest.raises(InputError, match="fusion: Input should be 'auto', 'on' or 'off', got 'maybe'"):
        small_job("clip.mp4", "fusion=maybe")
