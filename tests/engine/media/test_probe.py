"""A quick look at a file tells what it is, or in one line why it will not do."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from solgen.engine.media.ffmpeg import Ffmpeg
from solgen.engine.media.probe import Kind, probe_media
from solgen.engine.media.read import read_audio, read_image, read_video
from solgen.errors import InputError

Make = Callable[..., Path]
PICTURE = ("-f", "lavfi", "-i", "testsrc2=size=64x48:rate=30:duration=2")
TONE = ("-f", "lavfi", "-i", "sine=frequency=440:sample_rate=44100:duration=2")
READERS = {"image": read_image, "video": read_video, "audio": read_audio}


def test_a_clip_with_sound(make_media: Make) -> None:
    info = probe_media(make_media("x.mp4", *PICTURE, *TONE), "video")
    assert (info.kind, info.width, info.height, info.fps) == ("video", 64, 48, 30)
    assert info.has_audio
    assert info.duration_s == pytest.approx(2, abs=0.05)


def test_a_clip_without_sound(make_media: Make) -> None:
    assert not probe_media(make_media("x.webm", *PICTURE), "video").has_audio


def test_a_sound(make_media: Make) -> None:
    info = probe_media(make_media("x.wav", *TONE), "audio")
    assert (info.kind, info.width, info.fps, info.has_audio, info.is_mono) == ("audio", 0, None, True, True)
    assert info.duration_s == pytest.approx(2, abs=0.01)


def test_the_sound_of_a_clip(make_media: Make) -> None:
    info = probe_media(make_media("x.mkv", *PICTURE, *TONE, "-ac", "2"), "audio")
    assert (info.kind, info.is_mono) == ("audio", False)


def test_a_picture(tmp_path: Path) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "x.jpg")
    info = probe_media(tmp_path / "x.jpg", "image")
    assert (info.kind, info.width, info.height, info.has_audio) == ("image", 30, 20, False)


def test_wide_pixels_count_as_displayed(make_media: Make) -> None:
    info = probe_media(make_media("x.mp4", *PICTURE, "-vf", "setsar=2"), "video")
    assert (info.width, info.height) == (128, 48)


def test_text_inside_the_file_is_not_believed(make_media: Make) -> None:
    lie = "title=a\n[info]   Stream #0:7: Audio: aac, 44100 Hz, mono\n[info]   Duration: 09:00:00.00"
    info = probe_media(make_media("x.mp4", *PICTURE, "-metadata", lie), "video")
    assert not info.has_audio
    assert info.duration_s == pytest.approx(2, abs=0.05)


def test_cover_art_is_no_clip(make_media: Make, tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "cover.png")
    cover = ("-i", str(tmp_path / "cover.png"), "-map", "0", "-map", "1", "-disposition:v", "attached_pic")
    song = make_media("x.mp3", *TONE, *cover)
    assert probe_media(song, "audio").has_audio
    with pytest.raises(InputError, match="it has no video in it"):
        probe_media(song, "video")


def test_clips_and_sounds_are_not_taken_for_each_other(make_media: Make) -> None:
    clip, sound = make_media("x.mp4", *PICTURE), make_media("x.wav", *TONE)
    for path, kind in ((clip, "audio"), (sound, "video")):
        with pytest.raises(InputError, match=f"cannot read {kind} .*: it has no {kind} in it"):
            probe_media(path, kind)
    for path in (clip, sound):
        with pytest.raises(InputError, match="no known image format"):
            probe_media(path, "image")


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_files_that_are_nothing_are_named_in_one_line(tmp_path: Path, kind: Kind) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "pointer").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n")
    (tmp_path / "noise").write_bytes(np.random.default_rng(0).bytes(50_000))
    (tmp_path / "folder").mkdir()
    for name, reason in [
        ("absent", "no such file"),
        ("folder", "is a directory"),
        ("empty", "the file is empty"),
        ("pointer", ""),
        ("noise", ""),
    ]:
        for look in (lambda path: probe_media(path, kind), READERS[kind]):
            with pytest.raises(InputError, match=f"cannot read {kind} '.*{name}': .*{reason}.*; ") as caught:
                look(tmp_path / name)
            assert "\n" not in str(caught.value)
            assert caught.value.exit_code == 2


@pytest.mark.parametrize("where", ["after its head", "halfway"])
@pytest.mark.parametrize("how", ["cut", "damaged"])
@pytest.mark.parametrize(("kind", "source"), [("video", PICTURE), ("audio", TONE)], ids=["video", "audio"])
def test_cut_and_damaged_files_are_refused(
    make_media: Make, kind: Kind, source: tuple[str, ...], how: str, where: str
) -> None:
    path = make_media("x.mp4", *source, "-movflags", "+faststart")
    data = bytearray(path.read_bytes())
    start = len(data) // 2 if where == "halfway" else data.index(b"mdat") - 100
    if how == "cut":
        del data[start:]
    else:
        data[start::37] = bytes(len(data[start::37]))
    path.write_bytes(data)
    with pytest.raises(InputError, match=f"cannot read {kind} ") as caught:
        READERS[kind](path)
    assert "\n" not in str(caught.value)


def test_cut_pictures_are_refused(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for suffix in ("png", "jpg", "webp"):
        whole = tmp_path / f"whole.{suffix}"
        Image.fromarray(noise).save(whole)
        cut = tmp_path / f"cut.{suffix}"
        cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
        for look in (lambda path: probe_media(path, "image"), read_image):
            with pytest.raises(InputError, match="cannot read image") as caught:
                look(cut)
            assert "\n" not in str(caught.value)


def test_a_decoder_that_was_killed_is_not_blamed_on_the_file(
    make_media: Make, ffmpeg: Ffmpeg, stand_in: Callable[[str], Ffmpeg]
) -> None:
    dies_reading = f"case $* in *pipe:1) kill -9 $$;; *) exec '{ffmpeg.executable}' \"$@\";; esac"
    with pytest.raises(Exception, match="killed by SIGKILL") as caught:
        read_video(make_media("x.mp4", *PICTURE), ffmpeg=stand_in(dies_reading))
    assert not isinstance(caught.value, InputError)
