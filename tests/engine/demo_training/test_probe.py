"""The probe is right on rendered clips, whose contents are known, and says no to wrong ones."""

from functools import cache

import numpy as np
import pytest
import torch

from solgen.engine.demo_training.probe import Reading, loudest_pitch, pan_agrees, pitch_agrees, read_clip
from solgen.engine.demo_training.render import render
from solgen.engine.demo_training.scenes import COLOURS, MOTIONS, Shot, draw_scene
from solgen.engine.demo_training.sound import synthesise
from solgen.engine.demo_training.tracks import Canvas, track_scenes

CANVAS = Canvas(64, 64, 124)


@cache
def readings() -> list[tuple[Shot, Reading]]:
    scenes = [draw_scene(9, index, held_out=index % 2 == 0) for index in range(64)]
    found = []
    for scene in scenes:
        tracks = track_scenes([scene], CANVAS)
        frames = (render(tracks, CANVAS)[0].permute(1, 2, 3, 0) * 255).byte().numpy()
        found.append((scene.shots[0], read_clip(frames[::2], synthesise(tracks, CANVAS)[0].numpy())))
    return found


def test_every_rendered_clip_is_read_right() -> None:
    for shot, reading in readings():
        assert (reading.colour, reading.motion) == (shot.colour, shot.motion), shot
        assert pitch_agrees(reading, shot.colour), shot
        assert pan_agrees(reading, shot.motion), shot


def test_other_colours_and_motions_are_refused() -> None:
    assert {shot.motion for shot, _ in readings()} == set(MOTIONS)
    for shot, reading in readings():
        assert not any(pitch_agrees(reading, colour) for colour in COLOURS if colour != shot.colour)
        if shot.motion in ("left", "right"):
            other = "left" if shot.motion == "right" else "right"
            assert not pan_agrees(reading, other)
            assert not pan_agrees(reading, "up")


@pytest.mark.parametrize("kind", ["noise", "plain", "still"])
def test_a_clip_without_a_moving_object_has_no_motion(kind: str) -> None:
    random = np.random.default_rng(0)
    frames = np.full((62, 64, 64, 3), 90, np.uint8)
    if kind == "noise":
        frames = random.integers(0, 256, frames.shape, dtype=np.uint8)
    if kind == "still":
        frames[:, 20:40, 20:40] = (220, 30, 30)
    reading = read_clip(frames, np.zeros((2, 32000), np.float32))
    assert reading.motion is None
    assert reading.colour == (None if kind == "plain" else reading.colour)
    assert not any(pitch_agrees(reading, colour) for colour in COLOURS)
    assert not any(pan_agrees(reading, motion) for motion in MOTIONS)


def test_frames_in_reverse_order_reverse_the_motion() -> None:
    scene = next(s for s in (draw_scene(9, i) for i in range(99)) if s.shots[0].motion == "left")
    frames = (render(track_scenes([scene], CANVAS), CANVAS)[0].permute(1, 2, 3, 0) * 255).byte().numpy()
    assert read_clip(frames[::-2], np.zeros((2, 32000), np.float32)).motion == "right"


def test_pitch_of_a_pure_tone() -> None:
    time = torch.arange(64000) / 32000
    for pitch in (240.0, 800.0):
        tone = (0.1 * (2 * torch.pi * pitch * time).sin()).repeat(2, 1).numpy()
        assert abs(loudest_pitch(tone) - pitch) < 4
