"""What published adapter files leave unsaid: alpha, positions, shifts and tasks, from their model cards."""

import re
from dataclasses import dataclass

from solgen.engine.adapters.header import Header
from solgen.engine.adapters.source import Source
from solgen.presets.schema import Task


@dataclass(frozen=True)
class Known:
    """One published file, or several with the same terms.

    Attributes:
        title: What to call it.
        file: Pattern of the file's name, for files known by name.
        repo: Hub repository, for files known by place.
        metadata: Entries that the header must have, as patterns; with them alone a renamed copy is known too.
        alpha: Training alpha, at `rank`.
        rank: Rank of every pair; a file with another one is not this file.
        steps: Denoiser calls.
        positions: Noise levels before the shift; None is uniform.
        video_shift: Shift of the video schedule.
        audio_shift: Shift of the audio schedule.
        tasks: What it was distilled for.
        two_times: Whether its timesteps are (t, r) pairs.
    """

    title: str
    tasks: tuple[Task, ...]
    steps: int
    file: str = ""
    repo: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    alpha: float | None = None
    rank: int | None = None
    positions: tuple[float, ...] | None = None
    video_shift: float = 12.0
    audio_shift: float = 3.0
    two_times: bool = False


FASTH3_POSITIONS = (0.999, 0.749, 0.5, 0.25, 0.0)
HYPERFLOW_POSITIONS = (1.0, 0.931506, 0.839236, 0.703462, 0.5, 0.296538, 0.160764, 0.068494, 0.0)


def _turbo(task: str, steps: int, version: str, alpha: float, video_shift: float, size: str = "") -> Known:
    """A row of lightx2v's table; `_comfyui` files hold the same weights, fused."""
    return Known(
        title=f"lightx2v Turbo {task} {steps}-step v{version}{size.replace('_', ' ')}",
        file=rf"minimax_h3_{task}(_lightx2v)?_turbo_{steps}step_v{re.escape(version)}{size}(_comfy(ui)?)?(_bf16)?\.safetensors",
        tasks=("ref2va",) if task == "ref2v" else ("t2va", "fl2va"),
        steps=steps,
        alpha=alpha,
        rank=128,
        video_shift=video_shift,
    )


KNOWN = (
    Known(
        title="FastH3 4-step",
        repo="FastVideo/FastVideo-FastH3-4-step-Preview-v1-LoRA",
        metadata=(("format", "fastvideo-lora-v2"), ("finetuned_model", r"(?i)fastvideo/.*fasth3.*4-step.*")),
        tasks=("t2va",),
        steps=4,
        positions=FASTH3_POSITIONS,
    ),
    Known(
        title="HyperFlow 8-step",
        repo="videorebirth/hyperflow",
        metadata=(("hyperflow", "true"), ("hyperflow_version", r"v?1\..*")),
        tasks=("t2va", "fl2va", "ref2va"),
        steps=8,
        positions=HYPERFLOW_POSITIONS,
        two_times=True,
    ),
    _turbo("fl2v", 4, "0.1", 8, 12),
    _turbo("fl2v", 4, "1.0", 128, 6, "_768p"),
    _turbo("fl2v", 4, "1.1", 128, 6, "_768p"),
    _turbo("fl2v", 4, "1.2", 8, 6, "_768p"),
    _turbo("fl2v", 8, "1.0", 8, 12),
    _turbo("fl2v", 8, "1.0", 8, 6, "_768p"),
    _turbo("ref2v", 4, "0.1", 8, 12),
    _turbo("ref2v", 8, "1.0", 8, 6, "_768p"),
)


def find_known(source: Source, header: Header | None) -> Known | None:
    """The table's row for a file, by its place on the Hub, its metadata, or its name and rank.

    Args:
        source: Where it comes from.
        header: None while it has not been read; a name alone then has to do.
    """
    for known in KNOWN:
        if header is None or not known.metadata:
            named = (known.repo and source.repo == known.repo) or (
                known.file and re.fullmatch(known.file, source.file_name)
            )
            if named and (header is None or known.rank is None or _has_rank(header, known.rank)):
                return known
        elif all(re.fullmatch(pattern, header.metadata.get(key, "")) for key, pattern in known.metadata):
            return known
    return None


def _has_rank(header: Header, rank: int) -> bool:
    """Whether all pairs have this rank, or three times it where q, k and v were fused block-diagonally."""
    ranks = {shape[0] for name, shape in header.shapes.items() if shape and re.search(r"\.lora_(A|down)\b", name)}
    return bool(ranks) and ranks <= {rank, 3 * rank}
