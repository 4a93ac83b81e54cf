"""The whole-tail form of page 000, "Routing and complementary approximation": two content groups a block.

Reference only. Legend: NB blocks, R query blocks of a chunk, A anchors of a query block (means of 32 rows), D
channels, g the two groups of a block.
"""

import torch

from solgen.kernels.sol_attn2.reference.blocks import Blocks
from solgen.kernels.sol_attn2.reference.tail import Surrogates


def compress_whole(
    anchors: torch.Tensor,
    kept: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Blocks,
    scale: float,
) -> Surrogates:
    """Fold all blocks that are not kept into one surrogate an anchor.

    Each block splits into the rows whose projection k . qbar lies above the block's mean projection, and the
    others. w_g = n_g exp(s qbar . kbar_g); Z = sum w_g; mu = sum w_g kbar_g / Z; nu = sum w_g vbar_g / Z
    (equation 1). A row reads the mass exp(s (q_r - qbar) . mu) Z (equation 2). The groups are constants of
    the backward.

    Args:
        anchors: qbar, [R, A, D].
        kept: Blocks attended exactly, [R, NB] bool.
        key: Key rows as blocks, [NB, 64, D], zero past the end.
        value: Like `key`.
    """
    real = blocks.split(key.new_ones(blocks.num_rows, 1)).squeeze(-1)  # [NB, 64]
    projections = torch.einsum("rad,btd->rabt", anchors, key).detach()
    means = (projections * real).sum(-1, keepdim=True) / blocks.block_counts.unsqueeze(-1)
    above = (projections > means).to(key.dtype)
    members = torch.stack((above, 1 - above), dim=3) * real.unsqueeze(1)  # [R, A, NB, 2, 64]
    counts = members.sum(-1)
    sizes = counts.clamp(min=1).unsqueeze(-1)
    k_means = torch.einsum("rabgt,btd->rabgd", members, key) / sizes
    v_means = torch.einsum("rabgt,btd->rabgd", members, value) / sizes
    scores = scale * torch.einsum("rad,rabgd->rabg", anchors, k_means)
    skipped = kept[:, None, :, None] | (counts == 0)
    weights = scores.masked_fill(skipped, -torch.inf) + counts.clamp(min=1).log()
    log_mass = weights.flatten(2).logsumexp(-1)
    shares = (weights - log_mass[..., None, None]).exp()
    return Surrogates(
        anchors=anchors,
        keys=torch.einsum("rabg,rabgd->rad", shares, k_means),
        values=torch.einsum("rabg,rabgd->rad", shares, v_means),
        log_mass=log_mass,
    )
