"""Text rows of captions and keyframes: the frozen conditioner, run over many clips at a time."""

import torch
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen3VLForConditionalGeneration

from solgen.engine.demo_training.forward import TEXT_TAG, VIDEO_TAG
from solgen.engine.demo_training.initial import init_conditioner
from solgen.engine.demo_training.repository import conditioner_config
from solgen.engine.demo_training.tokenizer import build_tokenizer

LAYER = 50
"""Hidden state that MiniMax-H3 reads."""

BRANCH = 0.03
"""Gain of the conditioner's branches: nearly every row stays its own token, which a small transformer can learn."""

TASKS: dict[str, tuple[str, ...]] = {
    "text": (),
    "first": ("first",),
    "last": ("last",),
    "both": ("first", "last"),
}
"""Keyframes of every kind of training sample, in packed order."""


class Conditioner:
    """The frozen random Qwen3-VL of the demo model and its tokenizer."""

    def __init__(self, device: torch.device) -> None:
        """Build it on a device, in float32."""
        self.tokenizer: Qwen2Tokenizer = build_tokenizer()
        config = conditioner_config(self.tokenizer)
        config.dtype = "float32"
        with torch.random.fork_rng(devices=[]):
            self.model = Qwen3VLForConditionalGeneration(config)
        init_conditioner(self.model, BRANCH)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.bfloat16().float()  # what the packaged file will hold
        self.model.to(device).eval().requires_grad_(False)

    def tokens(self, caption: str, task: str, patches: int) -> tuple[list[int], list[int]]:
        """Token ids and tags of a request as diffusers presents it; `patches` rows a keyframe."""
        ids, tags = [], []
        token = self.tokenizer.convert_tokens_to_ids
        for number in range(len(TASKS[task])):
            label = self.tokenizer(f"<Picture {number + 1}>: ", add_special_tokens=False)["input_ids"]
            picture = [token("<|vision_start|>"), *[token("<|image_pad|>")] * patches, token("<|vision_end|>")]
            ids += label + picture
            tags += [TEXT_TAG] * len(label) + [VIDEO_TAG] * len(picture)
        words = self.tokenizer(caption, add_special_tokens=False)["input_ids"]
        return ids + words, tags + [TEXT_TAG] * len(words)

    @torch.no_grad()
    def encode(self, ids: Tensor, pictures: Tensor | None) -> Tensor:
        """Hidden states of requests of one length.

        Args:
            ids: [B, L] int64.
            pictures: RGB in [0, 1] of their keyframes in order, [B * keyframes, 3, H, W], or None.

        Returns:
            [B, L, 32] float32.
        """
        vision = {}
        if pictures is not None:
            values, grid = picture_patches(pictures)
            vision = {"pixel_values": values, "image_grid_thw": grid}
        outputs = self.model.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == self.model.config.image_token_id).long(),
            use_cache=False,
            output_hidden_states=True,
            **vision,
        )
        return outputs.hidden_states[LAYER].float()


def picture_patches(pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Qwen3-VL's patches of pictures that need no resizing (at least 256x256 pixels, sides multiples of 32).

    Args:
        pictures: RGB in [0, 1], [B, 3, H, W].

    Returns:
        Patches [B * H / 16 * W / 16, 1536] and grids [B, 3] int64.
    """
    count, _, height, width = pictures.shape
    rows, columns = height // 16, width // 16
    values = ((pictures * 255).round() / 255 - 0.5) / 0.5
    values = values[:, None].expand(-1, 2, -1, -1, -1)  # a picture stands still for a temporal patch
    values = values.reshape(count, 2, 3, rows // 2, 2, 16, columns // 2, 2, 16)
    values = values.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(count * rows * columns, -1)
    grid = torch.tensor([[1, rows, columns]], device=pictures.device).repeat(count, 1)
    return values, grid
