"""The record in a checkpoint that adapters were merged into: its terms hold, and nothing is merged twice."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solgen.engine.adapters.contract import Contract
from solgen.engine.adapters.source import Source
from solgen.errors import InputError

RECORD = "solgen_adapters.json"
"""File beside the transformer's weights."""

ENDPOINT_FILE = "endpoint_time_embedder.safetensors"
"""HyperFlow's second time embedder, which stock diffusers has no place for."""


@dataclass(frozen=True)
class Merged:
    """What a checkpoint holds.

    Attributes:
        adapters: Record of every adapter, as the sidecar spells it.
        contract: Terms of all of them together.
        gate: Share of the second time embedding, if it has one.
    """

    adapters: tuple[dict[str, Any], ...]
    contract: Contract
    gate: float | None

    def holds(self, source: Source) -> bool:
        """Whether a preset's own adapter is in it, by its name or by the digest that the preset pins."""
        return any(
            record["source"] == source.name or (source.sha256 and record["sha256"].startswith(source.sha256))
            for record in self.adapters
        )

    def refuse_again(self, source: Source, sha256: str) -> None:
        """Refuse a second merge of the same file.

        Raises:
            InputError: naming the file and the strength it already has.
        """
        for record in self.adapters:
            if record["sha256"] == sha256:
                raise InputError(
                    f"{source.name} is already merged into this model (strength {record['strength']:g}); leave it out, "
                    "or use the model it was merged from"
                )


def read_merged(folder: Path) -> Merged | None:
    """The record in a transformer's folder; None where nothing was merged.

    Raises:
        InputError: if the record cannot be read.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        contract = Contract.from_record(table["contract"])
        return Merged(tuple(table["adapters"]), contract, table["gate"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a record of merged adapters; merge them again") from error
