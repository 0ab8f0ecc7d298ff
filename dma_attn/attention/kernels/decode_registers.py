"""The low keys of a decode step by single warps, for 4-bit formats and 8-bit floats.

    codes          -> shared memory, asynchronously, STAGES blocks of keys ahead of the products
    S^T = K Q^T       K row: lane c of 4 reads a quarter of its bytes, its part of operand A
    O^T = V^T P^T     V rows 2i, 2i + 1: lane g of 8 reads an eighth of both, in pairs of keys

Keys, then V's dims, are the 16 rows of a tensor core's product, and the queries its 8 columns, so
that a group of 4 heads wastes half of it and not three quarters. Dims and keys are renamed so that
what a lane reads is what the product wants from it, and no lane's part is longer than a block: its
scale sits in one register. P^T goes from one product's result to the next one's operand by 8 x 8
transpositions (`movmatrix`). A program is a warp; it has up to 16 queries (head of the group,
token) and a split of the low keys; more queries are more programs. It rotates its queries itself,
by a product with the Hadamard matrix.

P is relative to a maximum that may be SLACK too low, in powers of two: only a block with a larger
score reduces maxima among lanes and rescales the sums.

K is multiplied in fp16, by Q relative to a power of two for each row: elements of 4 bits times
their E4M3 scales; elements of 8 bits as they are, their E8M0 scales after the product, block by
block. Only MXFP4, 4 bits with scales that fp16 could not hold, is multiplied in bf16, by Q as a sum
of two numbers. V is bf16.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...formats import get_format
from ...quant.jit import bits, rotation_norm, scale_kind
from .codes_ptx import key_asm, key_power, value_asm, value_power
from .decode_operands import (
    consecutive,
    counted,
    hadamard_operand,
    identity_operand,
    key_scales,
    keys_of_4_bits,
    keys_of_8_bits,
    rotated_query,
    rows_from,
    transposed_blocks,
    value_operands,
    value_scales,
)
from .tiles import has_row_scale

FORMATS = ("int4", "fp4", "nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2")
STAGES = 2
# By rows: keys of a block, warps on an SM, and registers of a lane, with which these fit
SHAPES = {8: (32, 12, 168), 16: (32, 8, 255)}
SHARED = 227 * 1024  # bytes of an SM, 1 KB of which goes with each program
SLACK = gl.constexpr(8.0)
LOWEST = gl.constexpr(-3.4028234663852886e38)  # of float32: what no score has yet exceeded


@gluon.jit
def _copy(codes, smem, tokens, begin, hi, BYTES: gl.constexpr, N: gl.constexpr):
    """Start to copy the codes of keys, (N, BYTES), unless they begin at hi or behind."""
    LANES: gl.constexpr = BYTES // 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [32 // LANES, LANES], [1, 1], [1, 0])
    keys = tokens + rows_from(begin, hi, N, 1, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, BYTES, gl.SliceLayout(0, LAYOUT))
    at = codes + keys[:, None] * BYTES + cols[None, :]
    async_copy.async_copy_global_to_shared(smem, at, mask=begin < hi)


@gluon.jit
def _times_block_scale(k, q, words, s, INDEX: gl.constexpr, MMA: gl.constexpr):
    """s (N, M) plus the product with a block of dims, times its E8M0 scales (2^-127 as 0, and NaN
    as Inf: it multiplies zeros)."""
    zero = gl.zeros([s.shape[0], s.shape[1]], gl.float32, MMA)
    LEFT: gl.constexpr = 23 - 8 * INDEX
    words = words.to(gl.int32)
    scale = (words << LEFT if LEFT > 0 else words >> -LEFT) & 0x7F800000
    return gl.fma(mma_v2(k, q, zero), scale.to(gl.float32, bitcast=True)[:, None], s)


@gluon.jit
def _power(exponent):
    """2^(exponent - 127) for a biased exponent, kept among the normal numbers."""
    return (gl.minimum(gl.maximum(exponent, 1), 254) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _store(part_ptr, to, row, rows, acc0, acc1, BEGIN: gl.constexpr, D: gl.constexpr):
    """Rows of a part of the output, some dims from BEGIN on: of each four, two come from acc0."""
    DIMS: gl.constexpr = 2 * acc0.shape[0]
    M: gl.constexpr = acc0.shape[1]
    x = gl.join(acc0, acc1).reshape(DIMS // 32, 2, 8, M, 2).permute(3, 2, 0, 4, 1).reshape(M, DIMS)
    LAYOUT: gl.constexpr = consecutive(DIMS, M, 1)
    x = gl.convert_layout(x, LAYOUT, assert_trivial=True)
    row += gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    dims = BEGIN + gl.arange(0, DIMS, gl.SliceLayout(0, LAYOUT))
    gl.store(part_ptr + (to + row)[:, None] * D + dims[None, :], x, mask=(row < rows)[:, None])


@gluon.jit(do_not_specialize=["H_KV", "GROUP", "S_Q", "first", "n_low", "n_splits", "part_rows",
                              "diag", "sink", "capacity", "valid_size", "window"])
def low_keys_kernel(q, mean_ptr, k, v, part_ptr, lse_ptr, lengths_ptr, near_ptr,
                    starts_ptr, valid_ptr, H_KV, GROUP, S_Q, first, n_low, n_splits, part_rows,
                    diag, sink, capacity, valid_size, scale, window, D: gl.constexpr,
                    ROTATE: gl.constexpr, WINDOW: gl.constexpr, OVERLAP: gl.constexpr,
                    K_FORMAT: gl.constexpr, V_FORMAT: gl.constexpr, M: gl.constexpr,
                    N: gl.constexpr, STAGES: gl.constexpr,
                    K_LAYOUT: gl.constexpr, V_LAYOUT: gl.constexpr, K_SHARED: gl.constexpr,
                    V_SHARED: gl.constexpr, K_ASM: gl.constexpr, K_REGISTERS: gl.constexpr,
                    K_POWER: gl.constexpr, V_ASM: gl.constexpr, V_REGISTERS: gl.constexpr,
                    V_POWER: gl.constexpr):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    QUERIES: gl.constexpr = gl.SliceLayout(0, MMA)
    K_BYTES: gl.constexpr = K_LAYOUT.shape[1]
    V_BYTES: gl.constexpr = V_LAYOUT.shape[1]
    FOUR: gl.constexpr = bits(K_FORMAT) == 4
    F16: gl.constexpr = scale_kind(K_FORMAT) != "e8m0" or not FOUR
    K_TYPE: gl.constexpr = gl.float16 if F16 else gl.bfloat16
    DIMS: gl.constexpr = D // 2 if FOUR else 32
    K3: gl.constexpr = gl.zeros([N, K_BYTES], gl.uint8, K_LAYOUT).reshape(
        N, 4, K_BYTES // 4).type.layout
    V3: gl.constexpr = gl.zeros([N, V_BYTES], gl.uint8, V_LAYOUT).reshape(
        N // 2, 2, 8, V_BYTES // 8).permute(0, 2, 3, 1).split()[0].type.layout
    if OVERLAP:
        gdc_launch_dependents()
    plane = gl.program_id(0).to(gl.int64)
    split = gl.program_id(1)
    b = plane // H_KV
    h = plane % H_KV
    length = gl.minimum(gl.load(lengths_ptr + b), capacity)
    start = gl.load(starts_ptr + b)
    near = gl.load(near_ptr)
    chunk = gl.program_id(2) * M
    row = chunk + gl.arange(0, M, QUERIES)
    rows = GROUP * S_Q
    mask_m = row < rows
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
    tokens = plane * capacity
    k_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, N, K_BYTES], K_SHARED)
    v_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, N, V_BYTES], V_SHARED)
    for i in gl.static_range(STAGES - 1):
        _copy(k.codes, k_smem.index(i), tokens, lo + i * N, hi, K_BYTES, N)
        _copy(v.codes, v_smem.index(i), tokens, lo + i * N, hi, V_BYTES, N)
        async_copy.commit_group()
    k_row, k_low, k_high = key_scales(k, tokens, lo, hi, N, D, K_FORMAT, K3, MMA)
    v_row, v_e0, v_o0, v_e1, v_o1 = value_scales(v, tokens, lo, hi, N, D, V_FORMAT, V3, MMA)
    # Below, and from, these keys all queries see all of them
    full_hi = gl.minimum(hi, gl.min(gl.minimum(near_lo, pos_m + 1), 0))
    full_lo = lo
    if WINDOW:
        full_lo = gl.max(pos_m, 0) - window + 1
    # Q^T, and what it has with K's mean
    base = b * q.strides[0] + h * GROUP * q.strides[1]
    if mean_ptr is not None:
        mean_ptr += plane * D
    if ROTATE:
        matrix = hadamard_operand(DIMS, q.ptr.dtype.element_ty, A)
    else:
        matrix = identity_operand(DIMS, q.ptr.dtype.element_ty, A)
    q0, shift0 = rotated_query(q, mean_ptr, base, chunk, rows, S_Q, matrix, 0, FOUR, DIMS, M,
                               B, MMA)
    q1, shift1 = rotated_query(q, mean_ptr, base, chunk, rows, S_Q, matrix, DIMS, FOUR, DIMS, M,
                               B, MMA)
    shift0 += shift1
    q2 = q0
    q3 = q1
    if not FOUR and D == 128:
        q2, shift2 = rotated_query(q, mean_ptr, base, chunk, rows, S_Q, matrix, 64, FOUR, DIMS, M,
                               B, MMA)
        q3, shift3 = rotated_query(q, mean_ptr, base, chunk, rows, S_Q, matrix, 96, FOUR, DIMS, M,
                               B, MMA)
        shift0 += shift2 + shift3
    if ROTATE:
        q0, q1 = q0 + q1, q0 - q1
        if not FOUR and D == 128:
            q2, q3 = q2 + q3, q2 - q3
            q0, q1, q2, q3 = q0 + q2, q1 + q3, q0 - q2, q1 - q3
    shift = gl.convert_layout(shift0, QUERIES) * scale
    if scale < 0.0:  # below, larger sums are larger scores
        q0, q1, q2, q3 = -q0, -q1, -q2, -q3
    # fp16 is relative to a power of two with which the largest of a row is below 2^15
    unit = gl.full([M], 1.0, gl.float32, QUERIES) * gl.abs(scale)
    if ROTATE:
        unit *= rotation_norm(D)
    if F16:
        largest = gl.max(gl.maximum(gl.maximum(gl.abs(q0), gl.abs(q1)),
                                    gl.maximum(gl.abs(q2), gl.abs(q3))), 0)
        largest = largest.to(gl.int32, bitcast=True) >> 23
        factor = _power(268 - largest)[None, :]
        q0 *= factor
        q1 *= factor
        q2 *= factor
        q3 *= factor
        unit *= _power(largest - 14) * 2.0**K_POWER
    unit = gl.maximum(unit, 1e-30)  # such scores are 0, and a hidden one is -inf and not NaN
    if K_FORMAT == "int4":
        q1 *= 0.0625
    h0 = q0.to(K_TYPE)
    h1 = q1.to(K_TYPE)
    rest0 = (q0 - h0.to(gl.float32)).to(K_TYPE)
    rest1 = (q1 - h1.to(gl.float32)).to(K_TYPE)
    s_0 = gl.zeros([N, M], gl.float32, MMA)
    if K_FORMAT == "int4":  # 8 was added to its elements
        added = gl.sum(h0.to(gl.float32) + 16.0 * h1.to(gl.float32), 0)
        s_0 += (added * -(8.0 * 2.0**-24))[None, :]
    h0 = transposed_blocks(h0, B)
    h1 = transposed_blocks(h1, B)
    h2 = h0
    h3 = h1
    if not F16:
        rest0 = transposed_blocks(rest0, B)
        rest1 = transposed_blocks(rest1, B)
    if not FOUR and D == 128:
        h2 = transposed_blocks(q2.to(K_TYPE), B)
        h3 = transposed_blocks(q3.to(K_TYPE), B)
    if valid_ptr is not None:
        valid_ptr += b * valid_size
    acc0 = gl.zeros([V_BYTES // 2, M], gl.float32, MMA)
    acc1 = gl.zeros([V_BYTES // 2, M], gl.float32, MMA)
    acc2 = gl.zeros([V_BYTES // 2, M], gl.float32, MMA)
    acc3 = gl.zeros([V_BYTES // 2, M], gl.float32, MMA)
    offset = gl.zeros([M], gl.float32, QUERIES)  # P = 2^(s * unit + offset)
    sums = gl.sum(gl.zeros([N, M], gl.float32, MMA).reshape(N // 8, 8, M), 0)  # by lane
    BY_LANE: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    bound = gl.full([M], LOWEST, gl.float32, BY_LANE)
    stage = 0
    for block_lo in range(lo, hi, N):
        async_copy.wait_group(STAGES - 2)
        k_codes = k_smem.index(stage).load(K_LAYOUT)
        s = s_0
        if FOUR:
            k0, k1 = keys_of_4_bits(k_codes, k_low, k_high, A, K_FORMAT, K_ASM, K_REGISTERS)
            if not F16:
                s = mma_v2(k0, rest0, s)
                s = mma_v2(k1, rest1, s)
            s = mma_v2(k0, h0, s)
            s = mma_v2(k1, h1, s)
        else:
            k0, k1, k2, k3 = keys_of_8_bits(k_codes, A, K_ASM, K_REGISTERS)
            s = _times_block_scale(k0, h0, k_low, s, 0, MMA)
            s = _times_block_scale(k1, h1, k_low, s, 1, MMA)
            if D == 128:
                s = _times_block_scale(k2, h2, k_low, s, 2, MMA)
                s = _times_block_scale(k3, h3, k_low, s, 3, MMA)
        v_codes = v_smem.index(stage).load(V_LAYOUT)
        # The blocks ahead, where the block before this one was
        ahead = block_lo + (STAGES - 1) * N
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        _copy(k.codes, k_smem.index(free), tokens, ahead, hi, K_BYTES, N)
        _copy(v.codes, v_smem.index(free), tokens, ahead, hi, V_BYTES, N)
        async_copy.commit_group()
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        if has_row_scale(K_FORMAT):
            s = s * k_row[:, None]
        k_row, k_low, k_high = key_scales(k, tokens, block_lo + N, hi, N, D, K_FORMAT, K3, MMA)
        partly = block_lo + N > full_hi
        if WINDOW:
            partly = partly | (block_lo < full_lo)
        if valid_ptr is not None:
            partly = True
        if partly:
            pos = block_lo + gl.arange(0, N, gl.SliceLayout(1, MMA))
            counts = counted(pos, seen, hi, valid_ptr)
            visible = counts[:, None] & (pos[:, None] < near_lo[None, :]) & (
                pos[:, None] <= pos_m[None, :])
            if WINDOW:
                visible = visible & (pos[:, None] > pos_m[None, :] - window)
            s = gl.where(visible, s, float("-inf"))
            # What no query sees may be NaN
            if has_row_scale(V_FORMAT):
                v_row = gl.where(counts, v_row, 0.0)
            if scale_kind(V_FORMAT) != "fp32":
                even = block_lo + 2 * gl.arange(0, N // 2, gl.SliceLayout(1, v_e0.type.layout))
                counts_e = counted(even, seen, hi, valid_ptr)[:, None]
                counts_o = counted(even + 1, seen, hi, valid_ptr)[:, None]
                v_e0, v_o0 = gl.where(counts_e, v_e0, 0), gl.where(counts_o, v_o0, 0)
                if bits(V_FORMAT) == 4:
                    v_e1, v_o1 = gl.where(counts_e, v_e1, 0), gl.where(counts_o, v_o1, 0)
        exceeds = gl.max(s.reshape(N // 8, 8, M), 0) > bound[None, :]
        if gl.max(exceeds.to(gl.int32).reshape(8 * M), 0) > 0:
            top = gl.max(s, 0)
            old = gl.convert_layout(bound, QUERIES)
            higher = top > old
            new = gl.where(higher, -top * unit, offset)
            decay = gl.where(old == LOWEST, 0.0, gl.exp2(new - offset))
            decay = gl.where(higher, decay, 1.0)
            offset = new
            bound = gl.convert_layout(gl.where(higher, top + SLACK / unit, old), BY_LANE)
            sums *= gl.convert_layout(decay, BY_LANE)[None, :]
            acc0 *= decay[None, :]
            acc1 *= decay[None, :]
            acc2 *= decay[None, :]
            acc3 *= decay[None, :]
        p = gl.exp2(gl.fma(s, unit[None, :], offset[None, :]))
        sums += gl.sum(p.reshape(N // 8, 8, M), 0)
        if has_row_scale(V_FORMAT):
            p = p * v_row[:, None]
        p = transposed_blocks(p.to(gl.bfloat16), B)
        v_scales = (v_row, v_e0, v_o0, v_e1, v_o1)
        v0, v1, v2, v3 = value_operands(v_codes, v_scales, A, V_FORMAT, V_ASM, V_REGISTERS)
        v_row, v_e0, v_o0, v_e1, v_o1 = value_scales(v, tokens, block_lo + N, hi, N, D, V_FORMAT,
                                                     V3, MMA)
        acc0 = mma_v2(v0, p, acc0)
        acc1 = mma_v2(v1, p, acc1)
        if bits(V_FORMAT) == 4:
            acc2 = mma_v2(v2, p, acc2)
            acc3 = mma_v2(v3, p, acc3)
    row_sum = gl.convert_layout(gl.sum(sums, 0), QUERIES)
    to = (plane * n_splits + first + split) * part_rows
    blind = row_sum == 0.0  # NaN is not
    lse = shift - offset + gl.log2(row_sum)
    gl.store(lse_ptr + to + row, gl.where(blind, float("-inf"), lse), mask=mask_m)
    inverse = gl.where(blind, 0.0, 2.0**V_POWER / row_sum)[None, :]
    _store(part_ptr, to, chunk, rows, acc0 * inverse, acc1 * inverse, 0, D)
    if bits(V_FORMAT) == 4:
        _store(part_ptr, to, chunk, rows, acc2 * inverse, acc3 * inverse, D // 2, D)
    if OVERLAP:  # what comes next takes the kernel before this one as done, too
        gdc_wait()


@functools.cache
def variant(k_format: str, v_format: str, head_dim: int, rows: int) -> dict[str, Any]:
    """Launch arguments for `rows` in programs of up to 8 or 16: what unpacks codes, and how shared
    memory and the registers of a warp hold those of a block's keys."""
    m = 8 if rows <= 8 else 16
    n, _, registers = SHAPES[m]
    k, v = (head_dim * get_format(name).bits // 8 for name in (k_format, v_format))

    part = k // 4 if get_format(k_format).bits == 4 else 8  # bytes of K that a lane has in a row

    def powers(lo: int, hi: int, axis: int) -> list[list[int]]:
        steps = [1 << i for i in range(lo.bit_length() - 1, hi.bit_length() - 1)]
        return [[0, i] if axis else [i, 0] for i in steps]

    def shared(size: int) -> gl.SwizzledSharedLayout:
        return gl.SwizzledSharedLayout(16, max(1, 128 // size), min(8, size // 16), [1, 0])

    return {
        "K_FORMAT": k_format,
        "V_FORMAT": v_format,
        "D": head_dim,
        "M": m,
        "N": n,
        "STAGES": STAGES,
        "maxnreg": registers,
        "K_ASM": key_asm(k_format)[0],
        "K_REGISTERS": key_asm(k_format)[1],
        "K_POWER": key_power(k_format),
        "V_POWER": value_power(v_format),
        "V_ASM": value_asm(v_format)[0],
        "V_REGISTERS": value_asm(v_format)[1],
        "K_SHARED": shared(k),
        "V_SHARED": shared(v),
        "K_LAYOUT": gl.DistributedLinearLayout(
            [*powers(1, part, 1), *powers(4 * part, k, 1), *powers(8, n, 0)],
            [*powers(part, 4 * part, 1), *powers(1, 8, 0)], [], [], [n, k]),
        "V_LAYOUT": gl.DistributedLinearLayout(
            [*powers(1, v // 8, 1), [1, 0], *powers(8, n, 0)],
            [*powers(2, 8, 0), *powers(v // 8, v, 1)], [], [], [n, v]),
    }


def resident(kernel: dict[str, Any]) -> int:
    """Programs of a `variant` that an SM of Hopper holds at a time."""
    staged = kernel["STAGES"] * sum(math.prod(kernel[x].shape) for x in ("K_LAYOUT", "V_LAYOUT"))
    return int(min(SHAPES[kernel["M"]][1], SHARED // (staged + 1024)))
