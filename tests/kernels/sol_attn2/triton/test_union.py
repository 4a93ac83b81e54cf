"""The trios' work lists, and the ring protocol that the Gluon kernel runs on them, in a model of its barriers."""

import random

import pytest
import torch

pytest.importorskip("triton")

from solgen.kernels.sol_attn2.gluon.union import TRIO, schedule
from tests.kernels.sol_attn2.attention_cases import make_route


class Barrier:
    """An mbarrier: a phase ends when `count` arrivals and all announced loads are in."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.loads = self.phase = 0

    def arrive(self, count: int = 1, loads: int = 0) -> None:
        self.missing -= count
        self.loads += loads
        assert self.missing >= 0
        self._turn()

    def loaded(self) -> None:
        self.loads -= 1
        self._turn()

    def _turn(self) -> None:
        if self.missing == self.loads == 0:
            self.phase += 1
            self.missing = self.count

    def has_passed(self, parity: int) -> bool:
        """What a wait on a parity sees: the phase before the running one has it."""
        return self.phase & 1 != parity


def run_trio(kept, plan, head: int, trio: int, has_tail: bool, stages: int, generator: random.Random) -> None:
    """Run the producer and the consumers of a trio in random order; each must meet its own tiles, undisturbed."""
    num_blocks = kept.shape[-1]
    queries = range(TRIO * trio, min(TRIO * trio + TRIO, num_blocks))
    full = [Barrier(1) for _ in range(7 * stages)]
    empty = [Barrier(TRIO) for _ in range(stages)]
    ring: list[object] = [None] * stages
    loading: list[tuple[int, object, Barrier]] = []

    def produce():
        tiles = [(("tail", i), 1 << w) for w, i in enumerate(queries) if has_tail]
        listed = plan.loads[head, trio, : int(plan.num_loads[head, trio])].tolist()
        tiles += [(load & 0xFFFF, load >> 16) for load in listed]
        for n, (tile, consumers) in enumerate(tiles):
            stage = n % stages
            while not empty[stage].has_passed((n // stages & 1) ^ 1):
                yield
            barrier = full[(consumers - 1) * stages + stage]
            barrier.arrive(loads=1)
            ring[stage] = None
            loading.append((stage, tile, barrier))
            yield
            if (skipping := TRIO - consumers.bit_count()) > 0:
                empty[stage].arrive(skipping)
            yield

    def consume(w: int, i: int):
        phases = 0
        own = kept[head, i].nonzero().flatten().tolist()
        tiles = [(("tail", i), 1 << w, 0, w)] if has_tail else []
        for j, turn in zip(own, plan.turns[head, i].tolist(), strict=False):
            assert turn & 0xFFFF == j
            tiles.append((j, turn >> 22, turn >> 20 & 3, turn >> 16 & 0xF))
        for tile, consumers, others, stage in tiles:
            bit = others * 16 + stage
            while not full[(consumers - 1) * stages + stage].has_passed(phases >> bit & 1):
                yield
            phases ^= 1 << bit
            for _ in range(generator.choice([1, 2, 9])):
                assert ring[stage] == tile
                yield
            empty[stage].arrive()
            yield

    running = [produce(), *(consume(w, i) for w, i in enumerate(queries))]
    slow = generator.randrange(len(running))
    for _ in range(10**6):
        if loading and generator.random() < 0.3:
            stage, tile, barrier = loading.pop(generator.randrange(len(loading)))
            ring[stage] = tile
            barrier.loaded()
        chosen = generator.randrange(len(running))
        if chosen == slow and generator.random() < 0.7:
            continue
        if next(running[chosen], "done") == "done":
            running.pop(chosen)
            slow = 0
        if not running:
            return
    raise AssertionError("the ring is stuck")


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [3, 12])
@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
def test_every_consumer_meets_its_tiles(device, density, stages):
    generator = torch.Generator().manual_seed(stages)
    kept = torch.rand(2, 25, 25, generator=generator) < density
    kept[:, 1] = True
    kept[0, 3] = False
    for has_tail in (False, True):
        route = make_route(kept.to(device))
        plan = schedule(route, has_tail=has_tail, stages=stages)
        num_trios = plan.num_loads.shape[1]
        assert sorted(plan.order.tolist()) == list(range(2 * num_trios))
        for head in range(2):
            for trio in range(num_trios):
                run_trio(kept, plan, head, trio, has_tail, stages, random.Random(trio))


@pytest.mark.gpu
def test_long_trios_come_first(device):
    kept = torch.zeros(2, 70, 70, dtype=torch.bool)
    kept[:, :, 5] = True
    kept[1, 30] = True
    plan = schedule(make_route(kept.to(device)), has_tail=True, stages=12)
    assert plan.order[:2].tolist() == [24 + 10, 0]
    assert plan.num_loads[1, 10] == 70


def test_in_the_interpreter(run_in_interpreter):
    run_in_interpreter()
