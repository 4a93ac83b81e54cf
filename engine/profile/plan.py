"""The requests of a profile: the same one for every arm, a way of attending."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from solgen.engine.asked import Options, gather
from solgen.engine.batch import Job
from solgen.engine.request import settle
from solgen.errors import InputError

STOCK = "stock"
"""The arm that is diffusers' own call: its blocks as they come, cuDNN attention on a GPU."""

PROMPT = "A red ball bounces across a wooden floor."
"""What is profiled where nothing is asked for."""

TEXT_ROWS = 40
TEXT_ROWS_1080P = 38
"""Rows of a random prompt; 38 make 219,524 of a 15 s clip at 1080p."""


def plan_arms(options: Options, names: Sequence[str] | None, *, dummy: bool, text_rows: int | None) -> list[Job]:
    """One job for every arm.

    Args:
        options: The request, without its way of attending.
        names: Ways of attending; None for the preset's own.
        dummy: Whether weights and prompt are random.
        text_rows: Rows of the random prompt, None for as many as usual.

    Raises:
        InputError: one line.
    """
    if text_rows is not None and not dummy:
        raise InputError(f"--text-rows {text_rows} sizes a random prompt; it goes with --dummy-weights")
    if dummy and (options.model is not None or options.lora):
        given = "--lora" if options.lora else "--model"
        raise InputError(f"--dummy-weights stands for a model with its adapters; leave {given} out")
    if names and (twice := next((name for name in names if names.count(name) > 1), None)):
        raise InputError(f"--attention lists {twice!r} twice; list every way to attend once")
    jobs = []
    for name in names or (None,):
        backend = "dense" if name == STOCK else name
        asked = gather(dataclasses.replace(options, attention=backend))
        if asked.options.prompt is None:
            asked = dataclasses.replace(asked, options=dataclasses.replace(asked.options, prompt=PROMPT))
        request = settle(asked, seed=0)
        if dummy:
            usual = TEXT_ROWS_1080P if "1080p" in request.preset_name else TEXT_ROWS
            request = dataclasses.replace(request, text_rows=usual if text_rows is None else text_rows)
        jobs.append(Job(request, Path()))
    return jobs
