"""The conditioner's processor: the same numbers as transformers', without torchvision."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3Ref2VATextEncoderStep
from diffusers.modular_pipelines.minimax_h3.references import (
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.processing_utils import ProcessorMixin

from solgen.engine.processor import H3Processor, H3VideoProcessor
from solgen.errors import InputError

SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16, "merge_size": 2}
IMAGE = HALVES | {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 1024, "longest_edge": 64 * 64},
}
VIDEO = HALVES | {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 1024, "longest_edge": 8 * 64 * 64},
}
# The settings that Qwen3-VL is released with.
RELEASED = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}
CAPPED = RELEASED | {"cap_pixels_per_frame": True}
SHORT = {"size": {"shortest_edge": 4096, "longest_edge": 160_000}}


def save_tokenizer(folder: Path, tokens: list[str] = SPECIAL) -> None:
    vocabulary = {word: i for i, word in enumerate(["?", "cat", *tokens])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    special = {"unk_token": "?", "additional_special_tokens": tokens}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model folder with nothing but a processor in it, one file per part."""
    folder = tmp_path / "processor"
    save_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEO))
    return tmp_path


def read_processor(repository: Path) -> H3Processor:
    return H3Processor.from_folders(repository / "processor", repository / "tokenizer")


def clip(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, (*shape, 3), dtype=np.uint8)


# ---- clips


def test_a_tiny_clip_by_hand() -> None:
    plain = {"do_resize": False, "image_mean": (0, 0, 0), "image_std": (1, 1, 1)}
    processor = H3VideoProcessor(patch_size=1, merge_size=1, **plain)
    # Two frames of one row and two columns: column 0 goes from red to green, column 1 from blue to white.
    frames = np.array(
        [[[[255, 0, 0], [0, 0, 255]]], [[[0, 255, 0], [255, 255, 255]]]],
        dtype=np.uint8,
    )
    out = processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
    assert out["video_grid_thw"].tolist() == [[1, 1, 2]]
    # A row per patch; in it the channels, and in a channel the two frames.
    assert out["pixel_values_videos"].tolist() == [[1, 0, 0, 1, 0, 0], [0, 1, 0, 1, 1, 1]]


def test_patches_that_merge_lie_next_to_each_other() -> None:
    processor = H3VideoProcessor(patch_size=2, merge_size=2, do_resize=False)
    frames = clip(3, 8, 12)
    out = processor(videos=[frames])["pixel_values_videos"]
    padded = np.concatenate([frames, frames[-1:]]) / 127.5 - 1
    row = 0
    for time in range(2):
        for block_y in range(2):
            for block_x in range(3):
                for y in (0, 1):
                    for x in (0, 1):
                        top, left = 4 * block_y + 2 * y, 4 * block_x + 2 * x
                        patch = padded[2 * time : 2 * time + 2, top : top + 2, left : left + 2]
                        expected = torch.from_numpy(patch.transpose(3, 0, 1, 2).reshape(-1)).float()
                        torch.testing.assert_close(out[row], expected)
                        row += 1
    assert row == len(out)


def test_clips_of_different_shapes_follow_each_other() -> None:
    processor = H3VideoProcessor()
    first, second = clip(3, 40, 70), clip(2, 64, 64)
    both = processor(videos=[first, second])
    alone = [processor(videos=[frames]) for frames in (first, second)]
    for name in ("pixel_values_videos", "video_grid_thw"):
        assert torch.equal(both[name], torch.cat([one[name] for one in alone]))


