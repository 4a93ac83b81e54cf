"""The profile adds up, and leaves the transformer as it was."""

import pytest
import torch

from solgen.engine.profile import call_breakdown, profile


@pytest.fixture
def report(small_job, listener) -> dict:
    return profile(small_job(steps=2).request, listener)


def test_rows_add_up_to_the_call(report: dict) -> None:
    names = [row["name"] for row in report["modules"]]
    assert names[0] == "attention, rotary"
    assert names[-1] == "unattributed"
    assert sum(row["ms"] for row in report["modules"]) == pytest.approx(report["call_ms"], rel=1e-6)
    assert all(row["ms"] >= 0 for row in report["modules"])


def test_facts_say_what_was_measured(report: dict) -> None:
    facts = report["facts"]
    assert facts["preset"] == "demo"
    assert facts["rows"] == 37 * 4 + 414 + 3
    assert (facts["calls measured"], facts["warm-up calls left out"]) == (1, 1)
    assert 0 <= facts["density"] <= 1
    assert set(report["stages"]) == {"load", "encode", "AdaLN tables", "denoise", "decode audio", "decode video"}


def test_breakdown_subtracts_nested_groups() -> None:
    call = {
        "call": 100.0, "edges": 5.0, "block": 90.0, "attention module": 50.0, "projections": 12.0,
        "qk norms": 3.0, "norms": 7.0, "ffn": 20.0, "adaln": 6.0,
    }  # fmt: skip
    rows = {row["name"]: row["ms"] for row in call_breakdown([call], blocks=6)}
    assert rows["attention, rotary"] == 50 - 12 - 3
    assert rows["modulation, residuals"] == 90 - 50 - 20 - 6 - (7 - 3)
    assert rows["unattributed"] == 5
    assert sum(rows.values()) == 100


def test_hooks_are_gone_afterwards() -> None:
    from diffusers import MiniMaxH3Transformer3DModel

    from solgen.engine.profile import module_clock
    from solgen.presets.demo import demo_model_path

    model = MiniMaxH3Transformer3DModel.from_pretrained(demo_model_path() / "transformer")
    with module_clock(model, torch.device("cpu")):
        assert any(module._forward_hooks for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
