"""The batched, piecewise decoder against diffusers' own: the same tiles, seams and frames."""

import copy

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3

from solgen.engine.decode import decode_video
from solgen.engine.loader import load_decoders
from solgen.engine.repository import open_repository
from solgen.engine.tiles import decoded_stretches
from solgen.presets.demo import demo_model_path
from solgen.presets.schema import Model


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLMiniMaxH3:
    return AutoencoderKLMiniMaxH3.from_pretrained(demo_model_path() / "vae").eval()


def latents(frames: int, height: int, width: int) -> torch.Tensor:
    return torch.randn(1, 24, frames, height // 16, width // 16, generator=torch.Generator().manual_seed(frames))


@torch.no_grad()
def whole(vae: AutoencoderKLMiniMaxH3, given: torch.Tensor, at_once: int) -> torch.Tensor:
    return torch.cat(list(decoded_stretches(vae, given, at_once=at_once)), dim=2)


@torch.no_grad()
@pytest.mark.parametrize(
    ("frames", "height", "width"),
    [(7, 320, 512), (17, 64, 64), (12, 288, 96)],
    ids=["six tiles", "one tile smaller than 256, three stretches", "two tiles above one another, two stretches"],
)
def test_tile_by_tile_the_bits_are_diffusers(vae, frames: int, height: int, width: int) -> None:
    given = latents(frames, height, width)
    stock = vae.decode(given, return_dict=False)[0]
    assert stock.shape == (1, 3, (frames - 2) // 5 * 17 + 5, height, width)
    assert torch.equal(whole(vae, given, at_once=1), stock)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # those norms have float64 gains
def test_in_batches_the_error_stays_that_of_diffusers(vae) -> None:
    """Twelve small tiles in batches of five: products of other shapes may round otherwise, no more than before.

    The yardstick has its matrix products and sums in float64; norms take float32 whatever the model's type.
    """
    given = latents(7, 160, 208)
    vae = copy.deepcopy(vae)
    vae.enable_tiling(64, 64, 16, 16)
    stock = vae.decode(given, return_dict=False)[0]
    exact = copy.deepcopy(vae).double()
    exact.decoder.rope.inv_freq = vae.decoder.rope.inv_freq
    truth = whole(exact, given.double(), at_once=1)
    ours = whole(vae, given, at_once=5)
    assert (ours - truth).norm() <= 2 * (stock - truth).norm()
    assert (stock - truth).norm() < 1e-4 * truth.norm()


def test_frames_are_diffusers_pixels_as_bytes() -> None:
    repository = open_repository(Model(source="demo"), "t2va")
    pipeline = load_decoders(repository, device=torch.device("cpu"), dtype=torch.float32)
    given = latents(12, 64, 288)
    frames = decode_video(pipeline, given)
    assert [piece.shape for piece in frames] == [(17, 64, 288, 3), (17, 64, 288, 3), (5, 64, 288, 3)]
    assert {piece.dtype for piece in frames} == {np.dtype(np.uint8)}
    config = pipeline.vae.config
    shape = (1, 24, 1, 1, 1)
    scaled = given * torch.tensor(config.latents_std).view(shape) + torch.tensor(config.latents_mean).view(shape)
    with torch.no_grad():
        stock = pipeline.vae.decode(scaled, return_dict=False)[0][0].permute(1, 2, 3, 0)
    levels = 255 * (stock * torch.tensor(pipeline.pixel_std) + torch.tensor(pipeline.pixel_mean)).clamp(0, 1)
    # A byte may fall on either side where a level lies half way.
    assert (torch.from_numpy(np.concatenate(frames)).float() - levels).abs().max() <= 0.5 + 1e-3
    assert np.concatenate(frames).std() > 1


@pytest.mark.gpu
@torch.no_grad()
def test_a_1080p_clip_has_no_full_size_float_copy_on_a_gpu() -> None:
    """362 frames of 1920x1088 take 9 GB in float32; the peak stays below half of that, a copy in bf16."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    repository = open_repository(Model(source="demo"), "t2va")
    device = torch.device("cuda")
    pipeline = load_decoders(repository, device=device, dtype=torch.bfloat16)
    given = latents(107, 1088, 1920)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    frames = decode_video(pipeline, given)
    assert sum(map(len, frames)) == 362
    assert torch.cuda.max_memory_allocated() - before < 2 * 3 * 362 * 1088 * 1920
