"""The recipe of the demo model: every size, share and number of steps, and the stages in order."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel
from torch import Tensor

from solgen.engine.demo_training import shapes
from solgen.engine.demo_training.audio_vae import audio_loss, random_pieces
from solgen.engine.demo_training.conditioner import Conditioner
from solgen.engine.demo_training.dataset import Pool, encode_clips, encode_pool, fit_statistics, has_statistics
from solgen.engine.demo_training.distil import Distillation
from solgen.engine.demo_training.evaluate import HeldOut, report, report_long
from solgen.engine.demo_training.flow import Flow
from solgen.engine.demo_training.forward import Advance, advance_block
from solgen.engine.demo_training.loop import Stage, load_weights, save_weights, train
from solgen.engine.demo_training.package import write_model
from solgen.engine.demo_training.scenes import Scene, draw_scene
from solgen.engine.demo_training.sound import synthesise
from solgen.engine.demo_training.tracks import Canvas, Tracks, track_scenes
from solgen.engine.demo_training.video_vae import random_windows, reconstruction_loss
from solgen.errors import InputError

Log = Callable[[str], None]


@dataclass(frozen=True)
class Lesson:
    """A stage of the transformer and the clips that it learns from.

    Attributes:
        stage: How long and how fast.
        canvas: Of the clips.
        clips: How many are encoded once.
        keyframed: How many of them also appear with keyframes.
        batch: Clips in a step.
    """

    stage: Stage
    canvas: Canvas
    clips: int
    keyframed: int
    batch: int


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
    audio_vae=Stage("audio_vae", steps=800, rate=2e-3),
    flow=(
        Lesson(Stage("flow_small", steps=800, rate=2e-3, average=0.995), SMALL, clips=8192, keyframed=0, batch=192),
        Lesson(Stage("flow", steps=5000, rate=1.5e-3, average=0.995), FULL, clips=2048, keyframed=768, batch=16),
        Lesson(Stage("flow_long", steps=200, rate=3e-4), LONG, clips=32, keyframed=16, batch=1),
    ),
    distil=(
        Lesson(Stage("distil_long", steps=40, rate=3e-4), LONG, clips=32, keyframed=16, batch=1),
        Lesson(Stage("distil", steps=400, rate=5e-4), FULL, clips=2048, keyframed=768, batch=16),
    ),
    held_out=50,
    long_canvas=LONG,
    transformer_shape=shapes.TRANSFORMER,
)
"""The whole training; docs/demo_model.md tells what has been run."""

TOY = Canvas(32, 32, 22)


def _toy(name: str, rate: float) -> Lesson:
    return Lesson(Stage(name, steps=4, rate=rate, warmup=1, every=2), TOY, clips=8, keyframed=8, batch=2)


SMOKE = replace(
    RECIPE,
    canvas=TOY,
    clips=8,
    windows=2,
    pieces=2,
    zoom=1,
    vae=Stage("vae", steps=4, rate=2e-3, warmup=1, every=2),
    audio_vae=Stage("audio_vae", steps=4, rate=2e-3, warmup=1, every=2),
    flow=(_toy("flow_small", 2e-3), replace(_toy("flow", 2e-3), canvas=Canvas(32, 64, 22))),
    distil=(_toy("distil", 5e-4),),
    held_out=4,
    long_canvas=Canvas(32, 32, 39),
    transformer_shape=shapes.TRANSFORMER
    | {"hidden_size": 96, "ffn_dim": 32, "num_layers": 2, "num_attention_heads": 1},
)
"""Every stage at toy size: proves the program, teaches nothing."""


def train_demo(recipe: Recipe, folder: Path, device: torch.device, log: Log, start: Path | None = None) -> Path:
    """Run the whole recipe and leave `folder/model`, a repository that `--model` takes.

    A killed run continues where its last checkpoint was when called again with the same arguments.

    Args:
        recipe: What to train.
        folder: Existing folder of the run.
        device: One GPU, or the CPU for the smoke form.
        log: Receives progress, a line at a time.
        start: Weights to begin with: the folder of an earlier run, or a repository such as its `model`.
    """
    began = time.monotonic()

    def note(text: str) -> None:
        log(f"[{time.monotonic() - began:6.1f} s] {text}")

    with deterministic(device):
        tracks = track_scenes(draw_scenes(recipe, recipe.clips), recipe.canvas).to(device)
        vae = train_vae(recipe, tracks, folder, device, note, start)
        audio_vae = train_audio_vae(recipe, tracks, folder, device, note, start)
        teacher, student = train_transformer(recipe, tracks, vae, audio_vae, folder, device, note, start)
    conditioner = Conditioner(device)
    prompts = [draw_scene(recipe.seed + 1, i, held_out=True, spread=recipe.spread) for i in range(recipe.held_out)]
    held_out = HeldOut.encode(prompts, recipe.canvas, vae, audio_vae, conditioner, device)
    found = report(held_out, student, teacher, vae, audio_vae, folder, note)
    long = HeldOut.encode(prompts[:LONG_PROMPTS], recipe.long_canvas, vae, audio_vae, conditioner, device)
    found |= report_long(long, student, vae, audio_vae, folder, note)
    (folder / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    write_model(folder / "model", student, vae, audio_vae, conditioner)
    note("done")
    return folder / "model"


def train_vae(
    recipe: Recipe, tracks: Tracks, folder: Path, device: torch.device, log: Log, start: Path | None
) -> AutoencoderKLMiniMaxH3:
    """The video autoencoder, on windows rendered for every step: crops first, whole canvases in the end."""
    vae = shapes.new_vae().to(device)
    _begin(vae, start, "vae")

    def loss(step: int, generator: torch.Generator) -> Tensor:
        zoom = recipe.zoom if step < recipe.zoomed * recipe.vae.steps else 1
        pixels = random_windows(tracks, recipe.canvas, recipe.windows, generator, zoom)
        with _autocast(device):
            return reconstruction_loss(vae, pixels, generator)

    train(recipe.vae, vae, loss, folder, seed=recipe.seed, log=log)
    return vae.eval().requires_grad_(False)


def train_audio_vae(
    recipe: Recipe, tracks: Tracks, folder: Path, device: torch.device, log: Log, start: Path | None
) -> AutoencoderKLMiniMaxH3Audio:
    """The audio autoencoder, on pieces of the pool's first clips, in float32."""
    audio_vae = shapes.new_audio_vae().to(device)
    _begin(audio_vae, start, "audio_vae")
    first = torch.arange(min(512, recipe.clips), device=device).split(64)
    sound = torch.cat([synthesise(tracks.take(clips), recipe.canvas) for clips in first]).flatten(0, 1)

    def loss(step: int, generator: torch.Generator) -> Tensor:
        return audio_loss(audio_vae, random_pieces(sound, recipe.pieces, 20, generator), generator)

    train(recipe.audio_vae, audio_vae, loss, folder, seed=recipe.seed, log=log)
    return audio_vae.eval().requires_grad_(False)


