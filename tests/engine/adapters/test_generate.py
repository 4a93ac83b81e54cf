"""`solgen generate --lora`: both modes, several adapters, the record, and the preset's own adapter."""

import json
from pathlib import Path

import pytest
import torch

from solgen.__main__ import main
from solgen.engine.adapters.header import file_sha256
from solgen.engine.batch import Job
from solgen.engine.generate import generate
from solgen.engine.profile.run import profile
from solgen.engine.request import Options, resolve
from solgen.errors import InputError

SMALL = ("--preset", "demo", "-p", "a ball", "--width", "64", "--height", "64", "--steps", "1", "--seed", "7")


def test_two_adapters_from_the_command_line(write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write("native"), write("kohya")
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "clip.mp4"
    with pytest.raises(SystemExit) as stop:
        main(["generate", *SMALL, "--lora", f"{first}:0.5", "--lora", str(second), "-o", str(out)])
    assert stop.value.code == 0
    printed, said = capsys.readouterr()
    assert printed == f"{out}\n"
    assert "native.safetensors declares no alpha; alpha = rank is assumed" in said
    assert "kohya.safetensors declares" not in said
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["request"]["loras"] == [
        {"source": str(first), "strength": 0.5, "sha256": file_sha256(first)},
        {"source": str(second), "strength": 1.0, "sha256": file_sha256(second)},
    ]
    assert record["adapters"]["mode"] == "merge"
    assert [(f["sha256"], f["strength"], f["scales"]) for f in record["adapters"]["files"]] == [
        (file_sha256(first), 0.5, {"rank": [1.0]}),
        (file_sha256(second), 1.0, {"tensor": [1.0]}),
    ]
    assert set(record["adapters"]["kept"]) == {"attention", "FFN", "refiner"}


def test_both_modes_make_one_clip_and_strength_zero_makes_that_of_no_adapter(
    write, small_job, listener, tmp_path: Path
) -> None:
    path, latents = write(), {}

    def run(name: str, *loras: str, **options) -> str:
        def keep(step: int, video: torch.Tensor, audio: torch.Tensor) -> None:
            latents[name] = video.clone()

        job = small_job(f"{name}.mp4", attention="dense", lora=loras, **options)
        (record,) = generate([job], listener, on_step=keep)
        return record["latents_sha256"]

    plain = run("plain")
    assert run("zero", f"{path}:0") == plain
    merge, branch = run("merge", str(path)), run("branch", str(path), lora_mode="branch")
    assert plain not in (merge, branch)
    distance = (latents["merge"] - latents["branch"]).norm() / (latents["merge"] - latents["plain"]).norm()
    assert distance < 1e-3


def test_branches_work_under_sparse_attention(write, small_job, listener) -> None:
    first, second = write("native"), write("kohya")
    job = small_job("sparse.mp4", lora=(f"{first}:0.5", str(second)), lora_mode="branch")
    (record,) = generate([job], listener)
    assert record["adapters"]["mode"] == "branch"
    assert record["attention"]["density"][0]


def test_resume_knows_an_adapter_by_its_bytes(write, small_job, listener) -> None:
    path = write()
    job = small_job(lora=(str(path),))
    made = generate([job], listener)
    before = job.output.stat().st_mtime_ns
    assert generate([job], listener, resume=True) == made
    assert job.output.stat().st_mtime_ns == before
    write(change=lambda tensors: tensors.update({key: value * 2 for key, value in tensors.items()}))
    with pytest.raises(InputError, match="another request's clip"):
        generate([job], listener, resume=True)


def test_a_presets_own_adapter_is_applied_and_its_digest_checked(write, small_job, listener) -> None:
    path = write()
    own = (f"adapter.repo={path.parent}", f"adapter.file={path.name}")
    (plain,) = generate([small_job("plain.mp4")], listener)
    (record,) = generate([small_job("own.mp4", *own, f"adapter.sha256={file_sha256(path)[:8]}")], listener)
    assert record["latents_sha256"] != plain["latents_sha256"]
    assert record["adapters"]["files"][0]["sha256"] == file_sha256(path)
    with pytest.raises(InputError, match="00000000 is expected"):
        generate([small_job("bad.mp4", *own, "adapter.sha256=00000000")], listener)
    with pytest.raises(InputError, match="is a copy of a file that is given too"):
        generate([small_job("twice.mp4", *own, lora=(str(path),))], listener)


def test_profile_takes_adapters(write, listener) -> None:
    options = Options(prompt="x", preset="demo", width=64, height=64, steps=1, lora=(str(write()),))
    report = profile([Job(resolve(options, seed=0), Path())], listener, runs=1)
    assert report["arms"][0]["call_ms"] > 0
    assert any("declares no alpha" in note for note in listener.notes)


def test_a_config_file_may_list_adapters(write, tmp_path: Path) -> None:
    path = write()
    (tmp_path / "mine.toml").write_text(f'lora = ["{path}:0.25"]\nlora_mode = "branch"\n')
    request = resolve(Options(prompt="x", preset="demo", config=tmp_path / "mine.toml"), seed=0)
    assert [(source.path, source.strength) for source in request.loras] == [(path, 0.25)]
    assert request.preset.lora.mode == "branch"


def test_one_load_serves_one_set_of_adapters(write, small_job, listener) -> None:
    path = write()
    jobs = [small_job("a.mp4", lora=(str(path),)), small_job("b.mp4", lora=(f"{path}:0.5",))]
    with pytest.raises(InputError, match="share a task and a model with its adapters"):
        generate(jobs, listener)
