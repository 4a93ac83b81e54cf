"""The video autoencoder: its loss on windows of 22 frames, and the encoding of whole clips."""

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLMiniMaxH3
from torch import Tensor

from solgen.engine.demo_training.render import render
from solgen.engine.demo_training.shapes import LOG_STD
from solgen.engine.demo_training.tracks import Canvas, Tracks

CHUNK, OVERLAP = 17, 5
"""Frames that the encoder sees at a time, and those of the next chunk that the decoder sees with them."""

WINDOW = CHUNK + OVERLAP
"""Shortest clip that is encoded and decoded as part of a longer one is."""

PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

MEAN_PENALTY = 1e-3
"""Weight of the squared latent mean: keeps the posterior's noise from shrinking beside it."""


def normalise(pixels: Tensor) -> Tensor:
    """RGB in [0, 1], [B, 3, F, H, W], in the autoencoder's pixel convention."""
    mean, std = (pixels.new_tensor(values).view(-1, 1, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    return (pixels - mean) / std


def denormalise(pixels: Tensor) -> Tensor:
    """The inverse of `normalise`, clamped to [0, 1]."""
    mean, std = (pixels.new_tensor(values).view(-1, 1, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    return (pixels * std + mean).clamp(0, 1)


def encode_means(vae: AutoencoderKLMiniMaxH3, pixels: Tensor) -> Tensor:
    """Posterior means of 17 n + 5 frames, or of 1, the numbers of `vae.encode` without its padding to whole chunks.

    The encoder is causal, so the two latents that remain of the last chunk need its first five frames only. Chunks
    are independent and go through as a batch.

    Args:
        vae: Cuts canvases of more than 256 pixels into tiles.
        pixels: Normalised, [B, 3, F, H, W].

    Returns:
        [B, 24, 5 n + 2, H / 16, W / 16].
    """
    batch, _, frames = pixels.shape[:3]
    channels = vae.config.latent_channels
    if frames == 1:
        return vae._encode_clip(pixels)[:, :channels]
    whole = (frames - OVERLAP) // CHUNK
    chunks = pixels[:, :, : whole * CHUNK].unflatten(2, (whole, CHUNK)).transpose(1, 2).flatten(0, 1)
    first = vae._encode_clip(chunks).unflatten(0, (batch, whole)).transpose(1, 2).flatten(2, 3)
    last = vae._encode_clip(pixels[:, :, whole * CHUNK :])
    return torch.cat([first, last], 2)[:, :channels]


def reconstruction_loss(vae: AutoencoderKLMiniMaxH3, pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Squared and absolute error of windows of 22 frames through the noisy latents, and the mean's penalty.

    Args:
        vae: In training.
        pixels: RGB in [0, 1], [B, 3, 22, H, W] with sides of at most 256.
        generator: Of the posterior's noise.
    """
    target = normalise(pixels)
    mean = encode_means(vae, target).float()
    noise = torch.randn(mean.shape, generator=generator, device=mean.device)
    latents = mean + torch.tensor(LOG_STD).exp() * noise
    decoded = vae.decoder(vae.post_quant_conv(latents)).float()
    padding = vae.frame_pre_padding
    first, rest = decoded[:, :, padding : padding + CHUNK], decoded[:, :, -OVERLAP:]
    error = torch.cat([first, rest], 2) - target
    return error.square().mean() + 0.2 * error.abs().mean() + MEAN_PENALTY * mean.square().mean()


def random_windows(tracks: Tracks, canvas: Canvas, count: int, generator: torch.Generator, zoom: int = 1) -> Tensor:
    """Draw windows of 22 frames from the clips of a pool.

    Args:
        tracks: The pool's.
        canvas: Of the clips.
        count: Windows.
        generator: Decides clips, frames and crops.
        zoom: Divides height and width; a crop lies around an object, where there is something to learn.

    Returns:
        RGB in [0, 1], [count, 3, 22, H / zoom, W / zoom].
    """
    device, (clips, frames) = generator.device, tracks.radius.shape[:2]
    chosen = torch.randint(clips, (count,), generator=generator, device=device)
    start = torch.randint(frames - WINDOW + 1, (count, 1), generator=generator, device=device)
    window = tracks.take(chosen, start + torch.arange(WINDOW, device=device))
    if zoom == 1:
        return render(window, canvas)
    shift = 0.3 * (torch.rand((count, 2), generator=generator, device=device) - 0.5)
    reach = 0.5 - 0.5 / zoom
    middle = (window.centre[:, WINDOW // 2, 0] + shift).clamp(-reach, reach)
    return render(window.zoom(middle, zoom), Canvas(canvas.height // zoom, canvas.width // zoom, WINDOW))


def decoded_psnr(vae: AutoencoderKLMiniMaxH3, pixels: Tensor, latents: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of every clip in decibels, [B], from raw latents [B, 24, t, h, w]."""
    decoded = denormalise(vae.decode(latents, return_dict=False)[0].float())
    return -10 * (decoded - pixels).square().flatten(1).mean(1).log10()


def mse_psnr(first: Tensor, second: Tensor) -> float:
    """Peak signal-to-noise ratio of two pictures in [0, 1], in decibels."""
    return float(-10 * F.mse_loss(first, second).clamp_min(1e-10).log10())
