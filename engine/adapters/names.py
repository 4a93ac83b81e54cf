"""From the tensor names of any producer to parameters of diffusers' transformer, and to the rows that each takes.

diffusers' own converter knows MiniMax's names, fused QKV, DiffSynth's per-head rows and the swapped halves of fc1.
It is run here on row numbers instead of weights, so that its answer says which rows go where and nothing is rounded.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

import torch
from diffusers.loaders.lora_conversion_utils import (
    _convert_non_diffusers_minimax_h3_lora_to_diffusers as convert_native,
)

from solgen.errors import InputError

PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer_ref.", "transformer.")
"""Prefixes that wrap a module's name; PEFT's may stand before another one."""

FLATTENED = "lora_unet_"
"""kohya's prefix: the dots of the module's name are underscores behind it."""

ENDPOINT = "endpoint_time_embedder"
"""HyperFlow's second time embedder, a copy of the first one that only exists once it is made."""

_ROLES = (
    (r"\.lora_(A|down)(\.default)?(\.weight)?", "down"),
    (r"\.lora_(B|up)(\.default)?(\.weight)?", "up"),
    (r"\.alpha", "alpha"),
    (r"\.diff", "weight"),
    (r"\.diff_b", "bias"),
)
"""How a tensor's name ends, and its role."""

_NORMS = (
    (r"blocks\.(\d+)\.(norm[12])", r"transformer_blocks.\1.\2"),
    (r"blocks\.(\d+)\.attn\.([qk])_norm", r"transformer_blocks.\1.attn.norm_\2"),
    (r"token_refiner\.blocks\.(\d+)\.(norm[12])", r"token_refiner.refiner_blocks.\1.\2"),
    (r"token_refiner\.blocks\.(\d+)\.attn\.([qk])_norm", r"token_refiner.refiner_blocks.\1.attn.norm_\2"),
    (r"final_layer\.norm", "norm_out.norm"),
)
"""MiniMax's norms, which diffusers' converter leaves out because they take no LoRA."""


@dataclass
class Group:
    """The tensors of one module as its file names it.

    Attributes:
        module: Name without prefixes and roles, still the producer's.
        keys: Name of the tensor by role: "down", "up", "alpha", "weight" (a full difference), "bias".
        default: Whether PEFT's adapter name `.default.` stands in the keys.
        wrapped: Whether a prefix stood before the name.
    """

    module: str
    keys: dict[str, str] = field(default_factory=dict)
    default: bool = False
    wrapped: bool = False


def group_keys(keys: Collection[str]) -> tuple[list[Group], list[str]]:
    """Sort tensor names by module.

    Returns:
        The groups in order of appearance, and the names that have no role here.

    Raises:
        InputError: if two tensors have one role in one module.
    """
    groups: dict[str, Group] = {}
    unknown = []
    for key in keys:
        matches = ((re.fullmatch(rf"(.+?){ending}", key), role) for ending, role in _ROLES)
        match, role = next((found for found in matches if found[0]), (None, ""))
        if match is None:
            unknown.append(key)
            continue
        module = stripped = match[1]
        while prefix := next((p for p in PREFIXES if stripped.startswith(p)), None):
            stripped = stripped.removeprefix(prefix)
        group = groups.setdefault(stripped, Group(stripped))
        if role in group.keys:
            raise InputError(f"tensors {group.keys[role]!r} and {key!r} are the same part of one module; remove one")
        group.keys[role] = key
        group.default |= ".default" in key
        group.wrapped |= stripped != module
    return list(groups.values()), unknown


@dataclass(frozen=True)
class Names:
    """Module names of one transformer.

    Attributes:
        parameters: Names of its parameters, with `ENDPOINT` where an adapter brings that.
    """

    parameters: Collection[str]

    @cached_property
    def modules(self) -> set[str]:
        """Modules that own a parameter."""
        return {name.rpartition(".")[0] for name in self.parameters}

    @cached_property
    def _flattened(self) -> dict[str, str]:
        return {FLATTENED + name.replace(".", "_"): name for name in self.modules}

    def find(self, group: Group, rows: int) -> dict[str, tuple[slice, ...]] | None:
        """Where the rows of a group's tensors belong.

        Args:
            group: One module of a file.
            rows: Output rows of its tensors.

        Returns:
            By diffusers' module name, runs of rows in order; None if no module has this name.

        Raises:
            InputError: if the rows of a fused QKV could be in either of two orders.
        """
        everything = (slice(0, rows),)
        if (name := self._flattened.get(group.module, group.module)) in self.modules:
            return {name: everything}
        for pattern, target in _NORMS:
            if re.fullmatch(pattern, group.module):
                name = re.sub(pattern, target, group.module)
                return {name: everything} if name in self.modules else None
        if is_fused_qkv(group) and group.default and group.wrapped:
            raise InputError(
                f"tensor {group.keys.get('up', group.module)!r} may hold q, k, v in thirds or per head; drop "
                "'.default' from its keys if in thirds, or their prefix if per head as DiffSynth writes them"
            )
        endpoint = group.module.startswith(f"{ENDPOINT}.")
        native = _native_rows(group.module.removeprefix("endpoint_") if endpoint else group.module, rows, group.default)
        targets = {("endpoint_" if endpoint else "") + name: runs for name, runs in native.items()}
        return targets if targets and targets.keys() <= self.modules else None


def is_fused_qkv(group: Group) -> bool:
    """Whether a group changes q, k and v with one tensor."""
    return group.module.endswith(("attn.qkv_proj", "attn_qkv_proj"))


def _native_rows(module: str, rows: int, per_head: bool) -> dict[str, tuple[slice, ...]]:
    """Rows of a module in MiniMax's names, by diffusers' names; {} for a name the converter does not know.

    `per_head` marks DiffSynth's files, which the converter knows by PEFT's infix.
    """
    infix = ".default" if per_head and "qkv" in module else ""
    numbers = torch.arange(rows, dtype=torch.int32)[:, None]
    state = {f"{module}.lora_A{infix}.weight": numbers[:1], f"{module}.lora_B{infix}.weight": numbers}
    try:
        converted = convert_native(state)
    except ValueError:
        return {}
    end = ".lora_B.weight"
    return {
        key.removeprefix("transformer.").removesuffix(end): _runs(value[:, 0])
        for key, value in converted.items()
        if key.endswith(end)
    }


def _runs(numbers: torch.Tensor) -> tuple[slice, ...]:
    """Consecutive row numbers as slices, in order."""
    breaks = (numbers.diff() != 1).nonzero().flatten().add(1).tolist()
    bounds = [0, *breaks, len(numbers)]
    firsts = numbers[bounds[:-1]].tolist()
    return tuple(slice(f, f + b - a) for f, a, b in zip(firsts, bounds[:-1], bounds[1:], strict=True))
