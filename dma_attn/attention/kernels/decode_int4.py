"""The low keys of a decode step where K and V are `int4`: all in one warp's registers.

    K row    64 bytes: lane c of 4 loads bytes 16c to 16c + 15   = its part of the operand
    V rows   2i, 2i + 1: lane g of 8 loads bytes 8g to 8g + 7 of both, and pairs them key by key

Dims and keys are renamed so that what a lane loads is what the tensor core wants from it: nothing
is exchanged between lanes but maxima and sums, and shared memory is not used. A program is a warp;
it has up to 16 rows (head of the group, query) and a split of the low keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

KEYS = 32  # of a block
M = gl.constexpr(16)
HALF = gl.constexpr(64)  # of a head dim of 128, for both K and V

_HEAD = "{\n.reg .b32 a, b, c, d, e, f, g, h, one, last;\n"
# 0x6400 | (n ^ 8) is 1024 + (n ^ 8) in fp16, 0x4300 | (n ^ 8) is 128 + (n ^ 8) in bf16
_FP16 = ("lop3.b32 {x}, {x}, 0x000F000F, 0x64086408, 0x6A;\n"
         "add.rn.f16x2 {to}, {x}, last;\n")
_BF16 = ("lop3.b32 {x}, {x}, 0x000F000F, 0x43084308, 0x6A;\n"
         "fma.rn.bf16x2 {to}, {x}, one, last;\n")
# Bytes 0 to 3 -> elements of their low nibbles, of their high ones, in the order 0, 2, 1, 3
_K_ASM = gl.constexpr(
    _HEAD + "mov.b32 last, 0xE408E408;\n"
    "mov.b32 a, $4;\nshr.b32 b, a, 8;\nshr.b32 c, a, 4;\nshr.b32 d, a, 12;\n"
    + "".join(_FP16.format(x=x, to=f"${i}") for i, x in enumerate("abcd")) + "}")
# Bytes 0 to 3 of two keys -> pairs of elements: low nibbles of bytes 0, 1, of 2, 3, high ones
_V_ASM = gl.constexpr(
    _HEAD + "mov.b32 one, 0x3F803F80;\nmov.b32 last, 0xC308C308;\n"
    "prmt.b32 a, $8, $9, 0x5410;\nprmt.b32 c, $8, $9, 0x7632;\n"
    "shr.b32 b, a, 8;\nshr.b32 d, c, 8;\nshr.b32 e, a, 4;\nshr.b32 f, a, 12;\n"
    "shr.b32 g, c, 4;\nshr.b32 h, c, 12;\n"
    + "".join(_BF16.format(x=x, to=f"${i}") for i, x in enumerate("abcdefgh")) + "}")


@gluon.jit
def _keys(byte, B_LAYOUT: gl.constexpr):
    """uint8 (N, 64) -> fp16 (64, N) of the low nibbles and of the high ones, dims renamed."""
    low, high = gl.inline_asm_elementwise(_K_ASM, "=r,=r,=r,=r,r", [byte],
                                          dtype=(gl.float16, gl.float16), is_pure=True, pack=4)
    return _as_keys(low, B_LAYOUT), _as_keys(high, B_LAYOUT)


@gluon.jit
def _as_keys(x, B_LAYOUT: gl.constexpr):
    N: gl.constexpr = x.shape[0]
    x = x.reshape(N, 4, 4, 2, 2).permute(2, 3, 1, 4, 0).reshape(HALF, N)
    return gl.convert_layout(x, B_LAYOUT, assert_trivial=True)


@gluon.jit
def _values(even, odd, B_LAYOUT: gl.constexpr):
    """uint8 (N / 2, 64) of even and odd keys -> four bf16 (N, 32), dims renamed."""
    t0, t1, t2, t3 = gl.inline_asm_elementwise(
        _V_ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [even, odd],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=4)
    return (_as_values(t0, B_LAYOUT), _as_values(t1, B_LAYOUT), _as_values(t2, B_LAYOUT),
            _as_values(t3, B_LAYOUT))


@gluon.jit
def _as_values(x, B_LAYOUT: gl.constexpr):
    HALVES: gl.constexpr = x.shape[0]
    x = x.reshape(HALVES, 8, 2, 2, 2).permute(0, 4, 2, 3, 1).reshape(2 * HALVES, 32)
    return gl.convert_layout(x, B_LAYOUT, assert_trivial=True)


@gluon.jit
def _load(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, valid_ptr, start, hi, N: gl.constexpr,
          K_LAYOUT: gl.constexpr, V_LAYOUT: gl.constexpr, COLS: gl.constexpr):
    """Codes and scales of keys from start on; of the last one in place of those from hi on."""
    keys = gl.minimum(start + gl.arange(0, N, gl.SliceLayout(1, K_LAYOUT)), hi - 1)
    cols = gl.arange(0, HALF, gl.SliceLayout(0, K_LAYOUT))[None, :]
    k = gl.load(k_ptr + keys[:, None] * HALF + cols)
    pairs = start + 2 * gl.arange(0, N // 2, gl.SliceLayout(1, V_LAYOUT))
    cols = gl.arange(0, HALF, gl.SliceLayout(0, V_LAYOUT))[None, :]
    even = gl.load(v_ptr + gl.minimum(pairs, hi - 1)[:, None] * HALF + cols)
    odd = gl.load(v_ptr + gl.minimum(pairs + 1, hi - 1)[:, None] * HALF + cols)
    pos = start + gl.arange(0, N, COLS)
    at = gl.minimum(pos, hi - 1)
    k_scale = gl.load(k_scale_ptr + at)
    v_scale = gl.load(v_scale_ptr + at)
    counts = pos < hi
    if valid_ptr is not None:
        counts = counts & (gl.load(valid_ptr + at) != 0)
    return k, even, odd, k_scale, v_scale, counts


@gluon.jit
def _query(turned_ptr, row, mask, BEGIN: gl.constexpr, A_LAYOUT: gl.constexpr):
    """float32 rows (16,) of rotated Q, dims BEGIN to BEGIN + 63 renamed as K's."""
    kappa = gl.arange(0, HALF, gl.SliceLayout(0, A_LAYOUT))
    dim = BEGIN + 16 * ((kappa >> 1) & 3) + 4 * (kappa >> 4) + ((kappa >> 3) & 1) + 2 * (kappa & 1)
    return gl.load(turned_ptr + row[:, None] * (2 * HALF) + dim[None, :], mask=mask[:, None],
                   other=0.0)


