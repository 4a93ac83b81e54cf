"""Every spelling of one adapter gives the same weights, bit for bit; ambiguous spellings are refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from solgen.errors import InputError
from tests.engine.adapters.spellings import HIDDEN, STYLES


def formula(weight: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    """W + scale B A in FP32, rounded once."""
    down, up = pair
    return (weight.float() + (up.float() @ down.float()) * scale).to(weight.dtype)


@pytest.mark.parametrize("style", STYLES)
def test_every_spelling_is_the_formula_rounded_once(style: str, write, merged, weights, factors) -> None:
    result = merged(write(style))
    for name, weight in weights.items():
        pair = factors.get(name.removesuffix(".weight"))
        expected = weight if pair is None else formula(weight, pair)
        assert torch.equal(result[name], expected), name
        assert pair is None or not torch.equal(expected, weight)


def test_split_and_fused_forms_with_an_alpha_agree(write, merged) -> None:
    """An alpha tensor of a block-diagonal file counts in its tripled rank."""

    def alphas(value: float, tripled: float):
        def change(tensors) -> None:
            for key in [key for key in tensors if "lora_A" in key]:
                fused = "qkv_proj" in key
                tensors[key.partition(".lora_A")[0] + ".alpha"] = torch.tensor(tripled if fused else value)

        return change

    split = merged(write("diffusers", change=alphas(3.0, 3.0)))
    for style, tripled in (("native", 3.0), ("comfyui", 9.0)):
        fused = merged(write(style, change=alphas(3.0, tripled)))
        assert all(torch.equal(fused[name], tensor) for name, tensor in split.items())


def test_key_order_changes_nothing(write, merged, tmp_path) -> None:
    path = write("native")
    tensors = load_file(path)
    save_file(dict(reversed(tensors.items())), tmp_path / "reversed.safetensors")
    first, second = merged(path), merged(tmp_path / "reversed.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_scaling_b_or_alpha_differs_by_a_rare_ulp(write, merged) -> None:
    """0.7 in alpha or in the factors: the FP32 sums differ in their last bits, so a rounding may fall the other way."""

    def scaled(tensors) -> None:
        for key in [key for key in tensors if "lora_B" in key]:
            tensors[key] = tensors[key].float() * 0.7

    by_factor = merged(write("diffusers", "scaled.safetensors", change=scaled))
    by_alpha = merged(write("diffusers"), alpha=0.7 * 6)
    different = total = 0
    for name, tensor in by_factor.items():
        if tensor.dtype != torch.bfloat16:
            continue
        steps = (tensor.view(torch.int16).int() - by_alpha[name].view(torch.int16).int()).abs()
        largest = tensor.abs().max().float()
        # Where weight and change nearly cancel, FP32's own error spans several steps of what is left.
        cancelled = tensor.abs() < 2**-14 * largest
        assert steps[~cancelled].max() <= 1, name
        assert (tensor.float() - by_alpha[name].float()).abs()[cancelled].sum() <= 2**-21 * largest, name
        different += int((steps > 0).sum())
        total += tensor.numel()
    assert different <= 1e-4 * total


def test_wrapped_per_head_qkv_is_refused_not_guessed(write, opened) -> None:
    """'.default.' means rows per head over bare names; behind a prefix it could be PEFT's own."""

    def wrap(tensors) -> None:
        for key in list(tensors):
            tensors[f"base_model.model.{key}"] = tensors.pop(key)

    with pytest.raises(InputError, match=r"qkv_proj.lora_B.default.weight' may hold q, k, v in thirds or per head"):
        opened(write("diffsynth", change=wrap))


def test_fastvideo_differences_are_added(write, merged, weights) -> None:
    generator = torch.Generator().manual_seed(2)
    differences = {
        "proj_in.diff": "proj_in.weight",
        "proj_in.diff_b": "proj_in.bias",
        "transformer_blocks.1.norm1.diff": "transformer_blocks.1.norm1.weight",
        "transformer_blocks.1.adaln_proj.linear.diff_b": "transformer_blocks.1.adaln_proj.linear.bias",
    }
    values = {key: torch.randn(weights[name].shape, generator=generator) * 0.1 for key, name in differences.items()}
    path = write("fastvideo", change=lambda tensors: tensors.update(values), metadata={"diff_tensors": "4"})
    result = merged((path, 0.5))
    for key, name in differences.items():
        assert torch.equal(result[name], (weights[name].float() + values[key] * 0.5).to(weights[name].dtype)), name


def test_native_differences_land_in_their_rows(write, merged, weights) -> None:
    rows = weights["transformer_blocks.0.ff.net.0.proj.weight"].shape[0]
    gate_first = torch.cat([torch.full((rows // 2, HIDDEN), 2.0), torch.full((rows // 2, HIDDEN), 1.0)])

    def change(tensors) -> None:
        tensors.clear()
        tensors["blocks.0.mlp.fc1.diff"] = gate_first
        tensors["blocks.0.attn.q_norm.diff"] = torch.ones(128)

    result = merged(write("native", change=change))
    moved = (result["transformer_blocks.0.ff.net.0.proj.weight"].float()).round() - weights[
        "transformer_blocks.0.ff.net.0.proj.weight"
    ].float().round()
    assert moved[: rows // 2].mean() == pytest.approx(1, abs=0.05)
    assert moved[rows // 2 :].mean() == pytest.approx(2, abs=0.05)
    norm = "transformer_blocks.0.attn.norm_q.weight"
    assert torch.equal(result[norm], (weights[norm].float() + 1).to(torch.bfloat16))
