"""Sol-Attn2 in plain PyTorch: the specification that the GPU kernels are tested against."""
