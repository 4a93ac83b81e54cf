"""What is refused before a weight is read, whatever the model."""

import re
import subprocess
from pathlib import Path

import pytest

from solgen.engine import generate as life
from solgen.engine.check import MAX_ROWS, check
from solgen.engine.media.ffmpeg import Ffmpeg
from solgen.errors import InputError
from solgen.presets.schema import load_preset, preset_names


def refusal(job, listener) -> str:
    with pytest.raises(InputError) as error:
        life.generate([job], listener)
    assert "\n" not in str(error.value)
    assert listener.stages == []  # reading weights is the first stage
    return str(error.value)


def make_clip(path: Path, size: str, frames: int) -> Path:
    arguments = ["-f", "lavfi", "-i", f"testsrc=size={size}:rate=24", "-frames:v", str(frames), str(path)]
    subprocess.run([Ffmpeg.find().executable, "-loglevel", "error", *arguments], check=True)
    return path


@pytest.mark.parametrize(
    ("width", "height", "num_frames"), [(3_200_000, 3_200_000, 124), (2560, 1408, 362), (32768, 8192, 124)]
)
def test_a_canvas_that_no_operator_packs(width: int, height: int, num_frames: int, small_job, listener) -> None:
    rows = (num_frames // 17 * 5 + 2) * (width // 32) * (height // 32) + 2 * round(num_frames / 24 * 40)
    message = refusal(small_job(width=width, height=height, num_frames=num_frames), listener)
    assert f"packs {rows:,} rows of video and sound, the limit is 262,144" in message


def test_every_preset_fits() -> None:
    for name in preset_names():
        canvas = load_preset(name).canvas
        assert (canvas.num_frames // 17 * 5 + 2) * canvas.width * canvas.height // 1024 < MAX_ROWS


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["sampler.video_shift=1e39"], "the video levels of the 4 steps are not all finite .*video_shift 1e.39"),
        (["sampler.audio_shift=1e39"], "the audio levels of the 4 steps are not all finite .*audio_shift 1e.39"),
        (["sampler.steps=1000", "sampler.video_shift=1e6"], "too close for float32"),
        (
            ["sampler.steps=2", "sampler.video_sigmas=0.5,0.49999999999,0", "sampler.audio_sigmas=1,0.5,0"],
            "video levels of 2 steps are too close",
        ),
    ],
)
def test_noise_levels_that_cannot_work(sets: list[str], message: str, small_job, listener) -> None:
    assert re.search(message, refusal(small_job("clip.mp4", *sets, steps=None), listener))


def test_references_that_the_model_cannot_read(small_job, listener, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (410, 100)).save(tmp_path / "wide.png")
    for reference, message in (
        (f"image:{tmp_path / 'wide.png'}", "wide.png' is 410x100, expected 1:4 to 4:1; crop it"),
        (f"video:{make_clip(tmp_path / 'wide.mp4', '320x64', 24)}", "wide.mp4' is 320x64, expected 1:4 to 4:1"),
        (f"video:{make_clip(tmp_path / 'short.mp4', '64x64', 12)}", "has 12 frames at 24 fps, expected 13 or more"),
    ):
        assert message in refusal(small_job(reference=(reference,)), listener)
    # One frame more is enough, and exactly 4:1 is not too wide.
    check([small_job(reference=(f"video:{make_clip(tmp_path / 'enough.mp4', '256x64', 13)}",))])


BROKEN = [
    ("tokenizer/tokenizer.json", "", "tokenizer holds no readable tokenizer"),
    ("processor/tokenizer.json", "[]", "processor holds no readable tokenizer"),
    ("processor/video_preprocessor_config.json", "[]", "video_preprocessor_config.json is not a JSON object"),
    ("transformer/config.json", "[]", "transformer/config.json is not a JSON object"),
]


@pytest.mark.parametrize(("file", "text", "message"), BROKEN, ids=[file for file, _, _ in BROKEN])
def test_a_broken_model(file: str, text: str, message: str, small_job, listener, model_copy: Path) -> None:
    (model_copy / file).write_text(text)
    assert message in refusal(small_job(model=str(model_copy)), listener)


def test_a_tokenizer_without_files(small_job, listener, model_copy: Path) -> None:
    for path in (model_copy / "tokenizer").iterdir():
        path.unlink()
    assert f"no tokenizer in {model_copy / 'tokenizer'}" in refusal(small_job(model=str(model_copy)), listener)
