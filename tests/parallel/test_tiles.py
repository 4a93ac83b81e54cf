"""Ranks decode stretches of a clip at a time; its frames keep every bit."""

import numpy as np
import pytest

from solgen.parallel.launch import launch
from tests.parallel import on_ranks

SHAPE = (17, 20, 32)
"""Latents of three stretches of 512x320 pixels, six tiles each: with two ranks one is idle at the end."""


@pytest.fixture(scope="module")
def alone() -> list[np.ndarray]:
    return on_ranks.decode(SHAPE)[0]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_frames_are_those_of_one_rank_bit_for_bit(num_ranks: int, alone: list[np.ndarray]) -> None:
    frames, *others = launch(on_ranks.decode, SHAPE, num_ranks=num_ranks)
    assert others == [[]] * (num_ranks - 1)
    assert [len(piece) for piece in frames] == [17, 17, 17, 5]
    assert all(np.array_equal(piece, expected) for piece, expected in zip(frames, alone, strict=True))
