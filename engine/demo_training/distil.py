"""Distillation to a few calls: the student learns where the teacher's finer steps lead from states it meets itself."""

from itertools import pairwise

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor

from solgen.engine.demo_training.flow import Flow, shifted
from solgen.engine.demo_training.forward import Layout

CALLS = 4
"""Calls of the demo preset."""

State = tuple[Tensor, Tensor]


class Distillation:
    """A frozen teacher in front of a student that starts as its copy."""

    def __init__(self, flow: Flow, teacher: MiniMaxH3Transformer3DModel, substeps: int = 4) -> None:
        """`flow.model` is the student; the teacher takes `substeps` Euler steps for each of its calls."""
        self.flow, self.teacher, self.substeps = flow, teacher, substeps

    def loss(self, step: int, generator: torch.Generator) -> Tensor:
        """Squared error of the student's velocity over one segment of the schedule.

        The segment is drawn by the step's number; the state at its start is what the student's own calls made of
        noise.
        """
        flow, device = self.flow, self.flow.device
        task, group, chosen = flow.draw_group(generator)
        clips, text = group.clips[chosen], group.text[chosen]
        conditions = flow.conditions(task, clips, generator)
        rows = flow.pool.video[clips].shape, flow.pool.audio[clips].shape
        picture, sound = (torch.randn(shape, generator=generator, device=device) for shape in rows)
        state = picture, sound
        segment = CALLS - 1 - step % CALLS
        grid = torch.linspace(1, 0, CALLS + 1, device=device)
        fixed = conditions, text, group.layout
        with torch.no_grad():
            for call in range(segment):
                state = euler(flow, flow.model, state, grid[call], grid[call + 1], *fixed)
            goal = state
            fine = torch.linspace(float(grid[segment]), float(grid[segment + 1]), self.substeps + 1, device=device)
            for begin, end in pairwise(fine):
                goal = euler(flow, self.teacher, goal, begin, end, *fixed)
        sigma = shifted(grid[segment].expand(flow.batch))
        span = sigma - shifted(grid[segment + 1].expand(flow.batch))
        found = flow.predict(flow.model, state, conditions, text, sigma, group.layout)
        wanted = [(g - s) / span[:, i, None, None] for i, (g, s) in enumerate(zip(goal, state, strict=True))]
        errors = [(f - w).square().mean() for f, w in zip(found, wanted, strict=True)]
        return errors[0] + 0.5 * errors[1]


def euler(
    flow: Flow,
    model: MiniMaxH3Transformer3DModel,
    state: State,
    begin: Tensor,
    end: Tensor,
    conditions: Tensor,
    text: Tensor,
    layout: Layout,
) -> State:
    """One step from one position of the schedule to a lower one."""
    sigma = shifted(begin.expand(len(text)))
    span = sigma - shifted(end.expand(len(text)))
    found = flow.predict(model, state, conditions, text, sigma, layout)
    video, audio = (x + span[:, i, None, None] * v for i, (x, v) in enumerate(zip(state, found, strict=True)))
    return video, audio
