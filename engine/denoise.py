"""The denoising loop: one transformer call per noise level, checked for non-finite values at every step."""

from collections.abc import Callable

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.modular_pipeline import (
    BlockState,
    LoopSequentialPipelineBlocks,
    PipelineState,
)

from solgen.engine.attention_run import AttentionRun, solve_density
from solgen.engine.pipeline import H3Pipeline
from solgen.errors import SolgenError
from solgen.kernels.sol_attn2 import NonFiniteError
from solgen.kernels.sol_attn2.density import empty_histogram

StepHook = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Called after every step with its number from 1 and the video and audio rows, which it may write to."""


class NonFiniteLatentsError(SolgenError):
    """The latents hold NaN or infinity."""


def denoise(
    pipeline: H3Pipeline,
    loop: LoopSequentialPipelineBlocks,
    state: PipelineState,
    transformer: MiniMaxH3Transformer3DModel,
    run: AttentionRun,
    on_step: StepHook,
) -> None:
    """Run every denoiser call of a request and store the final rows in `state`.

    Args:
        pipeline: Loaded components.
        loop: diffusers' denoising loop of the task: one forward, one scheduler step.
        state: Holds the layout, the noise and the noise levels.
        transformer: The one that `loop` calls.
        run: Shared by the attention processors.
        on_step: Progress, and the seam for tests.

    Raises:
        NonFiniteLatentsError: naming the step and the first transformer block with a non-finite output.
    """
    block_state = loop.get_block_state(state)
    timesteps = block_state.timesteps
    calibrated = not run.solves_density
    with torch.no_grad():
        for index, timestep in enumerate(timesteps):
            before = block_state.latents.clone(), block_state.audio_latents.clone()
            try:
                if not calibrated:
                    calibrate(pipeline, loop, block_state, run)
                    calibrated = True
                run.begin_step(index)
                pipeline, block_state = loop.loop_step(pipeline, block_state, i=index, t=timestep)
                on_step(index + 1, block_state.latents, block_state.audio_latents)
                finite = _finite(block_state.latents, block_state.audio_latents)
            except NonFiniteError:
                finite = False
            if not finite:
                block_state.latents, block_state.audio_latents = before
                block = _first_bad_block(pipeline, loop, block_state, transformer, run, index)
                where = "" if block is None else f" (block {block})"
                raise NonFiniteLatentsError(
                    f"non-finite values at step {index + 1} of {len(timesteps)}{where}; no video was written. "
                    "Try --attention dense"
                )
    loop.set_block_state(state, block_state)


def calibrate(
    pipeline: H3Pipeline,
    loop: LoopSequentialPipelineBlocks,
    block_state: BlockState,
    run: AttentionRun,
    index: int = 0,
) -> None:
    """Forward call `index` once, only to see the log shares of its sparse blocks, and solve the density for them."""
    run.histogram = empty_histogram(run.video_rows.device)
    forward(pipeline, loop, block_state, run, index)
    solve_density(run)


def forward(
    pipeline: H3Pipeline,
    loop: LoopSequentialPipelineBlocks,
    block_state: BlockState,
    run: AttentionRun,
    index: int,
) -> None:
    """Denoiser call `index` without the scheduler's step: leaves `noise_pred` and `audio_noise_pred`."""
    run.begin_step(index)
    loop.sub_blocks["denoiser"](pipeline, block_state, i=index, t=block_state.timesteps[index])


def _first_bad_block(
    pipeline: H3Pipeline,
    loop: LoopSequentialPipelineBlocks,
    block_state: BlockState,
    transformer: MiniMaxH3Transformer3DModel,
    run: AttentionRun,
    index: int,
) -> int | None:
    """Repeat a failed call with a check behind every block; None if the transformer is not to blame."""
    found: list[int] = []

    def watch(number: int, output: torch.Tensor) -> None:
        if not _finite(output):
            found.append(number)

    handles = [
        block.register_forward_hook(lambda _module, _args, output, number=number: watch(number, output))
        for number, block in enumerate(transformer.transformer_blocks)
    ]
    try:
        loop.sub_blocks["denoiser"](pipeline, block_state, i=index, t=block_state.timesteps[index])
    except NonFiniteError:
        pass  # the blocks before the attention that refused its input have been seen
    finally:
        for handle in handles:
            handle.remove()
    none = len(transformer.transformer_blocks)
    first = torch.tensor(found[0] if found else none, device=run.video_rows.device)
    if run.ulysses is not None:
        run.ulysses.min(first)  # every rank saw its own rows
    return int(first) if first < none else None


def _finite(*tensors: torch.Tensor) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
