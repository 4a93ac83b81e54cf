"""The factor alpha / rank of every pair, and where it was found."""

import math
import re
from dataclasses import dataclass

from solgen.engine.adapters.header import Header
from solgen.engine.adapters.known import Known
from solgen.errors import InputError


@dataclass(frozen=True)
class Scale:
    """Factor of one pair.

    Attributes:
        value: alpha / rank.
        origin: "lora.alpha", "tensor", "metadata", "adapter_config.json", the title of a known file, or "rank".
    """

    value: float
    origin: str


@dataclass(frozen=True)
class AlphaRule:
    """Finds the scale of every pair of one file.

    Attributes:
        header: The file.
        known: Its row in the table of known files.
        setting: The preset key `lora.alpha`.
        tripled: Rank of q, k and v fused block-diagonally, three times that of their parts; None without any.
    """

    header: Header
    known: Known | None
    setting: float | None
    tripled: int | None = None

    def scale(self, module: str, rank: int, tensor: float | None, *, fused_rank: int | None = None) -> Scale:
        """The scale of one pair, from the first of these that says something: setting, tensor, metadata, table, rank.

        Args:
            module: Name in the file, without prefixes.
            rank: Rank of the pair; of one part, where q, k and v were fused block-diagonally.
            tensor: Value of the pair's own alpha tensor.
            fused_rank: Rank of the fused tensors themselves, which an alpha tensor counts in.

        Raises:
            InputError: for an alpha that is not a positive number.
        """
        if self.setting is not None:
            return Scale(self.setting / rank, "lora.alpha")
        if tensor is not None:
            if not 0 < tensor < math.inf:
                raise InputError(f"{self.header.path}: the alpha of {module!r} is {tensor}, expected a positive number")
            return Scale(tensor / (fused_rank or rank), "tensor")
        if self.header.metadata.get("format", "").startswith("fastvideo-lora"):
            return Scale(1.0, "format (alpha = rank)")
        if self.header.config.get("lora_alpha") is not None:
            return Scale(self._peft(module, rank), "adapter_config.json")
        if (alpha := self.header.number("lora_alpha", "alpha", "network_alpha", "ss_network_alpha")) is not None:
            # A converter that fuses ranks and writes alpha = rank means a scale of 1 for the other pairs as well.
            return Scale(1.0 if alpha == self.tripled else alpha / rank, "metadata")
        if self.known is not None and self.known.alpha is not None and self.known.rank is not None:
            return Scale(self.known.alpha / self.known.rank, self.known.title)
        return Scale(1.0, "rank")

    def _peft(self, module: str, rank: int) -> float:
        config = self.header.config
        patterns = (config.get("alpha_pattern") or {}).items()
        matching = (alpha for key, alpha in patterns if re.fullmatch(rf"(.*\.)?({key.removeprefix('^')})", module))
        alpha = next(matching, config["lora_alpha"])
        if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
            raise InputError(
                f"{self.header.path}: its PEFT config gives {module!r} alpha {alpha!r}, expected a positive number"
            )
        return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
