"""The main job, as the README runs it: the demo preset in a process of its own."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from solgen.engine.demo_training.probe import pitch_agrees, read_clip
from solgen.engine.demo_training.scenes import BACKGROUNDS
from solgen.engine.media.ffmpeg import Ffmpeg
from solgen.engine.media.read import read_video

PROMPT = "A red ball bounces across a wooden floor."

PROGRAM = """
import resource, sys
from solgen.__main__ import main
try:
    main(sys.argv[1:])
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("demo")
    arguments = [
        "generate",
        "--preset",
        "demo",
        "--prompt",
        PROMPT,
        "--seed",
        "1",
        "-o",
        "demo.mp4",
    ]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return folder, result


@pytest.mark.slow
def test_it_writes_a_clip_and_its_record_and_nothing_else(demo) -> None:
    folder, result = demo
    assert sorted(path.name for path in folder.iterdir()) == ["demo.json", "demo.mp4"]
    assert result.stdout == "demo.mp4\n"
    record = json.loads((folder / "demo.json").read_text())
    assert record["sampler"]["calls"] == 4
    assert [len(row) for row in record["attention"]["density"]] == [4] * 4


@pytest.mark.slow
def test_progress_in_a_file_is_plain_lines(demo) -> None:
    _, result = demo
    assert "\r" not in result.stderr
    assert "\x1b" not in result.stderr
    assert [line.split(":")[0] for line in result.stderr.splitlines()[:-1]] == [
        "load", "encode", "AdaLN tables", "denoise", "decode audio", "decode video", "write",
    ]  # fmt: skip


@pytest.mark.slow
def test_memory_stays_below_6_gib(demo) -> None:
    _, result = demo
    assert int(result.stderr.splitlines()[-1]) < 6 * 2**30


@pytest.mark.slow
def test_its_streams_are_what_players_accept(demo) -> None:
    folder, _ = demo
    _, _, log = Ffmpeg.find().capture(["-hide_banner", "-i", str(folder / "demo.mp4")])
    (video,) = re.findall(r"Stream .*Video: (.*)", log)
    (audio,) = re.findall(r"Stream .*Audio: (.*)", log)
    assert video.startswith("h264 (High)")
    assert "yuv420p(tv, bt709, progressive), 256x256" in video
    assert "24 fps" in video
    assert audio.startswith("aac (LC)")
    assert "32000 Hz, stereo" in audio
    assert PROMPT in log
    frames, sound = read_video(folder / "demo.mp4")
    assert frames.shape == (124, 256, 256, 3)
    assert sound is not None
    assert abs(sound.shape[1] / 32000 - 124 / 24) <= 1024 / 32000


@pytest.mark.slow
def test_the_clip_shows_and_sounds_what_the_prompt_says(demo) -> None:
    folder, _ = demo
    frames, sound = read_video(folder / "demo.mp4")
    assert sound is not None
    reading = read_clip(frames[::2, ::4, ::4], sound)
    assert (reading.colour, reading.motion) == ("red", "bounce")
    assert pitch_agrees(reading, "red")
    brown = np.array(BACKGROUNDS["wood"][0])
    assert np.abs(frames[:, :8, :8].mean((0, 1, 2)) / 255 - brown).max() < 0.05
