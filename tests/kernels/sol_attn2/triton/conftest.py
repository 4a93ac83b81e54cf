"""Where the Triton kernels of Sol-Attn2 are tested: on a CUDA GPU, in Triton's interpreter, or as machine code only.

Tests that launch kernels carry the marker `gpu` and take the fixture `device`. Without a GPU, `run_in_interpreter`
runs those of one file in a process of its own, because kernels are bound to the interpreter when they are defined.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

if triton.knobs.runtime.interpret:
    import triton.runtime.interpreter as interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_index(tensor, scope) -> None:
        """Let loop bounds be device scalars under NumPy 2.4, which no longer turns arrays of one element into int."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_tensor_index


@pytest.fixture
def device() -> torch.device:
    """Where kernels run."""
    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU, and not in Triton's interpreter")
    return torch.device("cuda")


@pytest.fixture
def large(device: torch.device) -> torch.device:
    """A device for sizes that the interpreter cannot finish."""
    if device.type == "cpu":
        pytest.skip("too large for Triton's interpreter")
    return device


@pytest.fixture
def run_in_interpreter(request: pytest.FixtureRequest) -> Callable[[], None]:
    """Run the file's `gpu` tests on the CPU."""

    def run() -> None:
        if torch.cuda.is_available() or triton.knobs.runtime.interpret:
            pytest.skip("the tests of this file run directly")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(request.path)]
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore::RuntimeWarning"}
        result = subprocess.run(command, env=environment, cwd=request.config.rootpath, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout[-4000:]
        assert "passed" in result.stdout

    return run


class MachineCode:
    """SASS of one compiled kernel."""

    def __init__(self, compiled) -> None:
        tools = Path(triton.__file__).parent / "backends/nvidia/bin"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(compiled.asm["cubin"])
            cubin.flush()
            self.sass, self.usage = (
                subprocess.run(
                    [tools / "cuobjdump", option, cubin.name], capture_output=True, text=True, check=True
                ).stdout
                for option in ("-sass", "-res-usage")
            )

    @property
    def stack_bytes(self) -> int:
        """Spilled registers, in bytes."""
        return int(re.search(r"STACK:(\d+)", self.usage)[1])

    @property
    def registers(self) -> int:
        """Of a thread."""
        return int(re.search(r"REG:(\d+)", self.usage)[1])

    def count(self, opcode: str) -> int:
        """Instructions whose name starts with `opcode`."""
        return len(re.findall(rf"\s{opcode}\S*\s", self.sass))

    def stray_merges(self) -> list[str]:
        """FP8 casts that merge into anything but zero or another cast's result: ptxas up to 12.9 miscompiles them."""
        stray, cast_results = [], set()
        for line in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(\S+ [^;]*?) *;", self.sass, re.MULTILINE):
            opcode, *operands = re.split(r"[ ,]+", line)
            is_cast = opcode.startswith("F2FP") and "MERGE_C" in opcode
            if is_cast and operands[-1] != "RZ" and operands[-1] not in cast_results:
                stray.append(line)
            (cast_results.add if is_cast else cast_results.discard)(operands[0])
        return stray


@pytest.fixture
def compile_sm90() -> Callable[..., MachineCode]:
    """Compile a kernel for sm_90a without a GPU."""
    if triton.knobs.runtime.interpret:
        pytest.skip("kernels are bound to the interpreter")

    def compile_kernel(kernel, types: dict[str, str], constants: dict[str, object], num_warps: int) -> MachineCode:
        """Types name the arguments that are not i32; pointers and strides count as divisible by 16."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        aligned = [name for name in names if signature[name].startswith("*") or name.startswith("stride_")]
        source = ASTSource(
            kernel,
            signature,
            {(names.index(name),): value for name, value in constants.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )
        target = GPUTarget("cuda", 90, 32)
        return MachineCode(triton.compile(source, target=target, options={"num_warps": num_warps}))

    return compile_kernel


@pytest.fixture
def packed_qkv() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Query, key and value [1, H, N, 128] as views into one packed tensor with NaN around them."""

    def make(
        num_rows: int, num_heads: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        packed = torch.full((num_rows + 8, 3, num_heads + 1, 128), float("nan"), dtype=dtype, device=device)
        for part in range(3):
            for head in range(num_heads):
                x = torch.randn(num_rows, 128, generator=generator, device=device)
                # Keys share a mean, and neighbouring queries and keys a direction: routes keep some blocks.
                drift = torch.randn(num_rows // 200 + 1, 128, generator=generator, device=device)
                x += drift.repeat_interleave(200, dim=0)[:num_rows] * 2
                x[:, 5] += 4.0 * part
                packed[4 : 4 + num_rows, part, head] = x.to(dtype)
        query, key, value = packed[4 : 4 + num_rows, :, :num_heads].permute(1, 2, 0, 3).unsqueeze(1)
        return query, key, value

    return make