@gluon.jit
def _power(exponent):
    """2^(exponent - 127) for a biased exponent, kept among the normal numbers."""
    return (gl.minimum(gl.maximum(exponent, 1), 254) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _store(part_ptr, to, mask, acc, inverse, BEGIN: gl.constexpr):
    n = gl.arange(0, 32, gl.SliceLayout(0, acc.type.layout))
    dim = BEGIN + 8 * (n & 7) + 4 * (n >> 4) + ((n >> 3) & 1)
    gl.store(part_ptr + to[:, None] * (2 * HALF) + dim[None, :], acc * inverse[:, None],
             mask=mask[:, None])


@gluon.jit(do_not_specialize=["H_KV", "GROUP", "S_Q", "first", "diag", "sink", "window",
                              "valid_size", "n_low"])
def low_int4_kernel(turned_ptr, shift_ptr, k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, part_ptr,
                    lse_ptr, lengths_ptr, near_ptr, starts_ptr, valid_ptr, H_KV, GROUP, S_Q, first,
                    n_low, n_splits, diag, sink, capacity, valid_size, scale, window,
                    WINDOW: gl.constexpr, N: gl.constexpr, K_LAYOUT: gl.constexpr,
                    V_LAYOUT: gl.constexpr):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    COLS: gl.constexpr = gl.SliceLayout(0, MMA)
    plane = gl.program_id(0).to(gl.int64)
    split = gl.program_id(1)
    b = plane // H_KV
    h = plane % H_KV
    length = gl.load(lengths_ptr + b)
    start = gl.load(starts_ptr + b)
    near = gl.load(near_ptr)
    # Rows: as the tensor core's results have them, and as its operand has them
    row = gl.arange(0, M, ROWS)
    mask_m = row < GROUP * S_Q
    pos_m = length - S_Q + row % S_Q
    begin = (gl.maximum(start, 0) >> 7) << 7
    first_hi = begin
    if (sink > 0) & (start >= 0):
        first_hi = gl.minimum(((start + sink + 127) >> 7) << 7, length)
    near_lo = length + 0 * row
    if diag > 0:
        near_lo = gl.maximum(((pos_m >> 7) << 7) - diag + 128, near)
    near_lo = gl.maximum(near_lo, first_hi)
    newest = gl.max(gl.where(mask_m, gl.minimum(near_lo, length), 0), 0)
    seen = first_hi * 0
    if WINDOW:
        seen = gl.maximum(length - S_Q - window + 1, 0)
    bottom = gl.maximum(first_hi, (seen // N) * N)
    per = gl.cdiv(gl.cdiv(gl.maximum(newest - bottom, 0), n_low), N) * N
    lo = bottom + split * per
    hi = gl.minimum(lo + per, newest)
    row_a = gl.arange(0, M, gl.SliceLayout(1, A))
    head = h * GROUP + row_a // S_Q
    q_row = (b * H_KV * GROUP + head) * S_Q + row_a % S_Q
    mask_a = row_a < GROUP * S_Q
    # Q in fp16, relative to a power of two with which the largest of a row is below 2^15
    q0 = _query(turned_ptr, q_row, mask_a, 0, A)
    q1 = _query(turned_ptr, q_row, mask_a, HALF, A)
    largest = gl.max(gl.maximum(gl.abs(q0), gl.abs(q1)), 1).to(gl.int32, bitcast=True) >> 23
    factor = _power(268 - largest)[:, None]
    q0 = (q0 * factor).to(gl.float16)
    q1 = (q1 * factor).to(gl.float16)
    unit = gl.convert_layout(_power(largest - 14), ROWS)
    shift = gl.zeros([M], gl.float32, ROWS)
    if shift_ptr is not None:
        at = (b * H_KV * GROUP + h * GROUP + row // S_Q) * S_Q + row % S_Q
        shift = gl.load(shift_ptr + at, mask=mask_m, other=0.0) * scale
    if valid_ptr is not None:
        valid_ptr += b * valid_size
    k_ptr += plane * capacity * HALF
    v_ptr += plane * capacity * HALF
    k_scale_ptr += plane * capacity
    v_scale_ptr += plane * capacity
    acc0 = gl.zeros([M, 32], gl.float32, MMA)
    acc1 = gl.zeros([M, 32], gl.float32, MMA)
    acc2 = gl.zeros([M, 32], gl.float32, MMA)
    acc3 = gl.zeros([M, 32], gl.float32, MMA)
    row_max = gl.full([M], float("-inf"), gl.float32, ROWS)
    row_sum = gl.zeros([M], gl.float32, ROWS)
    if lo < hi:
        for block in range(lo, hi, N):
            k, even, odd, k_scale, v_scale, counts = _load(
                k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, valid_ptr, block, hi, N, K_LAYOUT, V_LAYOUT,
                COLS)
            k0, k1 = _keys(k, B)
            s = mma_v2(q0, k0, gl.zeros([M, N], gl.float32, MMA))
            s = mma_v2(q1, k1, s)
            s = s * (k_scale * scale)[None, :] * unit[:, None] + shift[:, None]
            pos = block + gl.arange(0, N, COLS)
            visible = counts[None, :] & (pos[None, :] < near_lo[:, None])
            if WINDOW:
                visible = visible & (pos[None, :] > pos_m[:, None] - window)
            s = gl.where(visible, s, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(s, 1))
            base = gl.where(new_max == float("-inf"), 0.0, new_max)
            p = gl.exp2(s - base[:, None])
            decay = gl.exp2(row_max - base)
            row_sum = row_sum * decay + gl.sum(p, 1)
            row_max = new_max
            p = gl.convert_layout((p * v_scale[None, :]).to(gl.bfloat16), A, assert_trivial=True)
            v0, v1, v2, v3 = _values(even, odd, B)
            acc0 = mma_v2(p, v0, acc0 * decay[:, None])
            acc1 = mma_v2(p, v1, acc1 * decay[:, None])
            acc2 = mma_v2(p, v2, acc2 * decay[:, None])
            acc3 = mma_v2(p, v3, acc3 * decay[:, None])
    to = (plane * n_splits + first + split) * M + row
    lse = row_max + gl.log2(row_sum)
    gl.store(lse_ptr + to, gl.where(row_sum > 0.0, lse, float("-inf")), mask=mask_m)
    inverse = gl.where(row_sum > 0.0, 1.0 / row_sum, 0.0)
    _store(part_ptr, to, mask_m, acc0, inverse, 0)
    _store(part_ptr, to, mask_m, acc1, inverse, 2)
    _store(part_ptr, to, mask_m, acc2, inverse, HALF)
    _store(part_ptr, to, mask_m, acc3, inverse, HALF + 2)


def layouts(n: int) -> dict[str, gl.DistributedLinearLayout]:
    """Registers of a warp: codes of n keys of K, and of n / 2 pairs of keys of V."""
    more = [[i, 0] for i in (8, 16, 32) if i < n]
    pairs = [[i, 0] for i in (4, 8, 16) if i < n // 2]
    return {
        "K_LAYOUT": gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [0, 8], *more],
            [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]], [], [], [n, 64]),
        "V_LAYOUT": gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], *pairs],
            [[1, 0], [2, 0], [0, 8], [0, 16], [0, 32]], [], [], [n // 2, 64]),
    }
