"""The low keys of a decode step in one warp's registers, for 4-bit formats and 8-bit floats.

    K row    lane c of 4 loads a quarter of its bytes           = its part of the product's operand
    V rows   2i, 2i + 1: lane g of 8 loads an eighth of both, and pairs them key by key

Dims and keys are renamed so that what a lane loads is what the tensor core wants from it, and no
lane's part is longer than a block: its scale sits in one register. Nothing is exchanged between
lanes but maxima and sums, and shared memory is not used. A program is a warp; it has up to 16 rows
(head of the group, query) and a split of the low keys.

K with fp32 or E4M3 scales is multiplied in fp16, by Q relative to a power of two for each row; with
E8M0 scales, which fp16 could not hold, in bf16 by Q as a sum of two numbers. V is bf16.
"""

from __future__ import annotations

import functools
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ...formats import get_format
from ...quant.jit import bits, block, decode_e4m3, decode_e8m0, scale_kind
from .codes_ptx import key_asm, value_asm
from .tiles import has_row_scale

FORMATS = ("int4", "fp4", "nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2")
KEYS = 32  # of a block
M = gl.constexpr(16)


@gluon.jit
def _scales(ptr, rows, BEGIN: gl.constexpr, PART: gl.constexpr, D: gl.constexpr,
            FORMAT: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Block scales of the parts of rows (N,), a part being PART dims from BEGIN on: (N, parts)."""
    BLOCK: gl.constexpr = block(FORMAT, D)
    PARTS: gl.constexpr = LAYOUT.shape[1]
    part = gl.arange(0, PARTS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    at = rows[:, None] * (D // BLOCK) + ((part * PART + BEGIN) // BLOCK)[None, :]
    byte = gl.load(ptr + at).to(gl.int32)
    value = decode_e8m0(byte) if scale_kind(FORMAT) == "e8m0" else decode_e4m3(byte)
    return value.to(DTYPE)


@gluon.jit
def _keys(byte, scales, B_LAYOUT: gl.constexpr, FORMAT: gl.constexpr, ASM: gl.constexpr,
          REGISTERS: gl.constexpr):
    """uint8 (N, bytes) and block scales (N, 4) -> (bytes, N), dims renamed; of low and high
    nibbles, or twice the same."""
    N: gl.constexpr = byte.shape[0]
    BYTES: gl.constexpr = byte.shape[1]
    x = byte.reshape(N, 4, BYTES // 4)
    low_scale, high_scale = scales
    if bits(FORMAT) == 8:
        low = gl.inline_asm_elementwise(ASM, REGISTERS, [x, low_scale[:, :, None]],
                                        dtype=gl.bfloat16, is_pure=True, pack=4)
        low = _as_keys(low, B_LAYOUT)
        return low, low
    else:
        if scale_kind(FORMAT) == "fp32":
            low, high = gl.inline_asm_elementwise(
                ASM, REGISTERS, [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=4)
        elif scale_kind(FORMAT) == "e4m3":
            low, high = gl.inline_asm_elementwise(
                ASM, REGISTERS, [x, low_scale[:, :, None], high_scale[:, :, None]],
                dtype=(gl.float16, gl.float16), is_pure=True, pack=4)
        else:
            low, high = gl.inline_asm_elementwise(
                ASM, REGISTERS, [x, low_scale[:, :, None], high_scale[:, :, None]],
                dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4)
        return _as_keys(low, B_LAYOUT), _as_keys(high, B_LAYOUT)


@gluon.jit
def _as_keys(x, B_LAYOUT: gl.constexpr):
    N: gl.constexpr = x.shape[0]
    BYTES: gl.constexpr = 4 * x.shape[2]
    x = x.reshape(N, 4, BYTES // 16, 2, 2).permute(2, 3, 1, 4, 0).reshape(BYTES, N)
    return gl.convert_layout(x, B_LAYOUT, assert_trivial=True)


@gluon.jit
def _values(even, odd, scales, B_LAYOUT: gl.constexpr, FORMAT: gl.constexpr, ASM: gl.constexpr,
          REGISTERS: gl.constexpr):
    """uint8 (N / 2, bytes) of even and odd keys, block scales (N / 2, 8) of each -> four bf16
    (N, bytes / 2), dims renamed; of 8-bit formats the last two are the first again."""
    HALVES: gl.constexpr = even.shape[0]
    BYTES: gl.constexpr = even.shape[1]
    even = even.reshape(HALVES, 8, BYTES // 8)
    odd = odd.reshape(HALVES, 8, BYTES // 8)
    e0, o0, e1, o1 = scales
    if bits(FORMAT) == 8:
        t0, t1 = gl.inline_asm_elementwise(
            ASM, REGISTERS, [even, odd, e0[:, :, None], o0[:, :, None]],
            dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4)
        t0, t1 = _as_values(t0, B_LAYOUT), _as_values(t1, B_LAYOUT)
        return t0, t1, t0, t1
    else:
        if scale_kind(FORMAT) == "fp32":
            t0, t1, t2, t3 = gl.inline_asm_elementwise(
                ASM, REGISTERS, [even, odd],
                dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=4)
        else:
            t0, t1, t2, t3 = gl.inline_asm_elementwise(
                ASM, REGISTERS,
                [even, odd, e0[:, :, None], o0[:, :, None], e1[:, :, None], o1[:, :, None]],
                dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=4)
        return (_as_values(t0, B_LAYOUT), _as_values(t1, B_LAYOUT), _as_values(t2, B_LAYOUT),
                _as_values(t3, B_LAYOUT))


@gluon.jit
def _as_values(x, B_LAYOUT: gl.constexpr):
    HALVES: gl.constexpr = x.shape[0]
    WORDS: gl.constexpr = x.shape[2] // 4
    x = x.reshape(HALVES, 8, WORDS, 2, 2).permute(0, 4, 2, 3, 1).reshape(2 * HALVES, WORDS * 16)
    return gl.convert_layout(x, B_LAYOUT, assert_trivial=True)


@gluon.jit
def _query(turned_ptr, row, mask, BEGIN: gl.constexpr, BYTES: gl.constexpr, D: gl.constexpr,
           A_LAYOUT: gl.constexpr):
    """float32 rows (16,) of rotated Q, `BYTES` dims from BEGIN on, renamed as K's."""
    kappa = gl.arange(0, BYTES, gl.SliceLayout(0, A_LAYOUT))
    dim = (BEGIN + (BYTES // 4) * ((kappa >> 1) & 3) + 4 * (kappa >> 4) + ((kappa >> 3) & 1)
           + 2 * (kappa & 1))
    return gl.load(turned_ptr + row[:, None] * D + dim[None, :], mask=mask[:, None], other=0.0)


@gluon.jit
def _power(exponent):
    """2^(exponent - 127) for a biased exponent, kept among the normal numbers."""
    return (gl.minimum(gl.maximum(exponent, 1), 254) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _store(part_ptr, to, mask, acc, inverse, BEGIN: gl.constexpr, PART: gl.constexpr,
           D: gl.constexpr):
    n = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    dim = BEGIN + PART * (n & 7) + 4 * (n >> 4) + ((n >> 3) & 1)
    gl.store(part_ptr + to[:, None] * D + dim[None, :], acc * inverse[:, None], mask=mask[:, None])


@gluon.jit(do_not_specialize=["H_KV", "GROUP", "S_Q", "first", "diag", "sink", "window",
                              "valid_size", "n_low"])
def low_keys_kernel(turned_ptr, shift_ptr, k, v, part_ptr, lse_ptr, lengths_ptr, near_ptr,
                    starts_ptr, valid_ptr, H_KV, GROUP, S_Q, first, n_low, n_splits, diag, sink,
                    capacity, valid_size, scale, window, D: gl.constexpr, WINDOW: gl.constexpr,
                    K_FORMAT: gl.constexpr, V_FORMAT: gl.constexpr, N: gl.constexpr,
                    K_LAYOUT: gl.constexpr, V_LAYOUT: gl.constexpr, K_ASM: gl.constexpr,
                    K_REGISTERS: gl.constexpr, V_ASM: gl.constexpr, V_REGISTERS: gl.constexpr):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    COLS: gl.constexpr = gl.SliceLayout(0, MMA)
    K_BYTES: gl.constexpr = K_LAYOUT.shape[1]
    V_BYTES: gl.constexpr = V_LAYOUT.shape[1]
    F16: gl.constexpr = scale_kind(K_FORMAT) != "e8m0"
    K_TYPE: gl.constexpr = gl.float16 if F16 else gl.bfloat16
    plane = gl.program_id(0).to(gl.int64)
    split = gl.program_id(1)
    b = plane // H_KV
    h = plane % H_KV
    length = gl.load(lengths_ptr + b)
    start = gl.load(starts_ptr + b)
    near = gl.load(near_ptr)
    row = gl.arange(0, M, ROWS)
    mask_m = row < GROUP * S_Q
    pos_m = length - S_Q + row % S_Q
    first_hi = (gl.maximum(start, 0) >> 7) << 7
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
    # Q: rows as the operand has them
    row_a = gl.arange(0, M, gl.SliceLayout(1, A))
    head = h * GROUP + row_a // S_Q
    q_row = (b * H_KV * GROUP + head) * S_Q + row_a % S_Q
    mask_a = row_a < GROUP * S_Q
    q0 = _query(turned_ptr, q_row, mask_a, 0, K_BYTES, D, A)
    q1 = q0
    if bits(K_FORMAT) == 4:
        q1 = _query(turned_ptr, q_row, mask_a, D // 2, K_BYTES, D, A)
    # fp16 is relative to a power of two with which the largest of a row is below 2^15
    unit = gl.full([M], 1.0, gl.float32, ROWS)
    if F16:
        largest = gl.max(gl.maximum(gl.abs(q0), gl.abs(q1)), 1).to(gl.int32, bitcast=True) >> 23
        factor = _power(268 - largest)[:, None]
        q0 *= factor
        q1 *= factor
        unit = gl.convert_layout(_power(largest - 14), ROWS)
    hi0 = q0.to(K_TYPE)
    hi1 = q1.to(K_TYPE)
    rest0 = (q0 - hi0.to(gl.float32)).to(K_TYPE)
    rest1 = (q1 - hi1.to(gl.float32)).to(K_TYPE)
    shift = gl.zeros([M], gl.float32, ROWS)
    if shift_ptr is not None:
        at = (b * H_KV * GROUP + h * GROUP + row // S_Q) * S_Q + row % S_Q
        shift = gl.load(shift_ptr + at, mask=mask_m, other=0.0) * scale
    if valid_ptr is not None:
        valid_ptr += b * valid_size
    tokens = plane * capacity
    k_cols = gl.arange(0, K_BYTES, gl.SliceLayout(0, K_LAYOUT))
    v_cols = gl.arange(0, V_BYTES, gl.SliceLayout(0, V_LAYOUT))
    K3: gl.constexpr = gl.zeros([N, K_BYTES], gl.uint8, K_LAYOUT).reshape(
        N, 4, K_BYTES // 4).type.layout
    V3: gl.constexpr = gl.zeros([N // 2, V_BYTES], gl.uint8, V_LAYOUT).reshape(
        N // 2, 8, V_BYTES // 8).type.layout
    acc0 = gl.zeros([M, V_BYTES // 2], gl.float32, MMA)
    acc1 = gl.zeros([M, V_BYTES // 2], gl.float32, MMA)
    acc2 = gl.zeros([M, V_BYTES // 2], gl.float32, MMA)
    acc3 = gl.zeros([M, V_BYTES // 2], gl.float32, MMA)
    row_max = gl.full([M], float("-inf"), gl.float32, ROWS)
    row_sum = gl.zeros([M], gl.float32, ROWS)
    for block_lo in range(lo, hi, N):
        # Keys from hi on repeat the last one, and are hidden
        keys = gl.minimum(block_lo + gl.arange(0, N, gl.SliceLayout(1, K_LAYOUT)), hi - 1)
        k_codes = gl.load(k.codes + (tokens + keys)[:, None] * K_BYTES + k_cols[None, :])
        pairs = block_lo + 2 * gl.arange(0, N // 2, gl.SliceLayout(1, V_LAYOUT))
        evens = tokens + gl.minimum(pairs, hi - 1)
        odds = tokens + gl.minimum(pairs + 1, hi - 1)
        even = gl.load(v.codes + evens[:, None] * V_BYTES + v_cols[None, :])
        odd = gl.load(v.codes + odds[:, None] * V_BYTES + v_cols[None, :])
        pos = block_lo + gl.arange(0, N, COLS)
        col = tokens + gl.minimum(pos, hi - 1)
        counts = pos < hi
        if valid_ptr is not None:
            counts = counts & (gl.load(valid_ptr + (col - tokens)) != 0)
        k_scales = (1.0, 1.0)
        if scale_kind(K_FORMAT) != "fp32":
            PART: gl.constexpr = K_BYTES // 4
            L: gl.constexpr = K3
            rows = tokens + gl.minimum(
                block_lo + gl.arange(0, N, gl.SliceLayout(1, gl.SliceLayout(2, L))), hi - 1)
            k_scales = (_scales(k.scales, rows, 0, PART, D, K_FORMAT, K_TYPE, L),
                        _scales(k.scales, rows, D // 2 if bits(K_FORMAT) == 4 else 0, PART, D,
                                K_FORMAT, K_TYPE, L))
        k0, k1 = _keys(k_codes, k_scales, B, K_FORMAT, K_ASM, K_REGISTERS)
        s = gl.zeros([M, N], gl.float32, MMA)
        if not F16:
            s = mma_v2(rest0, k0, s)
            if bits(K_FORMAT) == 4:
                s = mma_v2(rest1, k1, s)
        s = mma_v2(hi0, k0, s)
        if bits(K_FORMAT) == 4:
            s = mma_v2(hi1, k1, s)
        if has_row_scale(K_FORMAT):
            s = s * (gl.load(k.row_scales + col) * scale)[None, :]
        else:
            s = s * scale
        if F16:
            s = s * unit[:, None]
        s = s + shift[:, None]
        visible = counts[None, :] & (pos[None, :] < near_lo[:, None]) & (
            pos[None, :] <= pos_m[:, None])
        if WINDOW:
            visible = visible & (pos[None, :] > pos_m[:, None] - window)
        s = gl.where(visible, s, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(s, 1))
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
        p = gl.exp2(s - base[:, None])
        decay = gl.exp2(row_max - base)
        row_sum = row_sum * decay + gl.sum(p, 1)
        row_max = new_max
        if has_row_scale(V_FORMAT):
            p = p * gl.load(v.row_scales + col)[None, :]
        p = gl.convert_layout(p.to(gl.bfloat16), A, assert_trivial=True)
        v_scales = (1.0, 1.0, 1.0, 1.0)
        if scale_kind(V_FORMAT) != "fp32":
            V_PART: gl.constexpr = V_BYTES // 8
            LV: gl.constexpr = V3
            HIGH: gl.constexpr = D // 2 if bits(V_FORMAT) == 4 else 0
            rows = block_lo + 2 * gl.arange(0, N // 2, gl.SliceLayout(1, gl.SliceLayout(2, LV)))
            even_rows = tokens + gl.minimum(rows, hi - 1)
            odd_rows = tokens + gl.minimum(rows + 1, hi - 1)
            v_scales = (
                _scales(v.scales, even_rows, 0, V_PART, D, V_FORMAT, gl.bfloat16, LV),
                _scales(v.scales, odd_rows, 0, V_PART, D, V_FORMAT, gl.bfloat16, LV),
                _scales(v.scales, even_rows, HIGH, V_PART, D, V_FORMAT, gl.bfloat16, LV),
                _scales(v.scales, odd_rows, HIGH, V_PART, D, V_FORMAT, gl.bfloat16, LV))
        v0, v1, v2, v3 = _values(even, odd, v_scales, B, V_FORMAT, V_ASM, V_REGISTERS)
        acc0 = mma_v2(p, v0, acc0 * decay[:, None])
        acc1 = mma_v2(p, v1, acc1 * decay[:, None])
        if bits(V_FORMAT) == 4:
            acc2 = mma_v2(p, v2, acc2 * decay[:, None])
            acc3 = mma_v2(p, v3, acc3 * decay[:, None])
    to = (plane * n_splits + first + split) * M + row
    lse = row_max + gl.log2(row_sum)
    gl.store(lse_ptr + to, gl.where(row_sum > 0.0, lse, float("-inf")), mask=mask_m)
    inverse = gl.where(row_sum > 0.0, 1.0 / row_sum, 0.0)
    _store(part_ptr, to, mask_m, acc0, inverse, 0, V_BYTES // 8, D)
    _store(part_ptr, to, mask_m, acc1, inverse, 2, V_BYTES // 8, D)
    if bits(V_FORMAT) == 4:
        _store(part_ptr, to, mask_m, acc2, inverse, D // 2, V_BYTES // 8, D)
        _store(part_ptr, to, mask_m, acc3, inverse, D // 2 + 2, V_BYTES // 8, D)


@functools.cache
def variant(k_format: str, v_format: str, head_dim: int, n: int = KEYS) -> dict[str, Any]:
    """Compile-time arguments: what unpacks codes, and the registers of a warp that hold codes of n
    keys of K, and of n / 2 pairs of keys of V."""
    k, v = (head_dim * get_format(name).bits // 8 for name in (k_format, v_format))

    def powers(lo: int, hi: int, axis: int) -> list[list[int]]:
        steps = [1 << i for i in range(lo.bit_length() - 1, hi.bit_length() - 1)]
        return [[0, i] if axis else [i, 0] for i in steps]

    return {
        "K_FORMAT": k_format,
        "V_FORMAT": v_format,
        "D": head_dim,
        "N": n,
        "K_ASM": key_asm(k_format)[0],
        "K_REGISTERS": key_asm(k_format)[1],
        "V_ASM": value_asm(v_format)[0],
        "V_REGISTERS": value_asm(v_format)[1],
        "K_LAYOUT": gl.DistributedLinearLayout(
            [*powers(1, k // 4, 1), *powers(8, n, 0)],
            [*powers(k // 4, k, 1), *powers(1, 8, 0)], [], [], [n, k]),
        "V_LAYOUT": gl.DistributedLinearLayout(
            [*powers(1, v // 8, 1), *powers(4, n // 2, 0)],
            [*powers(1, 4, 0), *powers(v // 8, v, 1)], [], [], [n // 2, v]),
    }
