"""What an adapter was distilled for: calls, noise levels, shifts and tasks; flags that contradict it are refused."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from solgen.engine.adapters.header import Header
from solgen.engine.adapters.known import Known
from solgen.errors import InputError
from solgen.presets.schema import Task

LEVELS = ("steps", "positions", "video_sigmas", "audio_sigmas")
"""Keys of the preset's sampler table that decide the noise levels together."""

INSIST = "--set lora.ignore_contract=true"


@dataclass(frozen=True)
class Contract:
    """Terms of one adapter, or of a checkpoint that it was merged into. None and () leave a term open.

    Attributes:
        source: Who sets the terms, for messages.
        steps: Denoiser calls.
        positions: Noise levels before the shift; None beside `steps` means uniform.
        video_shift: Shift of the video schedule.
        audio_shift: Shift of the audio schedule.
        tasks: Tasks it was made for.
    """

    source: str
    steps: int | None = None
    positions: tuple[float, ...] | None = None
    video_shift: float | None = None
    audio_shift: float | None = None
    tasks: tuple[Task, ...] = ()

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Contract":
        """Read back `dataclasses.asdict` after a trip through JSON."""
        positions = record["positions"]
        return cls(**{**record, "positions": positions and tuple(positions), "tasks": tuple(record["tasks"])})

    def sampler(self) -> dict[str, Any]:
        """The terms as keys of the preset's sampler table."""
        table: dict[str, Any] = {}
        if self.steps is not None:
            table |= {"steps": self.steps, "positions": self.positions or "off"}
            table |= {"video_sigmas": "off", "audio_sigmas": "off"}
        shifts = {"video_shift": self.video_shift, "audio_shift": self.audio_shift}
        return table | {key: value for key, value in shifts.items() if value is not None}

    def summary(self) -> str:
        """One line: `4 denoiser calls, video shift 12, audio shift 3, t2va`; empty without terms."""
        parts = [f"{self.steps} denoiser calls"] if self.steps else []
        parts += [f"{name} shift {shift:g}" for name, shift in self._shifts() if shift is not None]
        return ", ".join([*parts, *(["/".join(self.tasks)] if self.tasks else [])])

    def _shifts(self) -> tuple[tuple[str, float | None], ...]:
        return ("video", self.video_shift), ("audio", self.audio_shift)


def read_contract(name: str, header: Header | None, known: Known | None) -> Contract:
    """The terms that a header declares, and those of the table of known files where it is silent.

    Args:
        name: What messages call the adapter.
        header: None for a file of the Hub that has not been downloaded.
        known: Its row in the table.
    """
    terms: dict[str, Any] = {}
    if known is not None:
        terms = {key: getattr(known, key) for key in ("steps", "positions", "video_shift", "audio_shift", "tasks")}
    if header is not None:
        positions = header.numbers("hyperflow_sigmas", "base_schedule")
        declared = {
            "steps": positions and len(positions) - 1,
            "positions": positions,
            "video_shift": header.number("hyperflow_video_shift", "video_shift"),
            "audio_shift": header.number("hyperflow_audio_shift", "audio_shift"),
            "tasks": _tasks(header),
        }
        terms |= {key: value for key, value in declared.items() if value}
    return Contract(name, **terms)


def contradictions(contract: Contract, tables: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, str]]:
    """Keys of the user's tables that break a contract, each with the sentence that refuses it.

    Args:
        contract: The terms.
        tables: Pairs of (where it comes from, nested preset table) as the user gave them.
    """
    terms = contract.sampler()
    for origin, table in tables:
        for key, value in table.get("sampler", {}).items():
            if key not in terms or _same(value, terms[key]):
                continue
            wanted, got = _spelled(terms[key]), _spelled(value)
            yield (
                key,
                f"{contract.source} was made for sampler.{key} {wanted}, {origin} says {got}; "
                f"leave it out, or insist with {INSIST}",
            )


def refuse_disagreement(contracts: Sequence[Contract]) -> None:
    """Refuse adapters that cannot share one schedule.

    Raises:
        InputError: naming both adapters and both values.
    """
    for index, first in enumerate(contracts):
        for second in contracts[index + 1 :]:
            theirs = second.sampler()
            for key, value in first.sampler().items():
                if key in theirs and not _same(value, theirs[key]):
                    raise InputError(
                        f"{first.source} was made for sampler.{key} {_spelled(value)}, {second.source} for "
                        f"{_spelled(theirs[key])}; use one of them (--set adapter=off drops the preset's own)"
                    )


def refuse_task(contract: Contract, task: Task) -> None:
    """Refuse a task that an adapter was not made for.

    Raises:
        InputError: naming the task and the adapter's.
    """
    if contract.tasks and task not in contract.tasks:
        raise InputError(
            f"{contract.source} was made for {', '.join(contract.tasks)}, these inputs are {task}; "
            f"--preset hyperflow-5s does every task, or insist with {INSIST}"
        )


def as_record(contract: Contract) -> dict[str, Any]:
    """JSON-ready form, for `Contract.from_record`."""
    return dataclasses.asdict(contract)


def _tasks(header: Header) -> tuple[Task, ...]:
    """Tasks in the metadata, or those of the one partition that the tensors name.

    MiniMax's first partition is called fl2va and serves t2va too.
    """
    if (text := header.metadata.get("tasks")) is not None:
        try:
            names = json.loads(text)
        except ValueError:
            names = text.split(",")
        found = {str(name).strip().lower() for name in names}
        return tuple(t for t in get_args(Task) if t in found or (t == "t2va" and "fl2va" in found))
    return ("ref2va",) if any(name.startswith("transformer_ref.") for name in header.shapes) else ()


def _same(first: object, second: object) -> bool:
    """Whether two values of a sampler key mean the same, up to the digits that headers round to."""
    a, b = _numbers(first), _numbers(second)
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=0, abs_tol=1e-5) for x, y in zip(a, b, strict=True))


def _numbers(value: object) -> tuple[float, ...]:
    """A value of a sampler key as numbers; () for "off" and for what is no number."""
    parts: Any = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    try:
        return tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        return ()


def _spelled(value: object) -> str:
    return ", ".join(f"{number:g}" for number in _numbers(value)) or str(value)
