"""One adapter, matched to a transformer by name and shape and found sound, before any heavy weight is read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from safetensors import safe_open

from solgen.engine.adapters.alpha import AlphaRule, Scale
from solgen.engine.adapters.contract import Contract, read_contract
from solgen.engine.adapters.header import Header, file_sha256, read_adapter
from solgen.engine.adapters.known import find_known
from solgen.engine.adapters.merge import Delta
from solgen.engine.adapters.names import ENDPOINT, Group, Names, group_keys, is_fused_qkv
from solgen.engine.adapters.source import Source, fetch
from solgen.errors import InputError
from solgen.presets.schema import Lora

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of every parameter of a transformer, in diffusers' names."""


@dataclass(frozen=True)
class Change:
    """What one adapter does to one parameter: plus `scale` up down, or plus a full difference.

    Attributes:
        up: Tensor [out, r], or the difference itself, in the parameter's shape.
        down: Tensor [r, in]; None for a difference.
        rows: Runs of rows of `up`, in the parameter's order.
        ranks: Part of r that matters to these rows.
        scale: alpha / rank; 1 for a difference.
        module: Name of the module in the file.
    """

    up: str
    down: str | None
    rows: tuple[slice, ...]
    ranks: slice
    scale: Scale
    module: str


@dataclass(frozen=True)
class Adapter:
    """A sound adapter.

    Attributes:
        source: Where it comes from, and its strength.
        header: Its file.
        sha256: Digest of the file.
        changes: What it does, by parameter in diffusers' names.
        contract: What it was distilled for.
        gate: HyperFlow's share of the second time embedding; None for other adapters.
        unmatched: Tensors that fit no module, where those are allowed.
    """

    source: Source
    header: Header
    sha256: str
    changes: dict[str, list[Change]]
    contract: Contract
    gate: float | None
    unmatched: tuple[str, ...]

    def origins(self) -> dict[str, list[float]]:
        """Where the scales come from, each with the distinct values."""
        found: dict[str, set[float]] = {}
        for change in self.pairs():
            found.setdefault(change.scale.origin, set()).add(change.scale.value)
        return {origin: sorted(values) for origin, values in found.items()}

    def pairs(self) -> Iterator[Change]:
        """The low-rank changes."""
        yield from (change for changes in self.changes.values() for change in changes if change.down)

    def deltas(self, parameter: str, file: safe_open, device: torch.device | str = "cpu") -> list[Delta]:
        """The changes of one parameter as FP32 tensors.

        Args:
            parameter: In diffusers' names; [] if this adapter leaves it alone.
            file: The open adapter file.
            device: Where the tensors go.
        """
        deltas = []
        for change in self.changes.get(parameter, ()):
            up = file.get_tensor(change.up)
            up = torch.cat([up[rows] for rows in change.rows]) if len(change.rows) > 1 else up[change.rows[0]]
            down = None
            if change.down is not None:
                up, down = up[:, change.ranks], file.get_tensor(change.down)[change.ranks].to(device).float()
            # The file's own type crosses to the device, half the bytes of FP32.
            deltas.append(Delta(self.source.strength * change.scale.value, up.to(device).float(), down))
        return deltas


def open_adapter(source: Source, shapes: Shapes, settings: Lora) -> Adapter:
    """Read an adapter's header and judge every tensor of it.

    Args:
        source: Fetched here if it is on the Hub.
        shapes: The transformer it is meant for.
        settings: The preset's lora table.

    Raises:
        InputError: one line with the tensor's name, for anything that could not be applied in full.
    """
    path = fetch(source)
    header = read_adapter(path)
    digest = file_sha256(path)
    if not digest.startswith(source.sha256.lower()):
        raise InputError(
            f"{path} has SHA-256 {digest[:16]}..., {source.sha256} is expected of {source.name}; download it again"
        )
    known = find_known(source, header)
    gate = header.number("hyperflow_gate")
    if gate is not None:
        endpoint = {f"endpoint_{name}": s for name, s in shapes.items() if name.startswith("time_embedder.")}
        shapes = {**shapes, **endpoint}
    with safe_open(path, framework="pt") as file:
        groups, unmatched = group_keys(header.shapes)
        _check_complete(header, groups, two_time=gate is not None)
        tripled = {group.module: rank for group in groups if (rank := _tripled_rank(group, header, file))}
        rule = AlphaRule(header, known, settings.alpha, max(tripled.values(), default=None))
        names = Names(shapes.keys())
        changes: dict[str, list[Change]] = {}
        for group in groups:
            found = _changes(group, header, names, rule, file, fused_rank=tripled.get(group.module))
            if not found:
                unmatched += group.keys.values()
            for parameter, change in found:
                _check_shape(parameter, change, shapes, header)
                if any((other.down is None) == (change.down is None) for other in changes.get(parameter, ())):
                    raise InputError(f"{path}: tensor {change.up!r} changes {parameter} a second time; remove one")
                changes.setdefault(parameter, []).append(change)
        if not changes or (unmatched and not settings.allow_unmatched):
            raise InputError(_unmatched_line(header, unmatched, matched=bool(changes)))
        _check_finite(header, file)
    contract = read_contract(source.name, header, known)
    return Adapter(source, header, digest, changes, contract, gate, tuple(unmatched))


