"""Pictures, clips and sounds from files, on the model's clocks: RGB at 24 fps, stereo at 32 kHz."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from solgen.engine.media import FPS, SAMPLING_RATE
from solgen.engine.media.ffmpeg import Ffmpeg, FfmpegError, file_url
from solgen.engine.media.probe import SQUARE_PIXELS, Kind, check_file, open_image, probe_media, unreadable

# Says a log that ends well although the file does not.
_CUT_SHORT = ("partial file", "ended prematurely")


def read_image(path: Path) -> Image.Image:
    """An upright RGB picture, 8 bits per channel. Transparent parts turn white, as on paper.

    Raises:
        InputError: the file is missing, damaged or no image.
    """
    check_file(path, "image")
    image = ImageOps.exif_transpose(open_image(path))
    if image.mode == "F":
        raise unreadable(path, "image", "its pixels are floating point numbers of unknown range")
    if image.mode.startswith("I"):
        # Pillow's own conversion clips 16 bit greys at 255, which turns nearly everything white.
        greys = np.clip(np.asarray(image), 0, 65535).astype(np.float32) / 257
        image = Image.fromarray(greys.round().astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def read_video(
    path: Path,
    *,
    max_frames: int | None = None,
    canvas: Callable[[int, int], tuple[int, int]] | None = None,
    ffmpeg: Ffmpeg | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """A clip and its sound. Both start at the file's time 0 and keep their offset to each other.

    Frames are dropped or repeated to reach 24 fps, then scaled (Lanczos), as MiniMax-H3 is used to.

    Args:
        path: Any file that ffmpeg can decode. Rotation and non-square pixels are applied.
        max_frames: Read no more than this many frames, and sound of the same duration.
        canvas: From the clip's (width, height) to the (height, width) to scale it to. Its own by default.
        ffmpeg: The decoder, by default imageio-ffmpeg's own.

    Returns:
        Frames uint8 [F, H, W, 3] and stereo float32 [2, samples] at 32 kHz, or None if the file has no sound.

    Raises:
        InputError: the file is missing, damaged or no video.
    """
    ffmpeg = ffmpeg or Ffmpeg.find()
    info = probe_media(path, "video", ffmpeg=ffmpeg)
    height, width = canvas(info.width, info.height) if canvas else (info.height, info.width)
    # Without start_time=0 a clip whose picture starts late would be ahead of its sound.
    filters = f"fps={FPS}:start_time=0,{SQUARE_PIXELS},scale={width}:{height}:flags=lanczos+accurate_rnd"
    arguments = ["-map", "0:V:0", "-vf", f"{filters}+full_chroma_int", "-pix_fmt", "rgb24"]
    arguments += ["-fps_mode", "passthrough", "-f", "rawvideo"]
    if max_frames is not None:
        arguments += ["-frames:v", str(max_frames)]
    frames = np.frombuffer(_decode(path, "video", arguments, ffmpeg), dtype=np.uint8)
    frames = frames.reshape(-1, height, width, 3)
    if not info.has_audio:
        return frames, None
    return frames, _read_sound(path, "video", info.is_mono, max_frames, ffmpeg)


def read_audio(path: Path, *, max_frames: int | None = None, ffmpeg: Ffmpeg | None = None) -> np.ndarray:
    """A sound, or the sound of a clip, as stereo float32 [2, samples] at 32 kHz.

    Args:
        path: Any file that ffmpeg can decode. A mono sound is the same on both sides, at its own level.
        max_frames: Read no more than the duration of this many frames.
        ffmpeg: The decoder, by default imageio-ffmpeg's own.

    Raises:
        InputError: the file is missing, damaged or has no sound.
    """
    ffmpeg = ffmpeg or Ffmpeg.find()
    info = probe_media(path, "audio", ffmpeg=ffmpeg)
    return _read_sound(path, "audio", info.is_mono, max_frames, ffmpeg)


def _read_sound(path: Path, kind: Kind, is_mono: bool, max_frames: int | None, ffmpeg: Ffmpeg) -> np.ndarray:
    filters = f"aresample={SAMPLING_RATE}:async=1:first_pts=0"
    if is_mono:
        # ffmpeg would spread one channel over two at 0.7 of its level each.
        filters += ",pan=stereo|c0=c0|c1=c0"
    arguments = ["-map", "0:a:0", "-af", filters, "-ac", "2", "-ar", str(SAMPLING_RATE), "-f", "f32le"]
    if max_frames is not None:
        arguments += ["-t", f"{max_frames / FPS:.6f}"]
    samples = np.frombuffer(_decode(path, kind, arguments, ffmpeg), dtype="<f4")
    return np.ascontiguousarray(samples.reshape(-1, 2).T)


def _decode(path: Path, kind: Kind, arguments: list[str], ffmpeg: Ffmpeg) -> bytearray:
    try:
        data, log = ffmpeg.read(["-xerror", "-i", file_url(path), *arguments, "pipe:1"])
    except FfmpegError as error:
        if error.returncode < 0:
            raise  # killed, which is not the file's fault
        raise unreadable(path, kind, "it is damaged, decoding stops midway") from error
    if any(words in log for words in _CUT_SHORT):
        raise unreadable(path, kind, "the file is cut short")
    if not data:
        raise unreadable(path, kind, "nothing in it can be decoded")
    return data
