"""What the tests let GPUs do; imported by name in every rank."""

from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel

from solgen.parallel.agree import joined
from solgen.parallel.mesh import Mesh
from solgen.parallel.world import World
from solgen.presets.demo import demo_model_path
from tests.parallel.on_ranks import SOUND, check_exchanges, check_operands, forward, over_wire, packing

CASES = [("dense", 20, True), ("sol-attn2", 20), ("sol-attn2", 19, True), ("block-sparse", 20)]
"""Attention, rows of prompt, fusion."""

WIRES = [(wire, "sol-attn2", 20, overlap, SOUND) for wire in ("bf16", "fp8") for overlap in (False, True)]
"""Wire, attention, rows of prompt, overlap, rows of sound."""


def measure() -> dict[str, Any]:
    """The exchanges' own checks over NCCL, and calls of the demo transformer in bf16; tensors come back to the CPU."""
    world = World.from_environment()
    with joined(world):
        device = torch.device("cuda", world.local_rank)
        mesh = Mesh.over(world, dp_size=1, device_type="cuda")
        if mesh.sp_size > 1:
            check_exchanges(mesh, device)
            check_operands(mesh, device)
        model = MiniMaxH3Transformer3DModel.from_pretrained(demo_model_path() / "transformer", dtype=torch.bfloat16)
        model.eval().to(device)
        return {
            "outputs": {case: rows(forward(model, mesh, *case)[:2]) for case in CASES},
            "wires": {case: rows(over_wire(model, mesh, *case)[:2]) for case in WIRES},
            "packing": [[rows(part) for part in packing(model, mesh, 20, SOUND, overlap)] for overlap in (False, True)],
        }


def rows(found: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Video and sound in float64, on the CPU."""
    return [tensor.double().cpu() for tensor in found]