def train_transformer(
    recipe: Recipe,
    tracks: Tracks,
    vae: AutoencoderKLMiniMaxH3,
    audio_vae: AutoencoderKLMiniMaxH3Audio,
    folder: Path,
    device: torch.device,
    log: Log,
    start: Path | None,
) -> tuple[MiniMaxH3Transformer3DModel, MiniMaxH3Transformer3DModel]:
    """Flow matching on growing canvases, then distillation to the calls of the demo preset: teacher and student."""
    conditioner = Conditioner(device)
    if recipe.vae.steps or recipe.audio_vae.steps or not (has_statistics(vae) and has_statistics(audio_vae)):
        some = torch.arange(min(recipe.clips, 256), device=device)
        fit_statistics(vae, audio_vae, encode_clips(tracks.take(some), recipe.canvas, vae, audio_vae))
    save_weights(vae, folder / "vae.safetensors", recipe.vae.steps)
    save_weights(audio_vae, folder / "audio_vae.safetensors", recipe.audio_vae.steps)

    @cache
    def pool_of(canvas: Canvas, clips: int, keyframed: int) -> Pool:
        scenes = draw_scenes(recipe, clips)
        tracks = track_scenes(scenes, canvas).to(device)
        pool = encode_pool(scenes, tracks, canvas, vae, audio_vae, conditioner, keyframed=keyframed)
        log(f"{clips} clips of {canvas.num_frames} frames encoded")
        return pool

    # Lengths of text differ from step to step: one program for all.
    advance: Advance = torch.compile(advance_block, dynamic=True) if device.type == "cuda" else advance_block

    def study(lesson: Lesson, model: MiniMaxH3Transformer3DModel, teacher: MiniMaxH3Transformer3DModel | None) -> None:
        _begin(model, start, lesson.stage.name)
        if lesson.stage.steps:
            pool = pool_of(lesson.canvas, lesson.clips, lesson.keyframed)
            flow = Flow(model, pool, lesson.batch, advance)
            loss = flow.loss if teacher is None else Distillation(flow, teacher).loss
            train(lesson.stage, model, loss, folder, seed=recipe.seed, log=log)

    teacher = shapes.new_transformer(recipe.seed, recipe.transformer_shape).to(device)
    for lesson in recipe.flow:
        study(lesson, teacher, None)
    student = shapes.new_transformer(recipe.seed, recipe.transformer_shape).to(device)
    student.load_state_dict(teacher.state_dict())
    teacher.requires_grad_(False)
    for lesson in recipe.distil:
        study(lesson, student, teacher)
    return teacher, student.requires_grad_(False)


def draw_scenes(recipe: Recipe, count: int) -> list[Scene]:
    """The first scenes of training; a larger pool begins with those of a smaller one."""
    return [
        draw_scene(recipe.seed, index, cuts=recipe.cuts, pans=recipe.pans, spread=recipe.spread)
        for index in range(count)
    ]


def _begin(model: Any, start: Path | None, name: str) -> None:
    if start is None:
        return
    component = start / ("transformer" if name.startswith("flow") else name)
    if (start / f"{name}.safetensors").is_file():
        load_weights(model, start / f"{name}.safetensors")
    elif (component / "config.json").is_file():
        earlier = type(model).from_pretrained(component, torch_dtype=torch.float32, local_files_only=True)
        model.load_state_dict(earlier.state_dict())
        model.register_to_config(**{k: v for k, v in earlier.config.items() if k.startswith("latents_")})


def _autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Kernels whose bits repeat, so that a resumed run equals one that was not killed; settings return afterwards.

    On a GPU, an operation without such a kernel warns and runs.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    tf32 = torch.backends.cuda.matmul.allow_tf32
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")
    torch.backends.cuda.matmul.allow_tf32 = True
    # Nothing here reads memory that it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
