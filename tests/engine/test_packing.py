"""Cube order: a permutation, compact, and invisible to dense attention."""

import numpy as np
import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel

from solgen.engine.packing import cube_order, cube_token_order
from tests.engine.packed import raster_order

GRIDS = [(37, 23, 41), (37, 8, 8), (5, 7, 3), (1, 8, 8), (1, 1, 1), (4, 4, 4), (87, 23, 41)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_it_is_a_permutation(grid: tuple[int, int, int]) -> None:
    assert np.array_equal(np.sort(cube_order(*grid)), np.arange(np.prod(grid)))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_full_cubes_come_first_and_fill_blocks_exactly(grid: tuple[int, int, int]) -> None:
    count = int(np.prod([size // 4 for size in grid]))
    blocks = cube_order(*grid)[: 64 * count].reshape(count, 64)
    for corner_to_corner in np.stack(np.unravel_index(blocks, grid), axis=-1):
        low, high = corner_to_corner.min(0), corner_to_corner.max(0)
        assert np.array_equal(high - low, [3, 3, 3])
        assert not (low % 4).any()


@pytest.mark.parametrize("grid", [(37, 23, 41), (107, 34, 60), (1, 23, 41)], ids=str)
def test_leftover_blocks_are_compact(grid: tuple[int, int, int]) -> None:
    """All but the few blocks that join two slabs lie in a box of at most 2.5 times their rows."""
    order = cube_order(*grid)
    corners = np.stack(np.unravel_index(order, grid), axis=-1)
    boxes = [np.prod(np.ptp(corners[i : i + 64], axis=0) + 1) for i in range(0, len(order), 64)]
    assert sum(volume > 160 for volume in boxes) <= 2


def layout(grid: tuple[int, int, int], condition: tuple[int, int, int], text: int, audio: int):
    """A packed sequence [text | conditioning video | audio | target video] as diffusers lays it out."""
    conditions, targets = int(np.prod(condition)), int(np.prod(grid))
    rows = text + conditions + audio + targets
    index = torch.arange(rows)
    text_rows, condition_rows, audio_rows, target_rows = index.split([text, conditions, audio, targets])
    positions = torch.rand(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 40
    return torch.cat([condition_rows, target_rows]), audio_rows, text_rows, positions


@pytest.mark.parametrize("grid", [(37, 23, 41), (37, 8, 8), (5, 7, 3)], ids=str)
def test_dense_output_equals_raster_order(grid: tuple[int, int, int]) -> None:
    """The permuted transformer returns the same rows; only the order of float32 sums differs."""
    torch.manual_seed(0)
    model = MiniMaxH3Transformer3DModel(
        num_attention_heads=1, attention_head_dim=32, hidden_size=32, num_layers=1, num_refiner_layers=1,
        ffn_dim=32, text_dim=16, freq_dim=16, time_embed_hidden_dim=32, time_embed_dim=32, rope_freq_dim=4,
    ).eval()  # fmt: skip
    condition = (1, *grid[1:])
    video, audio, text, positions = layout(grid, condition, text=7, audio=10)
    tags = torch.zeros(len(positions), dtype=torch.long)
    tags[text], tags[audio] = 1, 2
    steps = torch.zeros_like(tags)
    steps[audio] = 1
    rows = (torch.randn(1, len(video), 96), torch.randn(1, 10, 32), torch.randn(1, 7, 16))

    def forward(order):
        return model(
            *rows,
            timestep=torch.tensor([0.2, 0.6]),
            timestep_indices=steps[order.order],
            token_tags=tags[order.order],
            position_ids=positions[order.order],
            video_indices=order.position[video],
            audio_indices=order.position[audio],
            text_indices=order.position[text],
            return_dict=False,
        )

    with torch.no_grad():
        raster = forward(raster_order(len(positions), video))
        cubes = forward(cube_token_order(video, audio, text, target_grid=grid, condition_grids=[condition]))
    for ours, theirs in zip(cubes, raster, strict=True):
        # Rounding of a float32 sum over N rows: N eps would be the worst case, sqrt(N) eps the typical one.
        bound = 4 * len(positions) ** 0.5 * torch.finfo(torch.float32).eps * theirs.abs().max()
        assert (ours - theirs).abs().max() <= bound


def test_sections_stand_in_order() -> None:
    video, audio, text, positions = layout((5, 4, 4), (1, 4, 4), text=3, audio=6)
    order = cube_token_order(video, audio, text, target_grid=(5, 4, 4), condition_grids=[(1, 4, 4)])
    target, condition = video[16:], video[:16]
    assert set(order.order[:80].tolist()) == set(target.tolist())
    assert set(order.order[80:96].tolist()) == set(condition.tolist())
    assert order.order[96:].tolist() == [*audio.tolist(), *text.tolist()]
    assert torch.equal(order.video_rows, torch.arange(len(positions)) < 96)
    assert torch.equal(order.order[order.position], torch.arange(len(positions)))


def test_grids_must_add_up() -> None:
    video, audio, text, _ = layout((5, 4, 4), (1, 4, 4), text=3, audio=6)
    with pytest.raises(ValueError, match="grids hold 80 rows, the sequence has 96"):
        cube_token_order(video, audio, text, target_grid=(5, 4, 4))
