"""The command line in this process."""

import pytest

from solgen.__main__ import main


def solgen(*arguments: str) -> int:
    """Exit code of a command."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert isinstance(stop.value.code, int)
    return stop.value.code
