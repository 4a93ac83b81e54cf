"""From latents to frames and sound, and the file that keeps latents when that fails."""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from solgen.engine.pipeline import H3Pipeline
from solgen.engine.tiles import decoded_stretches
from solgen.errors import InputError
from solgen.parallel.mesh import Mesh
from solgen.presets.schema import FPS, FRAMES_PER_CHUNK, LATENTS_PER_CHUNK, Canvas


@dataclass(frozen=True)
class Latents:
    """What the denoiser leaves.

    Attributes:
        video: [1, 24, latent frames, height / 16, width / 16] float32.
        audio: [2, 32, audio latents] float32, one row a stereo channel.
    """

    video: torch.Tensor
    audio: torch.Tensor

    def keep(self, output: Path, record: dict[str, Any]) -> Path:
        """Save beside an output that could not be written, or in the temporary folder where that fails too.

        Returns:
            The file: `<output>.latents.safetensors` or the next free number.
        """
        try:
            return self._save(output.parent, output.stem, record)
        except Exception:  # the disk that refused the clip may well refuse its latents
            return self._save(Path(tempfile.gettempdir()), output.stem, record)

    def _save(self, folder: Path, stem: str, record: dict[str, Any]) -> Path:
        """Write under a temporary name and rename; `record` goes into the header."""
        from safetensors.torch import save_file

        path, number = folder / f"{stem}.latents.safetensors", 2
        while os.path.lexists(path):
            path, number = folder / f"{stem}.latents-{number}.safetensors", number + 1
        temporary = folder / f".solgen-{os.getpid()}.safetensors"
        tensors = {"video": self.video.cpu().contiguous(), "audio": self.audio.cpu().contiguous()}
        try:
            save_file(tensors, temporary, metadata={"solgen": json.dumps(record)})
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    def check_shape(self, path: Path, canvas: Canvas) -> None:
        """Refuse latents that are not those of a canvas.

        Raises:
            InputError: naming the file.
        """
        chunks = (canvas.num_frames - LATENTS_PER_CHUNK) // FRAMES_PER_CHUNK
        video = (1, 24, LATENTS_PER_CHUNK * chunks + 2, canvas.height // 16, canvas.width // 16)
        audio = (2, 32, round(canvas.num_frames / FPS * 40))
        found = tuple(self.video.shape), tuple(self.audio.shape)
        if found != (video, audio):
            raise InputError(f"{path} holds latents {found}, its record promises {(video, audio)}; it is damaged")

    @classmethod
    def load(cls, path: Path) -> "tuple[Latents, dict[str, Any]]":
        """Read what `keep` wrote.

        Raises:
            InputError: if the file is not one of those.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                metadata = json.loads((file.metadata() or {})["solgen"])
                return cls(file.get_tensor("video"), file.get_tensor("audio")), metadata
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(f"{path} is not a latents file of solgen: {problem}") from error


@torch.no_grad()
def decode_video(pipeline: H3Pipeline, latents: torch.Tensor, mesh: Mesh | None = None) -> list[np.ndarray]:
    """Decode the picture; only a stretch of 17 frames a rank is ever there as floating point numbers.

    Args:
        pipeline: Holds the video VAE, and knows the pixel statistics.
        latents: [1, 24, t, h, w] float32, the same on every rank.
        mesh: Ranks that share the work; all of them take part.

    Returns:
        Consecutive uint8 frames [f, height, width, 3] in host memory, on the leader.
    """
    vae = pipeline.vae
    mean = torch.tensor(pipeline.pixel_mean, device=vae.device).view(-1, 1, 1, 1)
    std = torch.tensor(pipeline.pixel_std, device=vae.device).view(-1, 1, 1, 1)
    frames = []
    for pixels in decoded_stretches(vae, _denormalised(vae, latents.to(vae.device)), mesh=mesh):
        image = (pixels[0].float() * std + mean).clamp(0, 1).mul(255).round().to(torch.uint8)
        frames.append(image.permute(1, 2, 3, 0).contiguous().cpu().numpy())
    return frames


@torch.no_grad()
def decode_audio(pipeline: H3Pipeline, latents: torch.Tensor) -> np.ndarray:
    """Decode the sound.

    Args:
        pipeline: Holds the audio VAE, which is mono: the stereo channels are its batch.
        latents: [2, 32, t] float32.

    Returns:
        float32 samples [2, S] at the pipeline's `audio_sampling_rate`.
    """
    vae = pipeline.audio_vae
    audio = vae.decode(_denormalised(vae, latents.to(vae.device)), return_dict=False)[0]
    return audio.float()[:, 0].cpu().numpy()


def _denormalised(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    shape = (1, -1, *(1 for _ in latents.shape[2:]))
    std = torch.tensor(vae.config.latents_std, device=latents.device).view(shape)
    mean = torch.tensor(vae.config.latents_mean, device=latents.device).view(shape)
    return latents * std + mean
