"""Entry point of the `solgen` command: turns every failure into one line and an exit code."""

import os
import sys
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


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit.

    Exit codes: 0 done, 1 the environment or a bug, 2 the user's input, 130 interrupted.
    """
    from solgen.cli import app
    from solgen.errors import SolgenError

    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    if not debug:
        _quiet_libraries()
    try:
        code = app(args=arguments, prog_name="solgen", standalone_mode=False)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except SolgenError as error:
        if debug:
            raise
        _fail(str(error), error.exit_code)
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own complaint about the command line
            _fail(_usage(error), 2)
        if type(error).__name__ == "Abort":
            _fail("interrupted", 130)
        if debug:
            raise
        first = (str(error).splitlines() or [""])[0]
        _fail(f"{type(error).__name__}: {first} (a bug in solgen or its environment; --debug shows where)", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _quiet_libraries() -> None:
    """Keep library chatter off the terminal, unless the user has asked for it in the environment."""
    for name in ("DIFFUSERS_VERBOSITY", "TRANSFORMERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def _usage(error: Exception) -> str:
    """One line for a wrong option, naming ours when the spelling is another tool's."""
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and option in FOREIGN_OPTIONS:
        return f"no option {option}; use {FOREIGN_OPTIONS[option]}"
    text = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    return text[:1].lower() + text[1:]


def _fail(message: str, code: int) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
