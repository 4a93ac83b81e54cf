"""Queries and keys normed and rotated, values as they are, written where an all-to-all takes them from.

    y = qk_norm_rope(x), one rounding        packed[g // h, n, g % h] = (y_q, y_k, v)[n, g] for every head g

Bit for bit what `qk_norm_rope` and three copies make, in one reading and one writing. A program takes PAIRS (row, head)
pairs, whose three heads lie side by side in the buffer: it reads three stretches of memory and writes one. Queries and
keys share the angles they load; values move without being converted, whatever their bits. Heads are constants, so no
pair is divided by a number that only the launch knows.

Legend: n rows of a rank, H heads of all, P ranks, h = H / P heads of a rank, D = 128 channels of a head, R of them
rotated (64, 96 or 128), T = 3 tensors, 2 without values.
"""

import torch
import triton
import triton.language as tl

from solgen.kernels.fused.halves import HEAD_DIM, TURNED, half_channels, load_rows, load_weights, norm_rope
from solgen.kernels.fused.qk_norm_rope import qk_norm_rope_reference
from solgen.kernels.fused.validation import Impl, check_rows, check_weight, choose_impl

PAIRS = 16
"""Pairs of one program of four warps: eight threads a pair, which leaves seven programs to a multiprocessor."""


def norm_pack_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
    ranks: int,
) -> torch.Tensor:
    """`qk_norm_rope_reference` and the copies; arguments as for `norm_pack`."""
    angles = (torch.cat([table, table], dim=1) for table in (cos, sin))
    normed = qk_norm_rope_reference(query, key, query_weight, key_weight, *angles, eps=eps)
    packed = torch.stack(normed if value is None else (*normed, value), dim=2)
    return packed.unflatten(1, (ranks, query.shape[1] // ranks)).transpose(0, 1).contiguous()


@triton.jit
def _store_heads(p_out, o_first, o_second, b_y, m_p):
    tl.store(p_out + o_first, b_y[0].to(p_out.dtype.element_ty), mask=m_p)
    tl.store(p_out + o_second, b_y[1].to(p_out.dtype.element_ty), mask=m_p)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_pack_kernel(
    p_query,
    p_key,
    p_value,  # read with T = 3
    p_query_weight,  # [D]
    p_key_weight,
    p_cos,  # [n, R / 2] fp32
    p_sin,
    p_out,  # [P, n, h, T, D] contiguous
    num_rows,
    stride_query_row,
    stride_query_head,
    stride_key_row,
    stride_key_head,
    stride_value_row,
    stride_value_head,
    stride_cos,
    stride_sin,
    eps,
    ALL_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    T: tl.constexpr,
    ROTARY: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
):
    o_p = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)[:, None]
    o_row, o_g = o_p // ALL_HEADS, o_p % ALL_HEADS
    m_p = o_row < num_rows
    o_n, o_head = o_row.to(tl.int64), o_g.to(tl.int64)
    o_weight = half_channels(ROTARY)
    o_first, o_second = o_weight[0][None, :], o_weight[1][None, :]
    m_turned = o_first < ROTARY // 2

    p_query += o_n * stride_query_row + o_head * stride_query_head
    p_key += o_n * stride_key_row + o_head * stride_key_head
    b_query = load_rows(p_query + o_first, p_query + o_second, m_p, eps)
    b_key = load_rows(p_key + o_first, p_key + o_second, m_p, eps)
    b_value: tl.tuple = ()
    if T == 3:
        p_value += o_n * stride_value_row + o_head * stride_value_head
        b_value = tl.load(p_value + o_first, mask=m_p), tl.load(p_value + o_second, mask=m_p)
    b_cos = tl.load(p_cos + o_n * stride_cos + o_first, mask=m_p & m_turned, other=0.0)
    b_sin = tl.load(p_sin + o_n * stride_sin + o_first, mask=m_p & m_turned, other=0.0)

    p_out += (((o_g // HEADS) * num_rows.to(tl.int64) + o_n) * HEADS + o_g % HEADS) * (T * D)
    b_weights = load_weights(p_query_weight, o_weight[0], o_weight[1])
    _store_heads(p_out, o_first, o_second, norm_rope(b_query, b_weights, b_cos, b_sin, m_turned), m_p)
    b_weights = load_weights(p_key_weight, o_weight[0], o_weight[1])
    _store_heads(p_out + D, o_first, o_second, norm_rope(b_key, b_weights, b_cos, b_sin, m_turned), m_p)
    if T == 3:
        _store_heads(p_out + 2 * D, o_first, o_second, b_value, m_p)


def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    weights: tuple[torch.Tensor, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    ranks: int,
) -> torch.Tensor:
    rows, heads, width = query.shape
    tensors = 2 if value is None else 3
    packed = torch.empty(ranks, rows, heads // ranks, tensors, width, dtype=query.dtype, device=query.device)
    if rows == 0:
        return packed
    _norm_pack_kernel[(triton.cdiv(rows * heads, PAIRS),)](
        query,
        key,
        value,
        *weights,
        cos,
        sin,
        packed,
        rows,
        *query.stride()[:2],
        *key.stride()[:2],
        *((0, 0) if value is None else value.stride()[:2]),
        cos.stride(0),
        sin.stride(0),
        eps,
        ALL_HEADS=heads,
        HEADS=heads // ranks,
        T=tensors,
        ROTARY=2 * cos.shape[1],
        D=width,
        PAIRS=PAIRS,
        num_warps=4,
    )
    return packed


def norm_pack(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
    ranks: int,
    impl: Impl | None = None,
) -> torch.Tensor:
    """Norm and rotate this rank's queries and keys, and pack them with its values for the ranks that hold heads.

    Args:
        query, key, value: Of all heads, [n, H, D] with unit stride along D, as views of one packed projection or of
            three, one type: float64 (reference only), float32, bfloat16 or float16. None packs no values.
        query_weight, key_weight: Of the norms, [D], any float type.
        cos, sin: Of the angle by which channels d and d + R / 2 of a row are turned, [n, R / 2] with unit stride along
            the pairs, float32 (float64 for the reference). The kernel takes D = 128 and R / 2 = 32, 48 or 64.
        eps: Added to the mean square.
        ranks: P, which divides H; any n, also 0.
        impl: Who computes it; None takes the kernel on a GPU, the reference elsewhere.

    Returns:
        [P, n, H / P, T, D] contiguous, T = 3, or 2 without values: entry p is what rank p is sent.

    Raises:
        ValueError: if shapes, strides or types do not fit, or `impl` does not cover the call.
    """
    rows, heads, width = query.shape
    pairs = cos.shape[1]
    inputs = {"query": query, "key": key} | ({} if value is None else {"value": value})
    for name, x in inputs.items():
        if x.shape != query.shape or x.dtype != query.dtype or x.stride(2) != 1:
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; expected {query.dtype} "
                f"{tuple(query.shape)} with unit stride along the channels"
            )
    if ranks < 1 or heads % ranks:
        raise ValueError(f"{heads} heads for {ranks} ranks; expected as many for each")
    if 2 * pairs > width:
        raise ValueError(f"{2 * pairs} of {width} channels are rotated; expected at most all")
    check_weight(width, query_weight=query_weight, key_weight=key_weight)
    check_rows((rows, pairs), cos=cos, sin=sin)
    weights = query_weight, key_weight
    if choose_impl(impl, *inputs.values(), *weights, cos, sin) == "reference":
        return norm_pack_reference(query, key, value, *weights, cos, sin, eps=eps, ranks=ranks)
    if width != HEAD_DIM or pairs not in TURNED:
        raise ValueError(
            f"{pairs} pairs of {width} channels are turned; expected {', '.join(map(str, TURNED))} of {HEAD_DIM}"
        )
    if not cos.dtype == sin.dtype == torch.float32:
        raise ValueError(f"angles are {cos.dtype}, {sin.dtype}; expected float32, so that none is rounded")
    if rows * heads > 2**31 - PAIRS:
        raise ValueError(f"{rows} rows of {heads} heads; expected at most 2^31 - {PAIRS} heads in all")
    return _launch(query, key, value, weights, cos, sin, eps, ranks)
