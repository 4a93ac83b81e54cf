"""Real media files, made with the ffmpeg that solgen uses, and stand-ins for an ffmpeg that misbehaves."""

from collections.abc import Callable
from pathlib import Path

import pytest

from solgen.engine.media.ffmpeg import Ffmpeg


@pytest.fixture(scope="session")
def ffmpeg() -> Ffmpeg:
    return Ffmpeg.find()


@pytest.fixture
def make_media(tmp_path: Path, ffmpeg: Ffmpeg) -> Callable[..., Path]:
    """`make_media("clip.mp4", *arguments)` runs ffmpeg into a file of that name."""

    def make(name: str, *arguments: str) -> Path:
        path = tmp_path / name
        returncode, _, log = ffmpeg.capture(["-y", "-loglevel", "error", *arguments, f"file:{path}"])
        assert returncode == 0, log
        return path

    return make


@pytest.fixture
def stand_in(tmp_path: Path) -> Callable[[str], Ffmpeg]:
    """An ffmpeg that runs this shell script instead; its arguments are ffmpeg's."""

    def build(script: str) -> Ffmpeg:
        # Outside tmp_path, where tests look for what was left behind.
        folder = tmp_path.parent / f"{tmp_path.name}-bin"
        folder.mkdir(exist_ok=True)
        program = folder / "ffmpeg"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return Ffmpeg(str(program))

    return build
