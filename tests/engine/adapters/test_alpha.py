"""The factor alpha / rank: where it is found first, module by module, and that it is said."""

import json
from pathlib import Path

import pytest
import torch

from tests.engine.adapters.spellings import ADALN, BLOCKS, RANK, TIME

TURBO = "minimax_h3_fl2v_turbo_4step_v0.1.safetensors"


def scales(overlay) -> dict[str, list[float]]:
    return overlay.adapters[0].origins()


def with_alpha(value: float):
    def change(tensors) -> None:
        for key in [key for key in tensors if "lora_A" in key]:
            tensors[key.partition(".lora_A")[0] + ".alpha"] = torch.tensor(value)

    return change


def test_the_setting_beats_the_tensor_beats_the_metadata(write, opened) -> None:
    path = write(change=with_alpha(3.0), metadata={"alpha": "12"})
    assert scales(opened(path, alpha=1.5)) == {"lora.alpha": [0.25]}
    assert scales(opened(path)) == {"tensor": [0.5]}
    assert scales(opened(write(name="meta.safetensors", metadata={"alpha": "12"}))) == {"metadata": [2.0]}


def test_without_any_alpha_the_scale_is_one_and_that_is_said(write, opened) -> None:
    overlay = opened(write())
    assert scales(overlay) == {"rank": [1.0]}
    assert any("declares no alpha; alpha = rank is assumed" in note for note in overlay.notes)
    assert not opened(write(name="meta.safetensors", metadata={"alpha": "6"})).notes


def test_ranks_are_counted_module_by_module(write, merged, weights, factors) -> None:
    """Ranks 6 and 2 in one file without alpha: scale 1 for both, whichever key comes first."""
    down, up = torch.ones(2, TIME), torch.full((ADALN, 2), 0.25)
    name = "transformer_blocks.0.adaln_proj.linear"

    def change(tensors) -> None:
        rest = dict(tensors)
        tensors.clear()
        tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up} | rest

    result = merged(write(change=change))
    assert torch.equal(result[f"{name}.weight"], (weights[f"{name}.weight"].float() + up @ down).to(torch.bfloat16))
    other = f"{BLOCKS[0]}.attn.to_q"
    a, b = (tensor.float() for tensor in factors[other])
    assert torch.equal(result[f"{other}.weight"], (weights[f"{other}.weight"].float() + b @ a).to(torch.bfloat16))


def test_peft_config_with_patterns_and_rank_stabilisation(write, opened) -> None:
    path = write("peft")
    config = {"lora_alpha": 12, "alpha_pattern": {"to_k": 3}, "use_rslora": False}
    path.with_name("adapter_config.json").write_text(json.dumps(config))
    assert scales(opened(path)) == {"adapter_config.json": [0.5, 2.0]}
    path.with_name("adapter_config.json").write_text(json.dumps({"lora_alpha": 6, "use_rslora": True}))
    assert scales(opened(path)) == {"adapter_config.json": [pytest.approx(RANK**0.5)]}


def test_the_config_that_diffusers_packs_into_the_metadata(write, opened) -> None:
    packed = json.dumps({"transformer.r": RANK, "transformer.lora_alpha": 3})
    assert scales(opened(write(metadata={"lora_adapter_metadata": packed}))) == {"adapter_config.json": [0.5]}


def test_a_config_beside_another_file_is_not_its_own(write, opened, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 60}))
    assert scales(opened(write())) == {"rank": [1.0]}


def test_fastvideo_declares_a_scale_of_one(write, opened) -> None:
    overlay = opened(write("fastvideo", metadata={"rank": "64"}))
    assert scales(overlay) == {"format (alpha = rank)": [1.0]}
    assert not overlay.notes


def test_a_known_file_is_known_by_its_name_and_rank(write, opened) -> None:
    """lightx2v's v0.1 was trained at alpha 8 and rank 128, and does not say so."""

    def rank_128(tensors) -> None:
        for key in list(tensors):
            shape = (128, tensors[key].shape[1]) if "lora_A" in key else (tensors[key].shape[0], 128)
            tensors[key] = torch.ones(shape)

    assert scales(opened(write("peft dump", TURBO, change=rank_128))) == {"lightx2v Turbo fl2v 4-step v0.1": [8 / 128]}
    assert scales(opened(write("peft dump", TURBO))) == {"rank": [1.0]}  # rank 6: another file of that name


@pytest.mark.parametrize(("alpha", "expected"), [(18.0, 1.0), (3.0, 0.5)])
def test_a_declared_alpha_over_a_tripled_rank(alpha: float, expected: float, write, opened) -> None:
    """Fusing q, k, v block-diagonally triples their rank; alpha is that of the parts, or alpha = rank throughout."""
    overlay = opened(write("comfyui", metadata={"alpha": str(alpha)}))
    assert scales(overlay) == {"metadata": [expected]}
