"""Reads back from pixels and samples what a prompt asks for: colour, motion, pitch and pan.

Objects are the pixels that differ from the border; their colour is a weighted mean, their path the centroid of every
frame.
"""

import math
from dataclasses import dataclass

import numpy as np

from solgen.engine.demo_training.scenes import COLOURS, MOTIONS, PITCHES
from solgen.engine.demo_training.sound import SAMPLE_RATE

CONTRAST = 0.22
"""Distance in RGB from the background at which a pixel belongs to an object."""

PITCH_TOLERANCE = 0.06
"""Share by which a pitch may miss; neighbouring colours are at least 0.14 apart."""


@dataclass(frozen=True)
class Reading:
    """What was seen and heard.

    Attributes:
        colour: Nearest name, None if there is no object.
        motion: Name, None if the path is like no motion.
        pitch: Loudest frequency between 150 and 1200 Hz, 0 in silence.
        pan: Balance in the first and the last third, -1 left to 1 right.
        path: Centroid of every frame in short edges from the centre, [F, 2]; NaN without an object.
    """

    colour: str | None
    motion: str | None
    pitch: float
    pan: tuple[float, float]
    path: np.ndarray


def read_clip(frames: np.ndarray, sound: np.ndarray) -> Reading:
    """Probe a clip of one shot.

    Args:
        frames: [F, H, W, 3] uint8.
        sound: [2, S] float32 at 32 kHz.
    """
    shapes = np.stack([_moments(frame) for frame in frames])
    colour = _nearest(COLOURS, _mean_colour(shapes)) if np.isfinite(shapes[:, 0]).mean() > 0.5 else None
    return Reading(colour, _motion(shapes), loudest_pitch(sound), _balance(sound), shapes[:, 1:3])


def pitch_agrees(reading: Reading, colour: str) -> bool:
    """Whether the loudest tone is the colour's."""
    return abs(reading.pitch / PITCHES[colour] - 1) < PITCH_TOLERANCE


def pan_agrees(reading: Reading, motion: str) -> bool:
    """Whether there is a tone whose balance travels with a sideways motion and stays near the middle otherwise."""
    if reading.pitch == 0:
        return False
    change = reading.pan[1] - reading.pan[0]
    if motion in ("left", "right"):
        return change * (1 if motion == "right" else -1) > 0.4
    if motion == "bounce":
        return change > 0.15
    if motion == "orbit":
        return max(map(abs, reading.pan)) < 0.6
    return abs(change) < 0.25 and max(map(abs, reading.pan)) < 0.35


def _moments(frame: np.ndarray) -> np.ndarray:
    """Area in squared short edges, centroid x, y, spreads xx, yy, xy, mean RGB of a frame's objects: [9] float64."""
    pixels = frame.astype(np.float64) / 255
    height, width, _ = pixels.shape
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    distance = np.linalg.norm(pixels - np.median(border, 0), axis=-1)
    weight = np.where(distance > CONTRAST, 1.0, 0.0)
    total = weight.sum()
    if total < 1e-3 * height * width:
        return np.full(9, np.nan)
    short = min(height, width)
    y, x = np.mgrid[:height, :width]
    x, y = (x + 0.5 - width / 2) / short, (y + 0.5 - height / 2) / short
    mean_x, mean_y = (weight * x).sum() / total, (weight * y).sum() / total
    dx, dy = x - mean_x, y - mean_y
    spreads = [(weight * product).sum() / total for product in (dx * dx, dy * dy, dx * dy)]
    sure = weight * distance**2  # the soft edge is part background
    colour = (sure[..., None] * pixels).sum((0, 1)) / sure.sum()
    return np.array([total / short**2, mean_x, mean_y, *spreads, *colour])


def _mean_colour(shapes: np.ndarray) -> np.ndarray:
    return np.nanmean(shapes[:, 6:9], 0)


