"""`solgen bench merge`: its report, and a check that sees a wrong merge."""

import json

import pytest
import torch

from solgen.engine.adapters.adapter import open_adapter
from solgen.engine.adapters.overlay import Overlay
from solgen.engine.adapters.source import Source
from solgen.engine.bench import merge
from solgen.engine.dummy import DummyRepository, RandomWeights
from solgen.errors import SolgenError
from solgen.presets.demo import demo_transformer
from solgen.presets.schema import Lora
from tests.command_line import solgen


def test_merge_report(tmp_path, capsys):
    path = tmp_path / "merge.json"
    assert solgen("bench", "merge", "--preset", "demo", "--rank", "8", "--json", str(path)) == 0
    report = json.loads(path.read_text())
    assert report["layers"] == 6 * (demo_transformer()["num_layers"] + demo_transformer()["num_refiner_layers"])
    assert report["merge_s"] > 0
    assert 0 <= report["turned"] <= 1e-4
    assert "beside" in capsys.readouterr().out


def test_a_merge_that_went_wrong_is_not_timed(tmp_path):
    """The check sees a layer that was merged twice."""
    device = torch.device("cpu")
    repository = DummyRepository(
        path=tmp_path, source="", folders={}, digests={}, config=demo_transformer(), two_times=False, text_rows=1
    )
    model = RandomWeights(repository, device, torch.bfloat16).transformer(projections=False)
    layer = "transformer_blocks.0.attn.to_q"
    path = merge.write_adapter(tmp_path / "a.safetensors", model, [layer], merge.MergeSettings(rank=4))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    overlay = Overlay((open_adapter(Source(str(path), path=path), shapes, Lora()),), "merge", tmp_path)
    before = model.get_parameter(f"{layer}.weight").clone()
    overlay.apply(model)
    assert merge.check_layer(model, layer, before, overlay) <= merge.MOST_TURNED
    overlay.apply(model)
    with pytest.raises(SolgenError, match="is not W"):
        merge.check_layer(model, layer, before, overlay)
