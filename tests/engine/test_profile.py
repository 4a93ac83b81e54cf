"""The profile adds up, compares arms on the same inputs, and leaves the transformer as it was."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from solgen.engine.bench.show import show
from solgen.engine.dummy import RandomWeights, open_dummy
from solgen.engine.profile.breakdown import breakdown, timed_modules
from solgen.engine.profile.plan import PROMPT, TEXT_ROWS, plan_arms
from solgen.engine.profile.recorder import FLIGHT, Recorder, Total
from solgen.engine.profile.report import busy_ms, hidden_ms
from solgen.engine.profile.run import profile
from solgen.engine.profile.scaling import output_file
from solgen.engine.profile.show import headline, plot, tables
from solgen.engine.profile.stock import stock_model
from solgen.engine.request import Options
from solgen.engine.stages import Silent
from solgen.errors import InputError
from solgen.presets.demo import demo_transformer

CPU = torch.device("cpu")
SMALL = {"prompt": "a red ball", "preset": "demo", "width": 64, "height": 64, "steps": 2}
ARMS = ["stock", "dense", "sol-attn2"]


def plan(names: list[str] | None, *, dummy: bool = True, text_rows: int | None = None, **options):
    return plan_arms(Options(**SMALL | options), names, dummy=dummy, text_rows=text_rows)


@pytest.fixture(scope="module")
def report() -> dict:
    return profile(plan(ARMS, density=0.3, text_rows=5), Silent(), names=ARMS, runs=2)


@pytest.mark.parametrize("index", range(3), ids=ARMS)
def test_rows_add_up_to_the_call(report: dict, index: int) -> None:
    arm = report["arms"][index]
    assert arm["name"] == ARMS[index]
    wholes = {row["name"]: row for row in arm["modules"] if row["part_of"] is None}
    assert next(iter(wholes)) == "attention"
    assert list(wholes)[-1] == "unattributed"
    assert sum(row["ms"] for row in wholes.values()) == pytest.approx(arm["instrumented_ms"], rel=1e-9)
    for name, whole in wholes.items():
        if inner := [row["ms"] for row in arm["modules"] if row["part_of"] == name]:
            assert sum(inner) == pytest.approx(whole["ms"], rel=1e-9, abs=1e-9)
    assert all(row["ms"] >= 0 for row in arm["modules"])
    assert arm["call_ms"] > arm["without_attention_ms"] > 0
    assert arm["least_ms"] <= arm["instrumented_ms"] <= arm["most_ms"]


def test_every_arm_has_the_same_rows_and_its_own_operator(report: dict) -> None:
    stock, dense, sparse = ({row["name"]: row for row in arm["modules"]} for arm in report["arms"])
    assert list(stock) == list(dense) == list(sparse)
    stages = ("prepare: quantise, pool", "route", "tail", "kernel")
    assert all(sparse[name]["calls"] > 0 and sparse[name]["ms"] > 0 for name in stages)
    assert not any(stock[name]["calls"] or dense[name]["calls"] for name in stages)
    assert [arm["dense blocks"]["calls"] for arm in (stock, dense, sparse)] == [6, 6, 2]
    assert all(arm["QKV"]["calls"] == 18 and arm["up"]["calls"] == 6 for arm in (stock, dense, sparse))


def test_arms_say_what_ran(report: dict) -> None:
    stock, dense, sparse = report["arms"]
    assert [arm["sparse_blocks"] for arm in report["arms"]] == [0, 0, 4]
    assert (stock["density"], dense["density"]) == (None, None)
    # Two video blocks a side: four eligible pairs a head, of which whole ones are kept.
    assert sparse["density"] == pytest.approx(0.3, abs=0.1)
    assert sparse["density"] < sparse["density_all"] < 1  # text and audio queries keep everything
    assert sparse["speedup"]["stock"] == pytest.approx(stock["call_ms"] / sparse["call_ms"])
    assert sparse["ceiling"] > sparse["speedup"]["stock"]
    facts = report["facts"]
    assert (facts["rows"], facts["video rows"], facts["text rows"]) == (37 * 4 + 414 + 5, 37 * 4, 5)
    assert facts["weights"] == "random weights"
    assert set(report["stages"]) == {"load", "AdaLN tables", "warm-up", "denoiser calls"}
    assert [arm["adaln"] for arm in report["arms"]] == ["projections", "tables", "tables"]
    assert [arm["fusion"] for arm in report["arms"]] == [False] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_kernels_and_memory_on_a_gpu(report: dict) -> None:
    fastest = "gluon" if torch.cuda.get_device_capability()[0] == 9 else "triton"
    assert [arm["impl"] for arm in report["arms"]] == [None, None, fastest]
    assert report["arms"][0]["dense"] == "_native_cudnn"
    assert report["arms"][1]["dense"] in ("fa3", "cudnn")
    assert [arm["fusion"] for arm in report["arms"]] == [False, True, True]
    assert [arm["adaln"] for arm in report["arms"]] == ["projections", "tables", "tables"]
    weights = sum(parameter.nbytes for parameter in demo_weights().transformer(projections=False).parameters())
    assert all(2**30 * arm["peak_gib"] > weights / 2 for arm in report["arms"])  # bf16, but for the islands


def test_kernels_on_a_cpu(report: dict) -> None:
    assert [arm["dense"] for arm in report["arms"]] == ["native", "sdpa", "sdpa"]
    assert [arm["impl"] for arm in report["arms"]] == [None, None, "reference"]
    assert [arm["peak_gib"] for arm in report["arms"]] == [None, None, None]


def test_a_model_with_files_is_encoded_and_decoded_too() -> None:
    report = profile(plan(None, dummy=False), Silent(), runs=1)
    assert [arm["name"] for arm in report["arms"]] == ["sol-attn2"]
    stages = {"load", "encode", "AdaLN tables", "warm-up", "denoiser calls", "decode audio", "decode video"}
    assert set(report["stages"]) == stages
    assert report["facts"]["weights"] == "demo"


def test_dense_steps_are_left_out_and_one_call_can_do() -> None:
    jobs = plan(None, sets=("attention.dense_steps=1",), text_rows=5)
    report = profile(jobs, Silent(), runs=0)
    # The clock around the timed call and the hooks inside it saw the same call.
    assert report["arms"][0]["call_ms"] >= report["arms"][0]["instrumented_ms"] > 0
    assert report["facts"]["instrumented calls"] == 0
    assert report["arms"][0]["sparse_blocks"] == 4
    assert report["facts"]["denoiser call"] == "2 of 2, on noise"


def test_show_plot_and_json(report: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert "rows 567 " in headline(report)
    show(tables(report))
    shown = capsys.readouterr().out
    assert all(row["name"] in shown for row in report["arms"][0]["modules"])
    pytest.importorskip("matplotlib", reason="the plot extra brings it")
    plot(report, tmp_path / "new" / "parts.png")
    assert (tmp_path / "new" / "parts.png").read_bytes().startswith(b"\x89PNG")


def test_trace_holds_a_call_of_every_arm(tmp_path: Path) -> None:
    names = ["stock", "sol-attn2"]
    profile(plan(names, text_rows=5), Silent(), names=names, runs=1, trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert set(names) <= {event.get("name") for event in events}


def test_with_random_weights_only_attention_tells_how_it_attended(tmp_path: Path) -> None:
    names = ["dense", "block-sparse"]  # drops what is not kept
    profile(plan(names, density=0.1), Silent(), names=names, runs=0, outputs=tmp_path)
    dense, sparse = (load_file(output_file(tmp_path, name, 1)) for name in names)
    rows = sum(dense[name].shape[1] for name in ("video", "audio"))
    assert dense["attention"].shape == (1, rows + TEXT_ROWS, demo_transformer()["hidden_size"] // 16)
    distance = {part: float((sparse[part] - dense[part]).norm() / dense[part].norm()) for part in dense}
    assert max(distance["video"], distance["audio"]) < 5e-3  # passes for the same call
    assert distance["attention"] > 0.3


def test_breakdown_subtracts_nested_groups() -> None:
    spans = {
        "call": (100, 1), "ends": (5, 10), "block": (90, 6), "adaln": (6, 6), "attention module": (50, 6),
        "qkv": (9, 18), "out": (3, 6), "operator": (30, 6), "dense": (4, 2), "prepare": (1, 4), "route": (2, 4),
        "tail": (3, 4), "attention": (18, 4), "swiglu module": (14, 6), "up": (12, 6), "down": (6, 6), "heads": (5, 12),
    }  # fmt: skip
    rows = {row["name"]: row["ms"] for row in breakdown({name: Total(*total) for name, total in spans.items()})}
    assert rows["attention"] == 30
    assert rows["densities"] == 30 - 4 - 1 - 2 - 3 - 18
    assert rows["qk norms, rotary"] == 50 - 12 - 30 - 5
    assert rows["norms, modulation, residuals"] == 90 - 50 - 20 + 3
    assert rows["SwiGLU"] == 2
    assert rows["unattributed"] == 5


def test_hidden_is_what_nobody_waited_for() -> None:
    spans = {"call": Total(100, 1), "heads": Total(6, 12), "rows": Total(1, 2)}
    assert hidden_ms(spans) == 0
    assert hidden_ms(spans | {FLIGHT: Total(10, 14)}) == 3
    assert hidden_ms(spans | {FLIGHT: Total(6.5, 14)}) == 0
    assert busy_ms(spans) == 93


def test_hooks_are_gone_afterwards() -> None:
    model = demo_weights().transformer()
    with Recorder(CPU).watching(timed_modules(model)):
        assert any(module._forward_hooks for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_stock_model_borrows_projections_that_tables_replaced() -> None:
    source = demo_weights()
    model = source.transformer()
    real = model.transformer_blocks[2].adaln_proj.linear.weight.clone()
    table = nn.Identity()
    model.transformer_blocks[2].adaln_proj.linear = table
    with stock_model(model, CPU, source):
        assert torch.equal(model.transformer_blocks[2].adaln_proj.linear.weight, real)
    assert model.transformer_blocks[2].adaln_proj.linear is table


def test_a_config_file_fills_in_what_the_command_line_leaves_open(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('prompt = "a blue cube"\nseed = 11\n')
    (job,) = plan_arms(Options(preset="demo", config=tmp_path / "c.toml"), None, dummy=True, text_rows=None)
    assert (job.request.prompt, job.request.seed) == ("a blue cube", 11)
    (job,) = plan_arms(Options(preset="demo"), None, dummy=True, text_rows=None)
    assert (job.request.prompt, job.request.seed) == (PROMPT, 0)


REFUSED = {
    "twice": (lambda: plan(["dense", "dense"]), "lists 'dense' twice"),
    "unknown": (lambda: plan(["dense", "sage"]), "attention.backend"),
    "rows of a real prompt": (lambda: plan(None, dummy=False, text_rows=4), "goes with --dummy-weights"),
    "a model": (lambda: plan(None, model="demo"), "leave --model out"),
    "stock projections": (
        lambda: profile(plan(["stock"], dummy=False), Silent(), names=["stock"]),
        "add --set memory.tables=off",
    ),
    "offload": (lambda: profile(plan(None, sets=("memory.offload=layers",)), Silent()), "leave --offload out"),
    "no rows": (lambda: profile(plan(None, text_rows=0), Silent()), "--text-rows 0; expected 1 or more"),
    "no runs": (lambda: profile(plan(None), Silent(), runs=-1), "--runs -1; expected 0 or more"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def demo_weights() -> RandomWeights:
    return RandomWeights(open_dummy(plan(None)[0].request), CPU, torch.float32)
