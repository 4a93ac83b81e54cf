"""The training run of the demo model: autoencoders, transformer, distillation, measurement, one after another."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel
from safetensors import SafetensorError
from torch import Tensor

from solgen.engine.demo_training import shapes
from solgen.engine.demo_training.audio_vae import audio_loss, random_pieces
from solgen.engine.demo_training.conditioner import Conditioner
from solgen.engine.demo_training.dataset import Pool, encode_clips, encode_pool, fit_statistics, has_statistics
from solgen.engine.demo_training.distil import Distillation
from solgen.engine.demo_training.evaluate import HeldOut, report, report_long
from solgen.engine.demo_training.flow import Flow
from solgen.engine.demo_training.forward import Advance, advance_block
from solgen.engine.demo_training.loop import deterministic, load_weights, save_weights, train
from solgen.engine.demo_training.package import write_model
from solgen.engine.demo_training.recipe import LONG_PROMPTS, Lesson, Recipe, draw_scenes
from solgen.engine.demo_training.scenes import draw_scene
from solgen.engine.demo_training.sound import synthesise
from solgen.engine.demo_training.tracks import Canvas, Tracks, track_scenes
from solgen.engine.demo_training.video_vae import random_windows, reconstruction_loss
from solgen.engine.json_file import read_object
from solgen.errors import InputError

Log = Callable[[str], None]


def train_demo(recipe: Recipe, folder: Path, device: torch.device, log: Log, start: Path | None = None) -> Path:
    """Run the whole recipe and leave `folder/model`, a repository that `--model` takes.

    A killed run continues where its last checkpoint was when called again with the same arguments.

    Raises:
        InputError: if `folder` holds a run of another recipe, or `start` what does not fit the models.

    Args:
        recipe: What to train.
        folder: Existing folder of the run.
        device: One GPU, or the CPU for the smoke form.
        log: Receives progress, a line at a time.
        start: Weights to begin with: the folder of an earlier run, or a repository such as its `model`. The transformer
            takes those of the last stage of `start` that comes no later than the first one trained here.
    """
    _check_recipe(recipe, folder)
    began = time.monotonic()

    def note(text: str) -> None:
        log(f"[{time.monotonic() - began:6.1f} s] {text}")

    with deterministic():
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
        nonlocal start
        _begin(model, start, lesson.stage.name)
        if not lesson.stage.steps:
            return
        start = None  # what was learnt in this run goes on
        flows = [
            Flow(model, pool_of(part.canvas, part.clips, part.keyframed), part.batch, advance)
            for part in lesson.materials
        ]
        losses = [flow.loss if teacher is None else Distillation(flow, teacher).loss for flow in flows]

        def loss(step: int, generator: torch.Generator) -> Tensor:
            return torch.stack([part(step, generator) for part in losses]).mean()

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


def _check_recipe(recipe: Recipe, folder: Path) -> None:
    """A run goes on with its own recipe only: what follows a changed stage would have learnt from another."""
    path, mine = folder / "recipe.json", json.loads(json.dumps(asdict(recipe)))
    if not path.is_file():
        path.write_text(json.dumps(mine, indent=1) + "\n")
        return
    theirs = read_object(path)
    if changed := [name for name, value in mine.items() if theirs.get(name) != value]:
        raise InputError(
            f"{folder} holds a run of another recipe (other {', '.join(changed)}); "
            "use another --output, or the arguments of that run"
        )


def _begin(model: Any, start: Path | None, name: str) -> None:
    if start is None:
        return
    file, component = start / f"{name}.safetensors", start / ("transformer" if name.startswith("flow") else name)
    try:
        if file.is_file():
            load_weights(model, file)
        elif (component / "config.json").is_file():
            earlier = type(model).from_pretrained(component, torch_dtype=torch.float32, local_files_only=True)
            model.load_state_dict(earlier.state_dict())
            model.register_to_config(**{k: v for k, v in earlier.config.items() if k.startswith("latents_")})
    except (RuntimeError, SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise InputError(
            f"--from: {file if file.is_file() else component} does not fit the model that is trained "
            f"({' '.join(str(error).split())[:120]}); name a run or a model of the same shapes"
        ) from error


def _autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
