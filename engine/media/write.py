"""The mp4 that a request ends in: H.264 High, BT.709, with AAC-LC sound, complete or not there at all."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from solgen.engine.media import FPS, SAMPLING_RATE
from solgen.engine.media.ffmpeg import Ffmpeg
from solgen.errors import InputError, SetupError, SolgenError

# zscale rather than scale: in every ffmpeg from 7.0 on it puts the chroma samples where H.264 expects them.
# The tags belong to the frames, hence setparams: given as output options they read back as unknown.
_TO_BT709 = (
    "zscale=rangein=full:range=limited:primariesin=709:primaries=709:transferin=709:transfer=709"
    ":matrix=709:chromal=left,format=yuv420p,"
    "setparams=range=limited:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
)
_H264 = ["-c:v", "libx264", "-profile:v", "high", "-preset", "medium", "-crf", "16"]
# ffmpeg's default coder distorts the first 50 ms when both channels are alike; "fast" at this rate does not.
_AAC = f"-c:a aac -profile:a aac_low -aac_coder fast -b:a 320k -ar {SAMPLING_RATE}".split()

_MAX_COMMENT_BYTES = 64 * 1024


def write_video(
    path: Path,
    frames: Iterable[np.ndarray],
    audio: np.ndarray,
    *,
    num_frames: int,
    width: int,
    height: int,
    sampling_rate: int = SAMPLING_RATE,
    crop_height: int | None = None,
    comment: str = "",
    overwrite: bool = False,
    ffmpeg: Ffmpeg | None = None,
) -> None:
    """Write one clip at 24 fps. Until the file is complete, whatever is at `path` stays as it is.

    Args:
        path: Where to write; ends in `.mp4`.
        frames: Consecutive pieces of the clip, RGB, uint8 [F, height, width, 3]. One is in memory at a time.
        audio: Stereo sound, [2, samples], floating point in -1 ... 1; clipped to that range, then padded
            with silence or trimmed to the length of the picture.
        num_frames: Frames that the pieces add up to.
        width, height: Size of the frames, in pixels.
        sampling_rate: Samples of `audio` per second. The file has 32 kHz.
        crop_height: Keep this many rows from the top (1080 of 1088); the picture is never resampled.
        comment: Text for the file's comment tag, such as the prompt.
        overwrite: Replace a file that is already there.
        ffmpeg: The encoder, by default imageio-ffmpeg's own.

    Raises:
        InputError: the path cannot be written, or is taken and `overwrite` is off.
        SetupError: the encoder fails or the disk is full. Nothing is left behind.
        SolgenError: the sound has non-finite samples.
        ValueError: frames or sound are not what was promised.
    """
    rows = height if crop_height is None else crop_height
    if not 0 < rows <= height or rows % 2 or width % 2:
        raise ValueError(f"yuv420p needs even sides within the frame, got {width}x{rows} of {width}x{height}")
    check_output(path, overwrite=overwrite)
    sound = _fit_sound(audio, round(num_frames / FPS * sampling_rate))
    with _scratch_folder(path) as folder:
        video, raw_sound = folder / "video.mp4", folder / "sound.f32"
        with _disk_errors(path):
            raw_sound.write_bytes(sound.T.tobytes())
        picture_in = f"-f rawvideo -pix_fmt rgb24 -video_size {width}x{rows} -framerate {FPS} -i pipe:0"
        sound_in = f"-f f32le -sample_rate {sampling_rate} -ch_layout stereo -i"
        arguments = [*picture_in.split(), *sound_in.split(), str(raw_sound), "-map", "0:v", "-map", "1:a"]
        arguments += ["-vf", _TO_BT709, *_H264, *_AAC, "-metadata", f"comment={_tag(comment)}"]
        arguments += ["-movflags", "+faststart", "-f", "mp4", str(video)]
        with (ffmpeg or Ffmpeg.find()).feed(arguments) as pipe:
            _write_frames(pipe, frames, (num_frames, height, width, 3), rows)
        # Someone else may have taken the name meanwhile.
        _refuse_taken(path, overwrite)
        with _disk_errors(path):
            os.replace(video, path)


def check_output(path: Path, *, overwrite: bool) -> None:
    """Raise InputError unless a clip can be written to `path`. Tries it: call it before hours of work."""
    if path.suffix.lower() != ".mp4":
        raise InputError(f"the output is an mp4 file, got {str(path)!r}; end its name in .mp4")
    try:
        if not path.parent.is_dir():
            raise InputError(f"no folder {str(path.parent)!r} to write {path.name!r} into; create it first")
        with _scratch_folder(path) as folder:
            (folder / path.name).touch()
        _refuse_taken(path, overwrite)
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}; choose another name") from error


def _refuse_taken(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder; give the name of a file in it")
    if os.path.lexists(path) and not overwrite:
        raise InputError(f"{str(path)!r} already exists; choose another name or pass --overwrite")


@contextmanager
def _scratch_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path`, so on its file system: a rename out of it is atomic. Removed in any case."""
    with tempfile.TemporaryDirectory(prefix=".solgen-", dir=path.absolute().parent) as folder:
        yield Path(folder)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(f"cannot write {str(path)!r}: {error.strerror}; free some space") from error


def _fit_sound(audio: np.ndarray, num_samples: int) -> np.ndarray:
    """Stereo float32 [2, num_samples] in -1 ... 1."""
    if audio.ndim != 2 or audio.shape[0] != 2 or not np.issubdtype(audio.dtype, np.floating):
        raise ValueError(f"sound must be floating point [2, samples], got {audio.dtype} {list(audio.shape)}")
    if bad := int((~np.isfinite(audio)).sum()):
        raise SolgenError(f"{bad} of {audio.size} sound samples are not finite; try --attention dense")
    fitted = np.zeros((2, num_samples), dtype=np.float32)
    kept = min(num_samples, audio.shape[1])
    fitted[:, :kept] = np.clip(audio[:, :kept], -1, 1)
    return fitted


def _write_frames(
    pipe: IO[bytes], frames: Iterable[np.ndarray], promised: tuple[int, int, int, int], rows: int
) -> None:
    written = 0
    for piece in frames:
        written += len(piece)
        if piece.dtype != np.uint8 or piece.shape[1:] != promised[1:] or written > promised[0]:
            given = f"{piece.dtype} {list(piece.shape)}, {written} frames with it"
            raise ValueError(f"promised frames uint8 {list(promised)}, got a piece {given}")
        for frame in piece:
            pipe.write(np.ascontiguousarray(frame[:rows]).data)
    if written != promised[0]:
        raise ValueError(f"promised {promised[0]} frames, got {written}")


def _tag(comment: str) -> str:
    """`comment` as one command line argument can carry it: no NUL, no lone surrogates, bounded in bytes."""
    raw = comment.replace("\0", " ").encode("utf-8", errors="replace")[:_MAX_COMMENT_BYTES]
    return raw.decode("utf-8", errors="ignore")
