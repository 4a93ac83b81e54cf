"""Branches: the exact form that a merge rounds."""

import torch

from solgen.engine.adapters.branch import BranchLinear
from solgen.engine.adapters.merge import Delta
from tests.engine.adapters.spellings import BLOCKS, HIDDEN


def call(transformer):
    generator = torch.Generator().manual_seed(3)
    text, audio, video = torch.arange(40).split([4, 12, 24])
    tags = torch.cat([torch.ones(4), torch.full((12,), 2), torch.zeros(24)]).long()
    rows = [torch.randn(1, n, c, generator=generator) for n, c in ((24, 96), (12, 32), (4, 32))]
    with torch.no_grad():
        return transformer(
            *rows,
            timestep=torch.tensor([0.1, 0.4]),
            timestep_indices=(tags == 2).long(),
            token_tags=tags,
            position_ids=torch.rand(40, 3, dtype=torch.float64, generator=generator) * 32,
            video_indices=video,
            audio_indices=audio,
            text_indices=text,
            return_dict=False,
        )


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_branch_and_merge_are_one_function(write, opened, pristine) -> None:
    """In FP32 there is no rounding to tell them apart."""
    files = ((write("native"), 0.5), (write("kohya", change=lambda t: t.update({k: v * 1 for k, v in t.items()})), 0.5))
    outputs = {}
    for mode in ("merge", "branch"):
        transformer = pristine(torch.float32)
        opened(*files, mode=mode).apply(transformer)
        outputs[mode] = call(transformer)
    plain = call(pristine(torch.float32))
    for merged, branch, base in zip(outputs["merge"], outputs["branch"], plain, strict=True):
        assert relative(branch, merged) < 1e-5
        assert relative(base, merged) > 0.05


def test_branch_and_merge_differ_by_the_rounding_of_the_weights_alone(write, opened, pristine, factors) -> None:
    """Against float64: a branch over bf16 weights has the exact sum, a merge is off by the rounding of each weight."""
    name = f"{BLOCKS[0]}.ff.net.2"
    base = pristine(torch.bfloat16).get_submodule(name).weight
    down, up = factors[name]
    exact = base.double() + up.double() @ down.double()
    merged = pristine(torch.bfloat16)
    opened(write()).apply(merged)
    rounding = merged.get_submodule(name).weight.double() - exact
    inputs = torch.randn(5, exact.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    branch = BranchLinear(pristine(torch.bfloat16).get_submodule(name), [Delta(1.0, up, down)]).double()
    linear = merged.get_submodule(name).double()
    with torch.no_grad():
        difference = linear(inputs) - branch(inputs)
    torch.testing.assert_close(difference, inputs @ rounding.T, rtol=0, atol=1e-12)
    assert difference.abs().max() > 1e-6


def test_every_matched_layer_has_its_branch_and_its_weight_is_untouched(write, opened, pristine, factors) -> None:
    transformer, base = pristine(torch.bfloat16), pristine(torch.bfloat16).state_dict()
    opened(write(), mode="branch").apply(transformer)
    branches = {name for name, module in transformer.named_modules() if isinstance(module, BranchLinear)}
    assert branches == set(factors)
    for name in branches:
        layer = transformer.get_submodule(name)
        assert torch.equal(layer.base.weight, base[f"{name}.weight"])
        assert torch.equal(layer.ups[0], factors[name][1])
        assert not layer.ups[0].requires_grad


def test_branches_can_be_trained(write, opened, pristine) -> None:
    transformer = pristine(torch.float32).requires_grad_(False)
    opened(write(), mode="branch").apply(transformer)
    layer = transformer.get_submodule(f"{BLOCKS[0]}.attn.to_q")
    layer.ups.requires_grad_()
    layer(torch.randn(2, HIDDEN)).square().sum().backward()
    assert layer.ups[0].grad.abs().sum() > 0
    assert layer.base.weight.grad is None


def test_differences_are_merged_in_branch_mode_too(write, opened, pristine) -> None:
    path = write("fastvideo", change=lambda t: t.update({"proj_in.diff_b": torch.ones(HIDDEN)}))
    transformer, base = pristine(torch.bfloat16), pristine(torch.bfloat16)
    opened(path, mode="branch").apply(transformer)
    assert torch.equal(transformer.proj_in.bias, base.proj_in.bias + 1)
