"""Small requests on the demo model, shared by the engine's tests."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from solgen.engine.batch import Job
from solgen.engine.request import Options, resolve
from solgen.presets.demo import demo_model_path


class Quiet:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.stages: list[str] = []
        self.parts = 0

    def start(self, stage: str, total: int | None) -> None:
        self.stages.append(stage)

    def advance(self) -> None:
        self.parts += 1

    def finish(self, stage: str, seconds: float) -> None:
        assert self.stages[-1] == stage

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def listener() -> Quiet:
    return Quiet()


@pytest.fixture
def small_job(tmp_path: Path) -> Callable[..., Job]:
    """A job of 64 x 64 pixels, 124 frames and one denoiser call, unless told otherwise."""

    def make(name: str = "clip.mp4", *sets: str, **options) -> Job:
        given = {"prompt": "a red ball", "preset": "demo", "width": 64, "height": 64, "steps": 1} | options
        return Job(resolve(Options(**given, sets=sets), seed=7), tmp_path / name)

    return make


@pytest.fixture
def model_copy(tmp_path: Path) -> Path:
    """A copy of the demo model whose files may be broken."""
    return Path(shutil.copytree(demo_model_path(), tmp_path / "model"))


def edit_json(path: Path, **changes: object) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def picture(tmp_path: Path) -> Callable[[str, tuple[int, int, int]], Path]:
    """A flat picture of a given colour."""
    from PIL import Image

    def make(name: str, colour: tuple[int, int, int]) -> Path:
        Image.fromarray(np.full((64, 64, 3), colour, dtype=np.uint8)).save(tmp_path / name)
        return tmp_path / name

    return make


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """One second of a 440 Hz tone, mono, 44.1 kHz."""
    import wave

    samples = (np.sin(np.arange(44100) * 440 * 2 * np.pi / 44100) * 12000).astype("<i2")
    with wave.open(str(tmp_path / "tone.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(44100)
        file.writeframes(samples.tobytes())
    return tmp_path / "tone.wav"


os.environ.setdefault("HF_HUB_OFFLINE", "1")
