"""One stage of training: a loss, optimisers, a moving average, a checkpoint that resumes bit for bit.

Every step draws its random numbers from a generator seeded by the stage's name and the step's number. Weights,
average and optimiser state are therefore all that a checkpoint must hold.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

Loss = Callable[[int, torch.Generator], Tensor]
"""Loss of a step, given its number and its generator."""


@dataclass(frozen=True)
class Stage:
    """How long and how fast one model learns.

    Attributes:
        name: Names the files and seeds the steps.
        steps: Optimiser steps.
        rate: Highest learning rate; a matrix's update has the root mean square that Adam's would have.
        average: Decay of the moving average of the weights, which is what the stage leaves.
        warmup: Steps of linear rise; a linear fall to zero follows.
        every: Steps between checkpoints.
    """

    name: str
    steps: int
    rate: float
    average: float = 0.99
    warmup: int = 30
    every: int = 500


def step_generator(seed: int, name: str, step: int, device: torch.device) -> torch.Generator:
    """The generator of one step, on `device`."""
    digest = hashlib.sha256(f"{seed}/{name}/{step}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))


def train(
    stage: Stage, model: nn.Module, loss: Loss, folder: Path, *, seed: int, log: Callable[[str], None]
) -> nn.Module:
    """Train until the stage's last step and leave the averaged weights in `model`.

    Continues from `folder/<name>.ckpt` if a killed run left one there, and does nothing but load if the stage is
    finished. `folder/<name>.safetensors` holds the average as of the last checkpoint, rounded to bfloat16, which is
    also what the stage leaves in `model`. Losses go to `folder/curves.jsonl`.

    Args:
        stage: What to do.
        model: Changed in place; parameters that do not require gradients stay.
        loss: Its differentiable loss.
        folder: Existing folder of the run.
        seed: Of the whole recipe.
        log: Receives a line now and then.
    """
    weights = folder / f"{stage.name}.safetensors"
    if weights.is_file() and load_weights(model, weights) == stage.steps:
        return model
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = list(named.values())
    device = parameters[0].device
    optimisers = _optimisers(model, stage.rate)
    average = [p.detach().clone() for p in parameters]
    checkpoint = folder / f"{stage.name}.ckpt"
    start, spent = 0, 0.0
    if checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True, map_location=device)
        start, spent = state["step"], state["seconds"]
        model.load_state_dict(state["model"])
        torch._foreach_copy_(average, state["average"])
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
    _forget(folder / "curves.jsonl", stage, start)
    began = time.monotonic() - spent
    for step in range(start, stage.steps):
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = stage.rate * _schedule(step, stage)
        value = loss(step, step_generator(seed, stage.name, step, device))
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        decay = min(stage.average, (step + 1) / (step + 10))
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - decay)
        if step % max(1, stage.steps // 100) == 0 or step == stage.steps - 1:
            _record(folder / "curves.jsonl", stage, step, float(value.detach()), time.monotonic() - began, log)
        if (step + 1) % stage.every == 0 and step + 1 < stage.steps:
            state = {
                "step": step + 1,
                "seconds": time.monotonic() - began,
                "model": model.state_dict(),
                "average": average,
                "optimisers": [optimiser.state_dict() for optimiser in optimisers],
            }
            save_weights(model, weights, step + 1, dict(zip(named, average, strict=True)))
            _save(state, checkpoint)
    with torch.no_grad():
        torch._foreach_copy_([p.detach() for p in parameters], average)
    save_weights(model, weights, stage.steps)
    load_weights(model, weights)
    checkpoint.unlink(missing_ok=True)
    return model


def save_weights(model: Any, path: Path, step: int, average: dict[str, Tensor] | None = None) -> None:
    """Write bfloat16 weights, or their averages by name, the step and the latent statistics of an autoencoder."""
    state = model.state_dict() | (average or {})
    tensors = {name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in state.items()}
    statistics = {key: list(value) for key, value in model.config.items() if key.startswith("latents_")}
    draft = path.with_suffix(".part")
    save_file(tensors, draft, metadata={"step": str(step), "statistics": json.dumps(statistics)})
    draft.replace(path)


def load_weights(model: Any, path: Path) -> int:
    """Read what `save_weights` wrote, in place; returns the step."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118, not a dict
    if statistics := json.loads(metadata["statistics"]):
        model.register_to_config(**statistics)
    return int(metadata["step"])


def _optimisers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for the rest: ends of the network, kernels, vectors."""
    inside: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim == 2 and ("blocks" in name) and "adaln" not in name
            (inside if matrix else rest).append(parameter)
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=rest[0].is_cuda)
    ]
    if inside:
        found.append(torch.optim.Muon(inside, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return found


def _schedule(step: int, stage: Stage) -> float:
    rise = (step + 1) / max(stage.warmup, 1)
    fall = (stage.steps - step) / max(stage.steps - stage.warmup, 1)
    return max(0.0, min(rise, fall, 1.0))


def _record(path: Path, stage: Stage, step: int, loss: float, seconds: float, log: Callable[[str], None]) -> None:
    with path.open("a") as file:
        file.write(
            json.dumps({"stage": stage.name, "step": step, "loss": round(loss, 6), "seconds": round(seconds, 1)}) + "\n"
        )
    if step % max(1, stage.steps // 10) < max(1, stage.steps // 100) or step == stage.steps - 1:
        log(f"{stage.name} {step + 1}/{stage.steps} loss {loss:.4f} {seconds:.0f} s")


def _forget(path: Path, stage: Stage, step: int) -> None:
    """Drop what a killed run recorded of steps that are taken again."""
    if not path.is_file():
        return
    lines = path.read_text().splitlines(keepends=True)
    records = [(line, json.loads(line)) for line in lines if line.endswith("\n")]  # a kill may cut the last one
    draft = path.with_suffix(".part")
    draft.write_text(
        "".join(line for line, record in records if record["stage"] != stage.name or record["step"] < step)
    )
    draft.replace(path)


def _save(state: Any, path: Path) -> None:
    """Write beside and rename, so that a kill never leaves half a file."""
    draft = path.with_suffix(".part")
    torch.save(state, draft)
    draft.replace(path)


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels whose bits repeat, so that a resumed run equals one that was not killed; settings return afterwards.

    An operation without such a kernel is an error: told only to warn, attention's backward pass would not repeat.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    tf32 = torch.backends.cuda.matmul.allow_tf32
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = True
    # Nothing here reads memory that it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
