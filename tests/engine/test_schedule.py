"""Noise levels: N steps are N calls, the last level is 0, diffusers' own numbers."""

import pytest
import torch
from diffusers import MiniMaxH3Scheduler

from solgen.engine.schedule import sigma_schedules
from solgen.errors import InputError
from solgen.presets.schema import Sampler, load_preset, preset_names


@pytest.mark.parametrize("steps", [1, 4, 8, 49])
def test_steps_count_calls_and_match_diffusers(steps: int) -> None:
    for sigmas, shift in zip(sigma_schedules(Sampler(steps=steps)), (12.0, 3.0), strict=True):
        stock = MiniMaxH3Scheduler(shift)
        stock.set_timesteps(steps + 1)
        assert torch.equal(sigmas, stock.sigmas)
        assert (len(sigmas), sigmas[0].item(), sigmas[-1].item()) == (steps + 1, 1.0, 0.0)


def test_adapter_positions_are_shifted_per_modality() -> None:
    """The published levels of FastH3 and HyperFlow."""
    video, audio = sigma_schedules(load_preset("5s").sampler)
    assert video.tolist() == pytest.approx([0.999917, 0.972833, 0.923077, 0.8, 0.0], abs=1e-6)
    assert audio[:-1].tolist() == pytest.approx([3 * x / (1 + 2 * x) for x in (0.999, 0.749, 0.5, 0.25)], abs=1e-6)
    video, _ = sigma_schedules(load_preset("hyperflow-12s").sampler)
    published = [
        1.0,
        0.9939097854,
        0.9842874953,
        0.9660637197,
        0.9230769231,
        0.8349423898,
        0.6968520491,
        0.4687533149,
        0.0,
    ]
    assert video.tolist() == pytest.approx(published, abs=2e-6)


def test_finished_sigmas_are_used_as_they_are() -> None:
    sampler = Sampler(steps=2, video_sigmas=(0.9, 0.3, 0.0), audio_sigmas=(0.8, 0.2, 0.0))
    video, audio = sigma_schedules(sampler)
    assert torch.equal(video, torch.tensor([0.9, 0.3, 0.0]))
    assert torch.equal(audio, torch.tensor([0.8, 0.2, 0.0]))


def test_levels_that_float32_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(InputError, match="use fewer steps"):
        sigma_schedules(Sampler(steps=1000, video_shift=1e6))


def test_every_preset_has_a_schedule() -> None:
    for name in preset_names():
        sampler = load_preset(name).sampler
        for sigmas in sigma_schedules(sampler):
            assert len(sigmas) == sampler.steps + 1
