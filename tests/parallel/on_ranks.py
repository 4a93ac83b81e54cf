"""What the tests let ranks do; imported by name in every rank."""

import hashlib
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from solgen.engine.attention import BlockAttention, QueryAndKey, install_attention
from solgen.engine.attention_run import AttentionRun
from solgen.engine.batch import Job
from solgen.engine.check import check
from solgen.engine.decode import decode_video
from solgen.engine.exchange import OperandExchange
from solgen.engine.fusion import fused
from solgen.engine.generate import Clip, encode, generate, load, sample
from solgen.engine.loader import load_decoders
from solgen.engine.packing import TokenOrder, cube_token_order
from solgen.engine.repository import open_repository
from solgen.engine.sharding import sharded
from solgen.engine.stages import Silent, Stages
from solgen.errors import SolgenError
from solgen.kernels.sol_attn2 import NormRope, SolAttn2Config, sol_attn2
from solgen.kernels.sol_attn2.density import log_shares
from solgen.kernels.sol_attn2.wire import attend_operands
from solgen.parallel.agree import gather, joined
from solgen.parallel.mesh import Mesh
from solgen.parallel.ulysses import Ulysses
from solgen.parallel.world import World
from solgen.presets.demo import demo_model_path
from solgen.presets.schema import Attention, Model, Parallel

CPU = torch.device("cpu")
GRID = (5, 8, 8)
VIDEO = 320
SOUND = 161
CASES = [
    ("dense", 19),
    ("dense", 20),
    ("sol-attn2", 19),
    ("sol-attn2", 20),
    ("fp8", 20),
    ("sol-attn1", 20),
    ("block-sparse", 20),
    ("dense", 20, True),
    ("sol-attn2", 20, True),
    ("sol-attn2", 20, True, 61),
]
"""Attention, rows of prompt (one token apart makes 500 and 501 rows, the last block ragged by 52 and by 53), fusion,
and rows of sound (61 make seven blocks)."""


WIRES = [
    ("bf16", "sol-attn2", 19, True, SOUND),
    ("fp8", "sol-attn2", 19, False, SOUND),
    ("fp8", "sol-attn2", 20, False, SOUND),
    ("fp8", "sol-attn2", 20, True, SOUND),
    ("fp8", "fp8", 20, False, SOUND),
    ("bf16", "dense", 20, False, 61),
    ("bf16", "sol-attn2", 20, False, 61),
    ("fp8", "sol-attn2", 20, True, 61),
    ("bf16", "dense", 32, False, SOUND),
    ("fp8", "sol-attn2", 32, False, SOUND),
]
"""Wire, attention, rows of prompt, overlap, rows of sound.

401 rows leave the seventh of eight ranks 17 and the last none. Of 513 the last gets one, whose matrix products are
summed in another order: 5e-8, which four blocks in FP8 amplify to 3e-3, on one rank too. Hence dense with bf16.
"""


PACKINGS = [(text, sound, overlap) for text, sound in ((20, SOUND), (32, SOUND), (20, 61)) for overlap in (False, True)]
"""Rows of prompt, rows of sound, overlap; of eight ranks the last has 53 rows, one and none."""


class Recorded(BlockAttention):
    """Also keeps the route and the log shares of every call."""

    def __init__(self, block: int, run: AttentionRun) -> None:
        super().__init__(block, run, sparse=True)
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, norm: NormRope | None
    ) -> torch.Tensor:
        assert norm is None, "log shares are those of normed queries and keys"
        rows, config = self.run.video_rows, self.run.config
        _, details = sol_attn2(query, key, value, config=config, video_rows=rows, details=True)
        self.seen.append((details.route, log_shares(query, key)))
        return super()._attend(query, key, value, norm=norm)


class PackedByCopies(BlockAttention):
    """Norms and rotates in an op of its own, and packs what that wrote."""

    def _attend_heads(
        self,
        ulysses: Ulysses,
        query_and_key: QueryAndKey,
        value: torch.Tensor,
        dense: bool,
        norm: NormRope | None = None,
    ) -> torch.Tensor:
        assert norm is not None, "a fused run leaves norms to packing"
        query, key = norm.apply(*(heads.transpose(1, 2) for heads in query_and_key()))
        return super()._attend_heads(ulysses, lambda: (query.transpose(1, 2), key.transpose(1, 2)), value, dense)


def measure(job: Job) -> dict[str, Any]:
    """Everything that needs ranks but no files: exchanges, the transformer, the noise of a request."""
    world = World.from_environment()
    with joined(world):
        mesh = Mesh.over(world, dp_size=1, device_type="cpu")
        if mesh.sp_size > 1:
            check_exchanges(mesh)
            check_operands(mesh)
        model = MiniMaxH3Transformer3DModel.from_pretrained(demo_model_path() / "transformer", dtype=torch.float32)
        model.eval()
        return {
            "outputs": {case: forward(model, mesh, *case) for case in CASES},
            "wires": {case: over_wire(model, mesh, *case) for case in WIRES},
            "packing": {case: packing(model, mesh, *case) for case in PACKINGS},
            "routes": gather(world, record_routes(model, mesh)),
            "request": gather(world, run_request(world, mesh, job)),
        }