# Heights and widths that transformers 5.24 arrived at.
@pytest.mark.parametrize(
    ("config", "clip_size", "expected"),
    [
        (RELEASED, (2, 64, 64), (64, 64)),
        (RELEASED, (7, 20, 300), (32, 480)),
        (RELEASED, (10, 768, 1344), (768, 1344)),
        (RELEASED, (31, 768, 1344), (672, 1184)),
        (RELEASED, (31, 1344, 768), (1184, 672)),
        (RELEASED, (62, 33, 97), (32, 96)),
        ({}, (2, 64, 64), (256, 256)),
        ({}, (10, 768, 1344), (192, 352)),
        (CAPPED, (2, 1088, 1920), (640, 1152)),
        (CAPPED, (31, 768, 1344), (640, 1152)),
        (SHORT, (5, 100, 77), (96, 64)),
        (SHORT, (2, 2000, 16), (3136, 32)),
    ],
)
def test_sizes_are_those_of_the_original(
    config: dict, clip_size: tuple[int, int, int], expected: tuple[int, int]
) -> None:
    assert H3VideoProcessor.from_config(config).resized(*clip_size) == expected


def test_resizing_is_antialiased() -> None:
    stripes = np.zeros((2, 64, 64, 3), np.uint8)
    stripes[:, :, ::2] = 255
    shrinking = H3VideoProcessor.from_config({"size": {"shortest_edge": 64, "longest_edge": 2 * 32 * 32}})
    shrunk = shrinking(videos=[stripes])
    assert shrunk["video_grid_thw"].tolist() == [[1, 2, 2]]
    assert shrunk["pixel_values_videos"].abs().max() < 0.2


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="transformers' own video processor needs torchvision, which is not installed",
)
@pytest.mark.parametrize(
    "config",
    [
        RELEASED,
        {},
        CAPPED,
        SHORT | {"image_mean": [0.48, 0.45, 0.4], "image_std": [0.2, 0.3, 0.25]},
        SHORT | {"patch_size": 4, "temporal_patch_size": 3},
    ],
)
def test_patches_equal_the_original(config: dict) -> None:
    from transformers import Qwen3VLVideoProcessor

    theirs, ours = Qwen3VLVideoProcessor(**config), H3VideoProcessor.from_config(config)
    for videos in ([clip(3, 96, 160)], [clip(5, 100, 77)] * 2 + [clip(4, 33, 250)], [clip(7, 20, 300)]):
        expected = theirs(videos=videos, do_sample_frames=False, return_tensors="pt")
        found = ours(videos=videos, do_sample_frames=False, return_tensors="pt")
        assert torch.equal(found["video_grid_thw"], expected["video_grid_thw"])
        assert torch.equal(found["pixel_values_videos"], expected["pixel_values_videos"])


def test_what_is_not_equal_is_refused() -> None:
    with pytest.raises(ValueError, match="do_sample_frames=False"):
        H3VideoProcessor()(videos=[clip(4, 64, 64)], do_sample_frames=True)
    with pytest.raises(InputError, match="got resample=2, do_rescale=True"):
        H3VideoProcessor.from_config({"resample": 2})


# ---- the whole


def test_token_types_equal_the_original(repository: Path) -> None:
    processor = read_processor(repository)
    image, video = processor.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    batch = [[1, image, image, 0, video], [video], [1, 1]]
    ids = SimpleNamespace(image_token_ids=[image], video_token_ids=[video], audio_token_ids=[None])
    expected = ProcessorMixin.create_mm_token_type_ids(ids, batch)  # type: ignore[arg-type]
    assert processor.create_mm_token_type_ids(batch) == expected == [[0, 1, 1, 0, 2], [2], [0, 0]]


def test_settings_come_from_the_folder(repository: Path) -> None:
    processor = read_processor(repository)
    assert processor.image_processor.patch_size == 16
    assert processor.image_processor.size["longest_edge"] == 64 * 64
    assert processor.video_processor.size == VIDEO["size"]
    assert processor.tokenizer("cat", add_special_tokens=False)["input_ids"] == [1]


def test_settings_in_one_file_win(repository: Path) -> None:
    folder = repository / "processor"
    together = {
        "processor_class": "Qwen3VLProcessor",
        "image_processor": IMAGE | {"merge_size": 1},
        "video_processor": VIDEO | {"temporal_patch_size": 4},
    }
    (folder / "processor_config.json").write_text(json.dumps(together))
    processor = read_processor(repository)
    assert processor.image_processor.merge_size == 1
    assert processor.video_processor.temporal_patch_size == 4
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).unlink()
    assert read_processor(repository).video_processor.temporal_patch_size == 4


