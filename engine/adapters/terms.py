"""The preset keys that a request's adapters set, found before torch is imported."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from solgen.engine.adapters.contract import LEVELS, Contract, contradictions, read_contract, refuse_disagreement
from solgen.engine.adapters.header import read_adapter
from solgen.engine.adapters.known import find_known
from solgen.engine.adapters.merged import read_merged
from solgen.engine.adapters.source import Source, fetch, preset_source
from solgen.errors import InputError
from solgen.presets.schema import load_preset

Tables = Sequence[tuple[str, Mapping[str, Any]]]


def contract_terms(name: str, loras: Sequence[Source], tables: Tables, notes: list[str]) -> dict[str, Any]:
    """What the adapters of a request lay over its preset, below everything the user gave.

    Args:
        name: The preset.
        loras: Adapters of `--lora`.
        tables: The user's tables, each with where it comes from.
        notes: Gains a line for every adapter that sets something.

    Returns:
        A preset table; {} where no adapter has terms.

    Raises:
        InputError: if adapters disagree, or a flag contradicts one, unless `lora.ignore_contract` insists.
    """
    chosen = {"adapter", "lora", "model"}
    preset = load_preset(name, *((origin, {k: v for k, v in table.items() if k in chosen}) for origin, table in tables))
    contracts = [_contract(source) for source in loras if source.strength]
    notes += [f"{contract.source}: {contract.summary()}" for contract in contracts if contract.summary()]
    if preset.adapter is not None:
        contracts.insert(0, _contract(preset_source(preset.adapter)))
    folders = (Path(preset.model.source).expanduser() / part for part in ("transformer", "transformer_ref"))
    contracts += [merged.contract for folder in folders if (merged := read_merged(folder))]
    if not preset.lora.ignore_contract:
        refuse_disagreement(contracts)
    terms: dict[str, Any] = {}
    for contract in contracts:
        broken = list(contradictions(contract, tables))
        if broken and not preset.lora.ignore_contract:
            raise InputError(broken[0][1])
        terms |= contract.sampler()
        if any(key in LEVELS for key, _ in broken):
            # The user's own levels: those of the adapter, or of the preset that follows it, must not fill the rest.
            terms = {key: value for key, value in terms.items() if key not in LEVELS} | {"positions": "off"}
    return {"sampler": terms} if terms else {}


def _contract(source: Source) -> Contract:
    """Terms of one adapter; a file of the Hub is only fetched for them if the table does not know it."""
    known = find_known(source, None) if source.path is None else None
    if known is not None:
        return read_contract(source.name, None, known)
    header = read_adapter(fetch(source))
    return read_contract(source.name, header, find_known(source, header))
