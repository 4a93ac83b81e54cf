"""Shapes of the embedded demo model: MiniMax-H3's geometry, thin enough for two CPU cores.

Kept from the real model: heads of 128 channels, together wider than the residual stream, 3 x 16 rotary
frequencies, 1x2x2 patches, 17 n + 5 frames, a video VAE of f16 t4 d24 with 256-pixel tiles, 40 audio latents
a second at 32 kHz, a conditioner whose hidden state 50 is not its last. Together they stay below 22 MiB.
"""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<d>",
    "</d>",
)
"""Qwen3-VL's control tokens that diffusers reads by name, and MiniMax-H3's pair around spoken lines."""

VOCAB_SIZE = 1024
"""Bytes, merges and special tokens together; the special tokens take the last ids."""

CONTEXT_LENGTH = 8192
"""Longest presentation of a request, in tokens, that the conditioner accepts."""

INDEX = {"canvas_short_edge": 256, "canvas_max_pixels": 256 * 256, "reference_image_short_edge": 256}
"""Pipeline configs written into modular_model_index.json, in pixels."""

TRANSFORMER = {
    "num_attention_heads": 8,
    "attention_head_dim": 128,
    "hidden_size": 192,
    "num_layers": 6,
    "num_refiner_layers": 1,
    "ffn_dim": 320,
    "text_dim": 32,
    "time_embed_hidden_dim": 64,
    "time_embed_dim": 32,
}

VAE = {
    "block_out_channels": (8, 16, 32, 32, 48, 48),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "decoder_num_layers": 3,
    "decoder_num_attention_heads": 3,
    "decoder_attention_head_dim": 64,
    "decoder_ffn_mult": 2,
    # Zeros at the border: the backward pass of a reflected border has no deterministic kernel.
    "spatial_padding_mode": "constant",
    # Until they are measured.
    "latents_mean": (0.0,) * 24,
    "latents_std": (1.0,) * 24,
}

AUDIO_VAE = {
    "encoder_dim": 4,
    "latent_dim": 128,
    "num_attention_heads": 2,
    "decoder_dim": 160,
    # The real decoder halves its channels seven times, which would leave a single one here.
    "decoder_rates": (5, 5, 4, 4, 2),
    "decoder_kernel_sizes": (9, 9, 8, 8, 4),
    "resblock_kernel_sizes": (3,),
    "resblock_dilation_sizes": ((1, 3, 5),),
    "latents_mean": (0.0,) * 32,
    "latents_std": (1.0,) * 32,
}

CONDITIONER_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 51,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_LENGTH,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5_000_000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}

CONDITIONER_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": CONDITIONER_TEXT["hidden_size"],
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [0, 1, 2],
}

_VISION_INPUT = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}

IMAGE_PROCESSOR = _VISION_INPUT | {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}
"""Qwen3-VL's own preprocessing; the "edges" of `size` are pixel counts of one image."""

VIDEO_PROCESSOR = _VISION_INPUT | {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 4096, "longest_edge": 25165824},
}
"""The same for videos; the "edges" of `size` are pixel counts of all sampled frames together."""
