"""The last refusals before anything heavy loads."""

import dataclasses
from collections.abc import Sequence

import torch
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
    MINIMAX_H3_AUDIO_CHANNELS,
    audio_latent_num_frames,
    video_latent_num_frames,
)

from solgen.engine.adapters.contract import contradictions
from solgen.engine.adapters.overlay import Overlay, open_overlay
from solgen.engine.adapters.source import preset_source
from solgen.engine.attention_run import check_attention
from solgen.engine.batch import Job
from solgen.engine.dummy import DummyRepository, RandomWeights, check_memory, open_dummy
from solgen.engine.exchange import check_wire
from solgen.engine.fusion import check_fusion
from solgen.engine.linear import check_linear
from solgen.engine.machine import model_dtype, pick_device
from solgen.engine.media.ffmpeg import check_ffmpeg
from solgen.engine.media.read import read_image
from solgen.engine.media.references import check_reference
from solgen.engine.memory import available_memory, check_host_memory
from solgen.engine.pipeline import transformer_name
from solgen.engine.processor import H3Processor, read_tokenizer
from solgen.engine.repository import Repository, open_repository
from solgen.engine.request import CANVAS_MULTIPLE, Request
from solgen.engine.schedule import sigma_schedules
from solgen.errors import InputError
from solgen.kernels.sol_attn2.config import BLOCK
from solgen.kernels.sol_attn2.validation import MAX_GPU_BLOCKS
from solgen.parallel.mesh import check_split
from solgen.presets.schema import FRAMES_PER_CHUNK, LATENTS_PER_CHUNK, Canvas

MAX_ROWS = MAX_GPU_BLOCKS * BLOCK
"""Longest packed sequence."""


def check(jobs: Sequence[Job], num_ranks: int = 1) -> tuple[torch.device, Repository]:
    """Refuse what cannot work before anything heavy loads: sizes, noise levels, media, GPU, files, heads, prompts.

    Args:
        jobs: Resolved requests of one command.
        num_ranks: Processes that will share them.

    Raises:
        SolgenError: one line.
    """
    for job in jobs:
        check_canvas(job.request.preset.canvas)
        sigma_schedules(job.request.preset.sampler)
    for job in jobs:
        request = job.request
        for path in filter(None, (request.image, request.last_image)):
            read_image(path)
        for reference in request.references:
            check_reference(reference.kind, reference.path)
    first = jobs[0].request
    if any(_components(job.request) != _components(first) for job in jobs):
        raise InputError("the prompts of one command must share a task and a model with its adapters; run them apart")
    device = pick_device(first.preset_name)
    dummy = first.text_rows is not None
    if not dummy:
        check_ffmpeg()
    repository = open_dummy(first) if dummy else open_repository(first.preset.model, first.task)
    check_split(num_ranks, dp_size=first.preset.parallel.dp, num_heads=repository.num_heads(first.task))
    check_linear(first.preset, device)
    for job in jobs:
        check_attention(job.request.preset.attention, device, repository.num_blocks(first.task))
        check_wire(job.request.preset)
        check_fusion(job.request.preset.fusion, device)
    if isinstance(repository, DummyRepository):
        check_memory(RandomWeights(repository, device, model_dtype(device)), device)
        return device, repository
    check_prompts(jobs, repository)
    H3Processor.from_folders(repository.folders["processor"], repository.folders["tokenizer"])
    if device.type == "cuda":
        ranks = min(num_ranks, torch.cuda.device_count())
        memory = first.preset.memory
        check_host_memory(memory, repository, first.task, num_ranks=ranks, available=available_memory())
    return device, dataclasses.replace(repository, overlay=check_adapters(first, repository))


def check_canvas(canvas: Canvas) -> None:
    """Refuse a clip whose sequence is longer than any operator packs.

    Raises:
        InputError: with the rows and the limit.
    """
    latent_frames = video_latent_num_frames(canvas.num_frames, FRAMES_PER_CHUNK, LATENTS_PER_CHUNK)
    video = latent_frames * (canvas.height // CANVAS_MULTIPLE) * (canvas.width // CANVAS_MULTIPLE)
    rows = video + MINIMAX_H3_AUDIO_CHANNELS * audio_latent_num_frames(canvas.num_frames)
    if rows > MAX_ROWS:
        raise InputError(
            f"{canvas.width}x{canvas.height} with {canvas.num_frames} frames packs {rows:,} rows of video and sound, "
            f"the limit is {MAX_ROWS:,}; use a smaller canvas or a shorter clip"
        )


def _components(request: Request) -> tuple[object, ...]:
    """What one load of a model serves."""
    preset = request.preset
    components = (request.task, preset.model, preset.adapter, preset.lora, preset.linear, preset.memory)
    return *components, request.loras, request.text_rows


def check_adapters(request: Request, repository: Repository) -> Overlay | None:
    """Open the request's adapters and refuse what could not be applied in full.

    Raises:
        SolgenError: one line with the tensor's name.
    """
    preset = request.preset
    overlay = open_overlay(
        request.loras,
        repository.folders[transformer_name(request.task)],
        request.task,
        preset.lora,
        preset=preset_source(preset.adapter) if preset.adapter else None,
    )
    # A file of the Hub that the table knows has set its terms unread; its header has the last word.
    if overlay is not None and not preset.lora.ignore_contract:
        resolved = (f"preset {request.preset_name}", {"sampler": preset.sampler.model_dump()})
        for adapter in overlay.adapters:
            for _, line in contradictions(adapter.contract, [resolved]):
                raise InputError(line)
    return overlay


def check_prompts(jobs: Sequence[Job], repository: Repository) -> None:
    """Refuse prompts that the conditioner cannot hold, before its weights are read.

    Raises:
        InputError: with the counted tokens and the limit.
    """
    tokenizer = read_tokenizer(repository.folders["tokenizer"])
    limit = repository.prompt_limit()
    for job in jobs:
        count = len(tokenizer(job.request.prompt, add_special_tokens=False)["input_ids"])
        if count > limit:
            raise InputError(f"the prompt has {count:,} tokens; {repository.source} reads {limit:,}. Shorten it")
