"""The embedded demo model is a whole MiniMax-H3 repository: small, offline, and alive."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import MiniMaxH3ModularPipeline, ModularPipeline
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3AudioReference, MiniMaxH3VideoReference
from PIL import Image
from safetensors import safe_open
from transformers import AutoTokenizer, Qwen2Tokenizer, Qwen2VLImageProcessorPil

from solgen.engine.demo_training.conditioner import Conditioner
from solgen.engine.demo_training.dataset import encode_clips, standardise
from solgen.engine.demo_training.scenes import draw_scene
from solgen.engine.demo_training.tracks import Canvas, track_scenes
from solgen.presets.demo import demo_model_path

MIB = 2**20
PROMPT = "integrated_multimodal_description: [Shot 1] A fox. <d>[English] Hello.</d>\n\nnon_diegetic_music: none"


class Processor:
    """What diffusers' blocks ask of the `processor` component, for test inputs that need no resizing."""

    class VideoProcessor:
        temporal_patch_size = 2

        def __call__(self, videos, do_sample_frames, return_tensors):
            assert not do_sample_frames
            grids = [(-(-len(v) // 2), v.shape[1] // 16, v.shape[2] // 16) for v in videos]
            rows = sum(t * h * w for t, h, w in grids)
            values = torch.randn(rows, 3 * 2 * 16 * 16, generator=torch.Generator().manual_seed(0))
            return {"pixel_values_videos": values, "video_grid_thw": torch.tensor(grids)}

    def __init__(self, folder: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        self.video_processor = self.VideoProcessor()

    def create_mm_token_type_ids(self, input_ids):
        ids = self.tokenizer.convert_tokens_to_ids
        kinds = {ids("<|image_pad|>"): 1, ids("<|video_pad|>"): 2}
        return [[kinds.get(token, 0) for token in row] for row in input_ids]


@pytest.fixture(scope="module", autouse=True)
def no_network():
    def refuse(*args, **kwargs):
        raise AssertionError("the demo model must not use the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.socket.connect", refuse)
        yield


@pytest.fixture(scope="module")
def repository() -> Path:
    return demo_model_path()


@pytest.fixture(scope="module")
def pipeline(repository) -> MiniMaxH3ModularPipeline:
    pipeline = ModularPipeline.from_pretrained(repository, local_files_only=True)
    names = [name for name in pipeline.pretrained_component_names if name != "processor"]
    pipeline.load_components(names, dtype=torch.bfloat16, local_files_only=True)
    pipeline.update_components(processor=Processor(repository / "processor"))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_folder_fits_its_budget(repository):
    sizes = {path: path.stat().st_size for path in repository.rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= 22 * MIB
    assert max(sizes.values()) <= 16 * MIB


def test_index_makes_diffusers_load_every_component(pipeline):
    assert type(pipeline) is MiniMaxH3ModularPipeline
    assert pipeline.config.canvas_short_edge == pipeline.config.reference_image_short_edge == 256
    assert pipeline.config.canvas_max_pixels == 256 * 256
    assert pipeline.get_component_spec("transformer_ref").subfolder == "transformer"
    assert {name for name, component in pipeline.components.items() if component is None} == set()
    assert (pipeline.scheduler.config.shift, pipeline.audio_scheduler.config.shift) == (12.0, 3.0)


def test_geometry_is_the_real_models(pipeline):
    transformer = pipeline.transformer.config
    assert (transformer.attention_head_dim, transformer.num_attention_heads) == (128, 8)
    assert (transformer.hidden_size, transformer.ffn_dim, transformer.num_layers) == (192, 320, 6)
    assert (transformer.rope_freq_dim, transformer.rope_theta, transformer.num_refiner_layers) == (16, 1e4, 1)
    assert (tuple(transformer.patch_size), pipeline.canvas_multiple) == ((1, 2, 2), 32)

    vae = pipeline.vae
    assert (vae.spatial_compression_ratio, vae.temporal_compression_ratio) == (16, 4)
    assert (vae.config.latent_channels, vae.config.clip_length, vae.config.token_drop) == (24, 17, 3)
    assert vae.use_tiling
    assert vae.tile_sample_min_height == vae.tile_sample_min_width == 256

    audio_vae = pipeline.audio_vae
    assert audio_vae.config.sampling_rate == 40 * audio_vae.hop_length == 32000
    for config, channels in ((vae.config, 24), (audio_vae.config, 32)):
        assert len(config.latents_mean) == len(config.latents_std) == channels
        assert min(config.latents_std) > 0

    conditioner = pipeline.text_encoder.config
    assert conditioner.text_config.num_hidden_layers == 51 > pipeline.text_encoder_layer
    assert conditioner.text_config.hidden_size == transformer.text_dim
    assert conditioner.text_config.max_position_embeddings == pipeline.tokenizer.model_max_length == 8192
    assert (conditioner.vision_config.patch_size, conditioner.vision_config.temporal_patch_size) == (16, 2)


@pytest.mark.parametrize("frames", [22, 39])
def test_17n_plus_5_frames_become_5n_plus_2_latents_and_back(pipeline, frames):
    with torch.no_grad():
        latents = pipeline.vae.encode(torch.rand(1, 3, frames, 32, 32)).latent_dist.mode()
        assert latents.shape == (1, 24, (frames - 5) // 17 * 5 + 2, 2, 2)
        assert pipeline.vae.decode(latents).sample.shape == (1, 3, frames, 32, 32)


def test_a_second_of_sound_is_40_latents(pipeline):
    with torch.no_grad():
        latents = pipeline.audio_vae.encode(0.1 * torch.randn(2, 1, 32000)).latent_dist.mode()
    assert latents.shape == (2, 32, 40)


def test_latents_of_held_out_clips_are_near_unit_variance(repository, pipeline):
    canvas = Canvas(256, 256, 22)
    scenes = [draw_scene(8, index, held_out=True, spread=0.35) for index in range(8)]
    vae = type(pipeline.vae).from_pretrained(repository / "vae", torch_dtype=torch.float32)
    found = encode_clips(track_scenes(scenes, canvas), canvas, vae, pipeline.audio_vae)
    for model, latents in ((vae, found.video), (pipeline.audio_vae, found.audio.flatten(0, 1))):
        power = standardise(model, latents.float()).square().mean()
        assert 0.5 < power < 2


@pytest.mark.parametrize(
    ("component", "islands"),
    [
        ("transformer", {"proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out"}),
        ("vae", {"encoder", "quant_conv", "norm1", "norm2", "norm_out", "scale1", "scale2"}),
        ("audio_vae", {"encoder", "decoder", "pre_block", "dec_in_proj", "mean_proj", "logs_proj"}),
    ],
)
def test_what_must_run_in_float32_is_loaded_as_that(repository, pipeline, component, islands):
    """The transformer stores it so too, the autoencoders save the space."""
    loaded = getattr(pipeline, component).state_dict()
    with safe_open(repository / component / "diffusion_pytorch_model.safetensors", "pt") as stored:
        for name in stored.keys():  # noqa: SIM118, not a dict
            tensor = stored.get_tensor(name)
            island = not islands.isdisjoint(name.split("."))
            wide = island and component == "transformer"
            assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), name
            assert tensor.isfinite().all(), name
            assert loaded[name].dtype == (torch.float32 if island else torch.bfloat16), name
            assert torch.equal(loaded[name].float(), tensor.float()), name


def test_conditioner_and_tokenizer_are_those_of_the_training(repository, pipeline):
    """The frozen conditioner is random: what was trained understands no other."""
    conditioner = Conditioner(torch.device("cpu"))
    expected, found = conditioner.model.state_dict(), pipeline.text_encoder.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name].bfloat16(), found[name].bfloat16()) for name in expected)
    for folder in ("tokenizer", "processor"):
        tokenizer = AutoTokenizer.from_pretrained(repository / folder, local_files_only=True)
        assert tokenizer.get_vocab() == conditioner.tokenizer.get_vocab()
        assert tokenizer(PROMPT)["input_ids"] == conditioner.tokenizer(PROMPT)["input_ids"]


@pytest.mark.parametrize("folder", ["tokenizer", "processor"])
@pytest.mark.parametrize(
    "text",
    [
        PROMPT,
        "一只红色的狐狸跑过雪地。",
        "🦊👩‍👩‍👧 \u200b",
        "a\n\n\tb  c\r\n",
        "Ünïcödé Ωμέγα עברית हिन्दी",
        "\x00\x7f",
        "",
    ],
)
def test_tokenizer_keeps_any_text(repository, folder, text):
    tokenizer = AutoTokenizer.from_pretrained(repository / folder, local_files_only=True)
    assert isinstance(tokenizer, Qwen2Tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert all(0 <= number < len(tokenizer) for number in ids)


def test_special_tokens_are_single_and_known_to_the_conditioner(pipeline):
    tokenizer, config = pipeline.tokenizer, pipeline.text_encoder.config
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<d>", "</d>"]
    ids = [tokenizer(name, add_special_tokens=False)["input_ids"] for name in names]
    assert ids == [[tokenizer.convert_tokens_to_ids(name)] for name in names]
    assert [[config.vision_start_token_id], [config.vision_end_token_id]] == ids[:2]
    assert [[config.image_token_id], [config.video_token_id]] == ids[2:4]
    assert len(tokenizer) <= config.text_config.vocab_size
    assert len(tokenizer(PROMPT)["input_ids"]) < len(PROMPT) / 2


def test_processor_settings_are_qwen3_vls(repository):
    image, video = (
        json.loads((repository / "processor" / name).read_text())
        for name in ("preprocessor_config.json", "video_preprocessor_config.json")
    )
    for settings in (image, video):
        assert (settings["patch_size"], settings["temporal_patch_size"], settings["merge_size"]) == (16, 2, 2)
        assert settings["image_mean"] == settings["image_std"] == [0.5, 0.5, 0.5]
    assert image["size"] == {"shortest_edge": 65536, "longest_edge": 16777216}
    assert video["size"] == {"shortest_edge": 4096, "longest_edge": 25165824}


def _generate(pipeline, points: int, **inputs):
    generator = torch.Generator().manual_seed(1)
    state = pipeline(
        prompt=PROMPT,
        height=256,
        width=256,
        num_frames=124,
        num_inference_steps=points,
        generator=generator,
        output_type="np",
        **inputs,
    )
    return state.get("latents"), state.get("audio_latents"), state.get("videos")[0], state.get("audio")[0]


def _assert_alive(latents, audio_latents, video, audio):
    assert latents.shape == (1, 24, 37, 16, 16)
    assert audio_latents.shape == (2, 32, 207)
    for values in (latents, audio_latents):
        assert values.isfinite().all()
        assert 0.3 < values.std() < 3
        assert values.abs().max() < 15
    assert video.shape == (124, 256, 256, 3)
    assert 0.05 < video.std() < 0.35
    assert ((video <= 0) | (video >= 1)).mean() < 0.1, "clipped"
    assert 0.001 < np.abs(np.diff(video, axis=0)).mean() < 0.15, "a still or a flicker"
    assert audio.shape == (2, 207 * 800)
    assert 0.01 < audio.std() < 0.5
    assert (audio.abs() >= 1).float().mean() < 0.01, "clipped"
    assert audio.mean().abs() < 0.01


def test_one_call_makes_a_clip_with_sound(pipeline):
    _assert_alive(*_generate(pipeline, points=2))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["t2va", "fl2va", "ref2va"])
def test_four_calls_of_every_task_stay_bounded(pipeline, task):
    random = np.random.default_rng(0)
    picture = Image.fromarray(random.integers(0, 256, (256, 256, 3), dtype=np.uint8))
    clip = random.integers(0, 256, (39, 256, 256, 3), dtype=np.uint8)
    sound = 0.1 * torch.randn(2, 32000, generator=torch.Generator().manual_seed(0))
    inputs = {
        "t2va": {},
        "fl2va": {"image": picture, "last_image": picture},
        "ref2va": {
            "references": [
                MiniMaxH3VideoReference(frames=clip, fps=24.0, audio=sound, sample_rate=32000),
                MiniMaxH3AudioReference(audio=sound, sample_rate=32000),
            ]
        },
    }[task]
    _assert_alive(*_generate(pipeline, points=5, **inputs))


def test_import_is_light():
    code = "import sys, solgen.presets.demo; sys.exit('torch' in sys.modules or 'diffusers' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
