"""Is this file a picture, a clip or a sound that can be used? A quick look that decodes next to nothing."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image, UnidentifiedImageError

from solgen.engine.media.ffmpeg import Ffmpeg, file_url
from solgen.errors import InputError

Kind = Literal["image", "video", "audio"]

# imageio-ffmpeg ships no ffprobe, so the lines below are those that `ffmpeg -i` prints. Every line of ours
# starts with its level, which no metadata inside the file can imitate.
_DURATION = re.compile(r"^\[info\]   Duration: (\d+):(\d+):(\d+\.\d+)", re.MULTILINE)
_STREAM = re.compile(r"^\[info\]   Stream #0:\d+.*?: (Video|Audio): (.*)$", re.MULTILINE)
_ERROR = re.compile(r"^(?:\[[^\]]* @ 0x[0-9a-f]+\] )*\[(?:error|fatal)\] (.*)$", re.MULTILINE)
_SIZE = re.compile(r", (\d+)x(\d+)\b")
_RATE = re.compile(r", (\d+(?:\.\d+)?) fps\b")
_MONO = re.compile(r"\bHz, (?:mono|1 channels)\b")

# A pixel of the source may be wider than high; a pixel of ours is square.
SQUARE_PIXELS = "scale=w=iw*sar:h=ih,setsar=1"


@dataclass(frozen=True)
class MediaInfo:
    """What a file holds, as it is displayed: rotation and the shape of pixels applied.

    Sizes are in pixels, 0 for a sound. `duration_s` and `fps` are what the container claims, None where it
    does not say. `is_mono` is about the sound.
    """

    kind: Kind
    width: int = 0
    height: int = 0
    duration_s: float | None = None
    fps: float | None = None
    has_audio: bool = False
    is_mono: bool = False


def probe_media(path: Path, kind: Kind, *, ffmpeg: Ffmpeg | None = None) -> MediaInfo:
    """Look whether `path` holds media of this kind by decoding one picture, or one second of sound.

    Raises:
        InputError: the file is missing, empty or something else, in one line that names it.
    """
    check_file(path, kind)
    if kind == "image":
        image = open_image(path)
        return MediaInfo("image", width=image.width, height=image.height)
    decode_a_little = {
        "video": ["-map", "0:V:0", "-frames:v", "1", "-vf", SQUARE_PIXELS],
        "audio": ["-map", "0:a:0", "-t", "1"],
    }[kind]
    returncode, _, log = (ffmpeg or Ffmpeg.find()).capture(
        ["-xerror", "-loglevel", "level+info", "-i", file_url(path), *decode_a_little, "-f", "null", "-"]
    )
    source, _, decoded = log.partition("[info] Output #0")
    if returncode:
        raise unreadable(path, kind, _reason(source, kind))
    streams = _STREAM.findall(source)
    duration = _DURATION.search(source)
    sounds = [text for stream, text in streams if stream == "Audio"]
    size = rate = None
    if kind == "video":
        rate = _RATE.search(next(text for stream, text in streams if stream == "Video"))
        size = _SIZE.search(decoded)
        if size is None:
            raise unreadable(path, kind, "not one picture in it can be decoded")
    return MediaInfo(
        kind=kind,
        width=int(size[1]) if size else 0,
        height=int(size[2]) if size else 0,
        duration_s=_seconds(*duration.groups()) if duration else None,
        fps=float(rate[1]) if rate else None,
        has_audio=bool(sounds),
        is_mono=bool(sounds) and bool(_MONO.search(sounds[0])),
    )


def open_image(path: Path) -> Image.Image:
    """The decoded picture in the mode of its file, not yet turned upright."""
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except UnidentifiedImageError as error:
        raise unreadable(path, "image", "no known image format") from error
    except Exception as error:  # a broken file makes Pillow's decoders raise anything, SyntaxError included
        raise unreadable(path, "image", str(error) or type(error).__name__) from error


def check_file(path: Path, kind: Kind) -> None:
    """Raise InputError unless `path` is a readable file with something in it."""
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise unreadable(path, kind, "the file is empty")
    except OSError as error:
        raise unreadable(path, kind, (error.strerror or str(error)).lower()) from error


def unreadable(path: Path, kind: Kind, reason: str) -> InputError:
    return InputError(f"cannot read {kind} {str(path)!r}: {reason}; give a file that plays, or convert it")


def _reason(log: str, kind: Kind) -> str:
    if "matches no streams" in log:
        return f"it has no {kind} in it"
    error = _ERROR.search(log)
    return error[1].strip() if error else "ffmpeg cannot decode it"


def _seconds(hours: str, minutes: str, seconds: str) -> float:
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