def _changes(
    group: Group, header: Header, names: Names, rule: AlphaRule, file: safe_open, *, fused_rank: int | None
) -> list[tuple[str, Change]]:
    """The parameters that one module of a file changes; [] if the transformer has no such module."""
    one, found = Scale(1.0, "difference"), []
    for role in ("up", "weight", "bias"):
        if (key := group.keys.get(role)) is None:
            continue
        if not (shape := header.shapes[key]) or (targets := names.find(group, shape[0])) is None:
            return []
        down = group.keys["down"] if role == "up" else None
        rank = header.shapes[down][0] if down else 1
        scale, part = one, rank
        if down:
            alpha = float(file.get_tensor(group.keys["alpha"])) if "alpha" in group.keys else None
            part = rank // 3 if fused_rank else rank
            scale = rule.scale(group.module, part, alpha, fused_rank=fused_rank)
        for index, (module, rows) in enumerate(targets.items()):
            ranks = slice(index * part, (index + 1) * part) if fused_rank else slice(0, rank)
            parameter = f"{module}.{'bias' if role == 'bias' else 'weight'}"
            found.append((parameter, Change(key, down, rows, ranks, scale, group.module)))
    return found


def _tripled_rank(group: Group, header: Header, file: safe_open) -> int | None:
    """Rank of a fused QKV whose B is block-diagonal: three pairs side by side, as made for ComfyUI."""
    shape = header.shapes[group.keys["up"]] if "up" in group.keys and is_fused_qkv(group) else ()
    if len(shape) != 2 or group.default or shape[0] % 3 or shape[1] % 3 or not shape[1]:
        return None
    rows, rank = shape
    blocks = file.get_tensor(group.keys["up"]).reshape(3, rows // 3, 3, rank // 3)
    empty = [not bool(blocks[i, :, j].any()) for i in range(3) for j in range(3) if i != j]
    return rank if all(empty) else None


def _check_finite(header: Header, file: safe_open) -> None:
    for name in header.shapes:
        tensor = file.get_tensor(name)
        if not bool(torch.isfinite(tensor if tensor.itemsize > 1 else tensor.float()).all()):
            raise InputError(f"{header.path}: tensor {name!r} holds NaN or infinity; the file is damaged")


def _check_complete(header: Header, groups: list[Group], *, two_time: bool) -> None:
    """Refuse pairs without their other half, alphas without a pair, and files with fewer tensors than they declare."""
    for group in groups:
        for role, other in (("down", "up"), ("up", "down"), ("alpha", "down")):
            if role in group.keys and other not in group.keys:
                missing = "lora_B" if other == "up" else "lora_A"
                raise InputError(
                    f"{header.path}: tensor {group.keys[role]!r} has no {missing} beside it; the file is incomplete"
                )
        if group.module.startswith(ENDPOINT) and not two_time:
            raise InputError(
                f"{header.path}: tensor {next(iter(group.keys.values()))!r} belongs to HyperFlow's two-time embedding, "
                "whose gate the header lacks (hyperflow_gate); use the original file"
            )
    counts = {
        "low_rank_tensors": sum(role in ("down", "up") for group in groups for role in group.keys),
        "diff_tensors": sum(role in ("weight", "bias") for group in groups for role in group.keys),
    }
    for key, count in counts.items():
        declared = header.metadata.get(key, str(count))
        if declared != str(count):
            raise InputError(f"{header.path}: its header promises {key} {declared}, it has {count}; download it again")


def _check_shape(parameter: str, change: Change, shapes: Shapes, header: Header) -> None:
    rows = sum(run.stop - run.start for run in change.rows)
    up = header.shapes[change.up]
    shape, got, tensor = (rows, *up[1:]), list(up), change.up
    if change.down is not None:
        down = header.shapes[change.down]
        if len(up) != 2 or len(down) != 2 or up[1] != down[0]:
            raise InputError(
                f"{header.path}: tensor {change.up!r} {list(up)} does not multiply {change.down!r} {list(down)}; "
                "the file is damaged or another kind of adapter"
            )
        shape = (rows, down[1])
        if shapes.get(parameter, shape)[1:] != shape[1:]:
            got, tensor = list(down), change.down
    if (expected := shapes.get(parameter)) == shape:
        return
    if expected is None:
        raise InputError(f"{header.path}: tensor {change.up!r} changes {parameter}, which the model does not have")
    pruned = "adaln" in parameter and shape[-1] == 8
    cause = "it was made for a pruned checkpoint with 8-wide AdaLN" if pruned else "it was made for another model"
    raise InputError(
        f"{header.path}: tensor {tensor!r} {got} gives {list(shape)}, {parameter} is {list(expected)}; {cause}"
    )


def _unmatched_line(header: Header, unmatched: list[str], *, matched: bool) -> str:
    total = len(header.shapes)
    if not matched:
        return (
            f"{header.path}: 0 of {total} adapter tensors matched, such as {', '.join(map(repr, unmatched[:2]))}; "
            "accepted are the names of diffusers (transformer_blocks.0.attn.to_q), MiniMax (blocks.0.attn.qkv_proj) "
            "and kohya (lora_unet_blocks_0_attn_qkv_proj)"
        )
    return (
        f"{header.path}: {len(unmatched)} of {total} tensors fit no module, the first is {unmatched[0]!r}; "
        "--set lora.allow_unmatched=true goes on without them"
    )
