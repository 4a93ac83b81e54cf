"""What cannot be applied in full is refused: exit code 2, one line with the tensor's name, nothing written."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from solgen.__main__ import main
from tests.engine.adapters.spellings import ADALN, HIDDEN, TIME, TIME_HIDDEN


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run `solgen generate` on the demo with adapters, and return the one line it says.

    A stage that had begun, such as loading, would have printed a line of its own.
    """
    monkeypatch.chdir(tmp_path)

    def run(*loras: Path | str, arguments: tuple[str, ...] = ()) -> str:
        before = sorted(tmp_path.rglob("*"))
        given = [part for lora in loras for part in ("--lora", str(lora))]
        with pytest.raises(SystemExit) as stop:
            main(["generate", "--preset", "demo", "-p", "a ball", *given, *arguments])
        out, err = capsys.readouterr()
        assert (stop.value.code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
        return err

    return run


def put(key: str, tensor: torch.Tensor):
    return lambda tensors: tensors.update({key: tensor})


def rename(start: str, to: str):
    def change(tensors) -> None:
        for key in list(tensors):
            tensors[key.replace(start, to, 1)] = tensors.pop(key)

    return change


FIRST = "transformer.transformer_blocks.0.attn.to_q"

KINDS = {
    "vsa gate": (
        put("transformer_blocks.0.attn.to_gate_compress.set_weight", torch.ones(2)),
        "to_gate_compress",
        "VSA",
    ),
    "dora": (put(f"{FIRST}.lora_magnitude_vector", torch.ones(1024)), "lora_magnitude_vector", "DoRA"),
    "dora kohya": (put(f"{FIRST}.dora_scale", torch.ones(1024)), "dora_scale", "DoRA"),
    "lokr": (put(f"{FIRST}.lokr_w1", torch.ones(2, 2)), "lokr_w1", "LoKr"),
    "pruned table": (put("adaln_t_table", torch.ones(1025, 8)), "adaln_t_table", "8-wide AdaLN"),
    "pruned adaln": (
        lambda tensors: tensors.update(
            {
                "transformer_blocks.0.adaln_proj.linear.lora_A.weight": torch.ones(4, 8),
                "transformer_blocks.0.adaln_proj.linear.lora_B.weight": torch.ones(ADALN, 4),
            }
        ),
        f"transformer_blocks.0.adaln_proj.linear.lora_A.weight' [4, 8] gives [{ADALN}, 8]",
        f"transformer_blocks.0.adaln_proj.linear.weight is [{ADALN}, {TIME}]; it was made for a pruned checkpoint",
    ),
    "converted head bank": (put("h3_pdd.bank.video", torch.ones(2)), "h3_pdd.bank.video", "PDD"),
    "orphan A": (lambda t: t.pop(f"{FIRST}.lora_B.weight"), f"{FIRST}.lora_A.weight", "no lora_B"),
    "orphan B": (lambda t: t.pop(f"{FIRST}.lora_A.weight"), f"{FIRST}.lora_B.weight", "no lora_A"),
    "orphan alpha": (put("transformer_blocks.2.attn.to_q.alpha", torch.tensor(1.0)), "to_q.alpha", "no lora_A"),
    "NaN": (put(f"{FIRST}.lora_A.weight", torch.full((6, HIDDEN), torch.nan)), f"{FIRST}.lora_A.weight", "NaN"),
    "Inf": (put(f"{FIRST}.lora_B.weight", torch.full((1024, 6), torch.inf)), f"{FIRST}.lora_B.weight", "infinity"),
    "wrong width": (
        put(f"{FIRST}.lora_A.weight", torch.ones(6, 96)),
        f"{FIRST}.lora_A.weight' [6, 96] gives [1024, 96]",
        f"transformer_blocks.0.attn.to_q.weight is [1024, {HIDDEN}]",
    ),
    "wrong height": (put(f"{FIRST}.lora_B.weight", torch.ones(512, 6)), "lora_B.weight' [512, 6]", "another model"),
    "wrong rank": (put(f"{FIRST}.lora_B.weight", torch.ones(1024, 5)), "lora_B.weight' [1024, 5]", "does not multiply"),
    "bad alpha": (put(f"{FIRST}.alpha", torch.tensor(-1.0)), "the alpha of 'transformer_blocks.0.attn.to_q'", "-1.0"),
    "unknown suffix": (put(f"{FIRST}.bananas", torch.ones(1)), f"{FIRST}.bananas", "1 of 37 tensors fit no module"),
    "unknown module": (
        put("transformer_blocks.9.norm1.diff", torch.ones(1)),
        "transformer_blocks.9.norm1.diff",
        "1 of",
    ),
    "all unknown": (rename("transformer.", "foo."), "0 of 36 adapter tensors matched", "'foo.token_refiner"),
    "no bias": (put("transformer_blocks.0.attn.to_q.diff_b", torch.ones(1024)), "to_q.diff_b", "does not have"),
    "second time embedder": (
        lambda tensors: tensors.update(
            {
                "transformer.endpoint_time_embedder.linear_1.lora_A.weight": torch.ones(2, 256),
                "transformer.endpoint_time_embedder.linear_1.lora_B.weight": torch.ones(TIME_HIDDEN, 2),
            }
        ),
        "endpoint_time_embedder.linear_1.lora_A.weight",
        "hyperflow_gate",
    ),
    "twice": (
        lambda t: t.update({k.removeprefix("transformer."): v.clone() for k, v in list(t.items())[:2]}),
        "'transformer_blocks.0.attn.to_q.lora_A.weight'",
        "same part of one module",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_cannot_be_applied_is_refused_by_name(kind: str, write, refused) -> None:
    change, *expected = KINDS[kind]
    line = refused(write(change=change))
    assert all(part in line for part in expected), line


def test_a_head_bank_is_refused(write, refused) -> None:
    def change(tensors) -> None:
        for key in list(tensors):
            tensors[key.replace("lora_A.weight", "lora_down").replace("lora_B.weight", "lora_up")] = tensors.pop(key)
        tensors["proj_out.weight"] = torch.ones(32, 96, 128)

    path = write(change=change, metadata={"pdd_num_steps": "32", "lora_alpha": "64.0"})
    assert "tensor 'proj_out.weight' [32, 96, 128] belongs to a PDD head bank" in refused(path)


def test_dora_in_the_peft_config_is_refused(write, refused) -> None:
    path = write("peft")
    path.with_name("adapter_config.json").write_text(json.dumps({"lora_alpha": 6, "use_dora": True}))
    assert "use_dora" in refused(path.parent)


@pytest.mark.parametrize("key", ["low_rank_tensors", "diff_tensors"])
def test_declared_counts_are_verified(key: str, write, refused) -> None:
    assert f"promises {key} 90, it has" in refused(write("fastvideo", metadata={key: "90"}))


@pytest.mark.parametrize("text", ["many", "-3", "nan", "0"])
def test_a_declared_alpha_that_is_no_number_is_refused(text: str, write, refused) -> None:
    assert f"metadata lora_alpha is {text!r}" in refused(write(metadata={"lora_alpha": text}))


class Touch:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["evil.pt", "evil.bin", "evil.ckpt", "evil.safetensors"])
@pytest.mark.parametrize("archive", [True, False], ids=["torch", "pickle"])
def test_a_pickle_is_refused_by_content_and_never_opened(name: str, archive: bool, tmp_path: Path, refused) -> None:
    marker = tmp_path / "marker"
    path = tmp_path / name
    if archive:
        torch.save({"x": Touch(marker)}, path)
    else:
        path.write_bytes(pickle.dumps(Touch(marker)))
    assert "is a pickle" in refused(path)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Touch(marker)))
    assert marker.exists()  # opening it would have