def test_a_file_for_the_class_alone_does_not_hide_the_others(repository: Path) -> None:
    (repository / "processor" / "processor_config.json").write_text('{"processor_class": "Qwen3VLProcessor"}')
    assert read_processor(repository).video_processor.size == VIDEO["size"]


def test_the_tokenizer_may_lie_beside_the_processor(repository: Path) -> None:
    for file in (repository / "processor").glob("tokenizer*"):
        file.unlink()
    save_tokenizer(repository / "tokenizer")
    assert read_processor(repository).create_mm_token_type_ids([[4, 5]]) == [[1, 2]]


def test_incomplete_folders_are_refused_in_one_line(repository: Path) -> None:
    folder = repository / "processor"

    def refusal() -> str:
        with pytest.raises(InputError) as caught:
            read_processor(repository)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    save_tokenizer(folder, SPECIAL[:3])
    assert f"the tokenizer in {folder} does not know <|video_pad|>" in refusal()
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer in" in refusal()
    (folder / "video_preprocessor_config.json").unlink()
    assert "no video_preprocessor_config.json in" in refusal()
    (folder / "preprocessor_config.json").write_text("{")
    assert "not readable JSON" in refusal()


BROKEN = [
    ("video_preprocessor_config.json", "[]", "video_preprocessor_config.json is not a JSON object"),
    ("preprocessor_config.json", "null", "preprocessor_config.json is not a JSON object"),
    ("processor_config.json", '{"video_processor": []}', "no video_processor in processor_config.json"),
    *(
        (f"{part}preprocessor_config.json", text, "does not describe Qwen3-VL's processor")
        for part in ("", "video_")
        for text in ('{"size": 5}', '{"size": {"longest_edge": 5}}', '{"patch_size": 0}', '{"image_mean": null}')
    ),
    *(("tokenizer.json", text, "processor holds no readable tokenizer") for text in ("", "[]", "{}", "{")),
    ("tokenizer_config.json", "[]", "processor holds no readable tokenizer"),
]


@pytest.mark.parametrize(("file", "text", "message"), BROKEN, ids=[f"{file} {text}" for file, text, _ in BROKEN])
def test_a_broken_file_is_named(file: str, text: str, message: str, repository: Path) -> None:
    (repository / "processor" / file).write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_processor(repository)
    assert "\n" not in str(caught.value)


def test_diffusers_gathers_its_features(repository: Path) -> None:
    processor = read_processor(repository)
    references = [
        MiniMaxH3ImageReference(image=Image.new("RGB", (96, 64), "white")),
        MiniMaxH3VideoReference(frames=clip(40, 64, 96)),
        MiniMaxH3ImageReference(image=Image.new("RGB", (64, 64))),
    ]
    step = MiniMaxH3Ref2VATextEncoderStep()
    features, image_tokens, video_tokens, times = step._gather_vision_features(processor, references, 24)
    assert times == [[0.25, 1.25]]  # frames 0, 12, 24 and 36, in pairs
    assert features["video_grid_thw"].tolist() == [[2, 4, 6]]
    assert video_tokens == [4 * 6 // 4]
    assert image_tokens == [int(grid.prod()) // 4 for grid in features["image_grid_thw"]]
    for name, grid in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        assert features[name].shape == (int(features[grid].prod(dim=1).sum()), 3 * 2 * 16 * 16)
    assert features["pixel_values"][0].unique().tolist() == [1.0]


def test_nothing_of_it_needs_torchvision(repository: Path) -> None:
    script = f"""
import sys
sys.modules["torchvision"] = sys.modules["torchaudio"] = sys.modules["av"] = None
from pathlib import Path
import numpy as np
from PIL import Image
from solgen.engine.processor import H3Processor
processor = H3Processor.from_folders(Path({str(repository)!r}) / "processor", Path())
processor.image_processor(images=[Image.new("RGB", (64, 64))], return_tensors="pt")
processor.video_processor(videos=[np.zeros((2, 64, 64, 3), np.uint8)])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
