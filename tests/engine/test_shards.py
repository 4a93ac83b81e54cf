"""Broken weight files are named before anything loads."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from solgen.engine.shards import BYTES, headers_digest, read_header, read_headers
from solgen.engine.weights import DTYPES
from solgen.errors import InputError


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards and their index."""
    tensors = {"a.weight": torch.ones(300), "b.weight": torch.zeros(20, 30)}
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        save_file({name: tensor}, tmp_path / f"model-{number}-of-2.safetensors")
    weight_map = {name: f"model-{number}-of-2.safetensors" for number, name in enumerate(tensors, 1)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_sound_shards_pass_and_their_digest_follows_the_headers(sharded: Path) -> None:
    digest = headers_digest(read_headers(sharded))
    assert headers_digest(read_headers(sharded)) == digest
    save_file({"b.weight": torch.zeros(30, 20)}, sharded / "model-2-of-2.safetensors")
    assert headers_digest(read_headers(sharded)) != digest


def test_every_type_that_is_let_through_can_be_read() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == BYTES


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"x": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert list(read_headers(tmp_path)) == ["model.safetensors"]
    assert len(headers_digest(read_headers(tmp_path))) == 64
    assert read_header(tmp_path / "model.safetensors")["x"]["dtype"] == "BF16"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def with_header(header: object) -> Callable[[Path], None]:
    text = json.dumps(header).encode()
    return lambda path: path.write_bytes(len(text).to_bytes(8, "little") + text)  # type: ignore[func-returns-value]


def entry(**changes: object) -> dict[str, object]:
    return {"b.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} | changes}


BREAKAGES = {
    "cut": (cut, r"bytes, its header promises [\d,]+; download it again"),
    "too long": (grow, "its header promises"),
    "missing": (Path.unlink, "cannot read .*No such file"),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes"),
    "git-lfs": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "git-lfs pointer"),
    "header cut": (lambda path: path.write_bytes(path.read_bytes()[:20]), "its header alone needs"),
    "text": (lambda path: path.write_text("hello world, not weights"), "not a safetensors file"),
    "list": (with_header([]), "not a safetensors file"),
    "number": (with_header(5), "not a safetensors file"),
    "entry": (with_header({"b.weight": []}), "not a safetensors file"),
    "no shape": (with_header(entry(shape=None)), "not a safetensors file"),
    "no type": (with_header(entry(dtype=5)), "not a safetensors file"),
    "one offset": (with_header(entry(data_offsets=[0])), "not a safetensors file"),
    "offsets in words": (with_header(entry(data_offsets=["a", "b"])), "not a safetensors file"),
    "unknown type": (with_header(entry(dtype="F8_E8M0")), "tensor 'b.weight' is F8_E8M0; expected one of F64, "),
    "too few bytes": (with_header(entry(shape=[3])), r"'b.weight', F32 \[3\], has 0 bytes, expected 12; download"),
    "backwards": (with_header(entry(data_offsets=[4, 0])), r"has -4 bytes, expected 0; download"),
    "zeros": (lambda path: path.write_bytes(bytes(4096)), "not a safetensors file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BREAKAGES)
def test_a_broken_shard_is_named(kind: str, sharded: Path) -> None:
    breakage, message = BREAKAGES[kind]
    breakage(sharded / "model-2-of-2.safetensors")
    with pytest.raises(InputError, match=message) as error:
        read_headers(sharded)
    assert "model-2-of-2.safetensors" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_index_that_names_a_missing_tensor(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"c.weight": "model-1-of-2.safetensors"}}))
    with pytest.raises(InputError, match=r"model-1-of-2.safetensors lacks tensor 'c.weight'"):
        read_headers(sharded)


INDICES = {
    "{": "not readable JSON",
    "[]": "not a JSON object",
    "{}": "not a shard index",
    '{"weight_map": []}': "not a shard index",
    '{"weight_map": {"a.weight": 5}}': "not a shard index",
}


@pytest.mark.parametrize("text", INDICES)
def test_a_broken_index_is_named(text: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=f"model.safetensors.index.json is {INDICES[text]}"):
        read_headers(sharded)


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InputError, match=r"holds no \*.safetensors file"):
        read_headers(tmp_path / "nothing")
