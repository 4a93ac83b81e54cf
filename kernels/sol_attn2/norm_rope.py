"""What queries and keys may still lack when they reach Sol-Attn2."""

from dataclasses import dataclass

import torch

from solgen.kernels.sol_attn2.config import HEAD_DIM


@dataclass(frozen=True)
class NormRope:
    """RMSNorm of every query and key head, then rotary angles on its leading channels (`kernels.fused.qk_norm_rope`).

    Attributes:
        query_weight: Of the queries' norm, [128], any float type.
        key_weight: Of the keys' norm.
        cos: Of the angle by which channels d and d + R / 2 of a row are turned, [N, R / 2], float32, unit stride
            along the pairs; R / 2 is 32, 48 or 64.
        sin: Like `cos`.
        eps: Added to the mean square; more than 0.
    """

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    eps: float

    def check(self, query: torch.Tensor) -> None:
        """Raise ValueError unless all of it fits queries [B, H, N, 128]."""
        num_rows = query.shape[2]
        for name in ("query_weight", "key_weight"):
            weight = getattr(self, name)
            if weight.shape != (HEAD_DIM,) or not weight.is_contiguous():
                raise ValueError(f"{name} is {tuple(weight.shape)}; expected contiguous ({HEAD_DIM},)")
        pairs = self.cos.shape[-1]
        if pairs not in (32, 48, 64):
            raise ValueError(f"{pairs} pairs of channels are turned; expected 32, 48 or 64")
        for name in ("cos", "sin"):
            table = getattr(self, name)
            if table.shape != (num_rows, pairs) or table.dtype != torch.float32 or table.stride(1) != 1:
                raise ValueError(
                    f"{name} is {table.dtype} {tuple(table.shape)} with strides {table.stride()}; expected "
                    f"float32 ({num_rows}, {pairs}) with unit stride along the pairs"
                )
        for name, tensor in vars(self).items():
            if torch.is_tensor(tensor) and tensor.device != query.device:
                raise ValueError(f"{name} is on {tensor.device}, query on {query.device}; move it")
        if not self.eps > 0:
            raise ValueError(f"eps is {self.eps}; expected more than 0")

    def apply(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [B, H, N, 128] as attention compares them."""
        # The op needs Triton, which CPU installations may not have.
        from solgen.kernels.fused.qk_norm_rope import qk_norm_rope

        cos, sin = (torch.cat([table, table], dim=1) for table in (self.cos, self.sin))
        weights = self.query_weight, self.key_weight
        entries = [
            qk_norm_rope(q.transpose(0, 1), k.transpose(0, 1), *weights, cos, sin, eps=self.eps)
            for q, k in zip(query, key, strict=True)
        ]
        query, key = (torch.stack(parts).transpose(1, 2) for parts in zip(*entries, strict=True))
        return query, key
