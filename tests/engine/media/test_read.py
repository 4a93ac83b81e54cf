"""Whatever the file's rates and orientation, it is read as it is seen and heard."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from solgen.engine.media.read import read_audio, read_image, read_video

Make = Callable[..., Path]
LOSSLESS = ("-c:v", "libx264rgb", "-qp", "0")
RED_OVER_BLUE = "color=red:size=64x48:rate={rate}:duration=1,drawbox=y=24:h=24:color=blue:t=fill"
TONE = "sine=frequency=440:sample_rate={rate}:duration=1"


def counting_frames(tmp_path: Path, rate: float, count: int) -> tuple[str, ...]:
    """Input arguments for `count` frames whose grey is their number."""
    raw = tmp_path / f"{count}.raw"
    raw.write_bytes(b"".join(bytes([i]) * (16 * 16) for i in range(count)))
    return ("-f", "rawvideo", "-pix_fmt", "gray", "-s", "16x16", "-r", str(rate), "-i", str(raw))


def numbers(frames: np.ndarray) -> list[int]:
    return [int(n) for n in np.round(frames.mean(axis=(1, 2, 3)))]


# ---- clips


def test_24_fps_is_read_frame_by_frame(make_media: Make, tmp_path: Path) -> None:
    clip = make_media("x.mkv", *counting_frames(tmp_path, 24, 50), "-c:v", "ffv1", "-pix_fmt", "gray")
    frames, sound = read_video(clip)
    assert frames.dtype == np.uint8
    assert frames.shape == (50, 16, 16, 3)
    assert numbers(frames) == list(range(50))
    assert frames.flags.writeable
    assert sound is None


@pytest.mark.parametrize("rate", [12, 25, 30, 48, 60])
def test_other_rates_keep_their_speed(make_media: Make, tmp_path: Path, rate: int) -> None:
    clip = make_media("x.mkv", *counting_frames(tmp_path, rate, 2 * rate), "-c:v", "ffv1", "-pix_fmt", "gray")
    frames, _ = read_video(clip)
    assert len(frames) == 48
    expected = np.arange(48) / 24 * rate
    assert np.abs(np.array(numbers(frames)) - expected).max() <= max(1, rate / 24 / 2 + 0.5)


def test_a_variable_rate_keeps_its_times(make_media: Make, tmp_path: Path) -> None:
    # 12 frames in the first second, then one every quarter of a second for two seconds.
    times = "setpts='if(lt(N,12), N/12, 1+(N-12)/4)/TB'"
    source = counting_frames(tmp_path, 12, 20)
    encoding = ("-fps_mode", "vfr", "-enc_time_base", "1/1000", "-c:v", "ffv1", "-pix_fmt", "gray")
    frames, _ = read_video(make_media("x.mkv", *source, "-vf", f"settb=1/1000,{times}", *encoding))
    found = numbers(frames)
    assert found[:24] == [i // 2 for i in range(24)]
    assert found[24:66] == [12 + i // 6 for i in range(42)]


def test_a_picture_that_starts_late_stays_in_step_with_its_sound(make_media: Make, tmp_path: Path) -> None:
    late = (*counting_frames(tmp_path, 24, 24), "-f", "lavfi", "-i", TONE.format(rate=32000))
    encoding = ("-vf", "setpts=PTS+0.5/TB", "-c:v", "ffv1", "-pix_fmt", "gray", "-c:a", "pcm_s16le")
    frames, sound = read_video(make_media("x.mkv", *late, *encoding))
    assert numbers(frames)[:14] == [0] * 13 + [1]
    assert sound is not None
    assert np.abs(sound[:, :100]).max() > 0


def test_sound_that_starts_late_stays_in_step_with_its_picture(make_media: Make, tmp_path: Path) -> None:
    late = (*counting_frames(tmp_path, 24, 24), "-f", "lavfi", "-i", TONE.format(rate=32000))
    encoding = ("-af", "asetpts=PTS+0.5/TB", "-c:v", "ffv1", "-pix_fmt", "gray", "-c:a", "pcm_s16le")
    frames, sound = read_video(make_media("x.mkv", *late, *encoding))
    assert numbers(frames)[:3] == [0, 1, 2]
    assert sound is not None
    assert np.abs(sound[:, :15_900]).max() == 0
    assert np.abs(sound[:, 16_100:16_300]).max() > 0.05


def test_rotation_is_honoured(make_media: Make) -> None:
    upright = make_media("u.mp4", "-f", "lavfi", "-i", RED_OVER_BLUE.format(rate=24), *LOSSLESS)
    turned = make_media("t.mp4", "-display_rotation", "90", "-i", str(upright), "-c", "copy")
    frames, _ = read_video(turned)
    assert frames.shape == (24, 64, 48, 3)
    assert (frames[:, :, :20, 0] > 250).all()
    assert (frames[:, :, 28:, 2] > 250).all()


def test_wide_pixels_become_square(make_media: Make) -> None:
    source = ("-f", "lavfi", "-i", RED_OVER_BLUE.format(rate=24), "-vf", "setsar=3/2")
    frames, _ = read_video(make_media("x.mp4", *source, *LOSSLESS))
    assert frames.shape == (24, 48, 96, 3)


def test_canvas_scales_while_decoding(make_media: Make) -> None:
    clip = make_media("x.mp4", "-f", "lavfi", "-i", RED_OVER_BLUE.format(rate=24), *LOSSLESS)
    asked = []

    def canvas(width: int, height: int) -> tuple[int, int]:
        asked.append((width, height))
        return 96, 32

    frames, _ = read_video(clip, canvas=canvas)
    assert asked == [(64, 48)]
    assert frames.shape == (24, 96, 32, 3)
    assert (frames[:, :40, :, 0] > 250).all()
    assert (frames[:, 56:, :, 2] > 250).all()


def test_max_frames_bounds_picture_and_sound(make_media: Make, tmp_path: Path) -> None:
    source = (*counting_frames(tmp_path, 24, 48), "-f", "lavfi", "-i", "sine=sample_rate=48000:duration=2")
    clip = make_media("x.mkv", *source, "-c:v", "ffv1", "-pix_fmt", "gray")
    frames, sound = read_video(clip, max_frames=12)
    assert len(frames) == 12
    assert sound is not None
    assert sound.shape == (2, 16_000)
    assert read_audio(clip, max_frames=6).shape == (2, 8_000)


@pytest.mark.parametrize("matrix", ["bt709", "smpte170m"])
def test_colours_follow_the_tags_of_the_file(make_media: Make, matrix: str) -> None:
    source = ("-f", "lavfi", "-i", "color=0xc86428:size=64x48:rate=24:duration=1")
    tags = f"scale=out_color_matrix={matrix}:out_range=limited,format=yuv420p,setparams=colorspace={matrix}"
    frames, _ = read_video(make_media("x.mp4", *source, "-vf", tags, "-qp", "0"))
    assert np.abs(frames.astype(int) - (200, 100, 40)).max() <= 3


@pytest.mark.parametrize("name", ["a b.mkv", "-x.mkv", "夜の猫 🐈.mkv", "%03d.mkv", "a:b.mkv", "pipe:0"])
def test_any_name_can_be_read(make_media: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = make_media("plain.mkv", "-f", "lavfi", "-i", RED_OVER_BLUE.format(rate=24))
    monkeypatch.chdir(path.parent)
    path.rename(name)
    assert len(read_video(Path(name))[0]) == 24


# ---- sounds


def test_mono_at_44_khz_becomes_stereo_at_32_khz_at_its_own_level(make_media: Make) -> None:
    sound = read_audio(make_media("x.wav", "-f", "lavfi", "-i", TONE.format(rate=44100)))
    assert sound.dtype == np.float32
    assert sound.shape == (2, 32_000)
    assert (sound[0] == sound[1]).all()
    # ffmpeg's sine has an amplitude of 1/8.
    expected = np.sin(2 * np.pi * 440 * np.arange(32_000) / 32_000) / 8
    assert np.abs(sound[0, 100:-100] - expected[100:-100]).max() < 2e-3


def test_left_and_right_stay_apart(make_media: Make) -> None:
    sides = "aevalsrc=0.5|0.25*sin(2*PI*440*t):s=32000:d=1"
    sound = read_audio(make_media("x.wav", "-f", "lavfi", "-i", sides))
    assert np.abs(sound[0] - 0.5).max() < 1e-3
    assert np.abs(sound[1]).max() == pytest.approx(0.25, abs=1e-3)


def test_surround_is_folded_into_stereo(make_media: Make) -> None:
    source = "aevalsrc=0.1|0.1|0.1|0.1|0.1|0.1:c=5.1:s=48000:d=1"
    sound = read_audio(make_media("x.flac", "-f", "lavfi", "-i", source))
    assert sound.shape == (2, 32_000)


@pytest.mark.parametrize("name", ["x.mp3", "x.m4a", "x.flac", "x.ogg", "x.opus"])
def test_common_formats_keep_their_length(make_media: Make, name: str) -> None:
    sound = read_audio(make_media(name, "-f", "lavfi", "-i", TONE.format(rate=48000)))
    assert abs(sound.shape[1] - 32_000) <= 2 * 1152
    assert np.isfinite(sound).all()


# ---- pictures


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 20), "blue")
    image.paste("red", (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    image.save(tmp_path / "x.png", exif=exif)
    upright = read_image(tmp_path / "x.png")
    assert upright.size == (20, 40)
    assert upright.getpixel((10, 5)) == (255, 0, 0)
    assert upright.getpixel((10, 35)) == (0, 0, 255)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_turn_white(tmp_path: Path, mode: str) -> None:
    image = Image.new("RGBA", (4, 2), (0, 0, 0, 0))
    image.paste((90, 90, 90, 255), (0, 0, 2, 2))
    image.convert(mode).save(tmp_path / "x.png")
    read = read_image(tmp_path / "x.png")
    assert read.mode == "RGB"
    assert [read.getpixel((x, 0)) for x in range(4)] == [(90, 90, 90)] * 2 + [(255, 255, 255)] * 2


def test_half_transparent_is_mixed_with_white(tmp_path: Path) -> None:
    Image.new("RGBA", (2, 2), (0, 0, 0, 128)).save(tmp_path / "x.png")
    assert read_image(tmp_path / "x.png").getpixel((0, 0)) == (127, 127, 127)


def test_a_palette_with_one_transparent_entry(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "x.png", transparency=1)
    read = read_image(tmp_path / "x.png")
    assert [read.getpixel((x, 0)) for x in range(2)] == [(10, 20, 30), (255, 255, 255)]


def test_16_bit_greys_are_scaled_not_clipped(tmp_path: Path) -> None:
    greys = np.array([[0, 300, 40_000, 65_535]], np.uint16)
    for name in ("x.png", "x.tif"):
        Image.fromarray(greys).save(tmp_path / name)
        read = np.asarray(read_image(tmp_path / name))
        assert read[0, :, 0].tolist() == [0, 1, 156, 255]
        assert (read[..., 0] == read[..., 2]).all()


@pytest.mark.parametrize("mode", ["L", "1", "CMYK", "YCbCr"])
def test_every_other_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    name = "x.jpg" if mode in ("CMYK", "YCbCr") else "x.png"
    Image.new("RGB", (8, 8), "white").convert(mode).save(tmp_path / name)
    read = read_image(tmp_path / name)
    assert read.mode == "RGB"
    assert min(read.getpixel((4, 4))) >= 253
