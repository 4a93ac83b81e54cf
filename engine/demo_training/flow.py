"""Flow matching in MiniMax-H3's convention: x_t = t x_0 + (1 - t) noise, velocity x_0 - noise, t = 1 clean."""

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor

from solgen.engine.demo_training.dataset import Group, Pool
from solgen.engine.demo_training.forward import Advance, Layout, RowTables, advance_block, velocity

SHIFTS = (12.0, 3.0)
"""Of the noise levels of video and sound."""

KEYFRAME_TIME = 0.999
"""t of keyframe rows."""

TASK_SHARES = {"text": 0.70, "first": 0.14, "last": 0.06, "both": 0.10}
"""How often a batch is of a task."""


def shifted(position: Tensor) -> Tensor:
    """Noise levels sigma of video and sound, [..., 2], at positions in [0, 1] of the schedule."""
    shift = position.new_tensor(SHIFTS)
    return shift * position[..., None] / (1 + (shift - 1) * position[..., None])


class Flow:
    """A transformer and its pool, with tables for every layout that were computed once."""

    def __init__(
        self, model: MiniMaxH3Transformer3DModel, pool: Pool, batch: int, advance: Advance = advance_block
    ) -> None:
        """Clips of one step share a layout; `advance` may be `advance_block` compiled."""
        self.model, self.pool, self.batch, self.advance = model, pool, batch, advance
        self.device = pool.video.device
        self.tables: dict[int, RowTables] = {}

    def draw_group(self, generator: torch.Generator) -> tuple[str, Group, Tensor]:
        """Task, group and places in it of the clips of a step, [batch] int64."""
        host = torch.Generator().manual_seed(generator.initial_seed() % 2**63)
        weights = torch.tensor([TASK_SHARES[task] for task in self.pool.groups])
        task = list(self.pool.groups)[int(torch.multinomial(weights, 1, generator=host))]
        groups = self.pool.groups[task]
        sizes = torch.tensor([float(len(group.clips)) for group in groups])
        group = groups[int(torch.multinomial(sizes, 1, generator=host))]
        chosen = torch.randint(len(group.clips), (self.batch,), generator=host)
        return task, group, chosen.to(self.device)

    def conditions(self, task: str, clips: Tensor, generator: torch.Generator) -> Tensor:
        """Keyframe rows with the noise that the pipeline gives them."""
        clean = self.pool.conditions(task, clips)
        noise = torch.randn(clean.shape, generator=generator, device=self.device)
        return KEYFRAME_TIME * clean + (1 - KEYFRAME_TIME) * noise

    def predict(
        self,
        model: MiniMaxH3Transformer3DModel,
        state: tuple[Tensor, Tensor],
        conditions: Tensor,
        text: Tensor,
        sigma: Tensor,
        layout: Layout,
    ) -> tuple[Tensor, Tensor]:
        """Velocities of video and sound rows [B, rows, channels] at noise levels sigma [B, 2]."""
        if id(layout) not in self.tables:
            self.tables[id(layout)] = RowTables.build(model, layout, self.device)
        keyframes = (1 - sigma[:, :1]).clamp_min(KEYFRAME_TIME)
        times = torch.cat([1 - sigma, keyframes], 1)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            video = torch.cat([conditions, state[0]], 1)
            return velocity(model, video, state[1], text, times, layout, self.tables[id(layout)], self.advance)

    def loss(self, step: int, generator: torch.Generator) -> Tensor:
        """Squared error of the velocity at positions drawn evenly over the schedule; sound counts half."""
        task, group, chosen = self.draw_group(generator)
        clips = group.clips[chosen]
        clean = self.pool.video[clips].float(), self.pool.audio[clips].float()
        noise = [torch.randn(x.shape, generator=generator, device=self.device) for x in clean]
        spread = torch.rand((), generator=generator, device=self.device)
        position = (torch.arange(self.batch, device=self.device) + spread) / self.batch
        sigma = shifted(position)
        video, audio = (
            torch.lerp(x, n, sigma[:, i, None, None]) for i, (x, n) in enumerate(zip(clean, noise, strict=True))
        )
        conditions = self.conditions(task, clips, generator)
        found = self.predict(self.model, (video, audio), conditions, group.text[chosen], sigma, group.layout)
        errors = [(f - (x - n)).square().mean() for f, x, n in zip(found, clean, noise, strict=True)]
        return errors[0] + 0.5 * errors[1]