@pytest.mark.parametrize("content", [b"", b"GGUF\x03\x00\x00\x00", b"\x10\x00\x00\x00\x00\x00\x00\x00{not json at all"])
def test_other_files_are_refused(content: bytes, tmp_path: Path, refused) -> None:
    (tmp_path / "other.safetensors").write_bytes(content)
    assert "other.safetensors" in refused(tmp_path / "other.safetensors")


def test_a_cut_file_is_refused(write, refused) -> None:
    path = write()
    path.write_bytes(path.read_bytes()[:-100])
    assert "its header promises" in refused(path)


def test_one_file_twice_is_refused_by_path_and_by_content(write, refused, tmp_path: Path) -> None:
    path = write()
    assert "given twice" in refused(path, f"{path}:0.5")
    (tmp_path / "copy.safetensors").write_bytes(path.read_bytes())
    assert "copy.safetensors is a copy of a file that is given too" in refused(path, tmp_path / "copy.safetensors")


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ("missing.safetensors", "no such file"),
        ("./a/b/missing.safetensors:0.5", "no such file"),
        ("missing.safetensors:strong", "no such file"),
        ("missing.safetensors:nan", "strength nan is not finite"),
        (".", "holds 0 *.safetensors files"),
    ],
)
def test_a_source_that_names_no_file_is_refused(lora: str, expected: str, refused) -> None:
    assert expected in refused(lora)


def test_quantised_weights_are_refused(write, refused, model_copy: Path) -> None:
    (path,) = (model_copy / "transformer").glob("*.safetensors")
    tensors = load_file(path)
    name = "transformer_blocks.0.attn.to_q.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, path)
    line = refused(write(), arguments=("--model", str(model_copy)))
    assert f"changes {name}, which" in line
    assert "F8_E4M3; merge into the bf16 model first" in line


def test_unmatched_tensors_can_be_left_out_and_are_listed(write, opened) -> None:
    path = write(change=put("transformer_blocks.9.norm1.diff", torch.ones(1)))
    overlay = opened(path, allow_unmatched=True)
    assert overlay.adapters[0].unmatched == ("transformer_blocks.9.norm1.diff",)
    assert any("transformer_blocks.9.norm1.diff" in note for note in overlay.notes)
