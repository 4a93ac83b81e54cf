"""Entry point of the `solgen` command: turns every failure into one line and an exit code."""

import errno
import os
import signal
import sys
import threading
import warnings

FOREIGN_OPTIONS = {
    "--audio-flow-shift": "--set sampler.audio_shift=S",
    "--attention-backend": "--attention",
    "--duration": "--seconds",
    "--first-frame": "--image",
    "--flow-shift": "--set sampler.video_shift=S",
    "--frames": "--num-frames",
    "--image-path": "--image",
    "--infer-steps": "--steps",
    "--last-frame": "--last-image",
    "--lora-alpha": "--set lora.alpha=N",
    "--lora-path": "--lora",
    "--lora-scale": "--lora PATH:STRENGTH",
    "--lora-strength": "--lora PATH:STRENGTH",
    "--model-path": "--model",
    "--num-gpus": "--gpus",
    "--num-inference-steps": "--steps",
    "--num-outputs-per-prompt": "--num-outputs",
    "--output-dir": "--output",
    "--output-path": "--output",
    "--prompt-file-path": "--prompt-file",
    "--prompt-path": "--prompt-file",
    "--ref": "--reference TYPE:PATH",
    "--size": "--width W --height H",
    "--sparse-tau": "--epsilon",
    "--video-shift": "--set sampler.video_shift=S",
}
"""Spellings that users bring from other tools, and ours."""


OF_PROFILE = ("--dummy-weights", "--text-rows")
"""Options that make no clip."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit.

    Exit codes: 0 done, 1 the environment or a bug, 2 the user's input, 128 + n stopped by signal n.
    """
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        _stop_cleanly()
        from solgen.cli import app
        from solgen.errors import SolgenError, describe

        if not debug:
            quiet_libraries()
        code = app(args=arguments, prog_name="solgen", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        _fail("interrupted", 128 + signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if isinstance(error, SolgenError) and not debug:
            _fail(*describe(error))
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it would fail again at exit
            _fail(f"{error.strerror}{f': {error.filename}' if error.filename else ''}; free some space", 1)
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())  # type: ignore[attr-defined]
            sys.exit(0)
        if hasattr(error, "format_message"):  # typer's own complaint about the command line
            _fail(_usage(error), 2)
        if debug:
            raise
        _fail(*describe(error))
    if code == 128 + signal.SIGINT:  # typer turns the interrupt into an exit code
        _fail("interrupted", code)
    sys.exit(code if isinstance(code, int) else 0)


def _stop_cleanly() -> None:
    """Let a polite request to stop unwind the stack, so that temporary files are removed."""

    def stop(number: int, _frame: object) -> None:
        _fail(f"stopped by {signal.Signals(number).name}", 128 + number)

    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), stop)


def quiet_libraries() -> None:
    """Keep library chatter off the terminal, unless the user has asked for it in the environment."""
    for name in ("DIFFUSERS_VERBOSITY", "TRANSFORMERS_VERBOSITY"):
        os.environ.setdefault(name, "critical")  # diffusers logs the tracebacks that it then raises
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler logs that it starts and stops
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def _usage(error: Exception) -> str:
    """One line for a wrong option, naming ours when the spelling is another tool's."""
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and option in OF_PROFILE:
        return f"no option {option}; it belongs to solgen profile, which makes no clip"
    if type(error).__name__ == "NoSuchOption" and option in FOREIGN_OPTIONS:
        return f"no option {option}; use {FOREIGN_OPTIONS[option]}"
    text = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    return text[:1].lower() + text[1:]


def _fail(message: str, code: int) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
