"""Operands of the decode step's products in a warp's registers, for `decode_registers`.

Codes of K and V as a lane reads them from shared memory, their block scales, and queries become
what `mma.sync` takes: dims and keys are renamed, so that only registers change their names.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ...quant.jit import bits, block, decode_e8m0, scale_kind
from .tiles import has_row_scale


@triton.constexpr_function
def consecutive(dims, m, axis):
    """A warp's layout of `dims` dims along `axis` and m queries: a lane has `dims / 4` consecutive
    dims of queries g and g + 8 (axis 0, as operand B), or `dims / 8` of two neighbours (axis 1, as
    a transposed result)."""

    def bases(lo, hi, along):
        steps = [1 << i for i in range(lo.bit_length() - 1, hi.bit_length() - 1)]
        return [[i, 0] if along == 0 else [0, i] for i in steps]

    if axis == 0:
        registers = bases(1, dims // 4, 0) + bases(8, m, 1)
        lanes = bases(dims // 4, dims, 0) + bases(1, 8, 1)
        shape = [dims, m]
    else:
        registers = bases(1, dims // 8, 1) + bases(1, 2, 0) + bases(8, m, 0)
        lanes = bases(2, 8, 0) + bases(dims // 8, dims, 1)
        shape = [m, dims]
    return gl.DistributedLinearLayout(registers, lanes, [], [], shape)


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
def rows_from(begin, hi, N: gl.constexpr, STEP: gl.constexpr, LAYOUT: gl.constexpr):
    """Every STEP-th key from begin on; those from hi on repeat the last one (and are hidden)."""
    return gl.maximum(gl.minimum(begin + STEP * gl.arange(0, N, LAYOUT), hi - 1), 0)


@gluon.jit
def counted(pos, lo, hi, valid_ptr):
    """Which keys some query sees: in [lo, hi), and valid."""
    counts = (pos >= lo) & (pos < hi)
    if valid_ptr is not None:
        counts = counts & (gl.load(valid_ptr + pos, mask=counts, other=0) != 0)
    return counts


@gluon.jit
def key_scales(k, tokens, begin, hi, N: gl.constexpr, D: gl.constexpr, FORMAT: gl.constexpr,
                K3: gl.constexpr, MMA: gl.constexpr):
    """As stored: scales of keys (N,); of blocks in the first half of the dims, in the second; of
    8-bit formats those of all blocks of a key in one number (N,)."""
    row = gl.to_tensor(0)
    low = gl.to_tensor(0)
    high = gl.to_tensor(0)
    if has_row_scale(FORMAT):
        row = gl.load(k.row_scales + tokens + rows_from(begin, hi, N, 1, gl.SliceLayout(1, MMA)))
    if bits(FORMAT) == 8:
        WORD: gl.constexpr = gl.int32 if D == 128 else gl.int16
        words = k.scales.to(gl.pointer_type(WORD), bitcast=True)
        low = gl.load(words + tokens + rows_from(begin, hi, N, 1, gl.SliceLayout(1, MMA)))
    elif scale_kind(FORMAT) != "fp32":
        rows = tokens + rows_from(begin, hi, N, 1, gl.SliceLayout(1, gl.SliceLayout(2, K3)))
        low = _block_scales(k.scales, rows, 0, 4, D, FORMAT, K3)
        high = _block_scales(k.scales, rows, D // 2, 4, D, FORMAT, K3)
    return row, low, high


@gluon.jit
def value_scales(v, tokens, begin, hi, N: gl.constexpr, D: gl.constexpr, FORMAT: gl.constexpr,
                  V3: gl.constexpr, MMA: gl.constexpr):
    """As stored: scales of keys (N,), then of blocks: even keys, odd keys, of the first half of
    the dims and of the second."""
    row = gl.to_tensor(0)
    even = gl.to_tensor(0)
    odd = gl.to_tensor(0)
    even_high = gl.to_tensor(0)
    odd_high = gl.to_tensor(0)
    if has_row_scale(FORMAT):
        row = gl.load(v.row_scales + tokens + rows_from(begin, hi, N, 1, gl.SliceLayout(1, MMA)))
    if scale_kind(FORMAT) != "fp32":
        LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, V3))
        evens = tokens + rows_from(begin, hi, N // 2, 2, LAYOUT)
        odds = tokens + rows_from(begin + 1, hi, N // 2, 2, LAYOUT)
        even = _block_scales(v.scales, evens, 0, 8, D, FORMAT, V3)
        odd = _block_scales(v.scales, odds, 0, 8, D, FORMAT, V3)
        if bits(FORMAT) == 4:
            even_high = _block_scales(v.scales, evens, D // 2, 8, D, FORMAT, V3)
            odd_high = _block_scales(v.scales, odds, D // 2, 8, D, FORMAT, V3)
    return row, even, odd, even_high, odd_high


@gluon.jit
def keys_of_4_bits(byte, low_scale, high_scale, A: gl.constexpr, FORMAT: gl.constexpr,
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
def keys_of_8_bits(byte, A: gl.constexpr, ASM: gl.constexpr, REGISTERS: gl.constexpr):
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
def _as_keys(x, A: gl.constexpr):
    N: gl.constexpr = x.shape[0]
    BYTES: gl.constexpr = 4 * x.shape[2]
    x = x.reshape(N, 4, BYTES // 16, 2, 2).permute(0, 2, 3, 1, 4).reshape(N, BYTES)
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def value_operands(byte, scales, A: gl.constexpr, FORMAT: gl.constexpr, ASM: gl.constexpr,
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
def transposed_blocks(x, B: gl.constexpr):
    """16-bit x (N, M) from a product's result to operand B: each 8 x 8 block is transposed twice,
    once among lanes and once by name."""
    N: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    x = gl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x],
                                  dtype=x.dtype, is_pure=False, pack=2)
    x = x.reshape(N // 8, 8, M // 8, 8).permute(0, 3, 2, 1).reshape(N, M)
    return gl.convert_layout(x, B, assert_trivial=True)


@gluon.jit
def hadamard_operand(SIZE: gl.constexpr, DTYPE: gl.constexpr, A: gl.constexpr):
    """The matrix of +-1 entries, 64 or 32 wide: the same for indices whose bits are permuted. A
    lane's entries are 2 numbers or their negatives: only the lower bits of i, j depend on it."""
    i = gl.arange(0, SIZE, gl.SliceLayout(1, A))[:, None]
    j = gl.arange(0, SIZE, gl.SliceLayout(0, A))[None, :]
    odd = (0x96 >> (i & j & 7)) ^ (0x96 >> ((i >> 3) & (j >> 3)))  # 0x96: parities of 0 to 7
    return gl.where((odd & 1) == 0, 1.0, -1.0).to(DTYPE)


