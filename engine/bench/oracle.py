"""What some query blocks of one head should come out as: exactly, and with the rounding of the kernels.

Both take the route as given, so that a block within rounding of the threshold is no error.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from solgen.engine.bench.arms import Arm
from solgen.kernels.sol_attn1 import SolAttn1Config
from solgen.kernels.sol_attn1.reference import Head
from solgen.kernels.sol_attn2.config import BLOCK, SLOTS, SolAttn2Config
from solgen.kernels.sol_attn2.reference.blocks import Blocks, make_blocks, mixed_blocks
from solgen.kernels.sol_attn2.reference.exact import ExactHead
from solgen.kernels.sol_attn2.reference.fp8 import Fp8Head, SharedPivotHead
from solgen.kernels.sol_attn2.reference.router import router_means
from solgen.kernels.sol_attn2.reference.selection import Selection
from solgen.kernels.sol_attn2.reference.tail import NUM_ANCHORS, SlotUnits, Surrogates, arrange_slots, compress

DTYPES = {"exact": torch.float64, "fp8": torch.float32}


def real_rows(blocks: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Numbers of the rows of ascending query blocks [R]."""
    rows = (blocks[:, None] * BLOCK + torch.arange(BLOCK, device=blocks.device)).flatten()
    return rows[rows < num_rows]


class Oracle:
    """One head, and what several operators need of it, formed once.

    Query blocks are given as ascending numbers [R], their routes as [R, NB] bool; every row is video.
    """

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take rows [N, 128]."""
        self.rows = (query, key, value)
        self.num_rows, head_dim = query.shape
        self.mixed = mixed_blocks(None, self.num_rows, query.device)
        self.scale = head_dim**-0.5
        self._made: dict[Any, Any] = {}

    def route(self, arm: Arm, blocks: torch.Tensor) -> torch.Tensor:
        """Key blocks that query blocks keep by the arm's rule."""
        if isinstance(arm.config, SolAttn1Config):
            return self._half_precision(rounded=True).select(arm.config)[blocks]
        epsilon = -math.inf if arm.config is None else arm.config.epsilon
        return self.shares(blocks) > epsilon

    def shares(self, blocks: torch.Tensor) -> torch.Tensor:
        """Log shares m_ij - L_i + ln NB of query blocks, [R, NB] fp32."""
        counts = self._geometry("fp8").unit_counts.log()
        q_units, k_units, _ = self._units("fp8")
        scores = self.scale * q_units[blocks].flatten(0, 1) @ k_units.flatten(0, 1).t()
        scores = scores.unflatten(0, (-1, 8)).unflatten(2, (-1, 8)) + counts + counts[blocks, :, None, None]
        masses = scores.logsumexp((1, 3))
        return masses - masses.logsumexp(-1, keepdim=True) + math.log(len(counts))

    def expected(self, arm: Arm, blocks: torch.Tensor, kept: torch.Tensor, *, rounded: bool) -> torch.Tensor:
        """Rows of query blocks with a given route, float64 [M, 128]; `rounded` as the kernels round, else exact."""
        if isinstance(arm.config, SolAttn2Config) and arm.name != "block-sparse":
            config = replace(arm.config, precision="fp8" if rounded else "exact")
            fp8_head = SharedPivotHead if arm.name == "shared-pivot" else Fp8Head
            pairs = zip(blocks.split(1), kept.split(1), strict=True)
            parts = [self._sol_attn2(config, *pair, fp8_head) for pair in pairs]
        else:
            head, atoms = self._half_precision(rounded), arm.name == "sol-attn1"
            parts = [
                head.attend(block, row, round_weights=rounded, atoms=atoms)[0]
                for block, row in zip(blocks.split(1), kept.split(1), strict=True)
            ]
            parts = [part.to(self.rows[0].dtype) for part in parts] if rounded else parts
        return torch.cat(parts).flatten(0, 1)[: len(real_rows(blocks, self.num_rows))].double()

    def _sol_attn2(
        self, config: SolAttn2Config, block: torch.Tensor, kept: torch.Tensor, fp8_head: type[Fp8Head]
    ) -> torch.Tensor:
        """One query block [1, 64, 128] of Sol-Attn2 in the precision of `config`."""
        listed = kept[0].nonzero().flatten()
        tail: Surrogates | None = None
        if config.tail != "none" and len(listed) < kept.shape[1]:
            anchors, slots = self._tail_inputs(config.precision, NUM_ANCHORS[config.tail])
            tail = compress(anchors[block], kept, slots, self.scale, config.precision)
        head = self._sol_attn2_head(config, fp8_head)
        return head.attend(Selection(block, listed[None], kept.sum(-1), len(listed)), tail)[0]

    def _sol_attn2_head(self, config: SolAttn2Config, fp8_head: type[Fp8Head]) -> ExactHead | Fp8Head:
        geometry = self._geometry(config.precision)
        if config.precision == "exact":
            return self._once("exact head", lambda: ExactHead(*self._split("exact"), geometry, self.scale))
        # Quantisation depends on the smoothing alone, the anchors' means on the tail.
        name = (fp8_head, config.smooth_key, config.smooth_value, config.tail)
        head: Fp8Head = self._once(name, lambda: fp8_head(*self._split("fp8"), geometry, self.scale, config))
        head.config = config
        return head

    def _half_precision(self, rounded: bool) -> Head:
        """The head of the 16-bit operators, in float64 unless `rounded`; block means and sums are stored in 16 bits."""
        query, key, value = self.rows
        stored: Head = self._once("stored", lambda: Head(query, key, value, self.mixed, scale=self.scale))
        if rounded:
            return stored

        def exact() -> Head:
            head = Head(query.double(), key.double(), value.double(), self.mixed, scale=self.scale)
            head.k_means, head.v_sums = stored.k_means.double(), stored.v_sums.double()
            return head

        return self._once("double", exact)

    def _geometry(self, precision: str) -> Blocks:
        return make_blocks(self.num_rows, self.mixed, DTYPES[precision])

    def _split(self, precision: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        geometry, dtype = self._geometry(precision), DTYPES[precision]
        return self._once(("split", precision), lambda: tuple(geometry.split(x.to(dtype)) for x in self.rows))

    def _units(self, precision: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        geometry, split = self._geometry(precision), self._split(precision)
        return self._once(("units", precision), lambda: tuple(router_means(x, geometry, precision) for x in split))

    def _tail_inputs(self, precision: str, num_anchors: int) -> tuple[torch.Tensor, SlotUnits]:
        geometry, (q_units, k_units, v_units) = self._geometry(precision), self._units(precision)
        return self._once(
            ("tail", precision, num_anchors),
            lambda: (
                geometry.group_means(q_units, num_anchors),
                arrange_slots(k_units, v_units, geometry, SLOTS // num_anchors),
            ),
        )

    def _once(self, name: Any, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]
