"""The `processor` component of MiniMax-H3's blocks, without torchvision.

transformers' own Qwen3VLProcessor cannot even be built for text where torchvision is missing. The blocks ask
little of it: types of tokens, patches of pictures, patches of clips.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from solgen.engine.components import first_line
from solgen.engine.json_file import read_object
from solgen.errors import InputError, SolgenError

BICUBIC = 3
"""Pillow's number for the only filter that Qwen3-VL's video processor is released with."""

IMAGE_TOKEN, VIDEO_TOKEN = "<|image_pad|>", "<|video_pad|>"
"""Tokens that stand for a patch of a picture or of a clip."""


class H3Processor:
    """Tokenizer, image processor and video processor of the conditioner, under the names that diffusers uses.

    Attributes:
        tokenizer: The conditioner's tokenizer.
        image_processor: transformers' own, in its Pillow version.
        video_processor: H3VideoProcessor.
    """

    def __init__(self, tokenizer: Any, image_processor: Any, video_processor: H3VideoProcessor) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.video_processor = video_processor
        ids = tokenizer.convert_tokens_to_ids
        self._types = {ids(IMAGE_TOKEN): 1, ids(VIDEO_TOKEN): 2}

    @classmethod
    def from_folders(cls, folder: Path, tokenizer_folder: Path) -> H3Processor:
        """Read the processor of a model on disk, and its tokenizer from where it lies.

        Args:
            folder: The processor's own folder.
            tokenizer_folder: The tokenizer's, read if there is none in `folder`.

        Raises:
            InputError: a file is missing or does not describe a processor like Qwen3-VL's.
        """
        from transformers import Qwen2VLImageProcessorPil

        image = _config(folder, "image_processor", "preprocessor_config.json")
        video = _config(folder, "video_processor", "video_preprocessor_config.json")
        tokenizer = read_tokenizer(folder if any(folder.glob("tokenizer*")) else tokenizer_folder)
        try:
            image_processor = Qwen2VLImageProcessorPil.from_dict(image)
            video_processor = H3VideoProcessor.from_config(video)
            # A black picture and clip show whether every setting can be used.
            image_processor(images=[Image.new("RGB", (64, 64))], return_tensors="pt")
            video_processor(videos=[np.zeros((2, 64, 64, 3), np.uint8)])
        except SolgenError:
            raise
        except Exception as error:
            raise InputError(
                f"{folder} does not describe Qwen3-VL's processor ({first_line(error)}); download it again"
            ) from error
        return cls(tokenizer, image_processor, video_processor)

    def create_mm_token_type_ids(self, input_ids: list[list[int]]) -> list[list[int]]:
        """What every token stands for: 0 text, 1 a patch of a picture, 2 a patch of a clip."""
        return [[self._types.get(token, 0) for token in tokens] for tokens in input_ids]


@dataclass(frozen=True)
class H3VideoProcessor:
    """Clips as the patches that Qwen3-VL's vision tower reads; equal to transformers' Qwen3VLVideoProcessor.

    Sizes are in pixels. `size` bounds the pixels of a whole clip, all its frames together.
    """

    size: dict[str, int] = field(
        default_factory=lambda: {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
    )
    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255
    resample: int = BICUBIC
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    cap_pixels_per_frame: bool | None = None
    max_video_tokens: int = 768

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> H3VideoProcessor:
        """From a `video_preprocessor_config.json`; what else it says plays no part in making patches."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in config.items() if name in known})

    def __post_init__(self) -> None:
        if self.resample != BICUBIC or not self.do_rescale or not self.do_normalize:
            raise InputError(
                "the video processor must resize bicubically, rescale and normalise, got "
                f"resample={self.resample}, do_rescale={self.do_rescale}, do_normalize={self.do_normalize}; "
                "use the model's own video_preprocessor_config.json"
            )

    def __call__(
        self, videos: list[np.ndarray], *, do_sample_frames: bool = False, return_tensors: str = "pt"
    ) -> dict[str, Tensor]:
        """Patches of all clips in one tensor, clip after clip.

        Args:
            videos: Frames uint8 [F, H, W, 3] of every clip, at the conditioner's two frames per second.
            do_sample_frames: Must be off: the blocks sample the frames and label them with their times.
            return_tensors: Must be "pt".

        Returns:
            `pixel_values_videos` float32 [patches, 3 * temporal_patch_size * patch_size ** 2] and
            `video_grid_thw` int64 [clips, 3], patches along time, height and width.
        """
        if do_sample_frames or return_tensors != "pt":
            raise ValueError("expected do_sample_frames=False and return_tensors='pt'")
        patches, grids = zip(*(self._patches(torch.from_numpy(video)) for video in videos), strict=True)
        return {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}

    def _patches(self, frames: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """[F, H, W, 3] uint8 to patches [T * H' * W', values] and (T, H', W')."""
        pixels = frames.permute(0, 3, 1, 2).contiguous()
        if self.do_resize:
            size = self.resized(*pixels.shape[:1], *pixels.shape[2:])
            if size != tuple(pixels.shape[2:]):
                pixels = functional.interpolate(pixels, size, mode="bicubic", antialias=True)
        # Mean and deviation are scaled up once in place of all pixels down, in float32 as the original does.
        mean = (torch.tensor(self.image_mean) * (1.0 / self.rescale_factor)).view(-1, 1, 1)
        std = (torch.tensor(self.image_std) * (1.0 / self.rescale_factor)).view(-1, 1, 1)
        values = (pixels.float() - mean) / std
        if missing := -len(values) % self.temporal_patch_size:
            values = torch.cat([values, values[-1:].expand(missing, -1, -1, -1)])

        time, merge, patch = self.temporal_patch_size, self.merge_size, self.patch_size
        grid = (len(values) // time, values.shape[2] // patch, values.shape[3] // patch)
        values = values.view(grid[0], time, 3, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch)
        # Patches that will be merged lie next to each other: [T, H'/m, W'/m, m, m, channel, time, p, p].
        return values.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(math.prod(grid), -1), grid

    def resized(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """The (height, width) nearest to a clip's shape: whole merged patches, pixels within `size`."""
        factor = self.patch_size * self.merge_size
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        most, least = self.size["longest_edge"], self.size["shortest_edge"]
        if self.cap_pixels_per_frame:
            per_frame = min(self.max_video_tokens * factor**2, most // num_frames)
            most = max(per_frame, int(least * 1.05)) * num_frames
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        pixels = round(num_frames / self.temporal_patch_size) * self.temporal_patch_size * new_height * new_width
        if pixels > most:
            shrink = math.sqrt(num_frames * height * width / most)
            new_height = max(factor, math.floor(height / shrink / factor) * factor)
            new_width = max(factor, math.floor(width / shrink / factor) * factor)
        elif pixels < least:
            grow = math.sqrt(least / (num_frames * height * width))
            new_height = math.ceil(height * grow / factor) * factor
            new_width = math.ceil(width * grow / factor) * factor
        return new_height, new_width


def read_tokenizer(folder: Path) -> Any:
    """The conditioner's tokenizer, with the tokens that stand for pictures and clips.

    Raises:
        InputError: its files are missing or broken.
    """
    from transformers import AutoTokenizer

    if not any(folder.glob("tokenizer*")):
        raise InputError(f"no tokenizer in {folder}; download the model again")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise InputError(f"{folder} holds no readable tokenizer ({first_line(error)}); download it again") from error
    for token in (IMAGE_TOKEN, VIDEO_TOKEN):
        if tokenizer.convert_tokens_to_ids(token) in (None, tokenizer.unk_token_id):
            raise InputError(f"the tokenizer in {folder} does not know {token}; use the model's own tokenizer")
    return tokenizer


def _config(folder: Path, section: str, file_name: str) -> dict[str, Any]:
    """Settings of one part: newer transformers save them together, older ones in a file each."""
    together, alone = folder / "processor_config.json", folder / file_name
    settings = read_object(together).get(section) if together.is_file() else None
    if settings is None and alone.is_file():
        settings = read_object(alone)
    if not isinstance(settings, dict):
        raise InputError(f"no {alone.name} in {folder}, and no {section} in {together.name}; download the model again")
    return settings
