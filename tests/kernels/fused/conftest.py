"""The fixtures of the Sol-Attn2 kernel tests, here too, and the types that the kernels are tried with."""

import pytest
import torch

from tests.kernels.sol_attn2.triton.conftest import compile_sm90, device, large, run_in_interpreter

__all__ = ["compile_sm90", "device", "every_dtype", "large", "narrow", "run_in_interpreter"]


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def every_dtype(device, request) -> torch.dtype:
    """Every type of the kernels."""
    if device.type == "cpu" and request.param == torch.bfloat16:
        pytest.skip("Triton's interpreter cuts bf16 numbers off where a GPU rounds them")
    return request.param


@pytest.fixture
def narrow(device) -> torch.dtype:
    """A 16-bit type: that of the model, or the one that the interpreter rounds."""
    return torch.float16 if device.type == "cpu" else torch.bfloat16