def check_exchanges(mesh: Mesh, device: torch.device = CPU) -> None:
    """There and back, with every row and head at its place; ranks without rows take part."""
    for rows in (1, 64, 100, 129, 512, 565):
        for dtype in (torch.float32, torch.bfloat16):
            ulysses = Ulysses.over(mesh, rows, block=64)
            assert ulysses is not None
            generator = torch.Generator().manual_seed(rows)
            whole = [torch.randn(1, rows, 8, 16, generator=generator).to(device, dtype) for _ in range(3)]
            mine = [ulysses.local(tensor, 1) for tensor in whole]
            heads = slice(mesh.sp_rank * 8 // mesh.sp_size, (mesh.sp_rank + 1) * 8 // mesh.sp_size)
            there = ulysses.to_heads(*mine)
            for tensor, expected in zip(there, whole, strict=True):
                assert torch.equal(tensor, expected[:, :, heads])
                assert tensor.stride(-1) == 1
            assert torch.equal(ulysses.to_rows(there[1]), mine[1])
            assert torch.equal(ulysses.gather(mine[2].flatten(2)), whole[2].flatten(2))


def check_operands(mesh: Mesh, device: torch.device = CPU) -> None:
    """Operands and outputs of any number of rows over the FP8 wire; ranks without rows take part."""
    dtype, rounding = (torch.float32, 1e-3) if device == CPU else (torch.bfloat16, 2**-8)
    heads = slice(mesh.sp_rank * 8 // mesh.sp_size, (mesh.sp_rank + 1) * 8 // mesh.sp_size)
    for rows, smooth in ((1, True), (64, False), (100, True), (129, True), (565, False)):
        ulysses = Ulysses.over(mesh, rows, block=64)
        assert ulysses is not None
        generator = torch.Generator().manual_seed(rows)
        whole = torch.randn(3, 1, rows, 8, 128, generator=generator).to(device, dtype)
        query, key, value = (ulysses.local(tensor, 1) for tensor in whole)
        config = SolAttn2Config(epsilon=0.05, smooth_key=smooth, smooth_value=smooth)
        exchange = OperandExchange(ulysses, config, nullcontext)
        sent = exchange.send_values(value)
        operands = exchange.operands(query, key, sent)
        output, details = attend_operands(operands, config=config, dtype=dtype)
        expected, alone = sol_attn2(*whole.transpose(2, 3), config=config, details=True)
        assert torch.equal(details.route, alone.route[:, heads])
        assert (output - expected[:, heads]).norm() <= rounding * expected.norm()
        back = exchange.to_rows(output.transpose(1, 2), sent)
        mine = ulysses.local(expected.transpose(1, 2), 1)
        assert back.shape == mine.shape
        # Half a step of E4M3 of what differs from the mean value.
        assert (back - mine).norm() <= 2**-4 * (mine - sent.statistics.mean).norm() + rounding * expected.norm()


def decode(shape: tuple[int, int, int]) -> list[list[Any]]:
    """Frames that every rank is left with, of random latents [frames, height, width]."""
    world = World.from_environment()
    with joined(world), torch.no_grad():
        mesh = Mesh.over(world, dp_size=1, device_type="cpu")
        pipeline = load_decoders(open_repository(Model(source="demo"), "t2va"), device=CPU, dtype=torch.float32)
        latents = torch.randn(1, 24, *shape, generator=torch.Generator().manual_seed(5))
        return gather(world, decode_video(pipeline, latents, mesh))


def packed(model: MiniMaxH3Transformer3DModel, text: int, sound: int = SOUND) -> tuple[dict[str, Any], TokenOrder]:
    """The model's inputs for a small clip with `text` rows of prompt and `sound` rows of sound."""
    generator = torch.Generator().manual_seed(3)
    rows = text + sound + VIDEO
    texts, audio, video = torch.arange(rows).split([text, sound, VIDEO])
    order = cube_token_order(video, audio, texts, target_grid=GRID)
    tags = torch.cat([torch.ones(text), torch.full((sound,), 2), torch.zeros(VIDEO)]).long()
    inputs = {
        "hidden_states": torch.randn(1, VIDEO, 96, generator=generator),
        "audio_hidden_states": torch.randn(1, sound, 32, generator=generator),
        "encoder_hidden_states": torch.randn(1, text, 32, generator=generator),
        "timestep": torch.tensor([0.1, 0.4]),
        "timestep_indices": (tags == 2).long()[order.order],
        "token_tags": tags[order.order],
        "position_ids": (torch.rand(rows, 3, dtype=torch.float64, generator=generator) * 32)[order.order],
        "video_indices": order.position[video],
        "audio_indices": order.position[audio],
        "text_indices": order.position[texts],
    }
    for name, tensor in inputs.items():
        inputs[name] = tensor.to(model.device, model.dtype if name.endswith("hidden_states") else tensor.dtype)
    order = TokenOrder(*(part.to(model.device) for part in (order.order, order.position, order.video_rows)))
    return {**inputs, "return_dict": False}, order


def start(
    model: MiniMaxH3Transformer3DModel,
    mesh: Mesh,
    order: TokenOrder,
    *,
    fuse: bool = False,
    parallel: Parallel | None = None,
    **attention: Any,
) -> AttentionRun:
    """Install attention for one call."""
    ulysses = Ulysses.over(mesh, order.order.numel(), block=64)
    settings = Attention(dense_blocks="0,5", **attention)
    run = AttentionRun.start(settings, order.video_rows, ulysses, fused=fuse, parallel=parallel)
    run.begin_step(0)
    install_attention(model, run)
    return run


@torch.no_grad()
def forward(
    model: MiniMaxH3Transformer3DModel, mesh: Mesh, backend: str, text: int, fuse: bool = False, sound: int = SOUND
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Video and audio rows of one call, and its densities."""
    inputs, order = packed(model, text, sound)
    run = start(model, mesh, order, fuse=fuse, backend=backend)
    with fused(model, fuse), sharded(model, run.ulysses):
        video, audio = model(**inputs)
    return video, audio, run.density_table()[0]


@torch.no_grad()
def over_wire(
    model: MiniMaxH3Transformer3DModel, mesh: Mesh, wire: str, backend: str, text: int, overlap: bool, sound: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float], int]:
    """Video and audio rows of one call, its densities, and the bytes that this rank sent as packets."""
    inputs, order = packed(model, text, sound)
    run = start(model, mesh, order, parallel=Parallel(wire=wire, overlap=overlap), backend=backend)
    sent = 0
    exchange = dist.all_to_all_single

    def count(output: torch.Tensor, source: torch.Tensor, *args: Any, **options: Any) -> Any:
        nonlocal sent
        sent += source.nbytes if source.dtype == torch.uint8 else 0
        return exchange(output, source, *args, **options)

    dist.all_to_all_single = count
    try:
        with sharded(model, run.ulysses):
            video, audio = model(**inputs)
    finally:
        dist.all_to_all_single = exchange
    return video, audio, run.density_table()[0], sent


@torch.no_grad()
def packing(
    model: MiniMaxH3Transformer3DModel, mesh: Mesh, text: int, sound: int, overlap: bool
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Video and audio rows of a fused call, packed as fused runs do and by copies."""
    inputs, order = packed(model, text, sound)
    outputs = []
    for processor in (BlockAttention, PackedByCopies):
        run = start(model, mesh, order, fuse=True, parallel=Parallel(overlap=overlap), backend="sol-attn2")
        if run.ulysses is not None:
            for index, block in enumerate(model.transformer_blocks):
                block.attn.set_processor(processor(index, run, sparse=block.attn.processor.sparse))
        with fused(model, True), sharded(model, run.ulysses):
            outputs.append(model(**inputs))
    return tuple(outputs)


@torch.no_grad()
def record_routes(model: MiniMaxH3Transformer3DModel, mesh: Mesh) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Route and log shares of this rank's heads in every sparse block."""
    inputs, order = packed(model, 20)
    run = start(model, mesh, order, backend="sol-attn2")
    processors = [Recorded(block, run) for block in range(1, 5)]
    for processor in processors:
        model.transformer_blocks[processor.block].attn.set_processor(processor)
    with sharded(model, run.ulysses):
        model(**inputs)
    return [processor.seen[0] for processor in processors]


def run_request(world: World, mesh: Mesh, job: Job) -> dict[str, Any]:
    """A request as `generate` runs it: bytes of the noise, and the latents it ends with."""
    device, repository = check([job], world.size)
    stages = Stages(device, Silent())
    clip = Clip(job, PipelineState(), stages)
    pipeline = load(repository, job.request, device, mesh, stages)
    if mesh.leads:
        encode(pipeline, clip)
    clip.state = mesh.share(clip.state)
    noise: list[str] = []

    def look(_module: Any, _args: Any, inputs: dict[str, Any]) -> None:
        tensors = (inputs["hidden_states"], inputs["audio_hidden_states"])
        noise.append(hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest())

    pipeline.transformer.register_forward_pre_hook(look, with_kwargs=True)
    sample(pipeline, clip, lambda *_: None, mesh)
    assert clip.latents is not None
    return {"noise": noise[0], "video": clip.latents.video, "audio": clip.latents.audio, "facts": clip.facts}


class FailingAt(Silent):
    """A listener that fails when a stage begins."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def start(self, stage: str, total: int | None) -> None:
        if stage == self.stage:
            raise SolgenError(f"{stage} went wrong")


def fail(kind: str, job: Job, pids: Path) -> Any:
    """Run a request in which rank 1, or rank 0 in a stage of its own, fails in the way `kind` names."""
    world = World.from_environment()
    (pids / str(world.rank)).write_text(str(os.getpid()))
    guilty = world.rank == (0 if kind == "decode video" else 1)

    def on_step(step: int, video: torch.Tensor, audio: torch.Tensor) -> None:
        if guilty and step == 2:
            if kind == "step 2":
                raise SolgenError("the second step went wrong")
            if kind == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)

    with joined(world):
        stage = "decode video" if kind == "decoding helper" else kind
        return generate([job], FailingAt(stage) if guilty else Silent(), on_step=on_step, world=world)
