"""What can happen in a training clip, drawn from a seed, and the captions that say it."""

import random
import zlib
from dataclasses import dataclass

COLOURS = {
    "red": (0.88, 0.12, 0.12),
    "orange": (0.96, 0.52, 0.08),
    "yellow": (0.95, 0.88, 0.12),
    "green": (0.14, 0.68, 0.20),
    "cyan": (0.15, 0.80, 0.86),
    "blue": (0.16, 0.30, 0.92),
    "pink": (0.95, 0.42, 0.74),
    "white": (0.95, 0.95, 0.95),
}
"""RGB in [0, 1] by name."""

PITCHES = dict(zip(COLOURS, (240, 280, 320, 400, 480, 560, 680, 800), strict=True))
"""Hertz by colour: multiples of the audio latent rate, so that a steady tone has the same latent at every step."""

SHAPES = {
    "circle": ("circle", "ball", "disc"),
    "square": ("square", "box"),
    "triangle": ("triangle",),
    "diamond": ("diamond",),
    "star": ("star",),
    "ring": ("ring",),
}
"""Words for every shape; the first is its name."""

SIZES = {"small": 0.12, "medium": 0.16, "large": 0.21}
"""Radius in short edges of the canvas."""

MOTIONS = {
    "left": ("moves left", "slides to the left", "moves from right to left"),
    "right": ("moves right", "slides to the right", "moves from left to right"),
    "up": ("moves up", "rises"),
    "down": ("moves down", "falls"),
    "bounce": ("bounces", "bounces up and down"),
    "orbit": ("orbits the centre", "moves in a circle"),
    "grow": ("grows", "gets bigger"),
    "collide": ("collide", "meet and part"),
}
"""Verb phrases for every motion, in the singular except for `collide`, which takes two."""

BACKGROUNDS = {
    "black": ((0.04, 0.04, 0.05), ("on a black background", "over black")),
    "grey": ((0.42, 0.42, 0.44), ("on a grey background", "in front of a grey wall")),
    "navy": ((0.06, 0.09, 0.30), ("on a navy background", "in front of a navy wall")),
    "wood": ((0.36, 0.22, 0.11), ("on a wooden floor", "across a wooden floor")),
    "teal": ((0.04, 0.30, 0.31), ("on a teal background", "over teal")),
}
"""RGB and wordings of every background."""

HELD_OUT_SHARE = 8
"""One (shape, colour, motion) in this many never appears in training."""


@dataclass(frozen=True)
class Shot:
    """One uncut stretch of a clip.

    Attributes:
        shape: Key of `SHAPES`.
        colour: Key of `COLOURS`.
        size: Key of `SIZES`.
        count: 1 or 2 objects.
        motion: Key of `MOTIONS`.
        background: Key of `BACKGROUNDS`.
        pan: Direction of the camera: -1 left, 1 right, 0 still.
        offset: Where the motion lies across its direction, in [-1, 1].
        phase: Where it starts, in [-1, 1].
    """

    shape: str
    colour: str
    size: str
    count: int
    motion: str
    background: str
    pan: int
    offset: float
    phase: float


@dataclass(frozen=True)
class Scene:
    """A clip: one shot or two, and its caption."""

    shots: tuple[Shot, ...]
    caption: str


def is_held_out(shape: str, colour: str, motion: str) -> bool:
    """Whether a combination belongs to the held-out prompts; a fixed function of the three names."""
    return zlib.crc32(f"{shape}/{colour}/{motion}".encode()) % HELD_OUT_SHARE == 0


def draw_scene(
    seed: int, index: int, *, held_out: bool = False, cuts: float = 0.0, pans: float = 0.0, spread: float = 1.0
) -> Scene:
    """Draw one scene; the same arguments give the same scene on every machine.

    Args:
        seed: Of the data set.
        index: Of the clip.
        held_out: Draw only held-out combinations, else only training ones.
        cuts: Share of scenes of two shots.
        pans: Share of shots in which the camera pans over stripes.
        spread: How far, in [0, 1], places and starts that no caption tells may differ from clip to clip.
    """
    source = random.Random(f"{seed}/{index}/{held_out}")
    shots = tuple(_draw_shot(source, held_out, pans, spread) for _ in range(2 if source.random() < cuts else 1))
    sentences = [_sentence(shot, source) for shot in shots]
    return Scene(shots, " Then ".join(sentences))


def _draw_shot(source: random.Random, held_out: bool, pans: float, spread: float) -> Shot:
    while True:
        shape, colour = source.choice(list(SHAPES)), source.choice(list(COLOURS))
        motion = source.choice(list(MOTIONS))
        if is_held_out(shape, colour, motion) == held_out:
            break
    return Shot(
        shape=shape,
        colour=colour,
        size=source.choice(list(SIZES)),
        count=2 if motion == "collide" or source.random() < 0.15 else 1,
        motion=motion,
        background=source.choice(list(BACKGROUNDS)),
        pan=source.choice((-1, 1)) if source.random() < pans else 0,
        offset=spread * source.uniform(-1, 1),
        phase=spread * source.uniform(-1, 1),
    )


def _sentence(shot: Shot, source: random.Random) -> str:
    """One sentence that names everything of a shot but where exactly it happens."""
    noun, verb = source.choice(SHAPES[shot.shape]), source.choice(MOTIONS[shot.motion])
    size = "" if shot.size == "medium" else f"{shot.size} "
    if shot.count == 2:
        subject = f"Two {size}{shot.colour} {noun}{'es' if noun == 'box' else 's'}"
        verb = verb if shot.motion == "collide" else _plural(verb)
    else:
        subject = f"{source.choice(('A', 'One'))} {size}{shot.colour} {noun}"
    place = source.choice(BACKGROUNDS[shot.background][1])
    camera = {-1: " while the camera pans left", 0: "", 1: " while the camera pans right"}[shot.pan]
    return f"{subject} {verb} {place}{camera}."


def _plural(verb: str) -> str:
    head, _, rest = verb.partition(" ")
    head = head.removesuffix("s")
    return f"{head} {rest}".strip()
