"""Kernels behind the FP8 wire against their references: packets byte for byte."""

import pytest
import torch

pytest.importorskip("triton")

from solgen.kernels.sol_attn2.triton import output as kernels
from solgen.kernels.sol_attn2.triton.statistics import channel_statistics
from solgen.kernels.sol_attn2.wire import OUTPUT_BYTES
from solgen.kernels.sol_attn2.wire.output import pack_output_reference, unpack_output_reference


def rows(num_rows: int, heads: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, h, 128] as a view inside NaN, and means [h, 128]."""
    generator = torch.Generator().manual_seed(num_rows)
    mean = torch.randn(heads, 128, generator=generator)
    inner = (mean + torch.randn(num_rows, heads, 128, generator=generator) ** 3).to(dtype)
    buffer = torch.full((num_rows + 2, heads + 1, 128), float("nan"), dtype=dtype, device=device)
    buffer[1:-1, :heads] = inner.to(device)
    return buffer[1:-1, :heads], mean.to(device)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [0, 1, 63, 65, 201])
@pytest.mark.parametrize("heads", [1, 7, 28])
def test_packets_are_the_reference_bytes(device, num_rows, heads):
    x, mean = rows(num_rows, heads, device, torch.float16)
    packet = kernels.pack_output(x, mean)
    assert torch.equal(packet.cpu(), pack_output_reference(x.cpu(), mean.cpu()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("ranks", "num_rows", "heads"), [(1, 65, 3), (2, 63, 7), (4, 1, 2), (2, 0, 2)])
def test_unpacking_rounds_once(device, ranks, num_rows, heads, dtype):
    mean = torch.randn(ranks * heads, 128, generator=torch.Generator().manual_seed(1)).to(device)
    packets = torch.stack([kernels.pack_output(*rows(num_rows, heads, device, dtype)) for _ in range(ranks)])
    found = kernels.unpack_output(packets, mean, dtype).cpu()
    assert found.shape == (num_rows, ranks * heads, 128)
    expected = unpack_output_reference(packets.cpu(), mean.cpu(), torch.float32)
    # A GPU fuses the product with the sum, which rounds once less.
    bound = torch.finfo(dtype).eps * expected.abs() + 2**-23 * (expected - mean.cpu()).abs() + 2**-24
    assert ((found.float() - expected).abs() <= bound).all()


@pytest.mark.gpu
def test_what_is_not_finite_arrives(device):
    x = torch.zeros(3, 1, 128, device=device)
    x[1, 0, 7] = float("nan")
    mean = torch.zeros(1, 128, device=device)
    back = kernels.unpack_output(kernels.pack_output(x, mean)[None], mean, torch.float32).cpu()
    assert back[[0, 2]].eq(0).all()
    assert back[1].isnan().any()


@pytest.mark.gpu
def test_offsets_beyond_32_bits(large):
    x = torch.zeros(600_000, 28, 128, dtype=torch.bfloat16, device=large)
    x[-1] = 3.0
    mean = torch.zeros(28, 128, device=large)
    packet = kernels.pack_output(x, mean)
    assert packet.shape == (600_000, 28 * OUTPUT_BYTES)
    assert torch.equal(packet[-1].cpu(), pack_output_reference(x[-1:].cpu(), mean.cpu())[0])
    assert kernels.unpack_output(packet[None], mean, torch.bfloat16)[-1].eq(3.0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 65, 1500])
def test_statistics_of_channels(device, packed_qkv, num_rows):
    _, key, _ = packed_qkv(num_rows, 2, device, torch.float16)
    found, x = channel_statistics(key).cpu(), key[0].cpu().double()
    bound = x.abs().sum(1) * 2**-24 * (num_rows.bit_length() + 64)
    assert ((found[:, 0] - x.sum(1)).abs() <= bound).all()
    assert torch.equal(found[:, 1].double(), x.amax(1))
    assert torch.equal(found[:, 2].double(), x.amin(1))


def test_in_the_interpreter(run_in_interpreter):
    run_in_interpreter()


@pytest.mark.parametrize("heads", [7, 14, 28, 56])
def test_machine_code_moves_wide_and_does_not_spill(compile_sm90, heads):
    types = {"p_x": "*bf16", "p_mean": "*fp32", "p_codes": "*u8", "p_scales": "*fp32", "p_out": "*bf16"}
    cast = {"INTEGER": False, "D": 128, "PAIRS": kernels.PAIRS, "HEADS": heads}
    pack = compile_sm90(kernels._pack_kernel, types, cast, num_warps=4)
    unpack = compile_sm90(kernels._unpack_kernel, types, cast | {"ALL_HEADS": 56}, num_warps=4)
    for code in (pack, unpack):
        assert code.stack_bytes == 0
        assert code.stray_merges() == []
        assert code.count("STG.E.U8") == code.count("LDG.E.U8") == 0
    assert pack.count("LDG.E.128") > 0
    assert pack.count("F2FP.SATFINITE.E4M3") > 0
    assert unpack.count("STG.E.128") + unpack.count("STG.E.64") > 0
