"""Frames from tracks: signed distances turned into soft-edged shapes, batched on any device."""

import math

import torch
from torch import Tensor

from solgen.engine.demo_training.scenes import SHAPES
from solgen.engine.demo_training.tracks import Canvas, Tracks

EDGE = 1.5
"""Width of a shape's soft edge in pixels."""

STRIPE = 0.25
"""Period of the stripes of a panned background, in short edges."""


def render(tracks: Tracks, canvas: Canvas) -> Tensor:
    """Draw clips.

    Args:
        tracks: Of B clips with F frames (the canvas's own number of frames is not used).
        canvas: Height and width.

    Returns:
        RGB in [0, 1], [B, 3, F, height, width] float32 on the device of the tracks.
    """
    device = tracks.centre.device
    short = min(canvas.height, canvas.width)
    half_x, half_y = canvas.half_extent
    x = (torch.arange(canvas.width, device=device) + 0.5) / short - half_x
    y = (torch.arange(canvas.height, device=device) + 0.5) / short - half_y

    picture = _background(tracks, x)
    for number in range(tracks.radius.shape[-1]):
        centre, radius = tracks.centre[:, :, number], tracks.radius[:, :, number, None, None]
        size = radius.clamp_min(1e-3)
        px = (x[None, None, None, :] - centre[:, :, 0, None, None]) / size
        py = (y[None, None, :, None] - centre[:, :, 1, None, None]) / size
        distance = _distance(px, py, tracks.shape[:, :, None, None]) * size * short
        cover = (0.5 - distance / EDGE).clamp(0, 1) * (radius > 0)
        picture = torch.lerp(picture, tracks.colour[..., None, None], cover[:, :, None])
    return picture.transpose(1, 2)


def _background(tracks: Tracks, x: Tensor) -> Tensor:
    """[B, F, 3, 1, width], plain or with lighter stripes."""
    wave = (2 * math.pi * (x - tracks.stripes[..., None]) / STRIPE).sin()
    light = torch.nan_to_num(0.10 * (0.5 + 2 * wave).clamp(0, 1), nan=0.0)
    return (tracks.background[..., None] + light[:, :, None]).unsqueeze(-2)


def _distance(x: Tensor, y: Tensor, shape: Tensor) -> Tensor:
    """Signed distance to the outline of a shape of radius 1, negative inside; [..., height, width]."""
    length = (x * x + y * y).sqrt()
    distances = {
        "circle": length - 0.95,
        "square": torch.maximum(x.abs(), y.abs()) - 0.82,
        "triangle": torch.maximum(0.866 * x.abs() - 0.5 * y, y) - 0.52,
        "diamond": 0.768 * x.abs() + 0.64 * y.abs() - 0.64,
        "star": _star(x, y, length),
        "ring": (length - 0.74).abs() - 0.24,
    }
    found = distances["circle"].expand(torch.broadcast_shapes(length.shape, shape.shape))
    for index, name in enumerate(SHAPES):
        found = torch.where(shape == index, distances[name], found)
    return found


def _star(x: Tensor, y: Tensor, length: Tensor) -> Tensor:
    """Five points: the angle is folded into half a point, whose edge is one straight line."""
    sector = math.pi / 5
    folded = ((torch.atan2(x, -y) + sector) % (2 * sector) - sector).abs()
    # From the tip (1.05, 0) to the notch at radius 0.45, angle pi / 5.
    tip, notch = (1.05, 0.0), (0.45 * math.cos(sector), 0.45 * math.sin(sector))
    normal = (notch[1] - tip[1], tip[0] - notch[0])
    norm = math.hypot(*normal)
    along, aside = length * folded.cos(), length * folded.sin()
    return ((along - tip[0]) * normal[0] + (aside - tip[1]) * normal[1]) / norm
