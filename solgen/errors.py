"""Errors that a user can act on. The command line prints them as one line and exits with `exit_code`.

Every message says what was wrong, what was given, what is expected and how to fix it, without a line break
except where a program's own output is quoted.
"""


class SolgenError(Exception):
    """Base of the errors that solgen raises on purpose; anything else is a bug and keeps its traceback."""

    exit_code = 1


class InputError(SolgenError):
    """The request cannot work as written: a flag, a file, a combination of the two."""

    exit_code = 2


class SetupError(SolgenError):
    """The machine cannot serve a sound request: a missing program, a full disk, an unusable cache."""


def describe(error: BaseException) -> tuple[str, int]:
    """One line and an exit code for any failure: 1 the environment or a bug, 2 the user's input, 130 interrupted."""
    if isinstance(error, SolgenError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, SystemExit):
        return "ended", error.code if isinstance(error.code, int) else 1
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first} (a bug in solgen or its environment; --debug shows where)", 1
