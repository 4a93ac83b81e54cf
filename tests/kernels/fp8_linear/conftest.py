"""The fixtures of the Sol-Attn2 kernel tests, here too."""

from tests.kernels.sol_attn2.triton.conftest import compile_sm90, device, large, run_in_interpreter

__all__ = ["compile_sm90", "device", "large", "run_in_interpreter"]
