"""HyperFlow's two-time conditioning: the embedding, the pairs of every row, and where they come from."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from diffusers.models.embeddings import get_timestep_embedding
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook

from solgen.engine.adapters.two_time import PairFeatures, pair_times, takes_two_times, time_embedding
from solgen.engine.generate import generate
from solgen.errors import InputError
from tests.engine.adapters.conftest import HYPERFLOW


def embed(weights, changes, times: torch.Tensor, module: str, strength: float = 1.0) -> torch.Tensor:
    """The time embedder with an adapter, written out."""

    def linear(layer: str, inputs: torch.Tensor) -> torch.Tensor:
        down, up = (changes[f"transformer.{module}.{layer}.lora_{part}.weight"] for part in "AB")
        weight = weights[f"time_embedder.{layer}.weight"] + strength * up @ down
        return functional.linear(inputs, weight, weights[f"time_embedder.{layer}.bias"])

    features = get_timestep_embedding(times, 256, flip_sin_to_cos=True, downscale_freq_shift=0)
    return linear("linear_2", functional.silu(linear("linear_1", features)))


@pytest.mark.parametrize("mode", ["merge", "branch"])
@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_the_embedding_is_the_formula(mode: str, strength: float, hyperflow, opened, pristine, weights) -> None:
    path = hyperflow()
    transformer = pristine(torch.bfloat16)
    opened((path, strength), mode=mode).apply(transformer)
    pairs = torch.tensor([[0.0, 0.3], [0.3, 1.0], [0.999, 0.999]])
    changes = load_file(path)
    start = embed(weights, changes, pairs[:, 0], "time_embedder", strength)
    end = embed(weights, changes, pairs[:, 1], "endpoint_time_embedder", strength)
    expected = start + 0.25 * strength * (end - start)
    torch.testing.assert_close(time_embedding(transformer, pairs), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, start, atol=1e-3)


def test_minimaxs_names_of_both_embedders(hyperflow, opened, tmp_path: Path) -> None:
    path = hyperflow()
    tensors = {
        key.removeprefix("transformer.").replace("linear_1", "proj_in").replace("linear_2", "proj_out"): tensor
        for key, tensor in load_file(path).items()
        if "time_embedder" in key
    }
    save_file(tensors, tmp_path / "native.safetensors", metadata=HYPERFLOW)
    theirs, ours = opened(path).adapters[0].changes, opened(tmp_path / "native.safetensors").adapters[0].changes
    assert set(ours) == {name for name in theirs if "time_embedder" in name}
    assert len(ours) == 4


def test_the_transformer_itself_uses_that_embedding(hyperflow, opened, pristine) -> None:
    """A table of AdaLN outputs may be built from `time_embedding`: the blocks see the same tensor."""
    transformer = pristine(torch.float32)
    opened(hyperflow()).apply(transformer)
    assert takes_two_times(transformer)
    seen = []
    transformer.transformer_blocks[0].register_forward_pre_hook(lambda _module, args: seen.append(args[1]))
    pairs = torch.tensor([[0.1, 0.4], [0.4, 0.4]])
    with torch.no_grad():
        transformer(
            torch.zeros(1, 2, 96),
            torch.zeros(1, 1, 32),
            torch.zeros(1, 1, 32),
            timestep=pairs,
            timestep_indices=torch.tensor([0, 1, 0, 0]),
            token_tags=torch.tensor([1, 2, 0, 0]),
            position_ids=torch.zeros(4, 3),
            video_indices=torch.tensor([2, 3]),
            audio_indices=torch.tensor([1]),
            text_indices=torch.tensor([0]),
        )
        assert torch.equal(seen[0], time_embedding(transformer, pairs))


def test_pairs_are_distinct_and_every_row_finds_its_own() -> None:
    start = torch.tensor([0.1, 0.5]), torch.tensor([0, 0, 1, 1, 0])
    end = torch.tensor([0.2, 0.5, 0.9]), torch.tensor([0, 2, 1, 2, 0])
    pairs, index = pair_times(start, end)
    assert torch.equal(pairs[index], torch.stack([start[0][start[1]], end[0][end[1]]], dim=1))
    assert len(pairs) == 4


def test_rows_end_where_the_next_step_starts_and_conditions_stay(hyperflow, small_job, listener, picture) -> None:
    """The pairs that every call of a request with a first frame embeds."""
    features: list[torch.Tensor] = []

    def watch(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        if isinstance(module, PairFeatures):
            features.append(args[0])

    job = small_job(steps=None, image=str(picture("a.png", (255, 0, 0))), lora=(str(hyperflow()),))
    hook = register_module_forward_pre_hook(watch)
    try:
        (record,) = generate([job], listener)
    finally:
        hook.remove()
    video, audio = (1 - torch.tensor(record["sampler"][f"{kind}_sigmas"]) for kind in ("video", "audio"))
    assert len(features) == 6  # the tables were built from the three before the calls
    assert all(torch.equal(built, called) for built, called in zip(features[:3], features[3:], strict=True))
    for step, pairs in enumerate(features[3:]):
        expected = {
            (float(video[step]), float(video[step + 1])),
            (float(audio[step]), float(audio[step + 1])),
            (max(float(video[step]), 0.999), max(float(video[step]), 0.999)),
        }
        got = {tuple(pair) for pair in pairs.tolist()}
        assert len(got) == len(expected)
        for one, other in zip(sorted(got), sorted(expected), strict=True):
            assert one == pytest.approx(other, abs=1e-6)


def test_the_schedule_comes_from_the_header(hyperflow, small_job, listener) -> None:
    (record,) = generate([small_job(steps=None, lora=(str(hyperflow()),))], listener)
    for kind, shift in (("video", 10.0), ("audio", 2.0)):
        expected = [shift * s / (1 + (shift - 1) * s) for s in (1.0, 0.6, 0.25, 0.0)]
        assert record["sampler"][f"{kind}_sigmas"] == pytest.approx(expected, abs=1e-6)
        assert all(b < a for a, b in pairwise(record["sampler"][f"{kind}_sigmas"]))
    assert record["sampler"]["calls"] == 3


def test_two_second_embedders_are_refused(hyperflow, opened) -> None:
    first, second = hyperflow(), hyperflow("other.safetensors", note="another file")
    with pytest.raises(InputError, match="two adapters bring a second time embedding"):
        opened(first, second)
