"""diffusers' modular MiniMax-H3 pipeline with solgen's own token order, noise levels and length limit.

The workflow of a task is a flat list of diffusers blocks; two steps of it are replaced or added here, and
`solgen.engine.generate` runs the list stage by stage.
"""

from pathlib import Path

import torch
from diffusers import MiniMaxH3Blocks, MiniMaxH3ModularPipeline
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3SetTimestepsStep
from diffusers.modular_pipelines.modular_pipeline import (
    ModularPipelineBlocks,
    PipelineState,
    SequentialPipelineBlocks,
)

from solgen.engine.adaln import AdaLNTables
from solgen.engine.adapters.two_time import pair_times
from solgen.engine.packing import TokenOrder, cube_token_order
from solgen.presets.schema import FPS, Task

MAX_FRAMES = 362
"""Longest clip: 15.08 s, which diffusers' own limit of 15.0 s refuses."""


class H3Pipeline(MiniMaxH3ModularPipeline):
    """The stock pipeline with room for 362 frames.

    Attributes:
        device_in_use: Where it computes; some weights may wait elsewhere. None to ask the first component.
        tables: AdaLN tables in place of the transformer's projections, prepared for each schedule; None without.
    """

    device_in_use: torch.device | None = None
    tables: AdaLNTables | None = None

    @property
    def _execution_device(self) -> torch.device:
        return self.device_in_use or super()._execution_device

    @property
    def max_duration(self) -> float:
        """Longest clip in seconds."""
        return MAX_FRAMES / FPS


class TokenOrderStep(ModularPipelineBlocks):
    """Permutes the packed layout that the step before it built; latents stay in raster order."""

    model_name = "minimax-h3"

    def __call__(self, components: H3Pipeline, state: PipelineState) -> tuple[H3Pipeline, PipelineState]:
        """Reads the layout and stores it permuted, with the `token_order` that did it."""
        order = self.token_order(components, state)
        fields = "denoiser_input_fields"
        for name in ("position_ids", "token_tags"):
            state.set(name, state.get(name)[order.order], fields)
        for name in ("video_indices", "audio_indices", "text_indices"):
            state.set(name, order.position[state.get(name)], fields)
        state.set("token_order", order)
        return components, state

    def token_order(self, components: H3Pipeline, state: PipelineState) -> TokenOrder:
        """Cube order of the request's grids."""
        _, patch_h, patch_w = components.patch_size
        grids = [
            (frames, height // patch_h, width // patch_w)
            for frames, height, width in (
                *(tuple(latents.shape[2:]) for latents in state.get("condition_latents") or ()),
                (state.get("num_latent_frames"), state.get("latent_height"), state.get("latent_width")),
            )
        ]
        return cube_token_order(
            state.get("video_indices"),
            state.get("audio_indices"),
            state.get("text_indices"),
            target_grid=grids[-1],
            condition_grids=grids[:-1],
        )


class SetSigmasStep(MiniMaxH3SetTimestepsStep):
    """Takes finished `video_sigmas` and `audio_sigmas` from the state instead of a number of grid points."""

    def __call__(self, components: H3Pipeline, state: PipelineState) -> tuple[H3Pipeline, PipelineState]:
        """Stores the timesteps and the timestep of every row at every call; (t, r) pairs for a two-time model."""
        device = components._execution_device
        components.scheduler.set_timesteps(sigmas=state.get("video_sigmas"), device=device)
        components.audio_scheduler.set_timesteps(sigmas=state.get("audio_sigmas"), device=device)
        timesteps = components.scheduler.timesteps
        audio_timesteps = components.audio_scheduler.timesteps
        layout = (
            state.get("video_indices").cpu(),
            state.get("audio_indices").cpu(),
            state.get("num_condition_video_rows"),
            state.get("num_condition_audio_rows"),
            state.get("text_indices").numel(),
        )
        video, audio = timesteps.tolist(), audio_timesteps.tolist()
        conditions = [(max(time, components.keyframe_noise_aug), 1.0) for time in video]
        plan = [self.build_row_timesteps(*layout, v, a, *c) for v, a, c in zip(video, audio, conditions, strict=True)]
        if state.get("two_times"):
            # A step ends where the next one starts, the last at clean; condition rows stay where they are.
            ends = zip([*video[1:], 1.0], [*audio[1:], 1.0], conditions, strict=True)
            endpoints = [self.build_row_timesteps(*layout, v, a, *c) for v, a, c in ends]
            plan = [pair_times(start, endpoint) for start, endpoint in zip(plan, endpoints, strict=True)]
        state.set("timesteps", timesteps)
        state.set("audio_timesteps", audio_timesteps)
        state.set("row_timestep_plan", [(times.to(device), index.to(device)) for times, index in plan])
        return components, state


def task_blocks(task: Task) -> SequentialPipelineBlocks:
    """The flat list of blocks of one task, with the steps above in place."""
    workflow = MiniMaxH3Blocks().get_workflow(task)
    blocks: dict[str, ModularPipelineBlocks] = {}
    for name, block in workflow.sub_blocks.items():
        blocks[name] = SetSigmasStep() if isinstance(block, MiniMaxH3SetTimestepsStep) else block
        if name.endswith("prepare_layout"):
            blocks["denoise.token_order"] = TokenOrderStep()
    return SequentialPipelineBlocks.from_blocks_dict(blocks)


def empty_pipeline(task: Task, repository: Path | None) -> H3Pipeline:
    """The task's pipeline over a local repository or over none, without weights."""
    return H3Pipeline(blocks=task_blocks(task), pretrained_model_name_or_path=repository and str(repository))


def transformer_name(task: Task) -> str:
    """Component that denoises a task: one repository holds a transformer for references beside the other."""
    return "transformer_ref" if task == "ref2va" else "transformer"


def generator(seed: int) -> torch.Generator:
    """The CPU generator that draws every noise of a request, so that no device or rank changes its bytes."""
    return torch.Generator("cpu").manual_seed(seed)
