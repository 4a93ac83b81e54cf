"""The last refusals before anything heavy loads."""

from collections.abc import Sequence

import torch

from solgen.engine.batch import Job
from solgen.engine.loader import Repository, open_repository
from solgen.engine.machine import pick_device
from solgen.engine.media.ffmpeg import check_ffmpeg
from solgen.engine.media.probe import probe_media
from solgen.engine.media.read import read_image
from solgen.errors import InputError
from solgen.parallel.world import World


def check(jobs: Sequence[Job]) -> tuple[torch.device, Repository]:
    """Refuse what cannot work before anything heavy loads: media, GPU, ffmpeg, adapter, files, prompt length.

    Raises:
        SolgenError: one line.
    """
    World.from_environment().require_one()
    for job in jobs:
        request = job.request
        for path in filter(None, (request.image, request.last_image)):
            read_image(path)
        for reference in request.references:
            probe_media(reference.path, reference.kind)
    first = jobs[0].request
    if any((job.request.task, job.request.preset.model) != (first.task, first.preset.model) for job in jobs):
        raise InputError("the prompts of one command must share a task and a model; run them apart")
    device = pick_device(first.preset_name)
    check_ffmpeg()
    if first.preset.adapter is not None:
        raise InputError(
            f"preset {first.preset_name} needs the adapter {first.preset.adapter.repo}, and adapters cannot be loaded "
            "yet; use --preset base-5s or --preset demo"
        )
    repository = open_repository(first.preset.model, first.task)
    check_prompts(jobs, repository)
    return device, repository


def check_prompts(jobs: Sequence[Job], repository: Repository) -> None:
    """Refuse prompts that the conditioner cannot hold, before its weights are read.

    Raises:
        InputError: with the counted tokens and the limit.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(repository.folders["tokenizer"], local_files_only=True)
    limit = repository.prompt_limit()
    for job in jobs:
        count = len(tokenizer(job.request.prompt, add_special_tokens=False)["input_ids"])
        if count > limit:
            raise InputError(f"the prompt has {count:,} tokens; {repository.source} reads {limit:,}. Shorten it")
