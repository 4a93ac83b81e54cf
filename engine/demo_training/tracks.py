"""Where the objects of a scene are in every frame: what the renderer draws and the sound follows."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from solgen.engine.demo_training.scenes import BACKGROUNDS, COLOURS, PITCHES, SHAPES, SIZES, Scene, Shot

FPS = 24
OBJECTS = 2
"""Objects that a frame has room for."""


@dataclass(frozen=True)
class Canvas:
    """Pixels and frames of a clip."""

    height: int
    width: int
    num_frames: int

    @property
    def half_extent(self) -> tuple[float, float]:
        """Half the width and half the height, in short edges."""
        short = min(self.height, self.width)
        return self.width / short / 2, self.height / short / 2


@dataclass(frozen=True)
class Tracks:
    """Everything that is drawn and heard, for B clips of F frames; float32 except where said.

    Attributes:
        centre: [B, F, 2, 2], x to the right and y down from the centre of the canvas, in short edges.
        radius: [B, F, 2], 0 for an object that is not there.
        shape: [B, F] int64, index into `SHAPES`.
        colour: [B, F, 3] RGB in [0, 1].
        background: [B, F, 3] RGB in [0, 1].
        stripes: [B, F], offset of the background's stripes in short edges; NaN where it is plain.
        pitch: [B, F] in hertz.
        click: [B, F], 1 in a frame that begins with a click.
    """

    centre: Tensor
    radius: Tensor
    shape: Tensor
    colour: Tensor
    background: Tensor
    stripes: Tensor
    pitch: Tensor
    click: Tensor

    def take(self, clips: Tensor, frames: Tensor | None = None) -> "Tracks":
        """Some clips, [b] int64, and of each of them some frames, [b, f] int64, or all."""
        fields = {name: value[clips] for name, value in vars(self).items()}
        if frames is not None:
            rows = torch.arange(len(clips), device=clips.device)[:, None]
            fields = {name: value[rows, frames] for name, value in fields.items()}
        return Tracks(**fields)

    def zoom(self, middle: Tensor, factor: float) -> "Tracks":
        """Seen through a crop around `middle` [B, 2] whose short edge is that of the canvas divided by `factor`."""
        centre = (self.centre - middle[:, None, None]) * factor
        return replace(self, centre=centre, radius=self.radius * factor)

    def to(self, device: torch.device) -> "Tracks":
        """The same on another device."""
        return Tracks(**{name: value.to(device) for name, value in vars(self).items()})


def track_scenes(scenes: list[Scene], canvas: Canvas) -> Tracks:
    """Tracks of several scenes on the CPU; two shots share the frames of a clip evenly."""
    clips = [_track_scene(scene, canvas) for scene in scenes]
    return Tracks(**{name: torch.stack([clip[name] for clip in clips]) for name in clips[0]})


def _track_scene(scene: Scene, canvas: Canvas) -> dict[str, Tensor]:
    first = canvas.num_frames // len(scene.shots)
    lengths = [first, canvas.num_frames - first][: len(scene.shots)]
    parts = [_track_shot(shot, length, canvas) for shot, length in zip(scene.shots, lengths, strict=True)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _track_shot(shot: Shot, frames: int, canvas: Canvas) -> dict[str, Tensor]:
    progress = torch.arange(frames, dtype=torch.float32) / max(frames - 1, 1)
    radius = torch.full((frames, OBJECTS), SIZES[shot.size])
    click = torch.zeros(frames)
    centre, scale, contacts = _move(shot, progress, SIZES[shot.size], canvas)
    for moment in contacts:
        click[min(round(moment * (frames - 1)), frames - 1)] = 1.0
    radius = radius * scale[:, None]
    if shot.count == 1:
        radius[:, 1] = 0.0
    pan = shot.pan * 0.25 * progress * frames / FPS
    return {
        "centre": centre,
        "radius": radius,
        "shape": torch.full((frames,), list(SHAPES).index(shot.shape)),
        "colour": torch.tensor(COLOURS[shot.colour]).repeat(frames, 1),
        "background": torch.tensor(BACKGROUNDS[shot.background][0]).repeat(frames, 1),
        "stripes": pan if shot.pan else torch.full((frames,), math.nan),
        "pitch": torch.full((frames,), float(PITCHES[shot.colour])),
        "click": click,
    }


def _move(shot: Shot, u: Tensor, radius: float, canvas: Canvas) -> tuple[Tensor, Tensor, list[float]]:
    """Centres [F, 2, 2], scale of the radius [F] and the moments of contact, for progress u in [0, 1]."""
    half_x, half_y = canvas.half_extent
    still, one = torch.zeros_like(u), torch.ones_like(u)
    reach_x, reach_y = half_x - radius * 0.8, half_y - radius * 0.8
    across = 0.24 if shot.count == 2 else 0.0
    drift = 0.03 if shot.count == 2 else 0.16
    contacts: list[float] = []
    scale = one
    side = torch.tensor([-1.0, 1.0])
    if shot.motion in ("left", "right"):
        sign = 1.0 if shot.motion == "right" else -1.0
        x = sign * reach_x * (0.85 + 0.1 * shot.phase) * (2 * u - 1)
        centre = _spread(x, still + drift * shot.offset, still, across * side)
    elif shot.motion in ("up", "down"):
        sign = 1.0 if shot.motion == "down" else -1.0
        y = sign * reach_y * (0.85 + 0.1 * shot.phase) * (2 * u - 1)
        centre = _spread(still + drift * shot.offset, y, across * side, still)
    elif shot.motion == "bounce":
        bounces = max(2, round(0.6 * len(u) / FPS))
        floor = half_y - radius - 0.03
        height = (0.9 + 0.1 * shot.phase) * (2 * half_y - 2 * radius - 0.08)
        y = floor - height * (math.pi * bounces * u).sin().abs()
        x = 0.4 * half_x * (2 * u - 1) + 0.3 * drift * shot.offset
        centre = _spread(x, y, across * side, still)
        contacts = [k / bounces for k in range(1, bounces)]
    elif shot.motion == "orbit":
        angle = 2 * math.pi * (u + shot.phase / 2)
        turn = torch.stack([angle.cos(), angle.sin()], -1) * (min(half_x, half_y) - radius - 0.04)
        centre = torch.stack([turn, -turn], 1)
    elif shot.motion == "grow":
        scale = 0.4 + 1.1 * u
        centre = _spread(still + 0.6 * drift * shot.offset, still + 0.6 * drift * shot.phase, across * side, still)
    else:
        gap = radius + (half_x - 1.9 * radius) * (2 * u - 1).abs()
        centre = torch.stack([torch.stack([s * gap, still + 0.16 * shot.offset], -1) for s in (-1, 1)], 1)
        contacts = [0.5]
    return centre, scale, contacts


def _spread(x: Tensor, y: Tensor, apart_x: Tensor, apart_y: Tensor) -> Tensor:
    """One path [F] drawn twice, moved apart by -+ an offset; a lone object keeps the path itself."""
    apart_x, apart_y = (a if a.numel() == OBJECTS else torch.zeros(OBJECTS) for a in (apart_x, apart_y))
    return torch.stack([torch.stack([x + dx, y + dy], -1) for dx, dy in zip(apart_x, apart_y, strict=True)], 1)
