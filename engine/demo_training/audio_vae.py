"""The audio autoencoder: its loss on short pieces, and the log-spectral distance."""

import math

import torch
from diffusers import AutoencoderKLMiniMaxH3Audio
from torch import Tensor

from solgen.engine.demo_training.shapes import LOG_STD
from solgen.engine.demo_training.sound import HOP

WINDOWS = (256, 1024, 2048)
"""Samples of the windows in which spectra are compared."""

MEAN_PENALTY = 1e-3


def audio_loss(vae: AutoencoderKLMiniMaxH3Audio, sound: Tensor, generator: torch.Generator) -> Tensor:
    """Error of the waveform and of its spectra through the noisy latents, and the mean's penalty.

    Args:
        vae: In training.
        sound: [B, 1, samples], samples a multiple of 800.
        generator: Of the posterior's noise.
    """
    mean = vae.encode(sound, return_dict=False)[0].mean
    noise = torch.randn(mean.shape, generator=generator, device=mean.device)
    decoded = vae.decode(mean + math.exp(LOG_STD) * noise, return_dict=False)[0]
    spectral = sum((magnitude(decoded, window) - magnitude(sound, window)).abs().mean() for window in WINDOWS) / len(
        WINDOWS
    )
    wave = (decoded - sound).square().mean() / 0.01
    return wave + spectral + MEAN_PENALTY * mean.square().mean()


def magnitude(sound: Tensor, window: int) -> Tensor:
    """Compressed magnitudes of the spectrogram, [B, window / 2 + 1, frames], from [B, 1, samples]."""
    taper = torch.hann_window(window, device=sound.device)
    spectrum = torch.stft(sound[:, 0], window, window // 4, window=taper, center=False, return_complex=True)
    power = spectrum.real.square() + spectrum.imag.square()
    return (power / window + 1e-6).sqrt().sqrt()


def random_pieces(sound: Tensor, count: int, latents: int, generator: torch.Generator) -> Tensor:
    """Draw pieces that begin on a latent, [count, 1, latents * 800], from mono clips [P, samples]."""
    device, (clips, samples) = sound.device, sound.shape
    chosen = torch.randint(clips, (count, 1), generator=generator, device=device)
    start = torch.randint(samples // HOP - latents + 1, (count, 1), generator=generator, device=device) * HOP
    return sound[chosen, start + torch.arange(latents * HOP, device=device)][:, None]


def log_spectral_distance(first: Tensor, second: Tensor, window: int = 1024) -> Tensor:
    """Root mean square difference of log power spectra in decibels over bins above -80 dB, [B]; inputs [B, 1, S]."""
    powers = [magnitude(sound, window).pow(4) for sound in (first, second)]
    floor = 1e-8 * window
    a, b = (10 * (power + floor).log10() for power in powers)
    return (a - b).square().mean((1, 2)).sqrt()
