"""What is written reads back as promised, and what fails leaves everything as it was."""

import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from solgen.engine.media.ffmpeg import Ffmpeg, FfmpegError
from solgen.engine.media.read import read_video
from solgen.engine.media.write import check_output, write_video
from solgen.errors import InputError, SetupError, SolgenError

SIDE = 64
FRAMES = 22
AAC_FRAME = 1024


def moving_frames(num_frames: int, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """uint8 [F, H, W, 3] in which no two neighbouring frames are alike."""
    ramp = np.arange(height * width * 3).reshape(height, width, 3)
    return np.stack([(ramp + 7 * i) % 256 for i in range(num_frames)]).astype(np.uint8)


def tone(num_frames: int) -> np.ndarray:
    """float32 [2, samples] at 32 kHz, another note on either side."""
    time = np.arange(round(num_frames / 24 * 32_000)) / 32_000
    return np.stack([0.5 * np.sin(2 * np.pi * note * time) for note in (440, 660)]).astype(np.float32)


def write(path: Path, num_frames: int = FRAMES, **changes: object) -> None:
    settings: dict = {"num_frames": num_frames, "width": SIDE, "height": SIDE} | changes
    frames = settings.pop("frames", [moving_frames(num_frames)])
    audio = settings.pop("audio", tone(num_frames))
    write_video(path, frames, audio, **settings)


def report(ffmpeg: Ffmpeg, path: Path) -> str:
    return ffmpeg.capture(["-i", f"file:{path}"])[2]


def decoded(ffmpeg: Ffmpeg, path: Path, *arguments: str) -> bytes:
    return bytes(ffmpeg.read(["-i", f"file:{path}", *arguments, "pipe:1"])[0])


def boxes(path: Path) -> list[tuple[bytes, bytes]]:
    """Top-level boxes of an mp4 in the order of the file: name and content."""
    data, found, at = path.read_bytes(), [], 0
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        found.append((name, data[at + 8 : at + size]))
        at += size
    return found


def test_streams_are_what_every_player_accepts(tmp_path: Path, ffmpeg: Ffmpeg) -> None:
    write(tmp_path / "x.mp4")
    text = report(ffmpeg, tmp_path / "x.mp4")
    assert len(re.findall(r"Stream #0", text)) == 2
    assert "Video: h264 (High) (avc1" in text
    assert "yuv420p(tv, bt709, progressive), 64x64" in text
    assert "24 fps" in text
    assert re.search(r"Audio: aac \(LC\) \(mp4a.*, 32000 Hz, stereo", text)
    assert "start: 0.000000" in text


def test_index_comes_before_the_data_and_brands_are_common(tmp_path: Path) -> None:
    write(tmp_path / "x.mp4")
    found = boxes(tmp_path / "x.mp4")
    names = [name for name, _ in found]
    assert names[0] == b"ftyp"
    assert names.index(b"moov") < names.index(b"mdat")
    assert {b"isom", b"avc1"} <= set(re.findall(b"....", found[0][1]))


@pytest.mark.parametrize("num_frames", [124, 175, 362])
@pytest.mark.parametrize("surplus", [-5000, 0, 5000])
def test_exactly_the_promised_frames_and_sound_as_long(
    tmp_path: Path, ffmpeg: Ffmpeg, num_frames: int, surplus: int
) -> None:
    path = tmp_path / "x.mp4"
    samples = round(num_frames / 24 * 32_000)
    audio = np.resize(tone(num_frames), (2, samples + surplus))
    frames = moving_frames(num_frames)
    write(path, num_frames, frames=[frames[:17], frames[17:18], frames[18:]], audio=audio)

    passthrough = ["-map", "0:v", "-fps_mode", "passthrough", "-pix_fmt", "gray", "-f", "rawvideo"]
    assert len(decoded(ffmpeg, path, *passthrough)) == num_frames * SIDE * SIDE
    heard = len(decoded(ffmpeg, path, "-map", "0:a", "-f", "f32le")) // 8
    assert abs(heard - samples) <= AAC_FRAME
    hours, minutes, seconds = re.findall(r"Duration: (\d+):(\d+):([\d.]+), start: 0", report(ffmpeg, path))[0]
    duration = 3600 * int(hours) + 60 * int(minutes) + float(seconds)
    assert abs(duration - num_frames / 24) <= AAC_FRAME / 32_000


def test_frames_keep_their_order(tmp_path: Path) -> None:
    shades = np.linspace(0, 255, FRAMES).round().astype(np.uint8)
    write(tmp_path / "x.mp4", frames=[np.full((1, SIDE, SIDE, 3), shade, np.uint8) for shade in shades])
    frames, _ = read_video(tmp_path / "x.mp4")
    assert np.abs(frames.mean(axis=(1, 2, 3)) - shades).max() < 3


@pytest.mark.parametrize(
    "color",
    [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (255, 255, 255), (0, 0, 0), (200, 120, 60)],
)
def test_flat_colours_survive(tmp_path: Path, color: tuple[int, int, int]) -> None:
    write(tmp_path / "x.mp4", frames=[np.full((FRAMES, SIDE, SIDE, 3), color, np.uint8)])
    frames, _ = read_video(tmp_path / "x.mp4")
    assert np.abs(frames.astype(int) - color).max() <= 3


def test_a_grey_ramp_survives(tmp_path: Path) -> None:
    ramp = np.repeat(np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (FRAMES, SIDE, 256, 1)), 3, -1)
    write(tmp_path / "x.mp4", frames=[ramp], width=256)
    frames, _ = read_video(tmp_path / "x.mp4")
    assert np.abs(frames.astype(int) - ramp).max() <= 3


