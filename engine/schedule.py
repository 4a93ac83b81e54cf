"""Noise levels of the denoiser calls. `steps` always counts calls; the last level is 0."""

import torch

from solgen.errors import InputError
from solgen.presets.schema import Sampler


def sigma_schedules(sampler: Sampler) -> tuple[torch.Tensor, torch.Tensor]:
    """Video and audio sigma levels, computed in float32 as diffusers' `MiniMaxH3Scheduler` does.

    Args:
        sampler: Finished sigmas are returned as they are; positions (uniform from 1 to 0 when not given) are
            shifted per modality by sigma' = s sigma / (1 + (s - 1) sigma).

    Returns:
        Two tensors of `steps + 1` strictly decreasing float32 levels ending at 0.

    Raises:
        InputError: if a level is no number, or float32 cannot tell neighbouring levels apart after the shift.
    """
    video, audio = _levels(sampler)
    _check("video", video, sampler.video_shift)
    _check("audio", audio, sampler.audio_shift)
    return video, audio


def _levels(sampler: Sampler) -> tuple[torch.Tensor, torch.Tensor]:
    if sampler.video_sigmas is not None and sampler.audio_sigmas is not None:
        return torch.tensor(sampler.video_sigmas), torch.tensor(sampler.audio_sigmas)
    if sampler.positions is None:
        base = torch.linspace(1.0, 0.0, sampler.steps + 1, dtype=torch.float32)
    else:
        base = torch.tensor(sampler.positions, dtype=torch.float32)
    return _shifted(base, sampler.video_shift), _shifted(base, sampler.audio_shift)


def _shifted(base: torch.Tensor, shift: float) -> torch.Tensor:
    return shift * base / (1 + (shift - 1) * base)


def _check(name: str, sigmas: torch.Tensor, shift: float) -> None:
    steps = sigmas.numel() - 1
    if not bool(sigmas.isfinite().all()):
        raise InputError(
            f"the {name} levels of the {steps} steps are not all finite numbers (sampler.{name}_shift {shift:g}); "
            "give finite levels and a shift such as 12"
        )
    if not bool((sigmas[1:] < sigmas[:-1]).all()):
        raise InputError(
            f"the {name} levels of {steps} steps are too close for float32 (sampler.{name}_shift {shift:g} merges "
            "neighbours); use fewer steps or a smaller shift"
        )
