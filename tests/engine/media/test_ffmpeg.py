"""The binary is found, checked and run without a deadlock, and its failures are explained."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from solgen.engine.media.ffmpeg import Ffmpeg, FfmpegError, check_ffmpeg
from solgen.errors import SetupError

ENCODER_TABLE = "echo ' V....D libx264  H.264'; echo ' A....D aac  AAC'"


def test_the_bundled_binary_has_what_the_writer_needs() -> None:
    assert os.access(check_ffmpeg(), os.X_OK)


def test_a_binary_without_libx264_is_refused_by_name(stand_in: Callable[[str], Ffmpeg]) -> None:
    with pytest.raises(SetupError, match="lacks libx264, aac; reinstall") as caught:
        stand_in("echo ' V....D libx264rgb  libx264 H.264'").check()
    assert "\n" not in str(caught.value)


def test_a_binary_without_a_filter_is_refused_by_name(stand_in: Callable[[str], Ffmpeg]) -> None:
    with pytest.raises(SetupError, match="lacks zscale"):
        stand_in(f"case $* in *-encoders) {ENCODER_TABLE};; *) echo ' .. setparams V->V';; esac").check()


def test_a_binary_that_fails_at_once_shows_what_it_printed(stand_in: Callable[[str], Ffmpeg]) -> None:
    with pytest.raises(SetupError, match=r"exit status 127.*\n.*libfoo\.so: not found"):
        stand_in("echo 'libfoo.so: not found' >&2; exit 127").check()


def test_a_missing_or_unusable_program_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no program")
    for name in ("absent", "data"):
        with pytest.raises(SetupError, match=r"cannot start .*; reinstall") as caught:
            Ffmpeg(str(tmp_path / name)).check()
        assert "\n" not in str(caught.value)


def test_no_binary_at_all_is_a_setup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_found() -> str:
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", none_found)
    with pytest.raises(SetupError, match="imageio-ffmpeg has no ffmpeg for this machine"):
        check_ffmpeg()


def test_a_flood_of_messages_does_not_stop_the_pipe(stand_in: Callable[[str], Ffmpeg]) -> None:
    talkative = stand_in("yes 'a warning about nothing' | head -c 1000000 >&2; cat >/dev/null; exit 3")
    with pytest.raises(FfmpegError, match="exit status 3") as caught, talkative.feed([]) as pipe:
        pipe.write(bytes(1_000_000))
    assert str(caught.value).count("\n") <= 8


def test_a_killed_encoder_is_named(stand_in: Callable[[str], Ffmpeg]) -> None:
    dying = stand_in("head -c 1000 >/dev/null; kill -9 $$")
    with pytest.raises(FfmpegError, match="was killed by SIGKILL"), dying.feed([]) as pipe:
        pipe.write(bytes(10_000_000))


def test_an_error_of_the_caller_ends_the_encoder(stand_in: Callable[[str], Ffmpeg], tmp_path: Path) -> None:
    waiting = stand_in(f"echo $$ > '{tmp_path}/pid'; echo ready >&2; exec cat >/dev/null")

    def feed() -> None:
        with waiting.feed([]) as pipe:
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                pipe.write(b"x")
            raise KeyError("decoder")

    with pytest.raises(KeyError):
        feed()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
