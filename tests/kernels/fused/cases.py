"""Inputs of the fused ops inside poisoned memory, and the rules that their kernels are held to."""

import torch

ROWS_AT_ONCE = 4096
"""Rows judged together, so that float64 copies of long inputs fit."""

NARROW = torch.finfo(torch.float32).eps * 8
"""Relative error of a few FP32 operations; it counts where the output is FP32 too."""


def poisoned(rows, width, device, dtype, seed, *, stride=None, offset=0):
    """Normals [rows, width] in a buffer of NaN; rows are `stride` elements apart and start at `offset`."""
    stride = stride or width
    generator = torch.Generator(device).manual_seed(seed)
    buffer = torch.full((offset + rows * stride + 8,), float("nan"), dtype=dtype, device=device)
    view = buffer.as_strided((rows, width), (stride, 1), offset)
    for part in view.split(ROWS_AT_ONCE):
        part.copy_(torch.randn(part.shape, generator=generator, device=device) * 2 + 0.25)
    return view


def tables(count, width, device, dtype, seed, *, rows=9):
    """`count` AdaLN tables [rows, width] as views of one [rows, count * width], every second row NaN."""
    packed = poisoned(rows, count * width, device, dtype, seed)
    packed[1::2] = float("nan")
    return packed.chunk(count, dim=1)


def table_rows(rows, device, dtype=torch.int64):
    """An index into the rows of `tables` that hold numbers, [rows]."""
    generator = torch.Generator(device).manual_seed(11)
    return (2 * torch.randint(0, 5, (rows,), generator=generator, device=device)).to(dtype)


def leave_poison(device, elements):
    """Free memory full of NaN, which outputs are then likely to be given."""
    if device.type == "cuda":
        torch.full((elements,), float("nan"), dtype=torch.float32, device=device)


def judge(op, rowwise, fixed=(), **options):
    """Hold the kernel of `op` to its rules, row by row.

    Its error against float64 is at most twice that of its reference, and its distance to the reference at most 1e-2.

    Args:
        op: Public function; returns a tensor or a tuple of them.
        rowwise: Its inputs by name that have a row each.
        fixed: Its other tensors by name.
        options: Its other arguments.

    Returns:
        The kernel's outputs.
    """
    fixed = dict(fixed)
    rows = len(next(iter(rowwise.values())))
    outputs = _tuple(op(**rowwise, **fixed, **options, impl="triton"))
    for start in range(0, rows, ROWS_AT_ONCE):
        part = {name: tensor[start : start + ROWS_AT_ONCE] for name, tensor in rowwise.items()}
        reference = _tuple(op(**part, **fixed, **options, impl="reference"))
        exact = _tuple(op(**_doubled(part), **_doubled(fixed), **options, impl="reference"))
        for got, same, truth in zip(outputs, reference, exact, strict=True):
            check_rows(got[start : start + ROWS_AT_ONCE], same, truth)
    return outputs


def check_rows(got, same, truth):
    """Both rules for every row of one output: kernel, reference and float64."""
    assert got.dtype == same.dtype
    assert got.is_contiguous()
    got, same, truth = (x.double().flatten(1) for x in (got, same, truth))
    assert got.isfinite().all()
    slack = NARROW * truth.norm(dim=1)
    assert ((got - truth).norm(dim=1) <= 2 * (same - truth).norm(dim=1) + slack).all()
    assert ((got - same).norm(dim=1) <= 1e-2 * same.norm(dim=1) + slack).all()


def _tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _doubled(tensors):
    return {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
