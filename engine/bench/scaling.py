"""Cost model of a denoiser call on several GPUs, from its profile on one and the speed of the link.

    call(P) = divided / P x (largest share of rows / mean) + whole + copies + exchanges - hidden
    bytes a rank sends a block = n H b (P - 1) / P          b = 1024 a row and head in bf16, 612.1 in fp8
    copies  = bytes that packing and unpacking read and write, at the speed of the memory

divided: attention, projections, FFN, norms. whole: what every rank does alone, embeddings, refiner, heads and what is
unattributed. hidden: with overlap, the values' exchange as far as projecting, norming and rotating queries and keys
takes as long.

Legend: P GPUs, n = N / P rows of a rank, H heads.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from solgen.engine.json_file import read_object
from solgen.engine.profile.breakdown import ATTENTION, ELEMENTWISE, FFN, PROJECTIONS
from solgen.engine.profile.plan import STOCK
from solgen.errors import InputError
from solgen.kernels.sol_attn2.config import BLOCK, HEAD_DIM
from solgen.kernels.sol_attn2.wire import OUTPUT_BYTES, PACKET_BYTES
from solgen.parallel.ulysses import split_rows

DIVIDED = (ATTENTION, PROJECTIONS, FFN, ELEMENTWISE)
"""Parts of a call that ranks share."""

ARM = {"name", "call_ms", "instrumented_ms", "modules", "sparse_blocks"}
"""What an arm of a profile has."""

READ = {ATTENTION, "QKV", "qk norms, rotary"}
"""Parts of a call that are read by name."""

HEADS = 56
"""Of MiniMax-H3, where a profile does not tell them."""


@dataclass(frozen=True)
class Machine:
    """What the model assumes of the GPUs.

    Attributes:
        link: GB/s that every GPU sends and receives at once; 323 were measured with NCCL's all-to-all on two H200s.
        memory: GB/s of a copy on the device, read and written; measured.
    """

    link: float = 323.0
    memory: float = 4200.0


@dataclass(frozen=True)
class Wire:
    """Bytes of a row and head: of values, of queries and keys, of the output; read and written to pack and unpack."""

    values: float
    rows: float
    output: float
    copies: float


_BF16 = 2 * HEAD_DIM
_VALUES, _ROWS = PACKET_BYTES["values"] / BLOCK, PACKET_BYTES["rows"] / BLOCK
WIRES = {
    # Queries, keys and values are packed; the output's heads are put in order.
    "bf16": Wire(_BF16, 2 * _BF16, _BF16, 2 * 4 * _BF16),
    # Operands are joined, and put together again; the output is packed from bf16 and unpacked to it.
    "fp8": Wire(_VALUES, _ROWS, OUTPUT_BYTES, 4 * (_VALUES + _ROWS) + 2 * (OUTPUT_BYTES + _BF16)),
}


def predict(
    report: dict[str, Any], arm: dict[str, Any], gpus: int, *, wire: str, overlap: bool, machine: Machine
) -> dict[str, Any]:
    """One denoiser call on `gpus` GPUs.

    Args:
        report: A profile on one GPU, as `solgen profile --json` prints it.
        arm: One of its arms.
        gpus: P.
        wire: "bf16" or "fp8"; dense blocks exchange bf16 with either.
        overlap: Whether values travel behind queries and keys.
        machine: Its speeds.
    """
    num_rows = report["facts"]["rows"]
    scale = arm["call_ms"] / arm["instrumented_ms"]  # the instruments' own share
    parts = {row["name"]: row["ms"] * scale for row in arm["modules"]}
    wholes = {row["name"] for row in arm["modules"] if row["part_of"] is None}
    blocks = next(row["calls"] for row in arm["modules"] if row["name"] == ATTENTION)
    shares = split_rows(num_rows, gpus, block=BLOCK)
    divided = sum(parts[name] for name in DIVIDED) * max(shares) / num_rows
    whole = sum(parts[name] for name in wholes.difference(DIVIDED))
    exchanges = copies = hidden = 0.0
    if gpus > 1:
        pairs = max(shares) * _heads(report)  # rows and heads of a rank
        early = (2 / 3 * parts["QKV"] + parts["qk norms, rotary"]) / gpus / blocks
        sparse = arm["sparse_blocks"]
        for kind, count in ((WIRES[wire], sparse), (WIRES["bf16"], blocks - sparse)):
            values = pairs * kind.values * (gpus - 1) / gpus / machine.link * 1e-6  # ms
            others = pairs * (kind.rows + kind.output) * (gpus - 1) / gpus / machine.link * 1e-6
            exchanges += count * (values + others)
            copies += count * pairs * kind.copies / machine.memory * 1e-6
            hidden += count * min(values, early) * overlap
    call = divided + whole + copies + exchanges - hidden
    return {
        "arm": arm["name"],
        "gpus": gpus,
        "wire": wire,
        "overlap": overlap,
        "call_ms": call,
        "speedup": arm["call_ms"] / call,
        "efficiency": arm["call_ms"] / call / gpus,
        "exposed_ms": exchanges - hidden,
        "exposed_share": (exchanges - hidden) / call,
        "copies_ms": copies,
        "whole_ms": whole,
    }


def bench_scaling(paths: Sequence[Path], gpus: Sequence[int], machine: Machine) -> list[dict[str, Any]]:
    """Predictions for every arm of a profile on one GPU, beside what was measured on several.

    Args:
        paths: JSON of `solgen profile`. Files with as many rows belong together: an arm is predicted from the first
            profile on one GPU that has it, and stands beside the first that measured it with the same wire.
        gpus: Numbers of GPUs.
        machine: Its speeds.

    Returns:
        A report for every number of rows.

    Raises:
        InputError: if a file is not such JSON, the files of as many rows hold no profile on one GPU, or heads do not
            divide.
    """
    groups: dict[int, dict[Path, dict[str, Any]]] = defaultdict(dict)
    for path in paths:
        found = read_object(path)
        if not _is_profile(found):
            raise InputError(f"{path} is not JSON of solgen profile of this version; write it again")
        groups[_profiles(found)[0]["facts"]["rows"]][path] = found
    return [_beside(files, gpus, machine) for files in groups.values()]


def _beside(files: dict[Path, dict[str, Any]], gpus: Sequence[int], machine: Machine) -> dict[str, Any]:
    bases: dict[str, tuple[Path, dict[str, Any], dict[str, Any]]] = {}
    for path, found in files.items():
        for profile in _profiles(found):
            if profile["facts"]["world size"] == 1:
                for arm in profile["arms"]:
                    bases.setdefault(arm["name"], (path, profile, arm))
    bases.pop(STOCK, None)
    if not bases:
        names = ", ".join(map(str, files))
        raise InputError(f"{names}: no profile on one GPU; give one of as many rows, of solgen profile --gpus 1 --json")
    heads = {_heads(profile) for _, profile, _ in bases.values()}
    if bad := [(total, count) for total in heads for count in gpus if total % count]:
        raise InputError(f"--gpus {bad[0][1]}: {bad[0][0]} heads cannot be split over {bad[0][1]} GPUs")
    measured: dict[tuple[str, int, str | None, bool], float] = {}
    for found in files.values():
        exchanged = _profiles(found)[0]["facts"]
        for row in found.get("scaling", ()):
            key = row["arm"], row["gpus"], exchanged.get("wire"), exchanged.get("overlap") == "on"
            measured.setdefault(key, row["call_ms"])
    rows = []
    for path, base, arm in bases.values():
        for wire in WIRES if arm["sparse_blocks"] else ("bf16",):
            for overlap in (False, True):
                for count in gpus:
                    row = predict(base, arm, count, wire=wire, overlap=overlap, machine=machine)
                    seen = measured.get((arm["name"], count, wire, overlap))
                    rows.append({"profile": str(path)} | row | {"measured_ms": seen})
    num_rows = next(iter(bases.values()))[1]["facts"]["rows"]
    return {"rows": num_rows, "machine": vars(machine), "predictions": rows}


def _is_profile(found: dict[str, Any]) -> bool:
    """Whether it is what `solgen profile --json` writes, as far as it is read here."""
    try:
        reports = found.get("reports") or [found]
        arms = [arm for profile in reports for arm in profile["arms"]]
        return (
            all(isinstance(profile["facts"][name], int) for profile in reports for name in ("rows", "world size"))
            and all(arm.keys() >= ARM and {row["name"] for row in arm["modules"]} >= READ for arm in arms)
            and all({"ms", "calls", "part_of"} <= row.keys() for arm in arms for row in arm["modules"])
            and all({"arm", "gpus", "call_ms"} <= row.keys() for row in found.get("scaling", ()))
        )
    except (AttributeError, KeyError, TypeError):
        return False


def _heads(report: dict[str, Any]) -> int:
    return report["facts"].get("heads", HEADS)


def _profiles(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of a file: one, or one for each number of GPUs."""
    return found.get("reports") or [found]


def prediction_tables(reports: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """One table a profile."""
    for report in reports:
        table = Table("", "wire", "overlap", "GPUs", "call, ms", "faster", "efficiency", "exposed", "measured, ms")
        table.title = f"predicted, {report['rows']:,} rows"
        for row in report["predictions"]:
            numbers = f"{row['call_ms']:,.0f}", f"{row['speedup']:.2f}x", f"{row['efficiency']:.1%}"
            seen = "" if row["measured_ms"] is None else f"{row['measured_ms']:,.0f}"
            kind = row["arm"], row["wire"], "on" if row["overlap"] else "", str(row["gpus"])
            table.add_row(*kind, *numbers, f"{row['exposed_share']:.1%}", seen)
        yield table
