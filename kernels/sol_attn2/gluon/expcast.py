"""ExpCast on one warpgroup's 64 x 64 score tile: bytes in the registers the value product reads them from.

A thread of a score tile holds 16 columns of two rows. Row state is kept as "quads" [64, 4]: one copy of a row's value
in each of the four threads that share the row, so that nothing is exchanged between threads except where a pivot moves.
"""

import math
import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from solgen.kernels.sol_attn2.config import EXPCAST_BIAS
from solgen.kernels.sol_attn2.triton.expcast import MAX_JOIN, PACK_BYTES, ROUND_MAGIC

FORCE_MOVE = gl.constexpr(1e30)
"""In place of the constant of an unrounded code, it makes every code too large: the pivot is set anew."""


def _code_constant(offset: int) -> float:
    """Unrounded code of a score at the pivot."""
    return EXPCAST_BIAS + 8.0 * offset


def _expcast_asm(offset: int) -> str:
    """PTX of ExpCast with a sticky pivot for the 32 scores a thread holds, in the value product's order.

    Codes are formed at the pivot in force. Only where a lane of the warp finds one of 120 or more, the tile's row
    maxima are taken, the pivots of rows that exceed their limit move, and the codes are formed again.

    Operands: $0-$7 bytes, $8-$39 new pivots; $40-$71 scores, $72 factor, $104 pivots, $136 lag, $168 code constant,
    each 32 wide with one register a score; rows alternate every four scores.
    """
    rows = [i // 4 % 2 for i in range(32)]
    scores = [f"${40 + i}" for i in range(32)]
    factor, pivots, lag, constant = "$72", ("$104", "$108"), "$136", "$168"

    def hexadecimal(value: float) -> str:
        return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"

    def bytes_at(bias: str) -> list[str]:
        lines = [f"fma.rn.f32 y{i}, {scores[i]}, {factor}, {bias}{rows[i]};" for i in range(32)]
        for word in range(8):
            lines += [f"cvt.rni.s32.f32 a{k}, y{4 * word + k};" for k in range(4)]
            lines += ["cvt.pack.sat.u8.s32.b32 high, a3, a2, 0;", f"cvt.pack.sat.u8.s32.b32 w{word}, a1, a0, high;"]
        return lines

    lines = [
        "{ .reg .f32 y<32>, b<2>, c<2>, m<2>, s<2>, v<2>, octave; .reg .b32 w<8>, high, sum, large;",
        ".reg .s32 a<4>; .reg .pred some, any, moves;",
    ]
    for r in (0, 1):
        lines += [f"mov.f32 v{r}, {pivots[r]};", f"fma.rn.f32 b{r}, v{r}, {hexadecimal(-8.0)}, {constant};"]
    lines += [*bytes_at("b"), "mov.b32 large, 0;"]
    for word in range(8):
        lines += [f"add.u32 sum, w{word}, 0x08080808;", f"lop3.b32 large, large, w{word}, sum, 0xFE;"]
    lines += [
        "and.b32 large, large, 0x80808080; setp.ne.u32 some, large, 0;",
        "vote.sync.any.pred any, some, 0xffffffff; @!any bra DONE;",
    ]
    for r in (0, 1):
        own = [scores[i] for i in range(32) if rows[i] == r]
        lines += [f"max.f32 y{16 * r + i}, {own[2 * i]}, {own[2 * i + 1]};" for i in range(8)]
    for step in (4, 2, 1):
        lines += [f"max.f32 y{16 * r + i}, y{16 * r + i}, y{16 * r + i + step};" for i in range(step) for r in (0, 1)]
    lines += ["mov.f32 m0, y0; mov.f32 m1, y16;"]
    for lane in (1, 2):
        lines += [f"shfl.sync.bfly.b32 s{r}, m{r}, {lane}, 0x1f, 0xffffffff;" for r in (0, 1)]
        lines += [f"max.f32 m{r}, m{r}, s{r};" for r in (0, 1)]
    lines += [f"mul.f32 octave, {factor}, {hexadecimal(0.125)};"]
    for r in (0, 1):
        lines += [
            f"mul.f32 m{r}, m{r}, octave; add.f32 s{r}, v{r}, {lag}; setp.gt.f32 moves, m{r}, s{r};",
            f"cvt.rpi.f32.f32 m{r}, m{r}; selp.f32 v{r}, m{r}, v{r}, moves;",
            f"fma.rn.f32 c{r}, v{r}, {hexadecimal(-8.0)}, {hexadecimal(_code_constant(offset))};",
        ]
    lines += [*bytes_at("c"), "DONE:", *(f"mov.b32 ${word}, w{word};" for word in range(8))]
    lines += [f"mov.f32 ${8 + i}, v{rows[i]};" for i in range(32)]
    return "\n".join([*lines, "}"])


EXPCAST_ASM = [_expcast_asm(offset) for offset in range(8)]
EXPCAST_CONSTRAINTS = gl.constexpr(",".join(["=r"] * 8 + ["=f"] * 32 + ["f"] * 160))
LN2 = gl.constexpr(math.log(2))


@gluon.constexpr_function
def code_constant(offset):
    """Unrounded code of a score at the pivot."""
    return EXPCAST_BIAS + 8.0 * offset


@gluon.constexpr_function
def expcast_asm(offset):
    return EXPCAST_ASM[offset]


@gluon.constexpr_function
def product_layout(width):
    """Layout of a 64 x width product of one warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 32])


@gluon.constexpr_function
def left_layout(width):
    """Layout of the left operand of a 64 x width product."""
    return gl.DotOperandLayout(operand_index=0, parent=product_layout(width), k_width=4)


@gluon.jit
def to_left(b_tile):
    """A score tile with its columns in VALUE_ORDER, as the left operand of the value product; moves nothing."""
    b_tile = b_tile.reshape([64, 4, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, 64])
    return gl.convert_layout(b_tile, left_layout(64), assert_trivial=True)


@gluon.jit
def quads_of_left(b_tile):
    """[64, 4] from a left operand whose rows are constant; moves nothing."""
    b_tile = b_tile.reshape([64, 2, 2, 4, 2, 2]).permute((0, 3, 1, 2, 4, 5))
    b_tile, _ = gl.split(b_tile)
    b_tile, _ = gl.split(b_tile)
    b_tile, _ = gl.split(b_tile)
    b_tile, _ = gl.split(b_tile)
    return b_tile


@gluon.jit
def quads_of_rows(b_row):
    """[64, 4] from row values [64] of a score tile; moves nothing."""
    return quads_of_left(to_left(b_row[:, None].broadcast_to([64, 64])))


@gluon.jit
def spread_left(b_quad):
    """Row values as a left operand with constant rows; moves nothing."""
    b_quad = gl.join(b_quad, b_quad)
    b_quad = gl.join(b_quad, b_quad)
    b_quad = gl.join(b_quad, b_quad)
    b_quad = gl.join(b_quad, b_quad).permute((0, 2, 3, 1, 4, 5)).reshape([64, 64])
    return gl.convert_layout(b_quad, left_layout(64), assert_trivial=True)


@gluon.jit
def spread_product(b_quad, width: gl.constexpr):
    """Row values as a 64 x width product with constant rows; moves nothing."""
    b_tile = gl.join(b_quad, b_quad)
    if width > 8:
        b_tile = gl.join(b_tile, b_tile)
        b_tile = gl.join(b_tile, b_tile).permute((0, 2, 3, 1, 4))
    if width > 32:
        b_tile = gl.join(b_tile, b_tile).permute((0, 5, 1, 2, 3, 4))
    if width > 64:
        b_tile = gl.join(b_tile, b_tile).permute((0, 6, 1, 2, 3, 4, 5))
    b_tile = b_tile.reshape([64, width])
    return gl.convert_layout(b_tile, product_layout(width), assert_trivial=True)


@gluon.jit
def row_max(b_tile):
    """Row maxima [64] of a score tile."""
    b_tile = b_tile.reshape([64, 4, 2, 4, 2]).permute((0, 3, 1, 2, 4)).reshape([64, 4, 4, 4])
    b_top = gl.max(gl.max(gl.max(b_tile, 3), 2), 1)
    return gl.convert_layout(b_top, gl.SliceLayout(1, product_layout(64)), assert_trivial=True)


@gluon.jit
def expcast(b_code):
    """Probabilities, as a left operand, of unrounded codes that do not exceed 120; -inf gives 0."""
    b_byte = gl.inline_asm_elementwise(PACK_BYTES, "=r,r,r,r,r", [to_left(b_code)], dtype=gl.int8, is_pure=True, pack=4)
    return b_byte.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def sticky_expcast(b_scores, factor, b_pivot, lag, constant, OFFSET: gl.constexpr):
    """Probabilities, as a left operand, of raw scores, and the pivots in force, quads."""
    b_byte, b_new = gl.inline_asm_elementwise(
        expcast_asm(OFFSET),
        EXPCAST_CONSTRAINTS,
        [to_left(b_scores), factor, spread_left(b_pivot), lag, constant],
        dtype=(gl.int8, gl.float32),
        is_pure=True,
        pack=32,
    )
    return b_byte.to(gl.float8e4nv, bitcast=True), quads_of_left(b_new)


@gluon.jit
def power_of_two(b_exponent):
    """2^exponent for whole FP32 exponents, clamped to +-100, exact."""
    b_exponent = gl.minimum(gl.maximum(b_exponent, -MAX_JOIN), MAX_JOIN) + (ROUND_MAGIC + 127.0)
    return (b_exponent.to(gl.int32, bitcast=True) << 23).to(gl.float32, bitcast=True)
