"""All adapters of a request over one transformer: checked together, applied while it loads, recorded."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from solgen.engine.adapters.adapter import Adapter, open_adapter
from solgen.engine.adapters.branch import add_branches
from solgen.engine.adapters.contract import refuse_disagreement, refuse_task
from solgen.engine.adapters.merge import Delta, Kept, merge_into
from solgen.engine.adapters.merged import ENDPOINT_FILE, Merged, read_merged
from solgen.engine.adapters.names import ENDPOINT
from solgen.engine.adapters.source import Source
from solgen.engine.adapters.two_time import add_endpoint, use_two_times
from solgen.engine.shards import read_headers
from solgen.errors import InputError
from solgen.presets.schema import Lora, Task

LOW_SHARE = 0.9
"""Below this share of a change that survives rounding, the user is told."""

PLAIN_DTYPES = {"BF16", "F16", "F32"}
"""Types that a change can be added to."""

Lay = Callable[[str, Tensor], list[Delta]]
"""Called with a parameter's name and its tensor, see `Overlay.laying`."""


@dataclass
class Overlay:
    """Checked adapters for one transformer.

    Attributes:
        adapters: In the order they were given; those of strength 0 are left out.
        mode: "merge" or "branch".
        folder: The transformer's folder.
        merged: What its checkpoint holds already.
        notes: Lines that the user should see.
        kept: After a merge, share of the change that survived rounding, by layer group.
        measured: What that is computed from, by parameter; a parameter merged again counts once.
        told: Notes that the user has seen.
    """

    adapters: tuple[Adapter, ...]
    mode: str
    folder: Path
    merged: Merged | None = None
    notes: list[str] = field(default_factory=list)
    kept: dict[str, float] = field(default_factory=dict)
    measured: dict[str, Kept] = field(default_factory=dict)
    told: int = 0

    def untold(self) -> list[str]:
        """Notes that were not returned before."""
        news, self.told = self.notes[self.told :], len(self.notes)
        return news

    @property
    def gate(self) -> float | None:
        """Share of the second time embedding; None for a model with one time.

        It is part of what an adapter changes, so strength scales it too.
        """
        gates = [adapter.gate * adapter.source.strength for adapter in self.adapters if adapter.gate is not None]
        return gates[0] if gates else self.merged.gate if self.merged else None

    def record(self) -> dict[str, Any]:
        """JSON-ready: what was applied, and what was in the checkpoint."""
        return {
            "mode": self.mode,
            "files": [adapter_record(adapter) for adapter in self.adapters],
            "kept": {group: round(share, 4) for group, share in self.kept.items()},
            "in_checkpoint": list(self.merged.adapters) if self.merged else [],
        }

    def apply(self, transformer: MiniMaxH3Transformer3DModel) -> None:
        """Lay the adapters over a loaded transformer, parameter by parameter; bounded memory beside it."""
        self.make_room(transformer)
        if stored := self.endpoint_file:
            transformer.endpoint_time_embedder.load_state_dict(load_file(stored))
        with self.laying() as lay:
            for name, parameter in list(transformer.named_parameters()):
                if branches := lay(name, parameter.data):
                    add_branches(transformer, name.removesuffix(".weight"), branches)
        self.finish(transformer)

    def make_room(self, transformer: MiniMaxH3Transformer3DModel) -> None:
        """Add the modules that the adapters change and a stock transformer lacks; before any is laid over."""
        if self.gate is not None:
            add_endpoint(transformer)

    def finish(self, transformer: MiniMaxH3Transformer3DModel) -> None:
        """Make a transformer whose parameters are complete use those modules."""
        if self.gate is not None:
            use_two_times(transformer, self.gate)

    @property
    def endpoint_file(self) -> Path | None:
        """Where the second time embedder lies; None if it starts as a copy of the first, or there is none."""
        return self.folder / ENDPOINT_FILE if self.merged is not None and self.merged.gate is not None else None

    @contextmanager
    def laying(self) -> Iterator[Lay]:
        """Open the adapters' files.

        Yields:
            Merges what belongs to a parameter into its tensor, in place, and returns the branches that belong beside
            it: all low-rank changes in branch mode, none in merge mode.
        """
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(a.header.path, framework="pt")) for a in self.adapters]

            def lay(name: str, tensor: Tensor) -> list[Delta]:
                deltas = collect_deltas(self.adapters, files, name, tensor.device)
                branches = [delta for delta in deltas if delta.down is not None] if self.mode == "branch" else []
                if sums := [delta for delta in deltas if not any(delta is branch for branch in branches)]:
                    self.measured[name] = merge_into(tensor, sums)
                return branches

            yield lay
        groups: dict[str, Kept] = {}
        for name, kept in self.measured.items():
            groups.setdefault(layer_group(name), Kept()).add(kept)
        self.kept = {group: kept.share for group, kept in groups.items()}
        self.notes += [note for note in low_share_notes(self.kept) if note not in self.notes]


