"""`linear=fp8`: which layers it replaces, what it leaves alone, where it is refused."""

import pytest
import torch
from torch import nn

from solgen.engine.adapters.branch import BranchLinear
from solgen.engine.dummy import RandomWeights, open_dummy
from solgen.engine.linear import LAYERS, Fp8Linear, check_linear, shared_rows, use_linear
from solgen.engine.profile.plan import plan_arms
from solgen.engine.request import Options
from solgen.errors import InputError
from solgen.presets.schema import load_preset
from tests.parallel.on_ranks import packed

CPU = torch.device("cpu")
FP8 = load_preset("demo", ("test", {"linear": "fp8"}))


@pytest.fixture
def model():
    (job,) = plan_arms(Options(prompt="x", preset="demo"), None, dummy=True, text_rows=None)
    return RandomWeights(open_dummy(job.request), CPU, torch.float32).transformer()


def test_only_sparse_blocks_change(model) -> None:
    use_linear(model, FP8)
    for index, block in enumerate(model.transformer_blocks):
        kinds = {type(block.get_submodule(name)) for name in LAYERS}
        assert kinds == ({nn.Linear} if index in (0, 5) else {Fp8Linear})
        assert isinstance(block.adaln_proj.linear, nn.Linear)
    assert not any(isinstance(module, Fp8Linear) for module in model.token_refiner.modules())


def test_off_changes_nothing(model) -> None:
    before = list(model.named_modules())
    use_linear(model, load_preset("demo"))
    assert list(model.named_modules()) == before


@torch.no_grad()
def test_a_call_moves_by_the_error_of_the_format(model) -> None:
    inputs, _ = packed(model, 5)
    exact = model(**inputs)
    use_linear(model, FP8)
    for got, expected in zip(model(**inputs), exact, strict=True):
        error = (got - expected).norm() / expected.norm()
        # Branches that err by 4 % each are gated by modulation of 2 %: it must show, and must stay small.
        assert 0 < error < 0.04


def test_branches_stay_beside_a_quantised_layer(model) -> None:
    layer = model.transformer_blocks[2].ff.net[2]
    branch = BranchLinear(layer, [])
    model.transformer_blocks[2].ff.net[2] = branch
    use_linear(model, FP8)
    assert model.transformer_blocks[2].ff.net[2] is branch
    assert isinstance(branch.base, Fp8Linear)
    rows = torch.randn(1, 3, layer.in_features)
    assert torch.equal(branch(rows), Fp8Linear(layer)(rows))


def test_layers_share_one_quantisation() -> None:
    first, second = nn.Linear(32, 16, bias=False), nn.Linear(32, 48, bias=False)
    rows = torch.randn(1, 5, 32)
    one, two = Fp8Linear(first), Fp8Linear(second)
    shared = shared_rows(rows, one, two)
    assert isinstance(shared, tuple)
    assert torch.equal(one(shared), one(rows))
    assert torch.equal(two(shared), two(rows))
    assert shared_rows(rows, one, second) is rows


def test_a_machine_without_fp8_is_refused() -> None:
    check_linear(load_preset("demo"), CPU)
    with pytest.raises(InputError, match="linear=fp8 runs on a CUDA GPU of sm_89 or newer, this run is on the cpu"):
        check_linear(FP8, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@torch.no_grad()
def test_a_layer_on_the_gpu() -> None:
    layer = nn.Linear(5376, 7168, bias=False, dtype=torch.bfloat16, device="cuda")
    rows = torch.randn(1, 1001, 5376, dtype=torch.bfloat16, device="cuda")
    exact = (rows.double() @ layer.weight.double().t())[0]
    output = Fp8Linear(layer)(rows)[0]
    assert (output.double() - exact).norm() / exact.norm() < 2**-4 * (2 / 3) ** 0.5