def _nearest(names: dict[str, tuple[float, float, float]], colour: np.ndarray) -> str:
    return min(names, key=lambda name: float(np.linalg.norm(np.subtract(names[name], colour))))


def _motion(shapes: np.ndarray) -> str | None:
    """Name the motion by the strongest change, each measured in units at which it is plain to see."""
    seen = shapes[np.isfinite(shapes[:, 0])]
    if len(seen) < 0.7 * len(shapes):
        return None
    area, x, y, xx, yy, xy = seen.T[:6]
    edge = max(2, len(seen) // 12)
    first, last = slice(0, edge), slice(-edge, None)
    travel_x, travel_y = (float(np.median(v[last]) - np.median(v[first])) for v in (x, y))
    middle = slice(len(seen) // 2 - edge // 2, len(seen) // 2 + edge // 2 + 1)
    apart = float(np.sqrt(min(np.median(xx[first]), np.median(xx[last]))) - np.sqrt(np.median(xx[middle])))
    scores = {
        "left": -travel_x / 0.25,
        "right": travel_x / 0.25,
        "up": -travel_y / 0.25,
        "down": travel_y / 0.25,
        "grow": math.log(max(np.median(area[last]) / np.median(area[first]), 1e-6)) / math.log(2.5),
        "collide": apart / 0.08 if abs(travel_x) < 0.12 and abs(travel_y) < 0.12 else 0.0,
        "orbit": 1.5 * _turns(x, y, xx, yy, xy) / 0.75,
        "bounce": 1.5 * _drops(y) / 2,
    }
    assert scores.keys() == MOTIONS.keys()
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] > 0.75 else None


def _turns(x: np.ndarray, y: np.ndarray, xx: np.ndarray, yy: np.ndarray, xy: np.ndarray) -> float:
    """Turns about the middle, of the centroid or, for two objects, of the line through both."""
    radius = np.hypot(x - x.mean(), y - y.mean())
    if radius.min() > 0.08:
        angle = np.unwrap(np.arctan2(y - y.mean(), x - x.mean()))
    elif np.sqrt((xx - yy) ** 2 + 4 * xy**2).min() > 0.02:
        angle = np.unwrap(np.arctan2(2 * xy, xx - yy)) / 2
    else:
        return 0.0
    return float(abs(angle[-1] - angle[0]) / (2 * np.pi))


def _drops(y: np.ndarray) -> int:
    """Falls of at least a tenth of the short edge that follow a rise as high."""
    count, low, high, rising = 0, y[0], y[0], True
    for value in y:
        if rising:
            high = min(high, value)  # y points down
            if value - high > 0.1:
                rising = False
                count += int(low - high > 0.1)
                low = value
        else:
            low = max(low, value)
            if low - value > 0.1:
                rising, high = True, value
    return count


def loudest_pitch(sound: np.ndarray) -> float:
    """Loudest frequency of both channels together between 150 and 1200 Hz; 0 below -50 dBFS."""
    mono = sound.astype(np.float64)
    if np.sqrt((mono**2).mean()) < 10 ** (-50 / 20):
        return 0.0
    size = 8192
    power = np.zeros(size // 2 + 1)
    for start in range(0, mono.shape[1] - size + 1, size // 2):
        piece = mono[:, start : start + size] * np.hanning(size)
        power += (np.abs(np.fft.rfft(piece)) ** 2).sum(0)
    frequency = np.fft.rfftfreq(size, 1 / SAMPLE_RATE)
    band = (frequency > 150) & (frequency < 1200)
    return float(frequency[band][power[band].argmax()])


def _balance(sound: np.ndarray) -> tuple[float, float]:
    """(right - left) / (right + left) of the root mean squares in the first and the last third."""
    third = sound.shape[1] // 3
    found = []
    for part in (sound[:, :third], sound[:, -third:]):
        left, right = np.sqrt((part.astype(np.float64) ** 2).mean(1))
        found.append(float((right - left) / max(right + left, 1e-9)))
    return found[0], found[1]
