"""Models read from their shards are diffusers' own, bit for bit, and cost no more memory than they are large."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import load_file, save_file
from torch import nn

from solgen.engine.adaln import projection_names
from solgen.engine.components import MODELS
from solgen.engine.loader import load_transformer
from solgen.engine.streaming import stream_model, stream_projections, stream_transformer
from solgen.engine.weights import DTYPES, Weights
from solgen.errors import InputError, SetupError
from solgen.presets.demo import demo_model_path
from solgen.presets.schema import Memory

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def split(folder: Path, shards: int) -> None:
    """Deal a component's tensors out to several files with an index."""
    (whole,) = folder.glob("*.safetensors")
    tensors = load_file(whole)
    whole.unlink()
    names = [sorted(tensors)[shard::shards] for shard in range(shards)]
    files = {f"model-{shard:05d}-of-{shards:05d}.safetensors": part for shard, part in enumerate(names, 1)}
    for file, part in files.items():
        save_file({name: tensors[name].clone() for name in part}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in files.items() for name in part}
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    """The same parameters and buffers, with the same types and bits, in evaluation mode."""
    for kind in ("named_parameters", "named_buffers"):
        mine, theirs = dict(getattr(found, kind)()), dict(getattr(expected, kind)())
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert mine[name].dtype == tensor.dtype, name
            assert mine[name].requires_grad == tensor.requires_grad, name
            assert torch.equal(mine[name], tensor), name
    assert not any(module.training for module in found.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["transformer", "vae", "audio_vae"])
def test_a_model_is_diffusers_own(name: str, dtype: torch.dtype) -> None:
    folder = demo_model_path() / name
    assert_same(
        stream_model(MODELS[name], folder, device=CPU, dtype=dtype), MODELS[name].from_pretrained(folder, dtype=dtype)
    )


def test_shards_are_put_together(model_copy: Path) -> None:
    folder = model_copy / "transformer"
    expected = MiniMaxH3Transformer3DModel.from_pretrained(folder, dtype=torch.bfloat16)
    split(folder, 5)
    model = stream_transformer(folder, None, device=CPU, dtype=torch.bfloat16, with_adaln=True, blocks_on=CPU)
    assert_same(model, expected)


def test_adaln_projections_are_left_out_and_read_one_by_one(model_copy: Path) -> None:
    folder = model_copy / "transformer"
    expected = MiniMaxH3Transformer3DModel.from_pretrained(folder, dtype=torch.bfloat16)
    model = stream_transformer(folder, None, device=CPU, dtype=torch.bfloat16, with_adaln=False, blocks_on=CPU)
    names = projection_names(model)
    absent = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert absent == {f"{name}.{part}" for name in names for part in ("weight", "bias")}
    split(folder, 3)
    layers = stream_projections(folder, None, device=CPU, dtype=torch.bfloat16)(names)
    for name, layer in zip(names, layers, strict=True):
        assert_same(layer.eval(), expected.get_submodule(name).eval())


def test_every_type_of_the_format_is_read(tmp_path: Path) -> None:
    """Values, shapes without an extent and without elements, and places that are no multiple of the type's size."""
    numbers = torch.arange(-3, 4)
    tensors = {name: (numbers > 0 if name == "BOOL" else numbers.abs().to(kind)) for name, kind in DTYPES.items()}
    tensors |= {"one": torch.tensor(5.5), "none": torch.zeros(0, 3), "odd": torch.ones(3, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "a.safetensors")
    with Weights(tmp_path) as weights:
        for name, tensor in tensors.items():
            found = weights.read(name, CPU)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found.double(), tensor.double())


def test_a_tensor_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solgen.engine.weights.PIECE", 1000)
    tensor = torch.randn(1237, 7, generator=torch.Generator().manual_seed(0))
    save_file({"a": torch.ones(3), "b": tensor}, tmp_path / "a.safetensors")
    with Weights(tmp_path) as weights:
        assert torch.equal(weights.read("b", CPU), tensor)


def test_a_file_that_shrinks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    with Weights(tmp_path) as weights:
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(SetupError, match="a.safetensors ended early while it was read"):
            weights.read("a", CPU)
    with pytest.raises(InputError, match="its header promises"):
        Weights(tmp_path)


