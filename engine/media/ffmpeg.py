"""imageio-ffmpeg's own binary: finding it, checking it, running it with a pipe.

No system ffmpeg and no Python binding is needed. Set IMAGEIO_FFMPEG_EXE to use another build.
"""

import re
import signal
import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO

from solgen.errors import SetupError

ENCODERS = ("libx264", "aac")
FILTERS = ("zscale", "setparams")
LOG_LINES = 8

_PIECE_BYTES = 1 << 20
_FIX = "reinstall it with `pip install --force-reinstall imageio-ffmpeg` or set IMAGEIO_FFMPEG_EXE"


class FfmpegError(SetupError):
    """ffmpeg ended with an error. The message quotes the last lines that it printed.

    `returncode` is its exit status, or minus the number of the signal that killed it.
    """

    def __init__(self, what: str, returncode: int, log: list[str]) -> None:
        self.returncode = returncode
        message = f"{what} failed with exit status {returncode}"
        if returncode < 0:
            with suppress(ValueError):
                message = f"{what} was killed by {signal.Signals(-returncode).name}"
        # The addresses in "[libx264 @ 0x55d0]" change from run to run and tell nobody anything.
        lines = [re.sub(r" @ 0x[0-9a-f]+", "", line) for line in log[-LOG_LINES:] if line.strip()]
        message += "; its last lines:" if lines else " and no message"
        super().__init__("\n  ".join([message, *lines]))


@dataclass(frozen=True)
class Ffmpeg:
    """One ffmpeg executable. Every method raises SetupError if it cannot be started."""

    executable: str

    @classmethod
    def find(cls) -> "Ffmpeg":
        """The binary that imageio-ffmpeg brought along, or SetupError if there is none."""
        try:
            import imageio_ffmpeg
        except ImportError:
            raise SetupError("imageio-ffmpeg is not installed; pip install imageio-ffmpeg") from None
        try:
            return cls(imageio_ffmpeg.get_ffmpeg_exe())
        except RuntimeError as error:
            raise SetupError(f"imageio-ffmpeg has no ffmpeg for this machine; {_FIX}") from error

    def check(self) -> str:
        """The path of the executable; SetupError if it lacks what the writer needs."""
        for option, names in (("-encoders", ENCODERS), ("-filters", FILTERS)):
            returncode, printed, log = self.capture([option])
            if returncode:
                raise FfmpegError(f"{self.executable} {option}", returncode, log.splitlines())
            # Every line of either table reads: flags, name, description.
            found = {words[1] for line in printed.splitlines() if len(words := line.split()) > 1}
            if missing := [name for name in names if name not in found]:
                raise SetupError(f"{self.executable} lacks {', '.join(missing)}; {_FIX}")
        return self.executable

    def capture(self, arguments: list[str]) -> tuple[int, str, str]:
        """Run to the end. Returns exit status, standard output and log; does not judge the status."""
        with _startable(self.executable):
            done = subprocess.run(
                [self.executable, "-hide_banner", "-nostdin", *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
            )
        return done.returncode, _text(done.stdout), _text(done.stderr)

    @contextmanager
    def feed(self, arguments: list[str]) -> Iterator[IO[bytes]]:
        """A pipe to ffmpeg's standard input (`-i pipe:0`); leaving the block waits for ffmpeg to finish.

        If the block raises, ffmpeg is killed. If ffmpeg fails, FfmpegError takes the place of a broken pipe.
        """
        run = _Run(self.executable, arguments, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        pipe = run.process.stdin
        assert pipe is not None
        with run.killed_on_error():
            # A broken pipe is only the echo of what the exit status tells.
            with suppress(BrokenPipeError):
                yield pipe
            with suppress(BrokenPipeError):
                pipe.close()
            run.finish()

    def read(self, arguments: list[str]) -> tuple[bytearray, str]:
        """Everything that ffmpeg writes to its standard output (`pipe:1`), and the end of its log.

        Held once in memory: `subprocess.run` would collect pieces and join them into a second copy.
        """
        run = _Run(self.executable, ["-nostdin", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        pipe = run.process.stdout
        assert pipe is not None
        with run.killed_on_error():
            data = bytearray()
            with pipe:
                while piece := pipe.read(_PIECE_BYTES):
                    data += piece
            return data, run.finish()


def check_ffmpeg() -> str:
    """The path of a usable ffmpeg, else SetupError. Takes a tenth of a second: call it before loading."""
    return Ffmpeg.find().check()


def file_url(path: Path) -> str:
    """An argument that ffmpeg reads as this file, whatever dashes, colons or percent signs its name has."""
    return f"file:{path.absolute()}"


class _Run:
    """A running ffmpeg. A thread keeps the end of its log, so that a full pipe of messages cannot stop it."""

    def __init__(self, executable: str, arguments: list[str], *, stdin: int, stdout: int) -> None:
        command = [executable, "-hide_banner", "-loglevel", "warning", *arguments]
        with _startable(executable):
            self.process = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE)
        self._log: deque[bytes] = deque(maxlen=LOG_LINES)
        self._reader = Thread(target=self._collect, daemon=True)
        self._reader.start()

    def finish(self) -> str:
        """Wait for the end; returns the log's last lines or raises FfmpegError."""
        returncode = self.process.wait()
        self._reader.join()
        lines = [_text(line).rstrip() for line in self._log]
        if returncode:
            raise FfmpegError("ffmpeg", returncode, lines)
        return "\n".join(lines)

    @contextmanager
    def killed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            raise

    def _collect(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self._log.extend(lines)


@contextmanager
def _startable(executable: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(f"cannot start {executable}: {error.strerror}; {_FIX}") from error


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")
