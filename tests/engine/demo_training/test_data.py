"""Scenes, renderer and sound: the same bytes from the same seed, and a split without overlap."""

import itertools

import pytest
import torch

from solgen.engine.demo_training.render import render
from solgen.engine.demo_training.scenes import COLOURS, MOTIONS, PITCHES, SHAPES, draw_scene, is_held_out
from solgen.engine.demo_training.sound import HOP, SAMPLE_RATE, num_latents, synthesise
from solgen.engine.demo_training.tracks import Canvas, track_scenes

SMALL = Canvas(48, 64, 22)


def test_a_seed_gives_the_same_clip_alone_and_in_a_batch() -> None:
    scenes = [draw_scene(5, index, cuts=0.3, pans=0.3) for index in range(12)]
    assert scenes == [draw_scene(5, index, cuts=0.3, pans=0.3) for index in range(12)]
    assert scenes != [draw_scene(6, index, cuts=0.3, pans=0.3) for index in range(12)]
    tracks = track_scenes(scenes, SMALL)
    pixels, sound = render(tracks, SMALL), synthesise(tracks, SMALL)
    for number in range(len(scenes)):
        alone = track_scenes([scenes[number]], SMALL)
        assert torch.equal(render(alone, SMALL)[0], pixels[number])
        torch.testing.assert_close(synthesise(alone, SMALL)[0], sound[number], rtol=0, atol=1e-5)


def test_pixels_and_samples_are_in_range_and_alive() -> None:
    tracks = track_scenes([draw_scene(1, index, cuts=0.5, pans=0.5) for index in range(16)], SMALL)
    pixels, sound = render(tracks, SMALL), synthesise(tracks, SMALL)
    assert pixels.shape == (16, 3, 22, 48, 64)
    assert sound.shape == (16, 2, num_latents(22) * HOP)
    assert pixels.min() >= 0
    assert pixels.max() <= 1
    assert sound.abs().max() <= 1
    assert (pixels.diff(dim=2).abs().amax((1, 2, 3, 4)) > 0.2).all(), "a clip stands still"
    assert (sound.square().mean((1, 2)).sqrt() > 0.01).all(), "a silent clip"


def test_training_and_held_out_combinations_are_disjoint() -> None:
    combinations = list(itertools.product(SHAPES, COLOURS, MOTIONS))
    held_out = {c for c in combinations if is_held_out(*c)}
    assert 0.05 < len(held_out) / len(combinations) < 0.25
    for flag in (False, True):
        shots = [s for i in range(600) for s in draw_scene(2, i, held_out=flag, cuts=0.2).shots]
        assert {is_held_out(s.shape, s.colour, s.motion) for s in shots} == {flag}
    for column, names in ((0, SHAPES), (1, COLOURS), (2, MOTIONS)):
        assert {c[column] for c in held_out} == set(names), "every word must be seen in training and be tested"
        assert {c[column] for c in combinations if c not in held_out} == set(names)


def test_captions_name_what_happens_in_more_than_one_wording() -> None:
    scenes = [draw_scene(3, index) for index in range(400)]
    for scene in scenes:
        shot = scene.shots[0]
        assert shot.colour in scene.caption
        assert any(noun in scene.caption for noun in SHAPES[shot.shape])
        assert ("Two" in scene.caption) == (shot.count == 2)
    assert len({scene.caption for scene in scenes}) > 300


def test_steady_tones_repeat_with_every_latent() -> None:
    assert all(pitch * HOP % SAMPLE_RATE == 0 for pitch in PITCHES.values())


@pytest.mark.parametrize("motion", MOTIONS)
def test_objects_stay_mostly_on_the_canvas(motion: str) -> None:
    canvas = Canvas(64, 64, 124)
    scenes = [s for s in (draw_scene(4, i) for i in range(400)) if s.shots[0].motion == motion]
    centre = track_scenes(scenes, canvas).centre
    present = track_scenes(scenes, canvas).radius > 0
    assert centre.abs().amax(-1)[present].max() < 0.5
