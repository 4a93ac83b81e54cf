"""References go through diffusers' own preparation untouched, without PyAV, torchvision or torchaudio."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3Ref2VASetupStep
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import resolve_canvas_size
from PIL import Image

from solgen.engine.media.references import build_reference
from solgen.errors import InputError

Make = Callable[..., Path]
NUM_FRAMES = 124


def picture(size: str, seconds: float, rate: int = 30) -> tuple[str, ...]:
    return ("-f", "lavfi", "-i", f"testsrc2=size={size}:rate={rate}:duration={seconds}")


TONE = ("-f", "lavfi", "-i", "sine=frequency=440:sample_rate=44100:duration=6")


def canvas(width: int, height: int) -> tuple[int, int]:
    """The released rule on a smaller scale, (height, width)."""
    return resolve_canvas_size(width, height, 32, short_edge=64, max_pixels=64 * 128)


def test_diffusers_prepares_every_kind_without_touching_its_samples(make_media: Make, tmp_path: Path) -> None:
    Image.new("RGB", (64, 96), "red").save(tmp_path / "x.png")
    clip = make_media("x.mp4", *picture("160x90", 6), *TONE, "-shortest")
    silent = make_media("silent.mp4", *picture("100x100", 2, rate=24))
    sound = make_media("x.wav", *TONE)
    references = [
        build_reference(kind, path, max_frames=NUM_FRAMES, canvas=canvas)
        for kind, path in (
            ("image", tmp_path / "x.png"),
            ("video", clip),
            ("audio", sound),
            ("video", silent),
        )
    ]
    pipeline = MiniMaxH3Ref2VASetupStep().init_pipeline()
    pipeline.load_components()
    pipeline.update_components(canvas_short_edge=64, canvas_max_pixels=64 * 128, reference_image_short_edge=64)
    ready = pipeline(references=references, num_frames=NUM_FRAMES, output="normalized_references")

    assert ready[0].image.size == (64, 96)
    assert ready[1].frames.shape == (NUM_FRAMES, *canvas(160, 90), 3)
    assert np.shares_memory(ready[1].frames, references[1].frames)
    assert torch.equal(ready[1].audio, references[1].audio[:, : NUM_FRAMES * 32_000 // 24])
    assert ready[2].audio.shape == (2, NUM_FRAMES * 32_000 // 24)
    assert ready[2].sample_rate == 32_000
    assert torch.equal(ready[2].audio, references[2].audio[:, : NUM_FRAMES * 32_000 // 24])
    assert ready[3].frames.shape == (48, 64, 64, 3)
    assert not ready[3].has_audio


def test_a_clip_keeps_its_size_without_a_canvas(make_media: Make) -> None:
    reference = build_reference("video", make_media("x.mp4", *picture("64x48", 1)), max_frames=NUM_FRAMES)
    assert reference.frames.shape == (24, 48, 64, 3)
    assert reference.fps == 24.0


def test_the_sound_of_a_clip_can_be_a_reference(make_media: Make) -> None:
    clip = make_media("x.mp4", *picture("64x48", 6), *TONE)
    assert build_reference("audio", clip, max_frames=NUM_FRAMES).audio.shape[0] == 2


def test_a_clip_too_short_for_the_conditioner_is_refused(make_media: Make) -> None:
    long_enough = make_media("a.mp4", *picture("64x48", 13 / 24, rate=24))
    assert len(build_reference("video", long_enough, max_frames=NUM_FRAMES).frames) == 13
    too_short = make_media("b.mp4", *picture("64x48", 12 / 24, rate=24))
    with pytest.raises(InputError, match=r"b\.mp4' has 12 frames at 24 fps, expected 13 or more"):
        build_reference("video", too_short, max_frames=NUM_FRAMES)


def test_shapes_beyond_four_to_one_are_refused(make_media: Make, tmp_path: Path) -> None:
    Image.new("RGB", (20, 81)).save(tmp_path / "x.png")
    with pytest.raises(InputError, match=r"x\.png' is 20x81, expected 1:4 to 4:1; crop it"):
        build_reference("image", tmp_path / "x.png", max_frames=NUM_FRAMES)
    with pytest.raises(InputError, match="is 260x64, expected 1:4 to 4:1"):
        build_reference("video", make_media("x.mp4", *picture("260x64", 1)), max_frames=NUM_FRAMES)
