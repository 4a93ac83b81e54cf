"""Values of presets as people write them: lists with commas, "off", ranges of blocks."""

import math
import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

_RANGE = r"[0-9]{1,4}(\s*-\s*[0-9]{1,4})?"
_BLOCKS = re.compile(rf"\s*({_RANGE}(\s*,\s*{_RANGE})*)?\s*")


def split_list(value: object) -> object:
    """The parts of a text between its commas; anything else as it is."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def none_if_off(value: object) -> object:
    """None for false, "off" and "none"; anything else as it is."""
    return None if value is False or value in ("off", "none") else value


def _blocks(value: object) -> str:
    """A list of blocks without its spaces; "off" lists none."""
    listed = "" if none_if_off(value) is None else value
    if not isinstance(listed, str) or not _BLOCKS.fullmatch(listed):
        raise ValueError("expected block numbers as 0-2,47-49")
    parts = [part.partition("-") for part in re.sub(r"\s", "", listed).split(",")]
    for first, dash, last in parts:
        if dash and int(last) < int(first):
            raise ValueError(f"{first}-{last} is an empty range; expected {last}-{first}")
    return ",".join(map("".join, parts))


def _finite(epsilon: float) -> float:
    if not math.isfinite(epsilon):
        raise ValueError("expected a finite number (attention.density=1 keeps every block)")
    return epsilon


Floats = Annotated[tuple[float, ...] | None, BeforeValidator(split_list), BeforeValidator(none_if_off)]
Blocks = Annotated[str, BeforeValidator(_blocks)]
Epsilon = Annotated[float, Field(allow_inf_nan=True), AfterValidator(_finite)]
