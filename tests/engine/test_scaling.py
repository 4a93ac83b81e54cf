"""The cost model: what it takes from a profile, and what it says of the link."""

import json
from pathlib import Path

import pytest

from solgen.engine.bench.scaling import Machine, bench_scaling, predict, prediction_tables
from solgen.engine.bench.show import show
from solgen.errors import InputError

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module", params=["hyperflow-12s", "1080p15"])
def report(request: pytest.FixtureRequest) -> dict:
    return json.loads((RESULTS / f"profile-{request.param}.json").read_text())


def row(report: dict, name: str, gpus: int, wire: str = "bf16", overlap: bool = False) -> dict:
    arm = next(arm for arm in report["arms"] if arm["name"] == name)
    return predict(report, arm, gpus, wire=wire, overlap=overlap, machine=Machine())


def test_one_gpu_is_its_profile(report: dict) -> None:
    for arm in report["arms"]:
        found = row(report, arm["name"], 1)
        assert found["call_ms"] == pytest.approx(arm["call_ms"])
        assert (found["exposed_ms"], found["copies_ms"]) == (0, 0)


def test_the_exchanges_of_two_gpus_take_what_was_measured(report: dict) -> None:
    """NCCL's all-to-all on two H200s, ms a block: queries, keys and values, then the output."""
    measured = {83_061: 2.77 + 1.00, 219_524: 7.16 + 2.44}[report["facts"]["rows"]]
    assert row(report, "dense", 2)["exposed_ms"] / 50 == pytest.approx(measured, rel=0.05)


def test_more_gpus_and_a_narrower_wire_and_overlap_are_faster(report: dict) -> None:
    calls = [row(report, "sol-attn2", gpus)["call_ms"] for gpus in (1, 2, 4, 8)]
    assert calls == sorted(calls, reverse=True)
    for gpus in (2, 4, 8):
        plain, narrow, early = (
            row(report, "sol-attn2", gpus, wire, overlap)
            for wire, overlap in (("bf16", False), ("fp8", False), ("bf16", True))
        )
        assert plain["efficiency"] < 1
        assert narrow["call_ms"] < plain["call_ms"]
        # Dense blocks stay bf16; values are a quarter of what is exchanged.
        sparse = 44 / 50
        assert narrow["exposed_ms"] / plain["exposed_ms"] == pytest.approx(1 - sparse * (1 - 612.125 / 1024))
        assert early["exposed_ms"] == pytest.approx(0.75 * plain["exposed_ms"])


def test_what_was_measured_stands_beside_what_was_predicted(tmp_path: Path, report: dict, capsys) -> None:
    facts = report["facts"] | {"wire": "fp8", "overlap": "on"}
    rows = [{"arm": "sol-attn2", "gpus": gpus, "call_ms": 100.0 * gpus} for gpus in (1, 2)]
    path = tmp_path / "study.json"
    path.write_text(json.dumps({"reports": [report | {"facts": facts}], "scaling": rows}))
    (found,) = bench_scaling([path], [1, 2, 4], Machine())
    seen = {
        (row["arm"], row["wire"], row["overlap"], row["gpus"]): row["measured_ms"]
        for row in found["predictions"]
        if row["measured_ms"] is not None
    }
    assert seen == {("sol-attn2", "fp8", True, 1): 100.0, ("sol-attn2", "fp8", True, 2): 200.0}
    show(prediction_tables([found]))
    assert f"predicted, {facts['rows']:,} rows" in capsys.readouterr().out


def test_files_of_as_many_rows_share_the_profile_on_one_gpu(tmp_path: Path) -> None:
    alone = [RESULTS / f"profile-{name}.json" for name in ("hyperflow-12s", "1080p15")]
    report = json.loads(alone[1].read_text())
    facts = report["facts"] | {"world size": 4, "wire": "fp8", "overlap": "off"}
    path = tmp_path / "study.json"
    rows = [{"arm": "sol-attn2", "gpus": 4, "call_ms": 9999.0}]
    path.write_text(json.dumps({"reports": [report | {"facts": facts}], "scaling": rows}))
    with pytest.raises(InputError, match="no profile on one GPU"):
        bench_scaling([path, alone[0]], [4], Machine())
    with pytest.raises(InputError, match="--gpus 3: 56 heads cannot be split over 3 GPUs"):
        bench_scaling([alone[0]], [1, 3], Machine())
    large, small = bench_scaling([path, *alone[::-1]], [4], Machine())
    for found, profile, rows in ((large, alone[1], 219_524), (small, alone[0], 83_061)):
        assert found["rows"] == rows
        assert {row["profile"] for row in found["predictions"]} == {str(profile)}
    measured = [row for row in large["predictions"] if row["measured_ms"] is not None]
    assert [(row["arm"], row["wire"], row["overlap"], row["measured_ms"]) for row in measured] == [
        ("sol-attn2", "fp8", False, 9999.0)
    ]
    assert measured[0]["call_ms"] == row(report, "sol-attn2", 4, "fp8")["call_ms"]
    assert all(row["measured_ms"] is None for row in small["predictions"])


def test_every_arm_is_predicted_from_the_first_profile_that_has_it(tmp_path: Path, report: dict) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    sparse = [arm for arm in report["arms"] if arm["name"] == "sol-attn2"]
    first.write_text(json.dumps(report | {"arms": sparse}))
    second.write_text(json.dumps(report))
    (found,) = bench_scaling([first, second], [2], Machine())
    assert {row["arm"]: row["profile"] for row in found["predictions"]} == {
        "sol-attn2": str(first),
        "dense": str(second),
    }


def test_the_first_measurement_stands_beside(tmp_path: Path, report: dict) -> None:
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path, call in zip(paths, (111.0, 222.0), strict=True):
        rows = [{"arm": "dense", "gpus": 2, "call_ms": call}]
        facts = report["facts"] | {"wire": "bf16", "overlap": "off"}
        path.write_text(json.dumps({"reports": [report | {"facts": facts}], "scaling": rows}))
    (found,) = bench_scaling(paths, [2], Machine())
    assert {row["measured_ms"] for row in found["predictions"]} == {111.0, None}


def test_what_is_no_profile_is_refused_by_name(tmp_path: Path, report: dict) -> None:
    path = tmp_path / "profile.json"
    arm = report["arms"][0]
    for broken in (
        {"arms": [{key: arm[key] for key in arm if key != "instrumented_ms"}]},
        {"arms": [arm | {"modules": []}]},
        {"arms": [arm | {"modules": [{"name": row["name"]} for row in arm["modules"]]}]},
        {"arms": ["dense"]},
        {"facts": {"world size": 1}},
        {"facts": [1]},
        {"reports": [1]},
        {"scaling": [{}]},
    ):
        path.write_text(json.dumps(report | broken))
        with pytest.raises(InputError, match="profile.json is not JSON of solgen profile of this version"):
            bench_scaling([path], [2], Machine())


def test_a_profile_tells_its_heads(tmp_path: Path, report: dict) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(report | {"facts": report["facts"] | {"heads": 8}}))
    (found,) = bench_scaling([path], [2], Machine())
    whole, eighth = row(report, "dense", 2), found["predictions"][0]
    assert eighth["exposed_ms"] == pytest.approx(whole["exposed_ms"] / 7)
    with pytest.raises(InputError, match="--gpus 7: 8 heads cannot be split over 7 GPUs"):
        bench_scaling([path], [2, 7], Machine())
