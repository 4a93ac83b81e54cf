"""The life of a request on the demo model: what is written, what repeats, what is kept when it fails."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from solgen.engine.decode import Latents
from solgen.engine.denoise import NonFiniteLatentsError
from solgen.engine.generate import generate
from solgen.engine.media.read import read_video
from solgen.engine.media.write import write_video
from solgen.engine.output import decode_file
from solgen.errors import InputError, SolgenError


def without_times(record: dict) -> dict:
    record = copy.deepcopy(record)
    del record["timings"], record["output"]["path"]
    return record


def test_same_seed_same_bytes_other_seed_other_clip(small_job, listener) -> None:
    jobs = [small_job("a.mp4", steps=2), small_job("b.mp4", steps=2), small_job("c.mp4", steps=2, seed=8)]
    first, second, other = generate(jobs, listener)
    assert first["latents_sha256"] == second["latents_sha256"] != other["latents_sha256"]
    assert without_times(first) == without_times(second)
    assert jobs[0].output.read_bytes() == jobs[1].output.read_bytes() != jobs[2].output.read_bytes()
    # A process of its own, a batch of its own: still the same.
    (alone,) = generate([small_job("d.mp4", steps=2)], listener)
    assert without_times(alone) == without_times(first)


def test_sidecar_holds_every_resolved_value(small_job, listener) -> None:
    job = small_job("clip.mp4", "attention.sink=true", steps=2)
    (record,) = generate([job], listener)
    assert json.loads(job.sidecar.read_text()) == record
    assert record["request"]["seed"] == 7
    assert record["request"]["prompt"] == "a red ball"
    assert record["request"]["settings"]["attention"]["sink"] is True
    assert record["sequence"]["rows"] == 37 * 2 * 2 + 2 * 207 + record["sequence"]["text"]
    assert record["sampler"]["calls"] == 2
    assert record["sampler"]["video_sigmas"][-1] == 0.0
    assert record["attention"]["impl"] == "reference"
    density = record["attention"]["density"]
    assert [sorted(row) for row in density] == [["1", "2", "3", "4"]] * 2
    assert all(0 <= value <= 1 for row in density for value in row.values())
    stages = {"load", "encode", "AdaLN tables", "denoise", "decode audio", "decode video", "write"}
    assert set(record["timings"]) == stages
    assert {"solgen", "torch", "diffusers", "python"} <= set(record["versions"])
    assert listener.parts == 2


def test_the_clip_has_the_promised_frames_and_sound(small_job, listener) -> None:
    job = small_job()
    generate([job], listener)
    frames, sound = read_video(job.output)
    assert frames.shape == (124, 64, 64, 3)
    assert sound is not None
    # AAC works in frames of 1,024 samples; 124 frames last 165,333 samples at 32 kHz.
    assert abs(sound.shape[1] - round(124 / 24 * 32000)) <= 1024
    assert frames.std() > 1
    assert np.abs(sound).max() > 1e-3


def test_keyframes(small_job, listener, picture) -> None:
    first, last = str(picture("a.png", (255, 0, 0))), str(picture("b.png", (0, 0, 255)))
    jobs = [
        small_job("both.mp4", image=first, last_image=last),
        small_job("first.mp4", image=first),
        small_job("last.mp4", last_image=last),
    ]
    records = generate(jobs, listener)
    assert [record["sequence"]["condition_video"] for record in records] == [8, 4, 4]
    assert len({record["latents_sha256"] for record in records}) == 3
    assert records[0]["request"]["task"] == "fl2va"
    assert len(records[0]["request"]["image"]["sha256"]) == 64


def test_references_in_order(small_job, listener, picture, sound) -> None:
    red, blue = picture("a.png", (255, 0, 0)), picture("b.png", (0, 0, 255))
    jobs = [
        small_job("ab.mp4", reference=(f"image:{red}", f"audio:{sound}", f"image:{blue}")),
        small_job("ba.mp4", reference=(f"image:{blue}", f"audio:{sound}", f"image:{red}")),
    ]
    records = generate(jobs, listener)
    assert records[0]["latents_sha256"] != records[1]["latents_sha256"]
    # Reference images have a short edge of 256 pixels, 64 patch rows; 1 s of sound is 40 latents a channel.
    assert records[0]["sequence"]["condition_video"] == 128
    assert records[0]["sequence"]["condition_audio"] == 80
    assert records[0]["request"]["task"] == "ref2va"


def test_a_video_reference(small_job, listener, tmp_path: Path) -> None:
    """39 frames with sound: 12 latent frames of 256 x 256, and a sound latent for every 800 samples of a channel."""
    frames = np.random.default_rng(0).integers(0, 255, (39, 64, 64, 3), dtype=np.uint8)
    tone = np.sin(np.arange(52000) / 20, dtype=np.float32)[None].repeat(2, 0) / 2
    write_video(tmp_path / "source.mp4", [frames], tone, num_frames=39, width=64, height=64)
    (record,) = generate([small_job("clip.mp4", reference=(f"video:{tmp_path / 'source.mp4'}",))], listener)
    assert record["sequence"]["condition_video"] == 12 * 8 * 8
    heard = read_video(tmp_path / "source.mp4")[1].shape[-1]  # codecs round 52,000 up to whole frames of theirs
    assert record["sequence"]["condition_audio"] == 2 * -(-heard // 800)


def test_362_frames_are_accepted(small_job, listener) -> None:
    job = small_job(num_frames=362)
    (record,) = generate([job], listener)
    assert record["output"]["seconds"] == pytest.approx(15.083, abs=1e-3)
    assert read_video(job.output)[0].shape[0] == 362


def test_cropping_keeps_the_upper_rows(small_job, listener) -> None:
    full, cropped = small_job("full.mp4"), small_job("cropped.mp4", "output.crop=60")
    records = generate([full, cropped], listener)
    assert records[1]["output"]["height"] == 60
    whole, cut = read_video(full.output)[0], read_video(cropped.output)[0]
    assert cut.shape == (124, 60, 64, 3)
    # Both went through the encoder, so rows agree up to its loss.
    assert np.abs(whole[:, :60].astype(float) - cut).mean() < 4


def test_density_is_solved_for(small_job, listener) -> None:
    job = small_job("clip.mp4", width=128, height=128, density=0.3)
    (record,) = generate([job], listener)
    measured = np.mean([value for row in record["attention"]["density"] for value in row.values()])
    assert measured == pytest.approx(0.3, abs=0.02)
    assert record["attention"]["epsilon"] != 0.47
    assert record["sampler"]["calls"] == 1


def test_dense_steps_and_dense_backend_measure_no_density(small_job, listener) -> None:
    jobs = [
        small_job("half.mp4", "attention.dense_steps=1", steps=2),
        small_job("dense.mp4", attention="dense", steps=2),
    ]
    half, dense = generate(jobs, listener)
    assert [len(row) for row in half["attention"]["density"]] == [0, 4]
    assert [len(row) for row in dense["attention"]["density"]] == [0, 0]
    assert dense["attention"]["impl"] is None


def poison(at: int):
    def hook(step: int, video: torch.Tensor, audio: torch.Tensor) -> None:
        if step == at:
            video[3, 5] = float("nan")

    return hook


def test_non_finite_latents_stop_the_run_at_their_step(small_job, listener, tmp_path: Path) -> None:
    with pytest.raises(
        NonFiniteLatentsError, match=r"non-finite values at step 2 of 3; no video was written.*--attention dense"
    ):
        generate([small_job(steps=3)], listener, on_step=poison(2))
    assert list(tmp_path.iterdir()) == []


def test_the_block_that_broke_is_named(small_job, listener, model_copy: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = model_copy / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["transformer_blocks.2.ff.net.2.weight"][0, 0] = float("inf")
    save_file(tensors, weights)
    for attention in ("dense", "sol-attn2"):
        with pytest.raises(NonFiniteLatentsError, match=r"step 1 of 1 \(block 2\)"):
            generate([small_job("clip.mp4", model=str(model_copy), attention=attention)], listener)
    assert not (tmp_path / "clip.mp4").exists()


def test_latents_are_kept_when_writing_fails_and_decode_later(small_job, listener, tmp_path: Path) -> None:
    plain, job = small_job("plain.mp4"), small_job("clip.mp4")
    generate([plain], listener)

    def fill_the_place(step: int, video: torch.Tensor, audio: torch.Tensor) -> None:
        job.output.mkdir()

    with pytest.raises(SolgenError, match=r"solgen decode .*clip.latents.safetensors"):
        generate([job], listener, on_step=fill_the_place)
    job.output.rmdir()
    with pytest.raises(SolgenError, match=r"clip.latents-2.safetensors"):
        generate([small_job("clip.mp4", seed=8)], listener, on_step=fill_the_place)
    kept = tmp_path / "clip.latents.safetensors"
    assert not job.sidecar.exists()
    decode_file(kept, tmp_path / "later.mp4", listener, overwrite=False)
    later, first = (json.loads((tmp_path / name).read_text()) for name in ("later.json", "plain.json"))
    assert without_times(later) == without_times(first)
    assert (tmp_path / "later.mp4").read_bytes() == plain.output.read_bytes()
    with pytest.raises(InputError, match="already exists"):
        decode_file(kept, tmp_path / "later.mp4", listener, overwrite=False)
    with pytest.raises(InputError, match="not a latents file"):
        Latents.load(plain.output)


def test_resume_skips_finished_clips_alone(small_job, listener) -> None:
    done, new = small_job("done.mp4"), small_job("new.mp4", seed=9)
    generate([done], listener)
    before = done.output.stat().st_mtime_ns
    records = generate([done, new], listener, resume=True)
    assert [record["request"]["seed"] for record in records] == [7, 9]
    assert records == [json.loads(job.sidecar.read_text()) for job in (done, new)]
    assert done.output.stat().st_mtime_ns == before
    assert f"{done.output} is finished; skipped" in listener.notes
    changed = small_job("done.mp4", seed=11)
    with pytest.raises(InputError, match="another request's clip"):
        generate([changed], listener, resume=True)
    new.sidecar.unlink()
    with pytest.raises(InputError, match="has no readable record new.json"):
        generate([new], listener, resume=True)
    generate([new], listener, resume=True, overwrite=True)
    assert json.loads(new.sidecar.read_text())["request"]["seed"] == 9


def test_a_canvas_without_an_all_video_block_has_no_density(small_job, listener) -> None:
    (record,) = generate([small_job(width=32, height=32)], listener)
    assert record["attention"]["density"] == [dict.fromkeys("1234")]


def test_latents_that_do_not_fit_their_record_are_refused(small_job, listener, tmp_path: Path) -> None:
    latents = Latents(torch.zeros(1, 24, 37, 4, 4), torch.zeros(2, 32, 207))
    settings = small_job().request.preset.model_dump(mode="json")
    request = {"settings": settings, "preset": "demo", "task": "t2va", "prompt": "x"}
    sound = {"request": request, "timings": {"denoise": 1.0}}
    for record, message in (
        ({}, "does not hold the record of a clip"),
        ({**sound, "request": {**request, "settings": {"canvas": 1}}}, "does not hold the record"),
    ):
        kept = latents.keep(tmp_path / "a.mp4", record)
        with pytest.raises(InputError, match=message):
            decode_file(kept, tmp_path / "b.mp4", listener, overwrite=False)
    kept = Latents(latents.video[..., :2], latents.audio).keep(tmp_path / "a.mp4", sound)
    with pytest.raises(InputError, match="it is damaged"):
        decode_file(kept, tmp_path / "b.mp4", listener, overwrite=False)
    assert listener.stages == []


def test_a_batch_shares_task_and_model(small_job, listener, picture) -> None:
    with pytest.raises(InputError, match="share a task and a model"):
        generate([small_job("a.mp4"), small_job("b.mp4", image=str(picture("a.png", (9, 9, 9))))], listener)
