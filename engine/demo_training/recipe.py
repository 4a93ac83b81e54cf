"""The recipe of the demo model: every size, share and number of steps, and the stages in order."""

from dataclasses import dataclass, replace
from typing import Any

from solgen.engine.demo_training import shapes
from solgen.engine.demo_training.loop import Stage
from solgen.engine.demo_training.scenes import Scene, draw_scene
from solgen.engine.demo_training.tracks import Canvas
from solgen.errors import InputError


@dataclass(frozen=True)
class Material:
    """Clips of one canvas.

    Attributes:
        canvas: Theirs.
        clips: How many are encoded once.
        keyframed: How many of them also appear with keyframes.
        batch: Of them in a step.
    """

    canvas: Canvas
    clips: int
    keyframed: int
    batch: int


@dataclass(frozen=True)
class Lesson:
    """A stage of the transformer and what it learns from.

    Attributes:
        stage: How long and how fast.
        materials: Every step takes a batch of each; what is left out is forgotten soon.
    """

    stage: Stage
    materials: tuple[Material, ...]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, beside the code and the machine.

    Attributes:
        seed: Of scenes, first weights and every step.
        canvas: Of the clips for the autoencoders and of the held-out prompts.
        clips: Of them.
        cuts, pans: Shares of clips of two shots and of shots with a moving camera.
        spread: How much places and starts that no caption tells differ, in [0, 1].
        windows, pieces: Clips in a step of the video and the audio autoencoder.
        zoom: Crop of the video autoencoder's windows in the first `zoomed` share of its steps.
        vae, audio_vae, flow, distil: Stages in order.
        held_out: Prompts that the trained model is measured on.
        long_canvas: Where a few of them are measured once more.
    """

    seed: int
    canvas: Canvas
    clips: int
    cuts: float
    pans: float
    spread: float
    windows: int
    pieces: int
    zoom: int
    zoomed: float
    vae: Stage
    audio_vae: Stage
    flow: tuple[Lesson, ...]
    distil: tuple[Lesson, ...]
    held_out: int
    long_canvas: Canvas
    transformer_shape: dict[str, Any]

    @property
    def stages(self) -> dict[str, Stage]:
        """Every stage by name, in order."""
        lessons = (lesson.stage for lesson in self.flow + self.distil)
        return {stage.name: stage for stage in (self.vae, self.audio_vae, *lessons)}

    def with_steps(self, steps: dict[str, int]) -> "Recipe":
        """The same with other numbers of steps, by name of the stage.

        Raises:
            InputError: for a name that is none.
        """
        if unknown := sorted(steps.keys() - self.stages.keys()):
            raise InputError(f"--steps {unknown[0]}: no such stage; expected one of {', '.join(self.stages)}")

        def change(stage: Stage) -> Stage:
            return replace(stage, steps=steps.get(stage.name, stage.steps))

        flow, distil = (
            tuple(replace(lesson, stage=change(lesson.stage)) for lesson in lessons)
            for lessons in (self.flow, self.distil)
        )
        return replace(self, vae=change(self.vae), audio_vae=change(self.audio_vae), flow=flow, distil=distil)


LONG_PROMPTS = 4
"""Held-out prompts of the long canvas."""

SMALL, FULL, LONG = Canvas(128, 128, 39), Canvas(256, 256, 124), Canvas(512, 512, 362)

RECIPE = Recipe(
    seed=7,
    canvas=FULL,
    clips=2048,
    cuts=0.04,
    pans=0.04,
    spread=0.35,
    windows=16,
    pieces=32,
    zoom=2,
    zoomed=0.75,
    vae=Stage("vae", steps=1300, rate=2e-3),
    audio_vae=Stage("audio_vae", steps=192, rate=2e-3),
    flow=(
        Lesson(Stage("flow_small", steps=780, rate=2e-3, average=0.995), (Material(SMALL, 8192, 0, 192),)),
        Lesson(Stage("flow", steps=3000, rate=1.5e-3, average=0.995), (Material(FULL, 2048, 768, 16),)),
        Lesson(Stage("flow_long", steps=80, rate=2e-4), (Material(FULL, 512, 256, 16), Material(LONG, 24, 12, 2))),
    ),
    distil=(
        Lesson(Stage("distil", steps=200, rate=3e-4), (Material(FULL, 512, 256, 16),)),
        Lesson(Stage("distil_long", steps=30, rate=1e-4), (Material(FULL, 512, 256, 16), Material(LONG, 24, 12, 1))),
    ),
    held_out=50,
    long_canvas=LONG,
    transformer_shape=shapes.TRANSFORMER,
)
"""What the packaged weights were trained with; docs/demo_model.md tells how they came out."""

TOY = Canvas(32, 32, 22)


def _toy(name: str, rate: float, *canvases: Canvas) -> Lesson:
    materials = tuple(Material(canvas, clips=8, keyframed=8, batch=2) for canvas in canvases)
    return Lesson(Stage(name, steps=4, rate=rate, warmup=1, every=2), materials)


SMOKE = replace(
    RECIPE,
    canvas=TOY,
    clips=8,
    windows=2,
    pieces=2,
    zoom=1,
    vae=Stage("vae", steps=4, rate=2e-3, warmup=1, every=2),
    audio_vae=Stage("audio_vae", steps=4, rate=2e-3, warmup=1, every=2),
    flow=(
        _toy("flow_small", 2e-3, TOY),
        _toy("flow", 2e-3, TOY),
        _toy("flow_long", 2e-3, TOY, Canvas(32, 64, 22)),
    ),
    distil=(_toy("distil", 5e-4, TOY), _toy("distil_long", 5e-4, TOY, Canvas(32, 64, 22))),
    held_out=4,
    long_canvas=Canvas(32, 32, 39),
    transformer_shape=shapes.TRANSFORMER
    | {"hidden_size": 96, "ffn_dim": 32, "num_layers": 2, "num_attention_heads": 1},
)
"""Every stage at toy size: proves the program, teaches nothing."""


def draw_scenes(recipe: Recipe, count: int) -> list[Scene]:
    """The first scenes of training; a larger pool begins with those of a smaller one."""
    return [
        draw_scene(recipe.seed, index, cuts=recipe.cuts, pans=recipe.pans, spread=recipe.spread)
        for index in range(count)
    ]
