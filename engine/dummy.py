"""Random weights and a random prompt: the speed of a model without its files. Nothing is read, nothing downloaded.

A transformer is built without memory and filled where it will run. Matrices have variance 1 / fan in, so that
activations stay near 1 and the scores of normed queries and keys are unit normals.
"""

import inspect
import math
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from torch import nn

from solgen.engine.adaln import AdaLNTables, is_projection
from solgen.engine.adapters.known import find_known
from solgen.engine.adapters.source import preset_source
from solgen.engine.adapters.two_time import add_endpoint, use_two_times
from solgen.engine.pipeline import H3Pipeline, empty_pipeline
from solgen.engine.repository import Repository
from solgen.engine.request import Request
from solgen.errors import InputError, SetupError
from solgen.presets.demo import demo_transformer
from solgen.presets.schema import Task

GATE = 0.5
"""Share of the second time embedding of a two-time model."""

MODULATION = 0.02
"""Gain of the AdaLN projections: shifts and gates near 0, scales near 1."""


@dataclass(frozen=True, kw_only=True)
class DummyRepository(Repository):
    """Stands for a model without files.

    Attributes:
        config: Of the transformer; what it leaves out is the released model's.
        two_times: Whether its timesteps are (t, r) pairs.
        text_rows: Rows of the random prompt.
    """

    config: dict[str, Any]
    two_times: bool
    text_rows: int

    def num_blocks(self, task: Task) -> int:
        """Transformer blocks."""
        return self.size("num_layers")

    def num_heads(self, task: Task) -> int:
        """Attention heads."""
        return self.size("num_attention_heads")

    def size(self, key: str) -> int:
        """One number of the config."""
        return self.config.get(key, inspect.signature(MiniMaxH3Transformer3DModel).parameters[key].default)


class RandomWeights:
    """Makes a transformer and, for the building of AdaLN tables, any of its AdaLN projections once more.

    Every tensor is drawn from a generator seeded by its name: the same bits whenever and alone.

    Args:
        repository: Config of the transformer.
        device: Where tensors are drawn.
        dtype: Type outside the FP32 islands, `_keep_in_fp32_modules`.
    """

    def __init__(self, repository: DummyRepository, device: torch.device, dtype: torch.dtype) -> None:
        self._repository = repository
        self._device = device
        self._dtype = dtype

    @torch.no_grad()
    def transformer(self, *, projections: bool = True) -> MiniMaxH3Transformer3DModel:
        """A filled transformer; without `projections`, the AdaLN projections stay on the meta device."""
        model = self._empty()
        for name, module in model.named_modules():
            if projections or not is_projection(name):
                self._fill(module, name)
        model.rope = type(model.rope)(model.config.rope_freq_dim, model.config.rope_theta).to(self._device)
        if self._repository.two_times:
            use_two_times(model, GATE)
        return model.requires_grad_(False).eval()

    @torch.no_grad()
    def projection(self, name: str) -> nn.Linear:
        """One AdaLN projection by its name, such as "transformer_blocks.3.adaln_proj.linear"."""
        width = self._shapes[name]
        with torch.device("meta"):
            module = nn.Linear(*width)
        self._fill(module, name)
        return module.requires_grad_(False)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the filled transformer."""
        return sum(self._dtype_of(name).itemsize * value.numel() for name, value in self._empty().named_parameters())

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        modules = self._empty().named_modules()
        return {name: (module.in_features, module.out_features) for name, module in modules if is_projection(name)}

    def _empty(self) -> MiniMaxH3Transformer3DModel:
        with torch.device("meta"):
            model = MiniMaxH3Transformer3DModel(**self._repository.config)
            if self._repository.two_times:
                add_endpoint(model)
        return model

    def _dtype_of(self, name: str) -> torch.dtype:
        islands = MiniMaxH3Transformer3DModel._keep_in_fp32_modules
        return torch.float32 if any(island in name for island in islands) else self._dtype

    def _fill(self, module: nn.Module, prefix: str) -> None:
        """Draw the module's own parameters: matrices normal, biases 0, gains of norms 1."""
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = f"{prefix}.{name}"
            value = torch.empty(parameter.shape, dtype=self._dtype_of(full), device=self._device)
            if value.ndim > 1:
                gain = MODULATION if is_projection(prefix) else 1.0
                generator = torch.Generator(self._device).manual_seed(zlib.crc32(full.encode()))
                value.normal_(std=gain / math.sqrt(value[0].numel()), generator=generator)
            else:
                value.fill_(0.0 if name == "bias" else 1.0)
            setattr(module, name, nn.Parameter(value, requires_grad=False))


def open_dummy(request: Request) -> DummyRepository:
    """The model that a request for random weights runs: the released one's sizes, or the demo's.

    Raises:
        InputError: for media or adapters, which random weights cannot serve.
    """
    assert request.text_rows is not None
    if request.task != "t2va":
        raise InputError(f"--dummy-weights has no conditioner and no VAE to read media with; {request.task} needs them")
    if request.loras:
        raise InputError("--dummy-weights stands for a model with its adapters; leave --lora out")
    if request.preset.memory.offload != "none":
        raise InputError("--dummy-weights are made on the device and stay there; leave --offload out")
    if request.text_rows < 1:
        raise InputError(f"--text-rows {request.text_rows}; expected 1 or more")
    adapter = request.preset.adapter
    known = find_known(preset_source(adapter), None) if adapter else None
    demo = request.preset.model.source == "demo"
    return DummyRepository(
        path=Path(),
        source="random weights",
        folders={},
        digests={},
        config=demo_transformer() if demo else {},
        two_times=known is not None and known.two_times,
        text_rows=request.text_rows,
    )


def check_memory(weights: RandomWeights, device: torch.device) -> None:
    """Refuse a GPU that the weights alone fill.

    Raises:
        SetupError: with both sizes.
    """
    if device.type != "cuda":
        return
    memory = torch.cuda.get_device_properties(device).total_memory
    if weights.num_bytes > memory:
        raise SetupError(
            f"random weights of this model take {weights.num_bytes / 2**30:.0f} GiB, "
            f"{torch.cuda.get_device_name(device)} has {memory / 2**30:.0f}; use a larger GPU or --preset demo"
        )


def dummy_pipeline(weights: RandomWeights, *, tables: bool) -> H3Pipeline:
    """The t2va pipeline with a random transformer and nothing else that has weights.

    With `tables` its AdaLN projections are tables, to be prepared for the schedule.
    """
    pipeline = empty_pipeline("t2va", None)
    transformer = weights.transformer(projections=not tables)
    if tables:
        pipeline.tables = AdaLNTables(transformer, lambda names: map(weights.projection, names))
    pipeline.update_components(
        transformer=transformer, scheduler=MiniMaxH3Scheduler(), audio_scheduler=MiniMaxH3Scheduler()
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def embed_random_prompt(pipeline: H3Pipeline, repository: DummyRepository, state: PipelineState) -> None:
    """Put what the conditioner would return into the state: unit normals [1, text_rows, text_dim]."""
    rows, width = repository.text_rows, repository.size("text_dim")
    embedder = pipeline.transformer.context_embedder.weight
    embeds = torch.randn(1, rows, width, generator=torch.Generator().manual_seed(rows))
    state.set("prompt_embeds", embeds.to(embedder.device, embedder.dtype))
    state.set("text_token_tags", torch.full((rows,), pipeline.text_tag, dtype=torch.long))
