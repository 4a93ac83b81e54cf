"""JSON files that something else has written."""

import json
from pathlib import Path
from typing import Any

from solgen.errors import InputError


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that must hold one JSON object.

    Raises:
        InputError: one line that names the file.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; write or download it again") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not readable JSON; write or download it again") from error
    if not isinstance(table, dict):
        raise InputError(f"{path} is not a JSON object; write or download it again")
    return table