def test_the_stored_matrix_is_bt709(tmp_path: Path, ffmpeg: Ffmpeg) -> None:
    write(tmp_path / "x.mp4", frames=[np.full((FRAMES, SIDE, SIDE, 3), (255, 0, 0), np.uint8)])
    stored = decoded(ffmpeg, tmp_path / "x.mp4", "-map", "0:v", "-frames:v", "1", "-f", "rawvideo")
    luma, blue, red = stored[0], stored[SIDE * SIDE], stored[-1]
    # 16 + 219 * 0.2126, 128 - 224 * 0.2126 / 1.8556, 128 + 224 / 2; BT.601 would store 81, 90, 240.
    assert np.abs(np.array([luma, blue, red]) - [63, 102, 240]).max() <= 1


def test_chroma_sits_where_players_expect_it(tmp_path: Path, ffmpeg: Ffmpeg) -> None:
    frames = np.zeros((FRAMES, SIDE, SIDE, 3), np.uint8)
    frames[:, :, :31] = (255, 0, 0)
    frames[:, :, 31:] = (0, 0, 255)
    write(tmp_path / "x.mp4", frames=[frames])
    stored = decoded(ffmpeg, tmp_path / "x.mp4", "-map", "0:v", "-frames:v", "1", "-f", "rawvideo")
    blue = np.frombuffer(stored, np.uint8)[SIDE * SIDE :][: SIDE * SIDE // 4].reshape(SIDE // 2, SIDE // 2)
    # Sample 15 lies on column 30, which is three quarters red, a quarter blue; between 30 and 31 it is half.
    assert abs(int(blue[16, 15]) - (0.75 * 102 + 0.25 * 240)) < 12


def test_sound_survives_from_its_very_beginning(tmp_path: Path) -> None:
    both_sides_alike = np.repeat(tone(FRAMES)[:1], 2, axis=0)
    for audio in (tone(FRAMES), both_sides_alike):
        write(tmp_path / "x.mp4", audio=audio, overwrite=True)
        _, heard = read_video(tmp_path / "x.mp4")
        assert heard is not None
        kept = slice(0, audio.shape[1] - AAC_FRAME)
        assert np.abs(heard[:, kept] - audio[:, kept]).max() < 0.05


def test_sound_at_another_rate_is_resampled(tmp_path: Path) -> None:
    time = np.arange(44_000) / 48_000
    audio = np.stack([0.5 * np.sin(2 * np.pi * 440 * time)] * 2).astype(np.float32)
    write(tmp_path / "x.mp4", audio=audio, sampling_rate=48_000)
    _, heard = read_video(tmp_path / "x.mp4")
    assert heard is not None
    assert np.abs(heard[:, 1000:28_000] - tone(FRAMES)[0, 1000:28_000]).max() < 0.05


def test_loud_sound_is_clipped_not_wrapped(tmp_path: Path) -> None:
    write(tmp_path / "x.mp4", audio=4 * tone(FRAMES))
    _, heard = read_video(tmp_path / "x.mp4")
    assert heard is not None
    assert 0.9 < np.abs(heard).max() < 1.3


def test_crop_keeps_the_upper_rows_unscaled(tmp_path: Path) -> None:
    frames = np.full((FRAMES, 96, SIDE, 3), 40, np.uint8)
    frames[:, 80:90] = 200
    frames[:, 90:] = 255
    write(tmp_path / "x.mp4", frames=[frames], height=96, crop_height=90)
    read, _ = read_video(tmp_path / "x.mp4")
    assert read.shape == (FRAMES, 90, SIDE, 3)
    assert np.abs(read.astype(int) - frames[:, :90]).max() <= 6


@pytest.mark.parametrize("name", ["a b.mp4", "-x.mp4", "夜の猫 🐈.mp4", "%03d:'q'.mp4", "x.MP4", "n" * 251 + ".mp4"])
def test_any_name_works(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "影片 folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write(Path(name))
    assert [p.name for p in folder.iterdir()] == [name]
    assert len(read_video(Path(name))[0]) == FRAMES


def test_comment_keeps_the_prompt(tmp_path: Path, ffmpeg: Ffmpeg) -> None:
    write(tmp_path / "x.mp4", comment='一只猫 "walks" = 🎬\0\ud800;#\\' + "長" * 100_000)
    assert 'comment         : 一只猫 "walks" = 🎬 ?;#\\長長' in report(ffmpeg, tmp_path / "x.mp4")


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    write(tmp_path / "x.mp4")
    (tmp_path / "plain").touch()
    assert (tmp_path / "x.mp4").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_existing_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "x.mp4"
    path.write_bytes(b"earlier clip")
    with pytest.raises(InputError, match="already exists; choose another name or pass --overwrite"):
        write(path)
    assert path.read_bytes() == b"earlier clip"
    with path.open("rb") as opened_before:
        write(path, overwrite=True)
        # Renamed over, not written into: whoever plays the old file sees it to its end.
        assert opened_before.read() == b"earlier clip"
    assert path.read_bytes()[4:8] == b"ftyp"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.mp4"

    def frames():
        path.write_bytes(b"another run")
        yield moving_frames(FRAMES)

    with pytest.raises(InputError, match="already exists"):
        write(path, frames=frames())
    assert path.read_bytes() == b"another run"


FAILURES = {
    "exits": ("head -c 30000 >/dev/null; echo 'x264 [error]: malloc failed' >&2; exit 1", "malloc failed"),
    "is killed": ("head -c 30000 >/dev/null; kill -9 $$", "SIGKILL"),
    "leaves a part": ('for last; do :; done; echo part > "$last"; exit 1', "exit status 1"),
    "has no libx264": ("cat >/dev/null; echo \"Unknown encoder 'libx264'\" >&2; exit 8", "Unknown encoder"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failing_encoder_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, stand_in: Callable[[str], Ffmpeg], how: str
) -> None:
    script, expected = FAILURES[how]
    path = tmp_path / "x.mp4"
    path.write_bytes(b"earlier clip")
    with pytest.raises(FfmpegError, match=expected):
        write(path, overwrite=True, ffmpeg=stand_in(script))
    assert path.read_bytes() == b"earlier clip"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, ffmpeg: Ffmpeg, stand_in: Callable[[str], Ffmpeg]
) -> None:
    path = tmp_path / "x.mp4"
    path.write_bytes(b"earlier clip")
    short_of_space = stand_in(f"trap '' XFSZ; ulimit -f 16; exec '{ffmpeg.executable}' \"$@\"")
    noise = np.random.default_rng(0).integers(0, 256, (FRAMES, SIDE, SIDE, 3), dtype=np.uint8)
    with pytest.raises(SetupError, match="File too large"):
        write(path, frames=[noise], overwrite=True, ffmpeg=short_of_space)
    assert path.read_bytes() == b"earlier clip"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_while_decoding_leaves_nothing(tmp_path: Path) -> None:
    def frames():
        yield moving_frames(5)
        raise OSError("the decoder's own trouble")

    with pytest.raises(OSError, match="own trouble"):
        write(tmp_path / "x.mp4", frames=frames())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "frames",
    [
        [moving_frames(FRAMES - 1)],
        [moving_frames(FRAMES), moving_frames(1)],
        [moving_frames(FRAMES).astype(np.float32)],
        [moving_frames(FRAMES, height=SIDE * 2)],
        [moving_frames(FRAMES)[..., :1]],
    ],
    ids=["too few", "too many", "float", "wrong size", "grey"],
)
def test_frames_that_were_not_promised_are_refused(tmp_path: Path, frames: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match="promised"):
        write(tmp_path / "x.mp4", frames=frames)
    assert list(tmp_path.iterdir()) == []


def test_sound_that_is_broken_is_refused(tmp_path: Path) -> None:
    broken = tone(FRAMES)
    broken[1, 7] = np.nan
    broken[0, 3:5] = np.inf
    with pytest.raises(SolgenError, match=r"3 of \d+ sound samples are not finite"):
        write(tmp_path / "x.mp4", audio=broken)
    with pytest.raises(ValueError, match=r"\[2, samples\], got float32 \[1, "):
        write(tmp_path / "x.mp4", audio=tone(FRAMES)[:1])
    with pytest.raises(ValueError, match="got int16"):
        write(tmp_path / "x.mp4", audio=np.zeros((2, 100), np.int16))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("height", "crop"), [(64, 63), (64, 66), (63, None), (64, 0)])
def test_a_picture_that_h264_cannot_hold_is_refused(tmp_path: Path, height: int, crop: int | None) -> None:
    with pytest.raises(ValueError, match="even sides"):
        write(tmp_path / "x.mp4", height=height, crop_height=crop)


def test_outputs_that_cannot_work_are_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "file").touch()
    for path, expected in [
        (tmp_path / "x.webm", "end its name in .mp4"),
        (tmp_path / "x", "end its name in .mp4"),
        (tmp_path / "absent" / "x.mp4", "create it first"),
        (tmp_path / "file" / "x.mp4", "no folder"),
        (tmp_path / "folder.mp4", "is a folder"),
        (tmp_path / ("猫" * 90 + ".mp4"), "File name too long"),
    ]:
        with pytest.raises(InputError, match=expected) as caught:
            check_output(path, overwrite=True)
        assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.mp4"]
