"""Models straight from their shards: built without memory, then filled tensor by tensor where they will run.

The largest thing beside the model is one tensor. Adapters are merged into each tensor as it passes.
"""

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import load_file
from torch import Tensor, nn

from solgen.engine.adaln import Projections, projection_names
from solgen.engine.adapters.branch import BranchLinear, add_branches
from solgen.engine.adapters.names import ENDPOINT
from solgen.engine.adapters.overlay import Overlay
from solgen.engine.weights import Weights


def stream_model(model_class: Any, folder: Path, *, device: torch.device, dtype: torch.dtype) -> Any:
    """A diffusers model from its folder, bit for bit as `from_pretrained(folder, dtype=dtype)` makes it.

    Args:
        model_class: Its class.
        folder: Its config and weights.
        device: Where it goes.
        dtype: Type of all but integers and the modules in `_keep_in_fp32_modules`.

    Raises:
        SolgenError: for a file that changed since it was checked.
    """
    model = empty_model(model_class, folder)
    with Weights(folder) as weights:
        tensors = owners(model)
        for name in sorted(tensors, key=weights.place):
            put(*tensors[name], cast(weights.read(name, device), name, model_class, dtype))
    _move_buffers(model, device)
    return model


def stream_transformer(
    folder: Path,
    overlay: Overlay | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    with_adaln: bool,
    blocks_on: torch.device,
) -> MiniMaxH3Transformer3DModel:
    """`stream_model` for a transformer, with adapters laid over each tensor on its way.

    Args:
        folder: Its config and weights.
        overlay: Adapters; the result is bit for bit that of `Overlay.apply` on the loaded model.
        device: Where tensors are merged, and go.
        dtype: Type of all but the FP32 islands.
        with_adaln: Read the AdaLN projections too; without, they stay on the meta device.
        blocks_on: Where the transformer blocks go.

    Raises:
        SolgenError: for a file that changed since it was checked.
    """
    model = empty_model(MiniMaxH3Transformer3DModel, folder)
    with ExitStack() as stack:
        weights = stack.enter_context(Weights(folder))
        stored: dict[str, Tensor] = {}
        lay = None
        if overlay is not None:
            overlay.make_room(model)
            lay = stack.enter_context(overlay.laying())
            stored = load_file(overlay.endpoint_file) if overlay.endpoint_file else {}
        left_out = () if with_adaln else tuple(projection_names(model))
        tensors = {name: owner for name, owner in owners(model).items() if not name.startswith(left_out)}
        for name in sorted(tensors, key=lambda name: weights.place(_origin(name))):
            own = stored.get(name.removeprefix(f"{ENDPOINT}.")) if name.startswith(ENDPOINT) else None
            tensor = weights.read(_origin(name), device) if own is None else own.to(device)
            tensor = cast(tensor, _origin(name), MiniMaxH3Transformer3DModel, dtype)
            branches = lay(name, tensor) if lay else []
            put(*tensors[name], tensor.to(blocks_on) if name.startswith("transformer_blocks.") else tensor)
            if branches:
                add_branches(model, name.removesuffix(".weight"), branches)
        if overlay is not None:
            overlay.finish(model)
    _move_buffers(model, device)
    return model


def stream_projections(
    folder: Path, overlay: Overlay | None, *, device: torch.device, dtype: torch.dtype
) -> Projections:
    """A source of AdaLN projections that reads each from its shard when it is asked for.

    Args:
        folder: The transformer's folder.
        overlay: Adapters, merged into each, or beside it as branches.
        device: Where it goes.
        dtype: Type of its weights.
    """

    def projections(names: Sequence[str]) -> Iterator[nn.Module]:
        with ExitStack() as stack:
            weights = stack.enter_context(Weights(folder))
            lay = stack.enter_context(overlay.laying()) if overlay is not None else None

            def projection(name: str) -> nn.Module:
                tensors = {part: weights.read(f"{name}.{part}", device).to(dtype) for part in ("weight", "bias")}
                rows, columns = tensors["weight"].shape
                linear = nn.Linear(columns, rows, device="meta")
                branches = []
                for part, tensor in tensors.items():
                    branches += lay(f"{name}.{part}", tensor) if lay else []
                    put(linear, part, tensor)
                return BranchLinear(linear, branches) if branches else linear

            for name in names:
                yield projection(name)

    return projections


def empty_model(model_class: Any, folder: Path) -> Any:
    """A diffusers model in evaluation mode, its parameters on the meta device and its buffers computed."""
    with init_empty_weights(include_buffers=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the audio VAE uses the old weight_norm
        return model_class.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8"))).eval()


def owners(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Module and attribute of every tensor that a checkpoint holds, by its name in the checkpoint."""
    parts = {name: name.rpartition(".") for name in model.state_dict()}
    return {name: (model.get_submodule(module), attribute) for name, (module, _, attribute) in parts.items()}


def put(module: nn.Module, attribute: str, tensor: Tensor) -> None:
    """Make a tensor a module's parameter or buffer, in place of one without memory."""
    before = getattr(module, attribute)
    if isinstance(before, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=before.requires_grad)
    setattr(module, attribute, tensor)


def cast(tensor: Tensor, name: str, model_class: Any, dtype: torch.dtype) -> Tensor:
    """A tensor in the type that diffusers gives it: FP32 within the islands of its class."""
    if not tensor.is_floating_point():
        return tensor
    island = not set(model_class._keep_in_fp32_modules or ()).isdisjoint(name.split("."))
    return tensor.to(torch.float32 if island else dtype)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move what was computed instead of read."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _origin(name: str) -> str:
    """Where a parameter starts from: an adapter's second time embedder is a copy of the first."""
    return name.replace(ENDPOINT, "time_embedder")