@gluon.jit
def identity_operand(SIZE: gl.constexpr, DTYPE: gl.constexpr, A: gl.constexpr):
    i = gl.arange(0, SIZE, gl.SliceLayout(1, A))
    j = gl.arange(0, SIZE, gl.SliceLayout(0, A))
    return (i[:, None] == j[None, :]).to(DTYPE)


@gluon.jit
def rotated_query(q, mean_ptr, base, row, rows, S_Q, matrix, BEGIN: gl.constexpr,
                  PARTS: gl.constexpr, DIMS: gl.constexpr, M: gl.constexpr, B: gl.constexpr,
                  MMA: gl.constexpr):
    """DIMS dims of Q^T from BEGIN on, of M rows (head of the group, token) from `row` on, renamed
    as K's: float32 (DIMS, M), times the matrix; and their share of q . mean (M,).

    A lane's dims are consecutive: the product has at 16 t + 8 i + 2 c + j what lane c of 4 has at
    4 t + 2 j + i (PARTS, where 4 bytes of K give dims in the order 0, 2, 1, 3) or 4 t + 2 i + j.
    """
    T: gl.constexpr = DIMS // 16
    LAYOUT: gl.constexpr = consecutive(DIMS, M, 0)
    row += gl.arange(0, M, gl.SliceLayout(0, LAYOUT))
    head, token = (row // S_Q).to(gl.int64), (row % S_Q).to(gl.int64)
    at = base + head * q.strides[1] + token * q.strides[2]
    dims = BEGIN + gl.arange(0, DIMS, gl.SliceLayout(1, LAYOUT))
    x = gl.load(q.ptr + at[None, :] + (dims * q.strides[3])[:, None],
                mask=(row < rows)[None, :], other=0.0)
    shift = gl.zeros([M], gl.float32, gl.SliceLayout(0, LAYOUT))
    if mean_ptr is not None:
        shift = gl.sum(x.to(gl.float32) * gl.load(mean_ptr + dims)[:, None], 0)
    x = x.reshape(4, T, 2, 2, M)
    x = x.permute(1, 3, 0, 2, 4) if PARTS else x.permute(1, 2, 0, 3, 4)
    x = gl.convert_layout(x.reshape(DIMS, M), B, assert_trivial=True)
    return mma_v2(matrix, x, gl.zeros([DIMS, M], gl.float32, MMA)), shift
