"""Kernels that make the operands of the Hopper kernel: statistics of K and V, folds of K, V and Q.

`quant.folded` launches them and says what they make; `fold_jit` holds the arithmetic of formats.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .fold_jit import e4m3_code, fold, in_format, int8_codes, reciprocal, tile_max
from .jit import INTERPRETED, constant, hadamard, item, rotation_norm, scale_kind, sequence
from .kernels import common, program_ids


@triton.jit
def _store_class(x, gain, top, c, codes_ptr, scales_ptr, plane, planes, tile, n_tiles,
                 T: tl.constexpr, D: tl.constexpr, CLASS: tl.constexpr, EXACT: tl.constexpr,
                 BY_ROW: tl.constexpr):
    FORMAT: tl.constexpr = item(CLASS, 0)
    RULE: tl.constexpr = item(CLASS, 1)
    SPAN: tl.constexpr = item(CLASS, 2)
    if scale_kind(FORMAT) == "fp32":
        codes, scale = int8_codes(x, gain, SPAN, EXACT)
        if not BY_ROW:
            scale = common(scale)
    else:
        elements, scale, bad, largest = in_format(x, gain, top, FORMAT, RULE, SPAN, EXACT, T, D)
        codes, scale = fold(elements, scale, bad, largest, BY_ROW, T, D)
    at_tile = (c * planes + plane) * n_tiles + tile
    rows = at_tile * T + tl.arange(0, T)
    tl.store(codes_ptr + rows[:, None] * D + tl.arange(0, D)[None, :],
             codes.to(tl.uint8, bitcast=True))
    if BY_ROW:
        tl.store(scales_ptr + rows, scale)
    else:
        tl.store(scales_ptr + at_tile, scale)


@triton.jit
def _inside(rows, length):
    """Rows without data read the first or the last that holds some."""
    return tl.maximum(tl.minimum(rows, length - 1), 0)


@triton.jit
def _load_rows(x, b, h, rows, D: tl.constexpr):
    """Rows (int64) of a strided 16-bit operand, (T, D); they leave L2 before anything else does."""
    at = rows[:, None] * x.strides[2] + tl.arange(0, D).to(tl.int64)[None, :] * x.strides[3]
    at += b * x.strides[0] + h * x.strides[1]
    return tl.load(x.ptr + at, eviction_policy="evict_first")


@triton.jit
def _load_tile(x, desc, b, h, begin, length, T: tl.constexpr, D: tl.constexpr):
    """T rows from begin on, (T, D), straight to shared memory where TMA can; rows without data hold
    anything."""
    if desc is None:
        rows = begin.to(tl.int64) + tl.arange(0, T)
        return _load_rows(x, b, h, _inside(rows, length), D)
    else:
        return desc.load([b.to(tl.int32), h.to(tl.int32), begin, 0]).reshape(T, D)


@triton.jit
def _prefetch_rows(x, b, h, rows, D: tl.constexpr):
    """Fetch rows of a 16-bit operand to L2, where its elements of a row lie side by side."""
    if not INTERPRETED:
        at = rows[:, None] * x.strides[2] + tl.arange(0, D // 64)[None, :] * 64 * x.strides[3]
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l",
                                  [x.ptr + b * x.strides[0] + h * x.strides[1] + at],
                                  dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _wait_for_kernel_before():
    """With programmatic dependent launch: until the kernel before this one has ended."""
    if not INTERPRETED:
        gdc_wait()


@triton.jit
def _start_kernel_after():
    """With programmatic dependent launch: the next kernel may start, up to its wait."""
    if not INTERPRETED:
        gdc_launch_dependents()


@triton.jit
def _hadamard_tile(hadamard_ptr, D: tl.constexpr):
    offs_d = tl.arange(0, D)
    return tl.load(hadamard_ptr + offs_d[:, None] * D + offs_d[None, :])


@triton.jit
def _rotated(raw, matrix, D: tl.constexpr):
    """raw (T, D) times the matrix of +-1 entries; tensor cores add exact products.

    The matrix holds its columns in such an order that a thread, with columns 8 j + 2 t + (0, 1) of
    the product for all j, has 16 consecutive dims of each 64: an NVFP4 block, and 16 bytes beside
    those of the next thread.
    """
    T: tl.constexpr = raw.shape[0]
    if INTERPRETED:  # its 16-bit product is wrong
        raw, matrix = raw.to(tl.float32), matrix.to(tl.float32)
    y = tl.dot(raw, matrix, input_precision="ieee")
    return y.reshape(T, D // 64, 8, 4, 2).permute(0, 1, 3, 2, 4).reshape(T, D)


@triton.jit
def _fold_rows(raw, mask_t, mean_ptr, sign, matrix, codes_ptr, scales_ptr, plane, planes, tile,
               n_tiles, T: tl.constexpr, D: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr):
    """A tile of K (minus the rotated mean (planes, D); zeros where mask_t (T,) is False), or of Q
    (mask_t None), in each class."""
    QUERY: tl.constexpr = mask_t is None
    if matrix is None:
        y = raw.to(tl.float32)
        gain = tl.zeros([], tl.float32) + sign
    else:
        y = _rotated(raw, matrix, D)
        gain = rotation_norm(D) * sign
    if mean_ptr is not None:
        _wait_for_kernel_before()
        mean = tl.load(mean_ptr + plane * D + tl.arange(0, D))
        y = tl.fma(y, gain, (mean * -1.0)[None, :])  # a minus would be a subtraction
        gain = tl.zeros([], tl.float32) + 1.0
    if not QUERY:
        y = tl.where(mask_t[:, None], y, 0.0)
    top = None if QUERY else tile_max(y, T, D)
    if HIGH is not None:
        _store_class(y, gain, top, 0, codes_ptr, scales_ptr, plane, planes, tile, n_tiles, T, D,
                     HIGH, matrix is None, QUERY)
    _store_class(y, gain, top, 0 if HIGH is None else 1, codes_ptr, scales_ptr, plane, planes,
                 tile, n_tiles, T, D, LOW, matrix is None, QUERY)


@triton.jit
def _fold_v_rows(v, codes_ptr, scale_ptr, b, h, begin, length, plane, n_tiles, T: tl.constexpr,
                 D: tl.constexpr):
    """128 keys of V -> E4M3 codes (Dv, 128), keys permuted in groups of 16."""
    j = tl.arange(0, T)
    rows = begin.to(tl.int64) + (j & -16) + (j & 1) + 4 * (j & 2) + ((j & 12) >> 1)
    x = _load_rows(v, b, h, _inside(rows, length), D).to(tl.float32)
    _wait_for_kernel_before()
    offs_d = tl.arange(0, D)
    scale = tl.load(scale_ptr + plane * D + offs_d)
    codes = e4m3_code(tl.fma(x, 0.0, x * reciprocal(scale)[None, :]))  # Inf becomes NaN
    at = (plane * D + offs_d)[:, None] * (n_tiles * T) + (begin + j)[None, :]
    tl.store(codes_ptr + at, tl.trans(codes))


@triton.jit(do_not_specialize=["n_tiles", "planes", "H", "S"])
def fold_kv_kernel(k, v, length_ptr, mean_ptr, hadamard_ptr, codes_ptr, scales_ptr, v_codes_ptr,
                   v_scale_ptr, n_tiles, planes, H, S, T: tl.constexpr, D: tl.constexpr,
                   DV: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr):
    """A tile of K, and of V (FP8), which is fetched to L2 while that of K is computed."""
    tile, b, h = program_ids(n_tiles, H)
    plane = b * H + h
    _, length = sequence(b, None, length_ptr, S, S)
    rows = tile.to(tl.int64) * T + tl.arange(0, T)
    if tile * T < length:
        matrix = None if hadamard_ptr is None else _hadamard_tile(hadamard_ptr, D)
        raw = _load_rows(k, b, h, _inside(rows, length), D)
        if v_codes_ptr is not None:
            _prefetch_rows(v, b, h, _inside(rows, length), DV)
        _fold_rows(raw, rows < length, mean_ptr, 1.0, matrix, codes_ptr, scales_ptr, plane,
                   planes, tile, n_tiles, T, D, HIGH, LOW)
        if v_codes_ptr is not None:
            _fold_v_rows(v, v_codes_ptr, v_scale_ptr, b, h, tile * T, length, plane,
                         n_tiles.to(tl.int64), T, DV)
    # Even programs without keys: what comes next takes both kernels as done when this one is
    _wait_for_kernel_before()


@triton.jit(do_not_specialize=["n_tiles", "planes", "H", "GROUP", "S", "S_KV", "scale"])
def fold_q_kernel(q, q_desc, length_ptr, hadamard_ptr, codes_ptr, scales_ptr, shift_ptr, mean_ptr,
                  n_tiles, planes, H, GROUP, S, S_KV, sign, scale, T: tl.constexpr,
                  TILES: tl.constexpr, D: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr):
    """Tiles of queries at absolute positions; shift (B, H, S) = scale * q . mean."""
    group, b, h = program_ids(tl.cdiv(n_tiles, TILES), H)
    _, kv_len = sequence(b, None, length_ptr, S_KV, S_KV)
    matrix = None if hadamard_ptr is None else _hadamard_tile(hadamard_ptr, D)
    plane = b * H + h
    for i in range(0, tl.minimum(TILES, n_tiles - group * TILES)):
        tile = group * TILES + i
        begin = tile * T - ((kv_len - S) & 127)
        rows = begin.to(tl.int64) + tl.arange(0, T)
        raw = _load_tile(q, q_desc, b, h, begin, S, T, D)
        if i + 1 < TILES:
            _prefetch_rows(q, b, h, _inside(rows + T, S), D)
        if shift_ptr is not None:
            mean = tl.load(mean_ptr + (b * (H // GROUP) + h // GROUP) * D + tl.arange(0, D))
            shift = tl.sum(raw.to(tl.float32) * mean[None, :], 1) * scale
            tl.store(shift_ptr + plane * S + rows, shift, mask=(rows >= 0) & (rows < S))
        _fold_rows(raw, None, None, sign, matrix, codes_ptr, scales_ptr, plane, planes, tile,
                   n_tiles, T, D, HIGH, LOW)


@triton.jit
def _merged(total, amax, total_1, amax_1):
    return total + total_1, tl.maximum(amax, amax_1)


@triton.jit
def _column_statistics(total, amax):
    """Columns of (T, D) and (T, DV): sums and maxima."""
    if not INTERPRETED and total.shape[1] == amax.shape[1]:
        return tl.reduce((total, amax), 0, _merged)  # one exchange between warps
    else:
        return tl.sum(total, 0), tl.max(amax, 0)


@triton.jit(do_not_specialize=["n_blocks", "H", "S"])
def statistics_kernel(k, v, length_ptr, partial_ptr, n_blocks, H, S, MEAN: tl.constexpr,
                      AMAX: tl.constexpr, ROWS: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
                      DV: tl.constexpr):
    """Per channel of ROWS keys: sum of K (MEAN), largest |V| (AMAX)."""
    _wait_for_kernel_before()
    # Not before: the fold reads K, V and lengths ahead of its own wait, the combination lengths
    _start_kernel_after()
    i_block, b, h = program_ids(n_blocks, H)
    _, length = sequence(b, None, length_ptr, S, S)
    total = tl.zeros([T, D], tl.float32)
    amax = tl.zeros([T, DV], tl.float32)
    begin = i_block.to(tl.int64) * ROWS
    if begin + ROWS <= length:  # without masks: many loads in flight at once
        for i in tl.static_range(0, ROWS, T):
            rows = begin + i + tl.arange(0, T)
            if MEAN:
                total += _load_rows(k, b, h, rows, D).to(tl.float32)
            if AMAX:
                amax = tl.maximum(amax, tl.abs(_load_rows(v, b, h, rows, DV).to(tl.float32)))
    else:
        for i in range(0, length - begin, T):
            rows = begin + i + tl.arange(0, T)
            if MEAN:
                x = _load_rows(k, b, h, _inside(rows, length), D).to(tl.float32)
                total += tl.where((rows < length)[:, None], x, 0.0)
            if AMAX:
                x = _load_rows(v, b, h, _inside(rows, length), DV).to(tl.float32)
                amax = tl.maximum(amax, tl.abs(x))
    sums, maxima = _column_statistics(total, amax)
    at = partial_ptr + ((b * H + h) * n_blocks + i_block) * (D + DV)
    tl.store(at + tl.arange(0, D), sums)
    tl.store(at + D + tl.arange(0, DV), maxima)


@triton.jit
def _combined(partial_ptr, plane, n_blocks, used, COLUMN: tl.constexpr, WIDTH: tl.constexpr,
              D: tl.constexpr, CHUNK: tl.constexpr, LARGEST: tl.constexpr):
    """Sums, or maxima, over the first `used` of the partial results of a plane."""
    offs_d = tl.arange(0, D)
    total = tl.zeros([CHUNK, D], tl.float32)
    for c in range(0, used, CHUNK):
        block = c + tl.arange(0, CHUNK)
        at = (plane * n_blocks + block)[:, None] * WIDTH + COLUMN + offs_d[None, :]
        x = tl.load(partial_ptr + at, mask=(block < used)[:, None], other=0.0)
        total = tl.maximum(total, x) if LARGEST else total + x
    return tl.max(total, 0) if LARGEST else tl.sum(total, 0)


@triton.jit
def _finite(x, b, h, begin, length, T: tl.constexpr, D: tl.constexpr):
    """Rows from begin on, fp32 (T, D), zeros where they are not finite; and where they are."""
    rows = (begin + tl.arange(0, T)).to(tl.int64)
    values = _load_rows(x, b, h, _inside(rows, length), D).to(tl.float32)
    finite = (rows < length)[:, None] & (tl.abs(values) < float("inf"))
    return tl.where(finite, values, 0.0), finite


@triton.jit(do_not_specialize=["n_blocks", "H", "S"])
def combine_kernel(k, v, partial_ptr, length_ptr, mean_ptr, rotated_ptr, v_scale_ptr, n_blocks, H,
                   S, ROTATE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                   PARTS: tl.constexpr):
    """Per channel of a head: mean of finite K, as it is and rotated, or the E4M3 scale of V.

    One program for each of the two (PARTS). Where a sum or a maximum is not finite, it reads its
    head again, value by value. The order of sums depends neither on timing nor on unused keys.
    """
    _start_kernel_after()
    plane = (tl.program_id(0) // PARTS).to(tl.int64)
    b, h = plane // H, plane % H
    _, length = sequence(b, None, length_ptr, S, S)
    used = tl.cdiv(length, ROWS)
    CHUNK: tl.constexpr = 64
    FEW: tl.constexpr = 32
    _wait_for_kernel_before()
    if mean_ptr is not None and tl.program_id(0) % PARTS == 0:
        offs_d = tl.arange(0, D)
        sums = _combined(partial_ptr, plane, n_blocks, used, 0, D + DV, D, CHUNK, False)
        counts = tl.zeros([D], tl.float32) + length
        if ~(tl.sum(sums * 0.0, 0) == 0.0):  # 0 times Inf or NaN is NaN
            total = tl.zeros([FEW, D], tl.float32)
            count = tl.zeros([FEW, D], tl.float32)
            for begin in range(0, length, FEW):
                x, finite = _finite(k, b, h, begin, length, FEW, D)
                total += x
                count += tl.where(finite, 1.0, 0.0)
            sums, counts = tl.sum(total, 0), tl.sum(count, 0)
        mean = tl.div_rn(sums, tl.maximum(counts, 1.0))
        tl.store(mean_ptr + plane * D + offs_d, mean)
        if ROTATE:
            tl.store(rotated_ptr + plane * D + offs_d, hadamard(mean[None, :], D, 1, D).reshape(D))
    elif v_scale_ptr is not None:
        maxima = _combined(partial_ptr, plane, n_blocks, used, D, D + DV, DV, CHUNK, True)
        if ~(tl.sum(maxima * 0.0, 0) == 0.0):  # NaN in V is no maximum, Inf is one
            largest = tl.zeros([FEW, DV], tl.float32)
            for begin in range(0, length, FEW):
                x, finite = _finite(v, b, h, begin, length, FEW, DV)
                largest = tl.maximum(largest, tl.abs(x))
            maxima = tl.max(largest, 0)
        scale = maxima / constant("E4M3_MAX")
        tl.store(v_scale_ptr + plane * DV + tl.arange(0, DV),
                 tl.where(scale < 2.0**-100, 1.0, scale))
