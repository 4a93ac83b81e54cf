"""Compilation is bounded: a length that has not been seen before compiles nothing, and processes share one cache."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.runtime.jit import JITFunction

from solgen.kernels.sol_attn2 import NormRope, SolAttn2Config, sol_attn2
from solgen.kernels.sol_attn2.density import share_histogram

KERNELS = Path(__file__).parents[2] / "kernels"

NUMBERS = {"scale", "octaves", "threshold", "log_blocks", "log_last", "sharpness", "reach", "eps"}
"""Arguments that are floating-point numbers, which Triton does not specialise on, or the same in every call."""

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are bound to the interpreter")


def launched_kernels():
    """Every kernel that the host launches, with its file."""
    for path in sorted(KERNELS.rglob("*.py")):
        name = ".".join(("solgen.kernels", *path.relative_to(KERNELS).with_suffix("").parts))
        for key, value in vars(importlib.import_module(name)).items():
            if isinstance(value, JITFunction) and key.endswith("_kernel") and value.__module__ == name:
                yield pytest.param(value, id=f"{path.stem}-{key}")


@pytest.mark.parametrize("kernel", list(launched_kernels()))
def test_no_kernel_is_compiled_for_a_length(kernel) -> None:
    """Triton compiles integers anew when they are 1, or begin or cease to be multiples of 16."""
    for parameter in kernel.params:
        name = parameter.name
        fixed = parameter.is_constexpr or name.startswith(("p_", "stride_")) or name.endswith("_desc")
        assert fixed or name in NUMBERS or parameter.do_not_specialize, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("tail", ["slots", "anchors", "none"])
@pytest.mark.parametrize("raw", [False, True], ids=["normed", "raw"])
def test_a_second_length_compiles_nothing(tail: str, raw: bool) -> None:
    compiled: list[str] = []

    def call(num_rows: int) -> list[str]:
        compiled.clear()
        query, key, value = torch.randn(3, 1, 3, num_rows, 128, dtype=torch.bfloat16, device="cuda")
        video = torch.arange(num_rows, device="cuda") < num_rows - 100
        share_histogram(query, key, video_rows=video)
        angles = torch.ones(num_rows, 96, device="cuda")[:, :48]
        norm = NormRope(query.new_ones(128), query.new_ones(128), angles, angles, 1e-5) if raw else None
        config = SolAttn2Config(epsilon=0.1, tail=tail)
        sol_attn2(query, key, value, config=config, video_rows=video, norm=norm, details=True)
        return list(compiled)

    hook = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda *, repr, **_: compiled.append(repr)
    try:
        call(5003)
        # 79 blocks each, then 80: another remainder by 16, and another number of blocks with and without it.
        assert [call(num_rows) for num_rows in (5008, 5017, 5056, 5065, 5120)] == [[]] * 5
    finally:
        triton.knobs.runtime.jit_post_compile_hook = hook


PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from solgen.kernels.fp8_linear.quantise import _quantise_rows_kernel as kernel

constants = {"INTEGER": False, "K": 384, "BLOCK": 512}
types = {"p_x": "*bf16", "p_codes": "*u8", "p_scales": "*fp32", "stride_x": "i32"}
signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
constants = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
print(triton.compile(ASTSource(kernel, signature, constants, {}), target=GPUTarget("cuda", 90, 32)).hash)
"""


def test_processes_share_one_cache(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(KERNELS.parent)}
    command = [sys.executable, "-c", PROGRAM]
    started = [subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True) for _ in range(3)]
    told = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], told
    (digest,) = {out.strip() for out, _ in told}
    # What they leave is whole: a fourth process reads it and compiles nothing.
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert any(path.suffix == ".cubin" for path in written)
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert again.stdout.strip() == digest
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
