"""solgen's transformer against stock diffusers on the same inputs."""

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel

from solgen.engine.attention import install_attention
from solgen.engine.attention_run import AttentionRun, check_attention
from solgen.engine.packing import cube_token_order
from solgen.errors import InputError
from solgen.presets.demo import demo_model_path
from solgen.presets.schema import Attention
from tests.engine.packed import raster_order

GRID = (5, 8, 8)


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(3)
    text, audio, video = torch.arange(500).split([19, 161, 320])
    return {
        "video": video,
        "audio": audio,
        "text": text,
        "positions": torch.rand(500, 3, dtype=torch.float64, generator=generator) * 32,
        "tags": torch.cat([torch.ones(19), torch.full((161,), 2), torch.zeros(320)]).long(),
        "rows": [torch.randn(1, n, c, generator=generator) for n, c in ((320, 96), (161, 32), (19, 32))],
    }


def forward(model, inputs, order):
    with torch.no_grad():
        return model(
            *inputs["rows"],
            timestep=torch.tensor([0.1, 0.4]),
            timestep_indices=(inputs["tags"] == 2).long()[order.order],
            token_tags=inputs["tags"][order.order],
            position_ids=inputs["positions"][order.order],
            video_indices=order.position[inputs["video"]],
            audio_indices=order.position[inputs["audio"]],
            text_indices=order.position[inputs["text"]],
            return_dict=False,
        )


def load() -> MiniMaxH3Transformer3DModel:
    return MiniMaxH3Transformer3DModel.from_pretrained(demo_model_path() / "transformer", dtype=torch.float32).eval()


def ours(order, **attention) -> MiniMaxH3Transformer3DModel:
    model = load()
    run = AttentionRun.start(Attention(**({"dense_blocks": "0,5"} | attention)), order.video_rows)
    run.begin_step(0)
    install_attention(model, run)
    return model


def cube(inputs):
    return cube_token_order(inputs["video"], inputs["audio"], inputs["text"], target_grid=GRID)


def test_dense_raster_is_stock_bit_for_bit(inputs) -> None:
    order = raster_order(500, inputs["video"])
    for mine, stock in zip(
        forward(ours(order, backend="dense"), inputs, order), forward(load(), inputs, order), strict=True
    ):
        assert torch.equal(mine, stock)


def test_dense_cubes_are_stock_to_rounding(inputs) -> None:
    order = cube(inputs)
    stock = forward(load(), inputs, raster_order(500, inputs["video"]))
    for mine, theirs in zip(forward(ours(order, backend="dense"), inputs, order), stock, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


def test_sol_attn2_that_keeps_all_blocks_is_stock_up_to_fp8(inputs) -> None:
    """epsilon far below every share keeps every block: what is left is quantisation."""
    order = cube(inputs)
    stock = forward(load(), inputs, raster_order(500, inputs["video"]))
    full = forward(ours(order, epsilon=-1e9, impl="reference"), inputs, order)
    none = forward(ours(order, epsilon=1e9, tail="none", impl="reference"), inputs, order)
    for mine, empty, theirs in zip(full, none, stock, strict=True):
        error = (mine - theirs).norm() / theirs.norm()
        assert 0 < error < 0.1
        assert error < (empty - theirs).norm() / theirs.norm()


def test_settings_that_cannot_be_served_are_refused() -> None:
    cpu = torch.device("cpu")
    check_attention(Attention(dense_blocks="0,5"), cpu, 6)
    check_attention(Attention(backend="dense"), cpu, 6)
    for settings, message in (
        (Attention(), "dense_blocks lists 47-49, the model has blocks 0-5"),
        (Attention(dense_blocks="", impl="triton"), "attention.impl triton runs on a CUDA GPU"),
        (Attention(dense_blocks="", backend="sol-attn1", density=0.1), "attention.tau"),
    ):
        with pytest.raises(InputError, match=message):
            check_attention(settings, cpu, 6)
    with pytest.raises(InputError, match="gluon does not offer block-sparse"):
        check_attention(Attention(dense_blocks="", backend="block-sparse", impl="gluon"), torch.device("cuda"), 6)


@pytest.mark.parametrize(
    ("backend", "settings", "bound"),
    [
        # Every block exact: what is left is the rounding of FP8, or of float32 sums.
        ("fp8", {}, 0.1),
        ("block-sparse", {"epsilon": -1e9}, 1e-5),
        ("sol-attn1", {"tau": -1e9}, 1e-5),
    ],
)
def test_the_operators_for_comparison_become_dense(inputs, backend: str, settings: dict, bound: float) -> None:
    order = cube(inputs)
    stock = forward(load(), inputs, raster_order(500, inputs["video"]))
    mine = forward(ours(order, backend=backend, **settings), inputs, order)
    for output, theirs in zip(mine, stock, strict=True):
        assert (output - theirs).norm() <= bound * theirs.norm()
    if backend != "fp8":
        sparse = forward(ours(order, backend=backend, epsilon=1e9, tau=1e9), inputs, order)
        assert (sparse[0] - stock[0]).norm() > 10 * bound * stock[0].norm()
