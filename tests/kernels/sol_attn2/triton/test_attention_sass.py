"""Machine code of the attention kernels, compiled without a GPU: no spills, probabilities that stay in registers."""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from solgen.kernels.sol_attn2.gluon import attention as gluon_attention
from solgen.kernels.sol_attn2.triton import attention as triton_attention

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are bound to the interpreter")

DESCRIPTOR = "tensordesc<fp8e4nv[64, 128],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)>"


class MachineCode:
    """SASS of a compiled kernel as (address, instruction) pairs, and its stack bytes, which are spills."""

    def __init__(self, compiled) -> None:
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(compiled.asm["cubin"])
            cubin.flush()
            sass, usage = (
                subprocess.run([tool, option, cubin.name], capture_output=True, text=True, check=True).stdout
                for option in ("-sass", "-res-usage")
            )
        self.stack_bytes = int(re.search(r"STACK:(\d+)", usage)[1])
        lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)
        self.instructions = [(int(address, 16), text) for address, text in lines]

    def product_loops(self) -> list[str]:
        """Text of the innermost loops with tensor core products."""
        loops = []
        for address, text in self.instructions:
            target = re.search(r"BRA\S*\s.*?(0x[0-9a-f]+)", text)
            if target and int(target[1], 16) < address:
                loops.append((int(target[1], 16), address))
        bodies = {
            loop: "\n".join(text for address, text in self.instructions if loop[0] <= address <= loop[1])
            for loop in loops
        }
        # A jump back from code behind the kernel's end is a retried wait, no loop.
        products = [loop for loop, body in bodies.items() if "GMMA" in body and "EXIT" not in body]
        return [
            bodies[loop]
            for loop in products
            if not any(loop != inner and loop[0] <= inner[0] and inner[1] <= loop[1] for inner in products)
        ]

    def stray_merges(self) -> list[str]:
        """FP8 casts that merge into anything but zero or another cast's result: ptxas up to 12.9 miscompiles them."""
        stray, cast_results = [], set()
        for _, text in self.instructions:
            opcode, *operands = re.split(r"[ ,]+", text.strip())
            is_cast = opcode.startswith("F2FP") and "MERGE_C" in opcode
            if is_cast and operands[-1] != "RZ" and operands[-1] not in cast_results:
                stray.append(text)
            if operands:
                (cast_results.add if is_cast else cast_results.discard)(operands[0])
        return stray


def compile_kernel(kernel, source, types: dict[str, str], constants: dict, capability: int, options: dict):
    """Compile with the given argument types; pointers and strides count as divisible by 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [name for name in names if signature[name].startswith("*") or name.startswith("stride_")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    compiled = source(kernel, signature, constants, attributes)
    return MachineCode(triton.compile(compiled, target=GPUTarget("cuda", capability, 32), options=options))


def argument_types(kernel, integers: tuple[str, ...], codes: dict[str, str]) -> dict[str, str]:
    types = {name: "*fp32" for name in kernel.arg_names if name.startswith("p_")}
    types |= dict.fromkeys(integers, "*i32") | codes
    return types | {"p_out": "*bf16", "scale": "fp32", "stride_head": "i64", "stride_row": "i64"}


def compile_triton(capability: int, tail_kind: str, lse: bool) -> MachineCode:
    fp8 = capability >= 89
    codes = dict.fromkeys(("p_q", "p_k", "p_v", "p_tail_k", "p_tail_v"), "*fp8e4nv" if fp8 else "*i8")
    kernel = triton_attention._attention_kernel
    types = argument_types(kernel, ("p_counts", "p_order"), codes | {"p_blocks": "*i16"})
    constants = {"OFFSET": 7, "TAIL": tail_kind, "LSE": lse, "FP8": fp8, "ASM": True}
    constants |= {"STAGES": triton_attention.STAGES}
    options = triton_attention.launch_options(capability, lse=lse)
    return compile_kernel(kernel, ASTSource, types, constants, capability, options)


def compile_gluon(tail_kind: str, lse: bool) -> MachineCode:
    kernel = gluon_attention._attention_kernel
    integers = ("p_counts", "p_loads", "p_num_loads", "p_turns", "p_order")
    codes = {"p_q": "*fp8e4nv"} | {name: DESCRIPTOR for name in kernel.arg_names if name.endswith("_desc")}
    types = argument_types(kernel, integers, codes)
    constants = {"OFFSET": 7, "TAIL": tail_kind, "LSE": lse, "STAGES": gluon_attention.STAGES}
    return compile_kernel(kernel, GluonASTSource, types, constants, 90, {"num_warps": 4})


@pytest.mark.parametrize(("tail_kind", "lse"), [("slots", False), ("anchors", True), ("none", False)])
def test_triton_on_hopper(tail_kind, lse):
    code = compile_triton(90, tail_kind, lse)
    assert code.stack_bytes == 0
    assert code.stray_merges() == []
    (loop,) = code.product_loops()
    assert loop.count("QGMMA") == 6
    assert loop.count("F2IP") == 16
    assert loop.count("STS.U8") == loop.count("SHFL.IDX") == 0


@pytest.mark.parametrize(("tail_kind", "lse"), [("slots", False), ("anchors", True), ("none", False)])
def test_gluon(tail_kind, lse):
    code = compile_gluon(tail_kind, lse)
    assert code.stack_bytes == 0
    assert code.stray_merges() == []
    loops = code.product_loops()
    assert len(loops) == 3
    for loop in loops:
        assert loop.count("QGMMA") == 8
        assert loop.count("QGMMA.64x8x32") == 2  # the denominator
        assert loop.count("F2IP") == 32  # the second half where a pivot moves
        assert loop.count("VOTE") == 1
        assert loop.count("STS") == loop.count("SHFL.IDX") == loop.count("PRMT") == 0


@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_triton_for_other_gpus(capability):
    assert compile_triton(capability, "slots", False).stack_bytes == 0
