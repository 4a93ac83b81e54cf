"""Presets: what a name such as `1080p15` stands for, as TOML files checked against one frozen schema.

Precedence (highest first): command line, config file, preset file, the defaults below.
"""

import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from solgen.errors import InputError
from solgen.presets.complaint import complaint, did_you_mean, refuse_unknown
from solgen.presets.values import Blocks, Epsilon, Floats, none_if_off, split_list

FRAMES_PER_CHUNK = 17
"""Pixel frames of one video VAE chunk; legal frame counts are 17 n + 5."""

LATENTS_PER_CHUNK = 5
"""Latent frames of one chunk, and the remainder of a legal frame count."""

FPS = 24
"""Frames per second of every clip."""

Task = Literal["t2va", "fl2va", "ref2va"]


class Table(BaseModel):
    """A table of a preset file: frozen, every number finite, and no key beyond its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Canvas(Table):
    """Size of the clip.

    Attributes:
        width: Pixels, a multiple of 32.
        height: Pixels, a multiple of 32.
        num_frames: Frames at 24 a second, 17 n + 5.
    """

    width: int = Field(1344, ge=32)
    height: int = Field(768, ge=32)
    num_frames: int = 124


class Model(Table):
    """Where the weights come from.

    Attributes:
        source: Folder or Hub repository in diffusers format, or "demo" for the embedded model.
        revision: Commit, tag or branch of a repository.
    """

    source: str = "MiniMaxAI/MiniMax-H3"
    revision: str | None = None


class Adapter(Table):
    """The distilled adapter whose contract (calls, positions, tasks) a preset follows.

    Attributes:
        repo: Hub repository, or a local folder.
        file: File inside it.
        revision: Commit.
        sha256: Digest of the file, full or its leading characters.
    """

    repo: str
    file: str
    revision: str | None = None
    sha256: str | None = None


class Lora(Table):
    """How adapters, the preset's own and those of `--lora`, are applied.

    Attributes:
        mode: "merge" adds them to the weights while these load; "branch" computes them beside the weights.
        alpha: Training alpha of every adapter, instead of what its file declares; the scale is alpha / rank.
        allow_unmatched: List tensors that fit no module and go on without them.
        ignore_contract: Let flags contradict what an adapter was distilled for.
    """

    mode: Literal["merge", "branch"] = "merge"
    alpha: Annotated[float | None, Field(gt=0), BeforeValidator(none_if_off)] = None
    allow_unmatched: bool = False
    ignore_contract: bool = False


class Sampler(Table):
    """Noise levels of the denoiser calls (architecture: Presets).

    Attributes:
        steps: Denoiser calls.
        positions: `steps + 1` levels before the shift, strictly decreasing to 0; None is uniform from 1.
        video_sigmas: Finished video levels used as they are, instead of `positions`.
        audio_sigmas: Finished audio levels, given with `video_sigmas`.
        video_shift: s of sigma' = s sigma / (1 + (s - 1) sigma) for video.
        audio_shift: The same for audio.
    """

    steps: int = Field(49, ge=1, le=1000)
    positions: Floats = None
    video_sigmas: Floats = None
    audio_sigmas: Floats = None
    video_shift: float = Field(12.0, gt=0)
    audio_shift: float = Field(3.0, gt=0)

    @model_validator(mode="after")
    def _levels(self) -> "Sampler":
        if (self.video_sigmas is None) != (self.audio_sigmas is None):
            raise ValueError("video_sigmas and audio_sigmas go together")
        if self.positions is not None and self.video_sigmas is not None:
            raise ValueError("give positions or finished sigmas, not both")
        for name in ("positions", "video_sigmas", "audio_sigmas"):
            levels = getattr(self, name)
            if levels is None:
                continue
            if len(levels) != self.steps + 1:
                raise PydanticCustomError(
                    "levels",
                    "{key} holds {found} levels; {steps} steps need {needed}",
                    {"key": name, "found": len(levels), "steps": self.steps, "needed": self.steps + 1},
                )
            if levels[-1] != 0.0 or any(b >= a for a, b in pairwise(levels)):
                raise ValueError(f"{name} must strictly decrease to 0")
            if levels[0] > 1.0:
                raise ValueError(f"{name} starts at {levels[0]}, above 1")
        return self


class Attention(Table):
    """How the denoiser's blocks attend.

    Attributes:
        backend: "sol-attn2"; for comparison "sol-attn1" (Sol-Attn 1.0), "block-sparse" (Sol-Attn2's route, no tail,
            16 bit), "fp8" (Sol-Attn2's kernel with every block kept); or "dense".
        impl: Implementation of the backend; "auto" takes the fastest that supports the machine.
        dense: Kernel of the dense blocks: FlashAttention 3, cuDNN's, PyTorch's choice, or "auto" for the fastest.
        epsilon: Share threshold of the router in nats.
        density: Solve epsilon for this share of kept block pairs with one calibration call, instead.
        top_k: Keep this fixed fraction of key blocks per query block, instead.
        tail: Form of the compressed tail.
        offset: ExpCast octaves of headroom.
        smooth_key: Subtract each head's mean key before quantising.
        smooth_value: Subtract each head's mean value before quantising.
        sink: Keep text and audio key blocks for every query block.
        tau: Threshold of Sol-Attn 1.0 in standard deviations above a row's mean block score.
        threshold: Its standard deviation from channel variances ("diag") or the full second moment ("exact").
        dense_blocks: Transformer blocks that stay dense, as "0-2,47-49".
        dense_steps: Leading denoiser calls that stay dense.
    """

    backend: Literal["sol-attn2", "sol-attn1", "block-sparse", "fp8", "dense"] = "sol-attn2"
    impl: Literal["auto", "reference", "triton", "gluon"] = "auto"
    dense: Literal["auto", "fa3", "cudnn", "sdpa"] = "auto"
    epsilon: Epsilon = 0.47
    density: Annotated[float | None, Field(gt=0, le=1), BeforeValidator(none_if_off)] = None
    top_k: Annotated[float | None, Field(gt=0, le=1), BeforeValidator(none_if_off)] = None
    tail: Literal["slots", "anchors", "none"] = "slots"
    offset: int = Field(7, ge=0, le=7)
    smooth_key: bool = True
    smooth_value: bool = True
    sink: bool = False
    tau: float = 1.0
    threshold: Literal["diag", "exact"] = "diag"
    dense_blocks: Blocks = "0-2,47-49"
    dense_steps: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _one_share(self) -> "Attention":
        if self.density is not None and self.top_k is not None:
            raise ValueError("density and top_k both set the share of kept blocks; give one, the other off")
        return self

    def is_dense_block(self, index: int) -> bool:
        """Whether transformer block `index` is listed in `dense_blocks`."""
        for part in filter(None, self.dense_blocks.split(",")):
            first, _, last = part.partition("-")
            if int(first) <= index <= int(last or first):
                return True
        return False


class Parallel(Table):
    """How the ranks of a run share its clips; no number of ranks changes what is asked for.

    Attributes:
        dp: Groups of ranks that take different prompts of a batch; the ranks of a group share each clip.
        wire: What ranks send around sparse attention: "bf16" tensors, or Sol-Attn2's "fp8" operands and an FP8 output.
        overlap: Send values while queries and keys are projected, normed and rotated; the same bits.
    """

    dp: int = Field(1, ge=1)
    wire: Literal["bf16", "fp8"] = "bf16"
    overlap: bool = False


class Memory(Table):
    """Where weights wait until they are used, and which of them stay.

    Attributes:
        offload: "none" frees the conditioner before the first denoiser call. "text-encoder" keeps it in host memory
            and passes its layers through the GPU while it encodes; "layers" the transformer's blocks too, in every
            call.
        tables: Replace the AdaLN projections, 13 of 33 billion parameters, by tables of what they return in the
            request's calls, bit for bit.
    """

    offload: Literal["none", "text-encoder", "layers"] = "none"
    tables: bool = True

    @model_validator(mode="after")
    def _streamed_blocks_have_tables(self) -> "Memory":
        if self.offload == "layers" and not self.tables:
            raise ValueError("offload=layers passes blocks through the GPU without their AdaLN projections; tables=on")
        return self


class Output(Table):
    """What is written.

    Attributes:
        crop: Rows kept of each frame, from the top (1088 -> 1080); "off" keeps all. Never resampled.
    """

    crop: Annotated[int | None, Field(gt=0), BeforeValidator(none_if_off)] = None


class Preset(Table):
    """One resolved preset.

    Attributes:
        tasks: Those its weights were made for.
        adapter: May be set "off".
        linear: "fp8" multiplies projections and feed-forward layers of the sparse blocks in FP8.
        fusion: Whether the ops between the matrix products of the blocks are fused kernels, "auto" wherever they run.
    """

    description: str = ""
    tasks: Annotated[tuple[Task, ...], BeforeValidator(split_list)] = ("t2va", "fl2va", "ref2va")
    canvas: Canvas = Canvas()
    model: Model = Model()
    adapter: Annotated[Adapter | None, BeforeValidator(none_if_off)] = None
    lora: Lora = Lora()
    linear: Literal["off", "fp8"] = "off"
    sampler: Sampler = Sampler()
    attention: Attention = Attention()
    fusion: Literal["auto", "on", "off"] = "auto"
    parallel: Parallel = Parallel()
    memory: Memory = Memory()
    output: Output = Output()


def preset_names() -> list[str]:
    """Names of the preset files, `demo` and `5s` first."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))
    return sorted(names, key=lambda name: (name != "demo", name.startswith(("base", "hyperflow")), len(name), name))


def read_table(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        InputError: if the file is missing, unreadable or not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not TOML: {error}") from error


def load_preset(name: str, *overrides: tuple[str, Mapping[str, Any]]) -> Preset:
    """Read preset `name` and lay tables of overrides over it, later ones winning.

    Args:
        name: A name from `preset_names()`.
        overrides: Pairs of (where the table comes from, nested table).

    Raises:
        InputError: for an unknown preset, an unknown key (the nearest one is named) or a bad value.
    """
    names = preset_names()
    if name not in names:
        raise InputError(
            f"unknown preset {name!r}{did_you_mean(name, names)}; solgen presets list shows {', '.join(names)}"
        )
    path = Path(__file__).parent / f"{name}.toml"
    layers = [(f"presets/{path.name}", read_table(path)), *overrides]
    merged: dict[str, Any] = {}
    for origin, table in layers:
        check_table(origin, table)
        merged = _overlay(merged, table)
    try:
        return Preset.model_validate(merged)
    except ValidationError as error:
        raise InputError(complaint(error, layers)) from error


def check_table(origin: str, table: Mapping[str, Any], *, others: Sequence[str] = ()) -> None:
    """Refuse keys that no preset has, and single values where tables belong.

    Args:
        origin: Where the table comes from.
        table: Nested preset table.
        others: Names beside those of a preset that a misspelt key may have meant.

    Raises:
        InputError: naming the key and the nearest one that exists.
    """
    refuse_unknown(origin, _SHAPE, table, others)
    for name in filter(_SHAPE.get, table):
        value = table[name]
        if not isinstance(value, Mapping) and none_if_off(value) is not Preset.model_fields[name].default:
            raise InputError(
                f"{origin}: {name}: expected a table, got {value!r}; set its keys, as {name}.{next(iter(_SHAPE[name]))}"
            )


def set_key(table: dict[str, Any], assignment: str) -> None:
    """Store `key=value` of `--set` in a nested table.

    Raises:
        InputError: if it is not of the form `table.key=value`.
    """
    key, equals, value = assignment.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise InputError(f"--set {assignment!r}: expected table.key=value, as attention.dense_blocks=0-2")
    for depth, part in enumerate(parts[:-1], 1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            outer = ".".join(parts[:depth])
            raise InputError(f"--set {assignment!r}: {outer} is set to {table!r} already; leave one of them out")
    table[parts[-1]] = value.strip()


def legal_frames(num_frames: int, *, shortest: int = 124, longest: int = 362) -> int:
    """The smallest legal frame count that holds `num_frames`, kept within the model's range.

    Legal counts are 17 n + 5 from 124 (5.17 s) to 362 (15.08 s).
    """
    aligned = num_frames + (LATENTS_PER_CHUNK - num_frames) % FRAMES_PER_CHUNK
    return min(max(aligned, shortest), longest)


def _overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _overlay(merged[key], value) if nested else value
    return merged


def _shape(model: type[BaseModel]) -> dict[str, Any]:
    """Keys of a table; those that hold a table have its shape, the others None."""
    shape: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        candidates = (field.annotation, *getattr(field.annotation, "__args__", ()))
        inner = next((c for c in candidates if isinstance(c, type) and issubclass(c, Table)), None)
        shape[name] = None if inner is None else _shape(inner)
    return shape


_SHAPE = _shape(Preset)
