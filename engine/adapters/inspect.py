"""What an adapter file is and whether it would be applied: the report of `solgen lora inspect`."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from solgen.engine.adapters.adapter import Adapter, Change, Shapes, open_adapter
from solgen.engine.adapters.header import Header, file_sha256, read_adapter
from solgen.engine.adapters.known import find_known
from solgen.engine.adapters.names import FLATTENED
from solgen.engine.adapters.overlay import adapter_notes, layer_group, weight_headers
from solgen.engine.adapters.source import Source, fetch
from solgen.errors import InputError
from solgen.presets.schema import Lora

IN_SCOPE = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")
"""Linear layers that every block has; 312 in MiniMax-H3."""


def inspect_adapter(source: Source, shapes: Shapes, settings: Lora) -> dict[str, Any]:
    """Judge one adapter against a transformer.

    Args:
        source: The file.
        shapes: From `h3_shapes` or `model_shapes`.
        settings: As a request would have them.

    Returns:
        JSON-ready report; `verdict` is "ok" or the line that a request would be refused with.

    Raises:
        InputError: if the file is no adapter at all, or a kind that is refused by its header.
    """
    path = fetch(source)
    header = read_adapter(path)
    known = find_known(source, header)
    report: dict[str, Any] = {
        "file": str(path),
        "sha256": file_sha256(path),
        "producer": known.title if known else _producer(header),
        "tensors": len(header.shapes),
        "types": sorted(set(header.dtypes.values())),
    }
    try:
        adapter = open_adapter(source, shapes, settings)
    except InputError as error:
        return report | {"verdict": f"refused: {error}"}
    return report | _matched(adapter, shapes) | {"notes": adapter_notes(adapter), "verdict": "ok"}


def h3_shapes() -> Shapes:
    """Shapes of MiniMax-H3's transformer, from diffusers' defaults; no weights are read."""
    from diffusers import MiniMaxH3Transformer3DModel

    with torch.device("meta"):
        transformer = MiniMaxH3Transformer3DModel()
    return {name: tuple(tensor.shape) for name, tensor in transformer.state_dict().items()}


def model_shapes(folder: Path) -> Shapes:
    """Shapes of a transformer on disk, from its headers."""
    return {name: tuple(entry["shape"]) for name, entry in weight_headers(folder).items()}


def _matched(adapter: Adapter, shapes: Shapes) -> dict[str, Any]:
    pairs = [(name, change) for name, changes in adapter.changes.items() for change in changes if change.down]
    ranks: dict[str, set[int]] = {}
    for name, change in pairs:
        ranks.setdefault(layer_group(name), set()).add(change.ranks.stop - change.ranks.start)
    scope = {name for name in shapes if name.removesuffix(".weight").endswith(IN_SCOPE)}
    covered = scope & adapter.changes.keys()
    return {
        "pairs": len({change.down for _, change in pairs}),
        "differences": sum(not change.down for changes in adapter.changes.values() for change in changes),
        "ranks": {group: sorted(found) for group, found in ranks.items()},
        "scale (alpha / rank)": adapter.origins(),
        "QKV": _layout(adapter, ".attn.to_k.weight", _qkv_layout),
        "FFN": _layout(adapter, ".ff.net.0.proj.weight", _ffn_layout),
        "coverage": f"{len(covered)} of {len(scope)} attention and FFN modules, "
        f"{len(adapter.changes.keys() - scope)} other parameters",
        "two-time gate": adapter.gate,
        "contract": adapter.contract.summary() or "none declared",
        "unmatched": list(adapter.unmatched),
    }


def _layout(adapter: Adapter, ending: str, name: Callable[[Change], str]) -> str:
    found = {name(c) for parameter, changes in adapter.changes.items() if parameter.endswith(ending) for c in changes}
    return ", ".join(sorted(found)) or "untouched"


def _qkv_layout(change: Change) -> str:
    """Layout by what k takes: its own rows, a third of a fused tensor's, or also its own ranks."""
    if not change.module.endswith("qkv_proj"):
        return "split"
    if len(change.rows) > 1:
        return "fused, rows per head (DiffSynth)"
    return "fused, block-diagonal" if change.ranks.start else "fused, thirds"


def _ffn_layout(change: Change) -> str:
    return "[gate; value], swapped" if len(change.rows) > 1 else "[value; gate]"


def _producer(header: Header) -> str:
    """A guess from the format's name, or from the spelling of the tensors'."""
    if header.metadata.get("format", "pt") != "pt":
        return header.metadata["format"]
    default = any(".default." in name for name in header.shapes)
    guesses = (
        (rf"{FLATTENED}", "kohya or musubi-tuner"),
        (r"base_model\.", "PEFT"),
        (r"(model\.)?diffusion_model\.", "ai-toolkit or ComfyUI"),
        (r"(token_refiner\.)?blocks\.|final_layer\.", "DiffSynth-Studio" if default else "unknown, MiniMax's names"),
    )
    for pattern, who in guesses:
        if any(re.match(pattern, name) for name in header.shapes):
            return who
    return "PEFT" if default else "diffusers"
