"""What MiniMax-H3 can make, checked on settled values."""

from collections.abc import Sequence

from solgen.engine.paths import check_unicode
from solgen.errors import InputError
from solgen.presets.schema import FPS, Preset, legal_frames

MAX_PROMPT_CHARACTERS = 7000
"""Longest prompt MiniMax-H3 documents."""

REFERENCE_LIMITS = {"image": 9, "video": 3, "audio": 3}
"""References of a kind that a ref2va request may carry (model card)."""

MAX_REFERENCES = 12
"""References of all kinds together."""

CANVAS_MULTIPLE = 32
"""Pixels: VAE compression 16 times the transformer's patch of 2."""

MAX_SEED = 2**63 - 1
"""Largest seed that every reader of a record can hold."""


def check_prompt(prompt: str | None) -> str:
    """The prompt, if there is one that can be used as it is.

    Raises:
        InputError: if it is missing, empty, too long or not Unicode.
    """
    if prompt is None:
        raise InputError("no prompt; give --prompt TEXT or --prompt-file FILE")
    if not prompt.strip():
        raise InputError("the prompt is empty; describe the clip in --prompt TEXT")
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise InputError(
            f"the prompt has {len(prompt):,} characters; the limit is {MAX_PROMPT_CHARACTERS:,}. "
            "It is never cut; shorten it"
        )
    check_unicode("the prompt", prompt)
    return prompt


def check_seed(seed: int) -> None:
    """Refuse a seed outside 0 to 2^63 - 1.

    Raises:
        InputError: with the seed.
    """
    if not 0 <= seed <= MAX_SEED:
        raise InputError(f"seed {seed} is outside 0 to {MAX_SEED}; give another --seed")


def frames_of(seconds: float) -> int:
    """Frames of a clip that lasts this long or, up to the next legal count, longer.

    Raises:
        InputError: outside 5 to 15.1 seconds.
    """
    if not 5.0 <= seconds <= 15.1:
        raise InputError(f"--seconds {seconds:g} is outside 5 to 15.1; the model makes 5.17 to 15.08 s")
    return legal_frames(round(seconds * FPS + 0.499))


def check_canvas(preset: Preset) -> None:
    """Refuse sizes and lengths that the model does not have, and crops that the canvas does not hold.

    Raises:
        InputError: naming the nearest that work.
    """
    canvas, crop = preset.canvas, preset.output.crop
    for name, value in (("width", canvas.width), ("height", canvas.height)):
        if value % CANVAS_MULTIPLE:
            below = value // CANVAS_MULTIPLE * CANVAS_MULTIPLE
            nearest = f"{below} or {below + CANVAS_MULTIPLE}" if below else str(CANVAS_MULTIPLE)
            raise InputError(f"{name} {value} is not a multiple of {CANVAS_MULTIPLE}; use {nearest}")
    if not is_aspect(canvas.width, canvas.height):
        raise InputError(f"canvas {canvas.width}x{canvas.height} is outside the aspect ratios 1:4 to 4:1")
    frames = canvas.num_frames
    above = legal_frames(frames)
    if above != frames:
        below = max(124, above - 17) if frames < 362 else 345
        nearest = " or ".join(str(n) for n in sorted({below, above}))
        raise InputError(f"{frames} frames; expected 17 n + 5 from 124 to 362; the nearest are {nearest}")
    if crop is not None and crop % 2:
        raise InputError(f"output.crop {crop} is odd; yuv420p needs an even number of rows")
    if crop is not None and crop > canvas.height:
        raise InputError(f"output.crop {crop} is beyond the canvas height {canvas.height}; add --set output.crop=off")


def is_aspect(width: int, height: int) -> bool:
    """Whether the sides are at most 4 to 1."""
    return max(width, height) <= 4 * min(width, height)


def check_references(kinds: Sequence[str]) -> None:
    """Refuse more references, or others, than the model takes.

    Raises:
        InputError: with the limit.
    """
    for kind, limit in REFERENCE_LIMITS.items():
        if kinds.count(kind) > limit:
            raise InputError(f"{kinds.count(kind)} {kind} references; the limit is {limit}")
    if len(kinds) > MAX_REFERENCES:
        raise InputError(f"{len(kinds)} references; the limit is {MAX_REFERENCES} in all")
    if set(kinds) == {"audio"}:
        raise InputError("sound cannot be the only reference; add an image or a video")
