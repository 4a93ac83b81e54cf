"""What is wrong with a table that somebody wrote, in one line that names its place and the nearest right spelling."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from solgen.errors import InputError

Shape = Mapping[str, Any]
"""Keys of a table; a key that holds a table maps to the shape of that, any other key to None."""

Loc = tuple[int | str, ...]
"""Place of a value: the keys, and the indices into lists, that lead to it."""

PLAIN = {
    "missing": "is missing; set it too",
    "finite_number": "expected a finite number",
    "tuple_type": "expected a list",
}
"""Words for pydantic's types of error where its own speak of Python."""


def complaint(error: ValidationError, layers: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The first thing that is wrong with a preset, blamed on the layer that holds it.

    Args:
        error: Of the merged layers.
        layers: Pairs of (where it comes from, nested table), later ones winning.
    """
    first = error.errors()[0]
    loc, hint = first["loc"], ""
    locs = [loc]
    if first["type"] == "levels":
        levels = (*loc, first["ctx"]["key"])
        locs = [levels, (*loc, "steps")]
        hint = f"; {_origin([levels], layers)} fixes the calls, --set {_spelled(levels)}=off frees them"
    return f"{_origin(locs, layers)}: {_spelled(loc)}: {describe(first)}{hint}"


def describe(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors in plain words, with the value that it is about."""
    message = PLAIN.get(error["type"], error["msg"].removeprefix("Value error, "))
    got = error["input"]
    return f"{message}, got {got!r}" if isinstance(got, str | int | float | list | tuple | None) else message


def refuse_unknown(origin: str, shape: Shape, table: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Refuse keys outside a shape.

    Args:
        origin: Where the table comes from.
        shape: What may be there.
        table: What is there.
        others: Further names that a misspelt key may have meant.

    Raises:
        InputError: naming the key and the nearest that exists.
    """
    for key in _unknown(shape, table):
        raise InputError(f"{origin}: unknown key {key!r}{did_you_mean(key, [*others, *_leaves(shape)])}")


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """`; did you mean 'attention.epsilon'?` for epsilom or attention.epsilom; empty if nothing comes near."""
    nearest = max(names, key=lambda candidate: _likeness(name, candidate))
    return f"; did you mean {nearest!r}?" if _likeness(name, nearest) >= 0.6 else ""


def _likeness(name: str, candidate: str) -> float:
    """Similarity, 0 to 1, of two keys or of their last parts."""
    pairs = ((name, candidate), (name.rpartition(".")[2], candidate.rpartition(".")[2]))
    return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)


def _leaves(shape: Shape, prefix: str = "") -> Iterator[str]:
    for name, inner in shape.items():
        if inner is None:
            yield prefix + name
        else:
            yield from _leaves(inner, f"{prefix}{name}.")


def _unknown(shape: Shape, table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in table.items():
        if name not in shape:
            yield prefix + name
        elif shape[name] is not None and isinstance(value, Mapping):
            yield from _unknown(shape[name], value, f"{prefix}{name}.")


def _spelled(loc: Loc) -> str:
    return ".".join(map(str, loc))


def _origin(locs: Sequence[Loc], layers: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The last of the layers that hold the longest beginning of one of `locs`."""
    return max(reversed(layers), key=lambda layer: max(_depth(loc, layer[1]) for loc in locs))[0]


def _depth(loc: Loc, table: Any) -> int:
    """How many parts of `loc` lead into a nested table."""
    for depth, part in enumerate(loc):
        if not isinstance(table, Mapping) or part not in table:
            return depth
        table = table[part]
    return len(loc)
