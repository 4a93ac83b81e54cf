"""Write a model with adapters merged into its transformer, as a repository of its own."""

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from solgen.engine.adapters.contract import Contract, as_record
from solgen.engine.adapters.header import file_sha256
from solgen.engine.adapters.merge import Kept, merge_into
from solgen.engine.adapters.merged import ENDPOINT_FILE, RECORD
from solgen.engine.adapters.names import ENDPOINT
from solgen.engine.adapters.overlay import (
    Overlay,
    adapter_record,
    collect_deltas,
    layer_group,
    low_share_notes,
    open_overlay,
)
from solgen.engine.adapters.source import Source
from solgen.engine.pipeline import transformer_name
from solgen.engine.repository import INDEX, Repository, open_repository
from solgen.engine.shards import read_headers
from solgen.engine.stages import Listener, Stages
from solgen.errors import InputError, SetupError
from solgen.presets.schema import Lora, Model, Task

STEM = "diffusion_pytorch_model"
"""First part of the names that diffusers gives to a transformer's files."""


def merge_checkpoint(
    model: Model, sources: Sequence[Source], output: Path, listener: Listener, *, task: Task, settings: Lora
) -> dict[str, Any]:
    """Write a copy of a model whose transformer holds the adapters, shard by shard.

    Args:
        model: The base.
        sources: Adapters, summed in FP32 in this order.
        output: New folder; it appears when everything is written.
        listener: Shows progress.
        task: Decides which of the two transformers is merged; the copy has that one alone.
        settings: The preset's lora table; its mode has no say here.

    Returns:
        The record of the merge, as it lies beside the weights.

    Raises:
        SolgenError: one line; nothing is left behind.
    """
    if output.exists():
        raise InputError(f"{output} exists; choose another --output, a merged model is never written over one")
    if not output.absolute().parent.is_dir():
        raise InputError(f"folder {output.absolute().parent} does not exist; create it or choose another --output")
    repository = open_repository(model, task)
    overlay = open_overlay(sources, repository.folders[transformer_name(task)], task, settings)
    if overlay is None or not overlay.adapters:
        raise InputError("there is nothing to merge; give --lora FILE with a strength other than 0")
    for note in overlay.notes:
        listener.note(note)
    draft = output.absolute().with_name(f".{output.name}.{os.getpid()}")
    try:
        draft.mkdir()
        _copy_others(repository, draft, task)
        record = _write_transformer(repository, overlay, draft, task, listener)
        draft.rename(output)
    except OSError as error:
        raise SetupError(f"cannot write {output}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return record


def _write_transformer(
    repository: Repository, overlay: Overlay, draft: Path, task: Task, listener: Listener
) -> dict[str, Any]:
    source = overlay.folder
    target = draft / source.relative_to(repository.path)
    target.mkdir(parents=True)
    files = [source / file for file in sorted(read_headers(source)) if file != ENDPOINT_FILE]
    shards = [f"{STEM}-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    weight_map: dict[str, str] = {}
    kept: dict[str, Kept] = {}
    size = 0
    stages = Stages(torch.device("cpu"), listener)
    with stages.stage("merge", total=len(files)) as advance, ExitStack() as stack:
        adapters = [stack.enter_context(safe_open(a.header.path, framework="pt")) for a in overlay.adapters]
        endpoint = _endpoint(overlay, files)
        for name, tensor in endpoint.items():
            if deltas := collect_deltas(overlay.adapters, adapters, f"{ENDPOINT}.{name}", "cpu"):
                merge_into(tensor, deltas)
        if endpoint:
            save_file(endpoint, target / ENDPOINT_FILE)
        for path, shard in zip(files, shards, strict=True):
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            for name, tensor in tensors.items():
                if deltas := collect_deltas(overlay.adapters, adapters, name, "cpu"):
                    kept.setdefault(layer_group(name), Kept()).add(merge_into(tensor, deltas))
                weight_map[name] = shard
                size += tensor.nbytes
            save_file(tensors, target / shard, metadata={"format": "pt"})
            advance()
    _write_json(target / f"{STEM}.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})
    for path in source.glob("*.json"):
        if path.name != RECORD and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
    overlay.kept = {group: share.share for group, share in kept.items()}
    for note in low_share_notes(overlay.kept):
        listener.note(note)
    record = _record(overlay, target)
    _write_json(target / RECORD, record)
    return record


def _endpoint(overlay: Overlay, files: list[Path]) -> dict[str, torch.Tensor]:
    """The second time embedder of a two-time model: the one in the checkpoint, or a copy of the first; {} without."""
    if overlay.gate is None:
        return {}
    stored = overlay.folder / ENDPOINT_FILE
    start = "" if stored.is_file() else "time_embedder."
    found: dict[str, torch.Tensor] = {}
    for path in [stored] if stored.is_file() else files:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(start)]  # noqa: SIM118
            found |= {name.removeprefix(start): file.get_tensor(name) for name in names}
    return found


def _record(overlay: Overlay, target: Path) -> dict[str, Any]:
    merged = overlay.merged
    contracts = [adapter.contract for adapter in overlay.adapters] + ([merged.contract] if merged else [])
    earlier = list(merged.adapters) if merged else []
    return {
        "adapters": earlier + [adapter_record(adapter) for adapter in overlay.adapters],
        "contract": as_record(_together(contracts)),
        "gate": overlay.gate,
        "kept": {group: round(share, 4) for group, share in overlay.kept.items()},
        "shards": {path.name: file_sha256(path) for path in sorted(target.glob("*.safetensors"))},
    }


def _together(contracts: Sequence[Contract]) -> Contract:
    """Terms of all; they have been found not to disagree."""
    terms: dict[str, Any] = {}
    for contract in contracts:
        terms |= {key: value for key, value in as_record(contract).items() if value is not None}
    tasks = [set(contract.tasks) for contract in contracts if contract.tasks]
    shared = set.intersection(*tasks) if tasks else set()
    in_order = tuple(task for task in get_args(Task) if task in shared)
    return Contract(**{**terms, "source": "the merged model", "tasks": in_order})


def _copy_others(repository: Repository, draft: Path, task: Task) -> None:
    """Link or copy every component but the transformers, and the index without the other transformer."""
    names = {name for name in repository.folders if not name.startswith("transformer")}
    for folder in {repository.folders[name] for name in names}:
        for path in folder.rglob("*"):
            if path.is_file():
                _link(path, draft / path.relative_to(repository.path))
    index = json.loads((repository.path / INDEX).read_text(encoding="utf-8"))
    folder = repository.folders[transformer_name(task)].relative_to(repository.path)
    for name in ("transformer", "transformer_ref"):
        entry = index.get(name)
        if isinstance(entry, list) and len(entry) == 3 and (entry[2].get("subfolder") or name) != str(folder):
            del index[name]
    _write_json(draft / INDEX, index)


def _link(source: Path, target: Path) -> None:
    """A second name for a large file where the file system allows it, a copy elsewhere."""
    target.parent.mkdir(parents=True, exist_ok=True)
    real = source.resolve()
    try:
        os.link(real, target)
    except OSError:
        shutil.copyfile(real, target)


def _write_json(path: Path, table: dict[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
