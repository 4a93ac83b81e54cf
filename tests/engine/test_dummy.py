"""Random weights: the released model's sizes, tame activations, the same bits for a part as for the whole."""

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel

from solgen.engine.adaln import is_projection
from solgen.engine.adapters.two_time import takes_two_times
from solgen.engine.check import check
from solgen.engine.dummy import RandomWeights, dummy_pipeline, open_dummy
from solgen.engine.generate import generate
from solgen.engine.profile.plan import plan_arms
from solgen.engine.request import Options
from solgen.errors import InputError, SetupError

CPU = torch.device("cpu")


def request(preset: str = "demo", **options):
    given = Options(prompt="x", preset=preset, **options)
    return plan_arms(given, None, dummy=True, text_rows=None)[0].request


def weights(preset: str = "demo", dtype: torch.dtype = torch.float32) -> RandomWeights:
    return RandomWeights(open_dummy(request(preset)), CPU, dtype)


def test_a_full_size_preset_stands_for_the_released_model() -> None:
    repository = open_dummy(request("hyperflow-12s"))
    assert (repository.num_blocks("t2va"), repository.num_heads("t2va")) == (50, 56)
    with torch.device("meta"):
        model = MiniMaxH3Transformer3DModel()
    assert sum(parameter.numel() for parameter in model.parameters()) == 33_122_992_896
    # bf16 but for the FP32 islands: two patch projections, two heads, the time embedders (two in a two-time model).
    islands = sum(5376 * width + 5376 + width * 5376 + width for width in (96, 32))
    embedder = 256 * 5376 + 5376 + 5376 * 2688 + 2688
    two_times = RandomWeights(repository, CPU, torch.bfloat16)
    assert two_times.num_bytes == 2 * (33_122_992_896 + islands + 3 * embedder)


@pytest.mark.parametrize(("preset", "rows"), [("5s", 40), ("1080p15", 38), ("hyperflow-1080p15", 38)])
def test_usual_prompts(preset: str, rows: int) -> None:
    assert request(preset).text_rows == rows


def test_values_depend_on_names_alone() -> None:
    whole, again = weights().transformer(), weights().transformer(projections=False)
    for (name, one), two in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert two.is_meta if is_projection(name.rpartition(".")[0]) else torch.equal(one, two)
    for name in ("transformer_blocks.4.adaln_proj.linear", "norm_out.linear"):
        made, there = weights().projection(name), whole.get_submodule(name)
        assert torch.equal(made.weight, there.weight)
        assert torch.equal(made.bias, there.bias)
    assert not torch.equal(whole.transformer_blocks[0].attn.to_q.weight, whole.transformer_blocks[1].attn.to_q.weight)


def test_islands_and_buffers() -> None:
    model = weights(dtype=torch.bfloat16).transformer()
    islands = model._keep_in_fp32_modules
    for name, parameter in model.named_parameters():
        expected = torch.float32 if any(island in name for island in islands) else torch.bfloat16
        assert parameter.dtype == expected, name
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    stock = MiniMaxH3Transformer3DModel(**open_dummy(request()).config)
    assert torch.equal(model.rope.inv_freq, stock.rope.inv_freq)


def test_activations_stay_near_one() -> None:
    """Scores of queries and keys are unit normals: their router sees what random inputs show it."""
    pipeline = dummy_pipeline(weights(), tables=False)
    model = pipeline.transformer
    rows = torch.randn(1, 500, 96, generator=torch.Generator().manual_seed(0))
    hidden = model.proj_in(rows)
    attention = model.transformer_blocks[0].attn
    query, key = (
        norm(projection(model.transformer_blocks[0].norm1(hidden)).unflatten(-1, (attention.heads, -1)))
        for norm, projection in ((attention.norm_q, attention.to_q), (attention.norm_k, attention.to_k))
    )
    scores = torch.einsum("bnhd,bmhd->bhnm", query, key) / 128**0.5
    assert 0.7 < hidden.std() < 1.3
    assert 0.7 < scores.std() < 1.5
    assert scores.mean().abs() < 0.2


def test_a_two_time_preset_gets_a_two_time_model() -> None:
    sets = ("model.source=demo",)
    for preset, expected in (("hyperflow-5s", True), ("5s", False)):
        repository = open_dummy(request(preset, sets=sets))
        assert takes_two_times(RandomWeights(repository, CPU, torch.float32).transformer()) is expected


def test_a_full_size_preset_needs_a_gpu() -> None:
    (job,) = plan_arms(Options(prompt="x", preset="hyperflow-5s"), None, dummy=True, text_rows=None)
    with pytest.raises(SetupError, match="no CUDA GPU found; preset hyperflow-5s needs one"):
        check([job])


def test_random_weights_make_no_clip_and_read_no_media(picture, listener) -> None:
    (job,) = plan_arms(Options(prompt="x", preset="demo"), None, dummy=True, text_rows=None)
    with pytest.raises(InputError, match="random weights make no clip"):
        generate([job], listener)
    with pytest.raises(InputError, match="fl2va needs them"):
        open_dummy(request(image=str(picture("a.png", (1, 2, 3)))))
