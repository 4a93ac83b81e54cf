"""`solgen train demo`: refusals in one line, before anything heavy loads."""

from pathlib import Path

import pytest

from tests.command_line import solgen


@pytest.mark.parametrize("text", ["flow", "flow=", "flow=-1", "flow=2.5", "=3"])
def test_steps_must_name_a_stage_and_a_number(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert solgen("train", "demo", "--smoke", "-o", str(tmp_path / "run"), "--steps", text) == 2
    assert capsys.readouterr().err.strip().splitlines() == [f"error: --steps {text} is not STAGE=N, such as flow=3000"]
    assert not (tmp_path / "run").exists()


def test_steps_must_name_a_stage_that_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert solgen("train", "demo", "--smoke", "-o", str(tmp_path / "run"), "--steps", "text=3") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: --steps text: no such stage; expected one of vae, audio_vae, flow_small, flow,")
    assert not (tmp_path / "run").exists()


def test_from_must_hold_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert solgen("train", "demo", "--smoke", "-o", str(tmp_path / "run"), "--from", str(tmp_path)) == 2
    assert f"--from {tmp_path} is neither a run nor a model" in capsys.readouterr().err


def test_without_a_gpu_only_the_smoke_form_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert solgen("train", "demo", "-o", str(tmp_path / "run")) == 1
    assert "no CUDA GPU found" in capsys.readouterr().err