SIZES = {
    "hidden_size": 1024, "num_attention_heads": 8, "num_layers": 18, "num_refiner_layers": 1, "ffn_dim": 4096,
    "text_dim": 64, "time_embed_hidden_dim": 256, "time_embed_dim": 512,
}  # fmt: skip
"""A transformer of 0.97 GB, 0.34 GB of them AdaLN."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of that transformer in seven shards; every tensor counts up, so no two are alike."""
    folder = tmp_path_factory.mktemp("large")
    with torch.device("meta"):
        model = MiniMaxH3Transformer3DModel(**SIZES)
    model.save_config(folder)
    names, weight_map = list(model.state_dict()), {}
    for shard in range(7):
        file, tensors = f"model-{shard}.safetensors", {}
        for number, name in list(enumerate(names))[shard::7]:
            meta = model.get_parameter(name)
            island = not set(model._keep_in_fp32_modules).isdisjoint(name.split("."))
            tensors[name] = torch.full(meta.shape, number, dtype=torch.float32 if island else torch.bfloat16)
            weight_map[name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


LOAD = """
import json, os, signal, sys
from pathlib import Path
import torch
from solgen.engine import streaming
from solgen.engine.loader import load_transformer
from solgen.presets.schema import Memory

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

folder, stop = Path(sys.argv[1]), int(sys.argv[2])
count = 0
put = streaming.put
def killed(*args):
    global count
    count += 1
    if count == stop:
        os.kill(os.getpid(), signal.SIGKILL)
    put(*args)
streaming.put = killed
before = status("VmRSS")
model, tables = load_transformer(folder, None, device=torch.device("cpu"), dtype=torch.bfloat16, memory=Memory())
tables.prepare([(torch.tensor([0.1, 0.2]), torch.zeros(1)), (torch.tensor([0.5]), torch.zeros(1))])
tensors = dict(model.named_parameters())
constant = all(float(tensor.max()) == float(tensor.min()) for tensor in tensors.values())
size = sum(tensor.nbytes for tensor in tensors.values())
print(json.dumps({"peak": status("VmHWM") - before, "size": size, "constant": constant, "count": count}))
"""


def load_apart(folder: Path, stop: int) -> subprocess.CompletedProcess[str]:
    """Load in a process of its own, which kills itself before it stores tensor `stop`."""
    command = [sys.executable, "-c", LOAD, str(folder), str(stop)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_loading_peaks_at_the_model_and_a_kill_halfway_breaks_nothing(large: Path) -> None:
    """Memory includes mapped pages and the AdaLN projections, which pass one by one.

    At full size 2 GiB beside the model are allowed; here a tenth of them, less than the projections together.
    """

    def files() -> dict[str, tuple[int, int]]:
        return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in large.iterdir()}

    before = files()
    assert load_apart(large, 100).returncode == -signal.SIGKILL
    assert files() == before
    result = load_apart(large, -1)
    assert result.returncode == 0, result.stderr
    assert files() == before
    report = json.loads(result.stdout)
    assert report["count"] > 200
    assert report["constant"]
    whole = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    assert 6e8 < report["size"] < whole - 3e8
    assert report["peak"] < report["size"] + 2 * 1024**3 / 10


@pytest.mark.gpu
def test_the_same_bits_arrive_on_a_gpu() -> None:
    """Every model directly, and the transformer with its blocks in page-locked host memory."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    cuda, dtype = torch.device("cuda"), torch.bfloat16
    for name in ("transformer", "vae", "audio_vae"):
        folder = demo_model_path() / name
        model = stream_model(MODELS[name], folder, device=cuda, dtype=dtype)
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"cuda"}
        assert_same(model.cpu(), MODELS[name].from_pretrained(folder, dtype=dtype))
    folder = demo_model_path() / "transformer"
    streamed, tables = load_transformer(folder, None, device=cuda, dtype=dtype, memory=Memory(offload="layers"))
    assert tables is not None
    expected = MiniMaxH3Transformer3DModel.from_pretrained(folder, dtype=dtype).state_dict()
    for name, tensor in streamed.state_dict().items():
        assert torch.equal(tensor.cpu(), expected[name])
        assert tensor.is_pinned() == (name.startswith("transformer_blocks.") and tensor.ndim > 1)
