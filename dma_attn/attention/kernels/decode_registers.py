"""The low keys of a decode step by single warps, for 4-bit formats and 8-bit floats.

    codes          -> shared memory, asynchronously, STAGES blocks of keys ahead of the products
    S^T = K Q^T       K row: lane c of 4 reads a quarter of its bytes, its part of operand A
    O^T = V^T P^T     V rows 2i, 2i + 1: lane g of 8 reads an eighth of both, in pairs of keys

Keys, then V's dims, are the 16 rows of a tensor core's product, and the queries its 8 columns, so
that a group of 4 heads wastes half of it and not three quarters. Dims and keys are renamed so that
what a lane reads is what the product wants from it, and no lane's part is longer than a block: its
scale sits in one register. P^T goes from one product's result to the next one's operand by 8 x 8
transpositions (`movmatrix`). A program is a warp; it has up to 16 queries (head of the group,
token) and a split of the low keys. It rotates its queries itself, by a product with the Hadamard
matrix.

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
from ...quant.jit import bits, block, decode_e8m0, rotation_norm, scale_kind
from .codes_ptx import key_asm, key_power, value_asm, value_power
from .tiles import has_row_scale

FORMATS = ("int4", "fp4", "nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2")
KEYS = 32  # of a block
STAGES = 3
WARPS = {8: 12, 16: 8}  # on an SM, for 8 and 16 rows
REGISTERS = {8: 168, 16: 255}  # with which that many fit
SHARED = 227 * 1024  # bytes of an SM, 1 KB of which goes with each program
ROWS = gl.constexpr(16)  # of a part of the output


@gluon.jit
def _block_scales(ptr, rows, BEGIN: gl.constexpr, PARTS: gl.constexpr, D: gl.constexpr,
                  FORMAT: gl.constexpr, LAYOUT: gl.constexpr):
    """Bytes of the block scales of parts of rows (N,), as many bytes of codes each, whose dims
    begin with BEGIN: (N, PARTS)."""
    BLOCK: gl.constexpr = block(FORMAT, D)
    PART: gl.constexpr = D * bits(FORMAT) // 8 // PARTS
    part = gl.arange(0, PARTS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    return gl.load(ptr + rows[:, None] * (D // BLOCK) + ((part * PART + BEGIN) // BLOCK)[None, :])


@gluon.jit
def _as_operand(byte, FORMAT: gl.constexpr):
    """Block scales (N, parts) as the assembly wants them, (N, parts, 1)."""
    if scale_kind(FORMAT) == "e8m0":
        return decode_e8m0(byte.to(gl.int32)).to(gl.bfloat16)[:, :, None]
    else:
        return byte[:, :, None]


@gluon.jit
def _rows(begin, hi, N: gl.constexpr, STEP: gl.constexpr, LAYOUT: gl.constexpr):
    """Every STEP-th key from begin on; those from hi on repeat the last one (and are hidden)."""
    return gl.minimum(begin + STEP * gl.arange(0, N, LAYOUT), hi - 1)


@gluon.jit
def _key_scales(k, tokens, begin, hi, N: gl.constexpr, D: gl.constexpr, FORMAT: gl.constexpr,
                K3: gl.constexpr, MMA: gl.constexpr):
    """As stored: scales of keys (N,); of blocks in the first half of the dims, in the second; of
    8-bit formats those of all blocks of a key in one number (N,)."""
    row = gl.to_tensor(0)
    low = gl.to_tensor(0)
    high = gl.to_tensor(0)
    if has_row_scale(FORMAT):
        row = gl.load(k.row_scales + tokens + _rows(begin, hi, N, 1, gl.SliceLayout(1, MMA)))
    if bits(FORMAT) == 8:
        WORD: gl.constexpr = gl.int32 if D == 128 else gl.int16
        words = k.scales.to(gl.pointer_type(WORD), bitcast=True)
        low = gl.load(words + tokens + _rows(begin, hi, N, 1, gl.SliceLayout(1, MMA)))
    elif scale_kind(FORMAT) != "fp32":
        rows = tokens + _rows(begin, hi, N, 1, gl.SliceLayout(1, gl.SliceLayout(2, K3)))
        low = _block_scales(k.scales, rows, 0, 4, D, FORMAT, K3)
        high = _block_scales(k.scales, rows, D // 2, 4, D, FORMAT, K3)
    return row, low, high


@gluon.jit
def _value_scales(v, tokens, begin, hi, N: gl.constexpr, D: gl.constexpr, FORMAT: gl.constexpr,
                  V3: gl.constexpr, MMA: gl.constexpr):
    """As stored: scales of keys (N,), then of blocks: even keys, odd keys, of the first half of
    the dims and of the second."""
    row = gl.to_tensor(0)
    even = gl.to_tensor(0)
    odd = gl.to_tensor(0)
    even_high = gl.to_tensor(0)
    odd_high = gl.to_tensor(0)
    if has_row_scale(FORMAT):
        row = gl.load(v.row_scales + tokens + _rows(begin, hi, N, 1, gl.SliceLayout(1, MMA)))
    if scale_kind(FORMAT) != "fp32":
        LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, V3))
        evens = tokens + _rows(begin, hi, N // 2, 2, LAYOUT)
        odds = tokens + _rows(begin + 1, hi, N // 2, 2, LAYOUT)
        even = _block_scales(v.scales, evens, 0, 8, D, FORMAT, V3)
        odd = _block_scales(v.scales, odds, 0, 8, D, FORMAT, V3)
        if bits(FORMAT) == 4:
            even_high = _block_scales(v.scales, evens, D // 2, 8, D, FORMAT, V3)
            odd_high = _block_scales(v.scales, odds, D // 2, 8, D, FORMAT, V3)
    return row, even, odd, even_high, odd_high


@gluon.jit
def _copy(codes, smem, tokens, begin, hi, BYTES: gl.constexpr, N: gl.constexpr):
    """Start to copy the codes of keys, (N, BYTES), unless they begin at hi or behind."""
    LANES: gl.constexpr = BYTES // 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [32 // LANES, LANES], [1, 1], [1, 0])
    keys = tokens + _rows(begin, hi, N, 1, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, BYTES, gl.SliceLayout(0, LAYOUT))
    at = codes + keys[:, None] * BYTES + cols[None, :]
    async_copy.async_copy_global_to_shared(smem, at, mask=begin < hi)


@gluon.jit
def _keys_of_4_bits(byte, low_scale, high_scale, A: gl.constexpr, FORMAT: gl.constexpr,
                    ASM: gl.constexpr, REGISTERS: gl.constexpr):
    """uint8 (N, bytes) and block scales (N, 4) -> (N, bytes), dims renamed, twice: of low and of
    high nibbles."""
    N: gl.constexpr = byte.shape[0]
    BYTES: gl.constexpr = byte.shape[1]
    x = byte.reshape(N, 4, BYTES // 4)
    if scale_kind(FORMAT) == "fp32":
        low, high = gl.inline_asm_elementwise(
            ASM, REGISTERS, [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=4)
    else:
        low_scale = _as_operand(low_scale, FORMAT)
        high_scale = _as_operand(high_scale, FORMAT)
        if scale_kind(FORMAT) == "e4m3":
            low, high = gl.inline_asm_elementwise(
                ASM, REGISTERS, [x, low_scale, high_scale],
                dtype=(gl.float16, gl.float16), is_pure=True, pack=4)
        else:
            low, high = gl.inline_asm_elementwise(
                ASM, REGISTERS, [x, low_scale, high_scale],
                dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4)
    return _as_keys(low, A), _as_keys(high, A)


@gluon.jit
def _keys_of_8_bits(byte, A: gl.constexpr, ASM: gl.constexpr, REGISTERS: gl.constexpr):
    """uint8 (N, D) -> fp16 (N, 32), dims renamed, of each block of 32 dims; of 2 blocks twice."""
    N: gl.constexpr = byte.shape[0]
    BLOCKS: gl.constexpr = byte.shape[1] // 32
    x = gl.inline_asm_elementwise(ASM, REGISTERS, [byte], dtype=gl.float16, is_pure=True, pack=4)
    x = x.reshape(N, BLOCKS, 4, 2, 2, 2).permute(0, 3, 4, 2, 5, 1).reshape(N, 32, BLOCKS)
    if BLOCKS == 4:
        even, odd = x.reshape(N, 32, 2, 2).split()
        x0, x2 = even.split()
        x1, x3 = odd.split()
        return (gl.convert_layout(x0, A, assert_trivial=True),
                gl.convert_layout(x1, A, assert_trivial=True),
                gl.convert_layout(x2, A, assert_trivial=True),
                gl.convert_layout(x3, A, assert_trivial=True))
    else:
        x0, x1 = x.split()
        x0 = gl.convert_layout(x0, A, assert_trivial=True)
        x1 = gl.convert_layout(x1, A, assert_trivial=True)
        return x0, x1, x0, x1


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
def _as_keys(x, A: gl.constexpr):
    N: gl.constexpr = x.shape[0]
    BYTES: gl.constexpr = 4 * x.shape[2]
    x = x.reshape(N, 4, BYTES // 16, 2, 2).permute(0, 2, 3, 1, 4).reshape(N, BYTES)
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def _values(byte, scales, A: gl.constexpr, FORMAT: gl.constexpr, ASM: gl.constexpr,
            REGISTERS: gl.constexpr):
    """uint8 (N, bytes), block scales (N / 2, 8) of even and odd keys -> four bf16 (bytes / 2, N),
    dims renamed; of 8-bit formats the last two are the first again."""
    HALVES: gl.constexpr = byte.shape[0] // 2
    BYTES: gl.constexpr = byte.shape[1]
    even, odd = byte.reshape(HALVES, 2, 8, BYTES // 8).permute(0, 2, 3, 1).split()
    if bits(FORMAT) == 8:
        _, e0, o0, _, _ = scales
        e0 = _as_operand(e0, FORMAT)
        o0 = _as_operand(o0, FORMAT)
        t0, t1 = gl.inline_asm_elementwise(ASM, REGISTERS, [even, odd, e0, o0],
                                           dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4)
        t0, t1 = _as_values(t0, A), _as_values(t1, A)
        return t0, t1, t0, t1
    else:
        if scale_kind(FORMAT) == "fp32":
            t0, t1, t2, t3 = gl.inline_asm_elementwise(
                ASM, REGISTERS, [even, odd],
                dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=4)
        else:
            _, e0, o0, e1, o1 = scales
            e0 = _as_operand(e0, FORMAT)
            o0 = _as_operand(o0, FORMAT)
            e1 = _as_operand(e1, FORMAT)
            o1 = _as_operand(o1, FORMAT)
            t0, t1, t2, t3 = gl.inline_asm_elementwise(
                ASM, REGISTERS, [even, odd, e0, o0, e1, o1],
                dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=4)
        return _as_values(t0, A), _as_values(t1, A), _as_values(t2, A), _as_values(t3, A)


@gluon.jit
def _as_values(x, A: gl.constexpr):
    HALVES: gl.constexpr = x.shape[0]
    WORDS: gl.constexpr = x.shape[2] // 4
    x = x.reshape(HALVES, 8, WORDS, 2, 2).permute(2, 3, 1, 0, 4).reshape(WORDS * 16, 2 * HALVES)
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def _transposed_blocks(x, B: gl.constexpr):
    """16-bit x (N, M) from a product's result to operand B: each 8 x 8 block is transposed twice,
    once among lanes and once by name."""
    N: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    x = gl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x],
                                  dtype=x.dtype, is_pure=False, pack=2)
    x = x.reshape(N // 8, 8, M // 8, 8).permute(0, 3, 2, 1).reshape(N, M)
    return gl.convert_layout(x, B, assert_trivial=True)


@gluon.jit
def _dims(kappa, BEGIN: gl.constexpr, DIMS: gl.constexpr, PARTS: gl.constexpr):
    """The dims that the product has at kappa < DIMS, from BEGIN on, a permutation of bits; PARTS:
    whether 4 bytes of K give dims in the order 0, 2, 1, 3."""
    i, j = (kappa >> 3) & 1, kappa & 1
    inner = i + 2 * j if PARTS else 2 * i + j
    return BEGIN + (DIMS // 4) * ((kappa >> 1) & 3) + 4 * (kappa >> 4) + inner


@gluon.jit
def _hadamard(SIZE: gl.constexpr, DTYPE: gl.constexpr, A: gl.constexpr):
    """The matrix of +-1 entries, 64 or 32 wide: the same for indices whose bits are permuted."""
    i = gl.arange(0, SIZE, gl.SliceLayout(1, A))
    j = gl.arange(0, SIZE, gl.SliceLayout(0, A))
    x = i[:, None] & j[None, :]
    x = gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True,
                                  pack=1)
    return (1 - 2 * (x & 1)).to(DTYPE)


@gluon.jit
def _identity(SIZE: gl.constexpr, DTYPE: gl.constexpr, A: gl.constexpr):
    i = gl.arange(0, SIZE, gl.SliceLayout(1, A))
    j = gl.arange(0, SIZE, gl.SliceLayout(0, A))
    return (i[:, None] == j[None, :]).to(DTYPE)


@gluon.jit
def _query(q, mean_ptr, at, mask, matrix, BEGIN: gl.constexpr, PARTS: gl.constexpr,
           DIMS: gl.constexpr, B: gl.constexpr, MMA: gl.constexpr):
    """DIMS dims of Q^T from BEGIN on, renamed as K's: float32 (DIMS, M), times the matrix; and
    their share of q . mean (M,)."""
    kappa = gl.arange(0, DIMS, gl.SliceLayout(1, B))
    dims = _dims(kappa, BEGIN, DIMS, PARTS)
    x = gl.load(q.ptr + at[None, :] + (dims * q.strides[3])[:, None], mask=mask[None, :],
                other=0.0)
    shift = gl.zeros([x.shape[1]], gl.float32, gl.SliceLayout(0, B))
    if mean_ptr is not None:
        shift = gl.sum(x.to(gl.float32) * gl.load(mean_ptr + dims)[:, None], 0)
    return mma_v2(matrix, x, gl.zeros([DIMS, x.shape[1]], gl.float32, MMA)), shift


@gluon.jit
def _power(exponent):
    """2^(exponent - 127) for a biased exponent, kept among the normal numbers."""
    return (gl.minimum(gl.maximum(exponent, 1), 254) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _store(part_ptr, to, mask, acc, inverse, BEGIN: gl.constexpr, PART: gl.constexpr,
           D: gl.constexpr):
    n = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    dim = BEGIN + PART * (n & 7) + 4 * (n >> 4) + ((n >> 3) & 1)
    gl.store(part_ptr + to[None, :] * D + dim[:, None], acc * inverse[None, :], mask=mask[None, :])


@gluon.jit(do_not_specialize=["H_KV", "GROUP", "S_Q", "first", "diag", "sink", "window",
                              "valid_size", "n_low"])
def low_keys_kernel(q, mean_ptr, k, v, part_ptr, lse_ptr, lengths_ptr, near_ptr,
                    starts_ptr, valid_ptr, H_KV, GROUP, S_Q, first, n_low, n_splits, diag, sink,
                    capacity, valid_size, scale, window, D: gl.constexpr, ROTATE: gl.constexpr,
                    WINDOW: gl.constexpr, OVERLAP: gl.constexpr,
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
    length = gl.load(lengths_ptr + b)
    start = gl.load(starts_ptr + b)
    near = gl.load(near_ptr)
    row = gl.arange(0, M, QUERIES)
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
    tokens = plane * capacity
    k_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, N, K_BYTES], K_SHARED)
    v_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, N, V_BYTES], V_SHARED)
    for i in gl.static_range(STAGES - 1):
        _copy(k.codes, k_smem.index(i), tokens, lo + i * N, hi, K_BYTES, N)
        _copy(v.codes, v_smem.index(i), tokens, lo + i * N, hi, V_BYTES, N)
        async_copy.commit_group()
    k_row, k_low, k_high = _key_scales(k, tokens, lo, hi, N, D, K_FORMAT, K3, MMA)
    v_row, v_e0, v_o0, v_e1, v_o1 = _value_scales(v, tokens, lo, hi, N, D, V_FORMAT, V3, MMA)
    # Below, and from, these keys all queries see all of them
    full_hi = gl.minimum(hi, gl.min(gl.minimum(near_lo, pos_m + 1), 0))
    full_lo = lo
    if WINDOW:
        full_lo = gl.max(pos_m, 0) - window + 1
    # Q^T, and what it has with K's mean
    row_b = gl.arange(0, M, gl.SliceLayout(0, B))
    mask_b = row_b < GROUP * S_Q
    at = (b * q.strides[0] + (h * GROUP + row_b // S_Q) * q.strides[1]
          + (row_b % S_Q) * q.strides[2])
    if mean_ptr is not None:
        mean_ptr += plane * D
    if ROTATE:
        matrix = _hadamard(DIMS, q.ptr.dtype.element_ty, A)
    else:
        matrix = _identity(DIMS, q.ptr.dtype.element_ty, A)
    q0, shift0 = _query(q, mean_ptr, at, mask_b, matrix, 0, FOUR, DIMS, B, MMA)
    q1, shift1 = _query(q, mean_ptr, at, mask_b, matrix, DIMS, FOUR, DIMS, B, MMA)
    shift0 += shift1
    q2 = q0
    q3 = q1
    if not FOUR and D == 128:
        q2, shift2 = _query(q, mean_ptr, at, mask_b, matrix, 64, FOUR, DIMS, B, MMA)
        q3, shift3 = _query(q, mean_ptr, at, mask_b, matrix, 96, FOUR, DIMS, B, MMA)
        shift0 += shift2 + shift3
    if ROTATE:
        q0, q1 = q0 + q1, q0 - q1
        if not FOUR and D == 128:
            q2, q3 = q2 + q3, q2 - q3
            q0, q1, q2, q3 = q0 + q2, q1 + q3, q0 - q2, q1 - q3
        q0 *= rotation_norm(D)
        q1 *= rotation_norm(D)
        q2 *= rotation_norm(D)
        q3 *= rotation_norm(D)
    shift = gl.convert_layout(shift0, QUERIES) * scale
    # fp16 is relative to a power of two with which the largest of a row is below 2^15
    unit = gl.full([M], 1.0, gl.float32, QUERIES) * scale
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
    h0 = _transposed_blocks(h0, B)
    h1 = _transposed_blocks(h1, B)
    h2 = h0
    h3 = h1
    if not F16:
        rest0 = _transposed_blocks(rest0, B)
        rest1 = _transposed_blocks(rest1, B)
    if not FOUR and D == 128:
        h2 = _transposed_blocks(q2.to(K_TYPE), B)
        h3 = _transposed_blocks(q3.to(K_TYPE), B)
    if valid_ptr is not None:
        valid_ptr += b * valid_size
    acc0 = gl.zeros([V_BYTES // 2, M], gl.float32, MMA)
    acc1 = gl.zeros([V_BYTES // 2, M], gl.float32, MMA)
    acc2 = gl.zeros([V_BYTES // 2, M], gl.float32, MMA)
    acc3 = gl.zeros([V_BYTES // 2, M], gl.float32, MMA)
    row_max = gl.full([M], float("-inf"), gl.float32, QUERIES)
    sums = gl.sum(gl.zeros([N, M], gl.float32, MMA).reshape(N // 8, 8, M), 0)  # by lane
    stage = 0
    for block_lo in range(lo, hi, N):
        async_copy.wait_group(STAGES - 2)
        k_codes = k_smem.index(stage).load(K_LAYOUT)
        s = s_0
        if FOUR:
            k0, k1 = _keys_of_4_bits(k_codes, k_low, k_high, A, K_FORMAT, K_ASM, K_REGISTERS)
            if not F16:
                s = mma_v2(k0, rest0, s)
                s = mma_v2(k1, rest1, s)
            s = mma_v2(k0, h0, s)
            s = mma_v2(k1, h1, s)
        else:
            k0, k1, k2, k3 = _keys_of_8_bits(k_codes, A, K_ASM, K_REGISTERS)
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
        s = gl.fma(s, unit[None, :], shift[None, :])
        k_row, k_low, k_high = _key_scales(k, tokens, block_lo + N, hi, N, D, K_FORMAT, K3, MMA)
        partly = block_lo + N > full_hi
        if WINDOW:
            partly = partly | (block_lo < full_lo)
        if valid_ptr is not None:
            partly = True
        if partly:
            pos = block_lo + gl.arange(0, N, gl.SliceLayout(1, MMA))
            counts = pos < hi
            if valid_ptr is not None:
                counts = counts & (gl.load(valid_ptr + gl.minimum(pos, hi - 1)) != 0)
            visible = counts[:, None] & (pos[:, None] < near_lo[None, :]) & (
                pos[:, None] <= pos_m[None, :])
            if WINDOW:
                visible = visible & (pos[:, None] > pos_m[None, :] - window)
            s = gl.where(visible, s, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(s, 0))
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
        p = gl.exp2(s - base[None, :])
        decay = gl.exp2(row_max - base)
        sums = sums * gl.convert_layout(decay, gl.SliceLayout(0, sums.type.layout))[None, :]
        sums += gl.sum(p.reshape(N // 8, 8, M), 0)
        row_max = new_max
        if has_row_scale(V_FORMAT):
            p = p * v_row[:, None]
        p = _transposed_blocks(p.to(gl.bfloat16), B)
        v0, v1, v2, v3 = _values(v_codes, (v_row, v_e0, v_o0, v_e1, v_o1), A, V_FORMAT, V_ASM,
                                 V_REGISTERS)
        v_row, v_e0, v_o0, v_e1, v_o1 = _value_scales(v, tokens, block_lo + N, hi, N, D, V_FORMAT,
                                                      V3, MMA)
        acc0 = mma_v2(v0, p, acc0 * decay[None, :])
        acc1 = mma_v2(v1, p, acc1 * decay[None, :])
        if bits(V_FORMAT) == 4:
            acc2 = mma_v2(v2, p, acc2 * decay[None, :])
            acc3 = mma_v2(v3, p, acc3 * decay[None, :])
    row_sum = gl.convert_layout(gl.sum(sums, 0), QUERIES)
    to = (plane * n_splits + first + split) * ROWS + row
    lse = row_max + gl.log2(row_sum)
    gl.store(lse_ptr + to, gl.where(row_sum > 0.0, lse, float("-inf")), mask=mask_m)
    inverse = gl.where(row_sum > 0.0, 2.0**V_POWER / row_sum, 0.0)
    _store(part_ptr, to, mask_m, acc0, inverse, 0, V_BYTES // 8, D)
    _store(part_ptr, to, mask_m, acc1, inverse, 2, V_BYTES // 8, D)
    if bits(V_FORMAT) == 4:
        _store(part_ptr, to, mask_m, acc2, inverse, D // 2, V_BYTES // 8, D)
        _store(part_ptr, to, mask_m, acc3, inverse, D // 2 + 2, V_BYTES // 8, D)
    if OVERLAP:  # what comes next takes the kernel before this one as done, too
        gdc_wait()


@functools.cache
def variant(k_format: str, v_format: str, head_dim: int, rows: int, n: int = KEYS,
            stages: int = STAGES) -> dict[str, Any]:
    """Compile-time arguments for up to 8 or 16 `rows`: what unpacks codes, and how shared memory
    and the registers of a warp hold those of n keys."""
    k, v = (head_dim * get_format(name).bits // 8 for name in (k_format, v_format))

    m = 8 if rows <= 8 else 16
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
        "STAGES": stages,
        "maxnreg": REGISTERS[m],
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
    return int(min(WARPS[kernel["M"]], SHARED // (staged + 1024)))