def open_overlay(
    sources: Sequence[Source], folder: Path, task: Task, settings: Lora, *, preset: Source | None = None
) -> Overlay | None:
    """Open and check every adapter of a request against the weight headers of its transformer.

    Args:
        sources: Those of `--lora`.
        folder: The transformer's folder.
        task: What the request does.
        settings: The preset's lora table.
        preset: The preset's own adapter.

    Returns:
        None if there is nothing to lay over.

    Raises:
        SolgenError: one line, before any weight is read.
    """
    merged = read_merged(folder)
    notes = []
    if preset is not None and merged is not None and merged.holds(preset):
        notes.append(f"{preset.name} is merged into this model already")
        preset = None
    wanted = [source for source in ([preset] if preset else []) + list(sources) if source.strength]
    if not wanted and merged is None:
        return None
    headers = weight_headers(folder)
    shapes = {name: tuple(entry["shape"]) for name, entry in headers.items()}
    adapters = tuple(open_adapter(source, shapes, settings) for source in wanted)
    for index, adapter in enumerate(adapters):
        if any(adapter.sha256 == other.sha256 for other in adapters[:index]):
            raise InputError(f"{adapter.source.name} is a copy of a file that is given too; give it once")
        if merged is not None:
            merged.refuse_again(adapter.source, adapter.sha256)
        refuse_quantised(adapter, headers, folder)
        notes += adapter_notes(adapter)
    if sum(adapter.gate is not None for adapter in adapters) + (merged is not None and merged.gate is not None) > 1:
        raise InputError("two adapters bring a second time embedding; a model has room for one, leave one out")
    if not settings.ignore_contract:
        contracts = [adapter.contract for adapter in adapters] + ([merged.contract] if merged else [])
        refuse_disagreement(contracts)
        for contract in contracts:
            refuse_task(contract, task)
    return Overlay(adapters, settings.mode, folder, merged, notes)


def collect_deltas(
    adapters: Sequence[Adapter], files: Sequence[safe_open], name: str, device: torch.device | str
) -> list[Delta]:
    """What all adapters do to one parameter, in order."""
    return [delta for a, file in zip(adapters, files, strict=True) for delta in a.deltas(name, file, device)]


def weight_headers(folder: Path) -> dict[str, dict[str, Any]]:
    """Type and shape of every tensor of a component, from the headers of its shards.

    Raises:
        InputError: naming a broken file.
    """
    headers = read_headers(folder).items()
    return {name: entry for file, header in headers if file != ENDPOINT_FILE for name, entry in header.items()}


def refuse_quantised(adapter: Adapter, headers: dict[str, dict[str, Any]], folder: Path) -> None:
    """Refuse weights of eight bits or less, whose rounding would swallow most of a change.

    Raises:
        InputError: naming the tensor and its type.
    """
    for name in adapter.changes:
        base = headers[name.replace(ENDPOINT, "time_embedder")]["dtype"]
        if base not in PLAIN_DTYPES:
            raise InputError(
                f"{adapter.source.name} changes {name}, which {folder} stores as {base}; "
                "merge into the bf16 model first, then quantise"
            )


def adapter_record(adapter: Adapter) -> dict[str, Any]:
    """JSON-ready: file, hash, strength and where alpha came from."""
    return {
        "source": adapter.source.name,
        "revision": adapter.source.revision,
        "sha256": adapter.sha256,
        "strength": adapter.source.strength,
        "scales": adapter.origins(),
        "unmatched": list(adapter.unmatched),
    }


def adapter_notes(adapter: Adapter) -> list[str]:
    """What a user should know of an adapter before it is applied."""
    name, notes = adapter.source.name, []
    if "rank" in adapter.origins():
        notes.append(f"{name} declares no alpha; alpha = rank is assumed (scale 1), --set lora.alpha=N changes it")
    if adapter.unmatched:
        listed = ", ".join(adapter.unmatched)
        notes.append(f"{name}: {len(adapter.unmatched)} tensors fit no module and are left out: {listed}")
    return notes


def low_share_notes(kept: dict[str, float]) -> list[str]:
    """A warning for every layer group whose change was mostly rounded away."""
    return [
        f"only {100 * share:.0f} % of the change survived rounding in {group}; --lora-mode branch keeps all of it"
        for group, share in kept.items()
        if share < LOW_SHARE
    ]


def layer_group(parameter: str) -> str:
    """Kind of layer that a parameter belongs to."""
    groups = {"token_refiner": "refiner", ".attn.": "attention", ".ff.": "FFN", "adaln_proj": "AdaLN"}
    return next((group for part, group in groups.items() if part in parameter), "embedders, heads")
