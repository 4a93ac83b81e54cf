"""Seeded query, key and value that look like video attention: smooth in space and time, peaked and diffuse heads.

Row r lies at voxel r % 64 of the 4 x 4 x 4 cube r // 64 of a latent grid 24 rows high and 40 wide, cubes in raster
order, as long in time as the rows ask. A head draws Gaussian random fields over (t, y, x) from random cosines,

    field(p) = sum_m a_m cos(omega_m . p + phi_m),        omega_m normal with deviation 1 / length,

and forms, with unit-variance independent noise per row,

    key   = field_k + NOISE noise + mean
    query = gain (agreement field_k + sqrt(1 - agreement^2) field_q + mean) + NOISE noise
    value = field_v + NOISE noise,

where the mean is zero but in channel 5, the "massive" channel: it moves all scores of a row alike, and costs FP8 keys
without smoothing their resolution there.

Score of a row with keys of its own neighbourhood: about gain x agreement x sqrt(128); gain runs geometrically over the
heads from diffuse (0.3) to peaked (2.4), in an order of its own, so that consecutive heads differ. Field lengths, in
voxels: keys and queries LENGTHS, with equal energy; values 6.

The same arguments give the same fields on every device; noise is drawn on the device and differs between CPU and GPU.
"""

from dataclasses import dataclass

import torch

HEIGHT, WIDTH = 24, 40
LENGTHS = (2.0, 6.0, 20.0)
VALUE_LENGTH = 6.0
NOISE = 0.6
WAVES = 64
"""Cosines of a field of one length."""


@dataclass(frozen=True)
class Structure:
    """What a set of heads looks like.

    Attributes:
        gain_low: Query gain of the most diffuse head.
        gain_high: Query gain of the most peaked head.
        agreement: Share of the keys' own field in the queries, 0 to 1.
        channel_mean: Mean of channel 5 of the keys, and of the queries before the gain; 0 for none.
    """

    gain_low: float = 0.3
    gain_high: float = 2.4
    agreement: float = 0.8
    channel_mean: float = 0.0


def positions(num_rows: int) -> torch.Tensor:
    """Voxel coordinates (t, y, x) of every row, [num_rows, 3] fp32."""
    row = torch.arange(num_rows)
    cube, voxel = row // 64, row % 64
    across, down = WIDTH // 4, HEIGHT // 4
    corner = torch.stack([cube // (across * down), cube // across % down, cube % across], 1) * 4
    return (corner + torch.stack([voxel // 16, voxel // 4 % 4, voxel % 4], 1)).float()


def head_gains(num_heads: int, structure: Structure) -> list[float]:
    """Query gain of every head: a geometric ladder, visited in steps of the golden section."""
    ratio = structure.gain_high / structure.gain_low
    return [structure.gain_low * ratio ** ((h * 0.6180339887 + 0.5) % 1.0) for h in range(num_heads)]


def structured_qkv(
    num_heads: int,
    num_rows: int,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    structure: Structure | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value, [1, num_heads, num_rows, 128] each, views of one packed [num_rows, 3, num_heads, 128].

    One head is formed at a time: beside the result, about 1 KiB a row is needed.

    Args:
        seed: Fields and noise of head h depend on the seed and h alone.
        structure: Look of the heads; `Structure()` by default.
    """
    structure = structure or Structure()
    packed = torch.empty(num_rows, 3, num_heads, 128, dtype=dtype, device=device)
    place = positions(num_rows).to(device)
    for head, gain in enumerate(head_gains(num_heads, structure)):
        drawn = torch.Generator().manual_seed(seed * 100_003 + head)
        noise = torch.Generator(device).manual_seed(seed * 100_003 + head)

        def field(lengths: tuple[float, ...], drawn: torch.Generator = drawn) -> torch.Tensor:
            waves = [torch.randn(3, WAVES, generator=drawn) / length for length in lengths]
            phases = 2 * torch.pi * torch.rand(WAVES * len(lengths), generator=drawn)
            weights = torch.randn(WAVES * len(lengths), 128, generator=drawn) * (2 / len(phases)) ** 0.5
            return (place @ torch.cat(waves, 1).to(device) + phases.to(device)).cos() @ weights.to(device)

        def rows(smooth: torch.Tensor, noise: torch.Generator = noise) -> torch.Tensor:
            return smooth + NOISE * torch.randn(num_rows, 128, generator=noise, device=device)

        shared = field(LENGTHS)
        other = (1 - structure.agreement**2) ** 0.5 * field(LENGTHS)
        mixed = structure.agreement * shared + other
        for part in (mixed, shared):
            part[:, 5] += structure.channel_mean
        packed[:, 0, head] = rows(gain * mixed).to(dtype)
        packed[:, 1, head] = rows(shared).to(dtype)
        packed[:, 2, head] = rows(field((VALUE_LENGTH,))).to(dtype)
    query, key, value = packed.permute(1, 2, 0, 3).unsqueeze(1)
    return query, key, value
