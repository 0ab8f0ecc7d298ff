"""Operands of the Hopper kernel: one 8-bit code per value, laid out for TMA and wgmma.

    K, Q -> transforms -> value in each class's format -> E4M3(value / s)    s a power of two
    K, Q -> transforms -> int8 code                                         s the int8 scale
    V    -> E4M3(V / channel scale), transposed, keys permuted in groups of 16

s spans a tile of 128 keys (K) or one query (Q). Folding a block scale into an element is exact for
MXFP4 up to 14 binades below the tile maximum, keeps MXFP8's mantissas among E4M3's normal numbers,
and rounds NVFP4 once more (docs/numerics.md has the bounds). Rows sit at absolute positions: Q's
first block may start before the first query. Rows without data are zeros.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..config import DMAConfig
from ..formats import BlockFormat
from ..schedule import TILE, tile_count
from .fold_jit import INTERPRETED, e4m3_code, fold, in_format, int8_codes, reciprocal
from .jit import abs_bits, constant, item, rotation_norm, scale_kind, sequence
from .kernels import Strided, common, program_ids

STATISTICS_ROWS = 256
KEY_TILES = 1  # tiles of K, or of V, to a program
QUERY_TILES = 8  # tiles of Q to a program, which fetches the Hadamard matrix once


class FoldedKV(NamedTuple):
    """K and V as the Hopper kernel reads them.

    Attributes:
        codes: uint8 (classes, B, H, tiles * 128, D), E4M3 or int8, the high class first.
        scales: float32 (classes, B, H, tiles).
        mean: float32 (B, H, 1, D) subtracted from K, or None.
        v: E4M3 codes (uint8) (B, H, Dv, tiles * 128), or None where V is read as it lies.
        v_scale: float32 (B, H, 1, Dv) channel scales, or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    mean: torch.Tensor | None
    v: torch.Tensor | None
    v_scale: torch.Tensor | None


@triton.jit
def _store_class(x, gain, c, codes_ptr, scales_ptr, plane, planes, tile, n_tiles, T: tl.constexpr,
                 D: tl.constexpr, CLASS: tl.constexpr, BY_ROW: tl.constexpr):
    FORMAT: tl.constexpr = item(CLASS, 0)
    RULE: tl.constexpr = item(CLASS, 1)
    SPAN: tl.constexpr = item(CLASS, 2)
    if scale_kind(FORMAT) == "fp32":
        codes, scale = int8_codes(x, gain, SPAN)
    else:
        elements, scale, largest, bad = in_format(x, gain, FORMAT, RULE, SPAN, T, D)
        codes, scale = fold(elements, scale, largest, bad, BY_ROW, T, D)
    at_tile = (c * planes + plane) * n_tiles + tile
    rows = at_tile * T + tl.arange(0, T)
    tl.store(codes_ptr + rows[:, None] * D + tl.arange(0, D)[None, :],
             codes.to(tl.uint8, bitcast=True))
    if BY_ROW:
        tl.store(scales_ptr + rows, scale)
    else:
        tl.store(scales_ptr + at_tile, common(scale))


@triton.jit
def _load_tile(x, b, h, rows, mask_t, D: tl.constexpr):
    """Rows of a strided 16-bit operand, (T, D); zeros where mask_t is False."""
    at = rows[:, None] * x.strides[2] + tl.arange(0, D).to(tl.int64)[None, :] * x.strides[3]
    return tl.load(x.ptr + b * x.strides[0] + h * x.strides[1] + at, mask=mask_t[:, None],
                   other=0.0)


@triton.jit
def _hadamard_tile(hadamard_ptr, D: tl.constexpr):
    offs_d = tl.arange(0, D)
    return tl.load(hadamard_ptr + offs_d[:, None] * D + offs_d[None, :])


@triton.jit
def _rotated(raw, matrix, D: tl.constexpr):
    """raw (T, D) times the matrix of +-1 entries; tensor cores add exact products.

    The matrix holds its columns in such an order that a thread, with columns 8 j + 2 t + (0, 1) of
    the product for all j, has D / 4 consecutive dims: the blocks of a row need no shuffles.
    """
    T: tl.constexpr = raw.shape[0]
    if INTERPRETED:  # its 16-bit product is wrong
        raw, matrix = raw.to(tl.float32), matrix.to(tl.float32)
    y = tl.dot(raw, matrix, input_precision="ieee")
    return y.reshape(T, D // 8, 4, 2).permute(0, 2, 1, 3).reshape(T, D)


@triton.jit
def _fold_rows(raw, mean, mask_t, sign, matrix, codes_ptr, scales_ptr, plane, planes, tile,
               n_tiles, T: tl.constexpr, D: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr,
               QUERY: tl.constexpr):
    """A tile of K (minus the rotated mean (D,)) or Q in each class."""
    if matrix is None:
        y = raw.to(tl.float32)
        gain = tl.zeros([], tl.float32) + sign
    else:
        y = _rotated(raw, matrix, D)
        gain = rotation_norm(D) * sign
    if not QUERY:
        y = tl.where(mask_t[:, None], y * gain - mean[None, :], 0.0)
        gain = tl.zeros([], tl.float32) + 1.0
    if HIGH is not None:
        _store_class(y, gain, 0, codes_ptr, scales_ptr, plane, planes, tile, n_tiles, T, D, HIGH,
                     QUERY)
    _store_class(y, gain, 0 if HIGH is None else 1, codes_ptr, scales_ptr, plane, planes, tile,
                 n_tiles, T, D, LOW, QUERY)


@triton.jit
def _fold_v_rows(v, codes_ptr, scale_ptr, b, h, begin, length, plane, n_tiles, T: tl.constexpr,
                 D: tl.constexpr):
    """128 keys of V -> E4M3 codes (Dv, 128), keys permuted in groups of 16."""
    j = tl.arange(0, T)
    rows = begin + (j & -16) + (j & 1) + 4 * (j & 2) + ((j & 12) >> 1)
    x = _load_tile(v, b, h, rows, rows < length, D).to(tl.float32)
    offs_d = tl.arange(0, D)
    scale = tl.load(scale_ptr + plane * D + offs_d)
    x = tl.where(abs_bits(x) >= 0x7F800000, float("nan"), x * reciprocal(scale)[None, :])
    codes = e4m3_code(x)
    at = (plane * D + offs_d)[:, None] * (n_tiles * T) + (begin + j)[None, :]
    tl.store(codes_ptr + at, tl.trans(codes))


@triton.jit(do_not_specialize=["n_tiles", "planes", "H", "S"])
def _fold_kv_kernel(k, v, length_ptr, mean_ptr, hadamard_ptr, codes_ptr, scales_ptr, v_codes_ptr,
                    v_scale_ptr, n_tiles, planes, H, S, T: tl.constexpr, TILES: tl.constexpr,
                    D: tl.constexpr, DV: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr):
    """Programs take TILES tiles of K, then (with FP8 V) of V."""
    groups = tl.cdiv(n_tiles, TILES)
    is_v = tl.program_id(0) >= groups * planes
    plane = (tl.program_id(0) // groups % planes).to(tl.int64)
    group = tl.program_id(0) % groups
    b = plane // H
    h = plane % H
    _, length = sequence(b, None, length_ptr, S, S)
    count = tl.minimum(TILES, tl.cdiv(length, T) - group * TILES)
    if is_v:
        if v_codes_ptr is not None:
            for i in range(0, count):
                begin = (group * TILES + i).to(tl.int64) * T
                _fold_v_rows(v, v_codes_ptr, v_scale_ptr, b, h, begin, length, plane,
                             n_tiles.to(tl.int64), T, DV)
    elif count > 0:
        mean = tl.zeros([D], tl.float32)
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + plane * D + tl.arange(0, D))
        matrix = None if hadamard_ptr is None else _hadamard_tile(hadamard_ptr, D)
        for i in range(0, count):
            tile = group * TILES + i
            rows = tile.to(tl.int64) * T + tl.arange(0, T)
            mask_t = rows < length
            _fold_rows(_load_tile(k, b, h, rows, mask_t, D), mean, mask_t, 1.0, matrix, codes_ptr,
                       scales_ptr, plane, planes, tile, n_tiles, T, D, HIGH, LOW, False)


@triton.jit(do_not_specialize=["n_tiles", "planes", "H", "GROUP", "S", "S_KV", "scale"])
def _fold_q_kernel(q, length_ptr, hadamard_ptr, codes_ptr, scales_ptr, shift_ptr, mean_ptr, n_tiles,
                   planes, H, GROUP, S, S_KV, sign, scale, T: tl.constexpr, TILES: tl.constexpr,
                   D: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr):
    """Tiles of queries at absolute positions; shift (B, H, S) = scale * q . mean."""
    group, b, h = program_ids(tl.cdiv(n_tiles, TILES), H)
    _, kv_len = sequence(b, None, length_ptr, S_KV, S_KV)
    matrix = None if hadamard_ptr is None else _hadamard_tile(hadamard_ptr, D)
    plane = b * H + h
    for i in range(0, tl.minimum(TILES, n_tiles - group * TILES)):
        tile = group * TILES + i
        rows = tile.to(tl.int64) * T - ((kv_len - S) & 127) + tl.arange(0, T)
        mask_t = (rows >= 0) & (rows < S)
        raw = _load_tile(q, b, h, rows, mask_t, D)
        if shift_ptr is not None:
            mean = tl.load(mean_ptr + (b * (H // GROUP) + h // GROUP) * D + tl.arange(0, D))
            shift = tl.sum(raw.to(tl.float32) * mean[None, :], 1) * scale
            tl.store(shift_ptr + plane * S + rows, shift, mask=mask_t)
        _fold_rows(raw, None, mask_t, sign, matrix, codes_ptr, scales_ptr, plane, planes, tile,
                   n_tiles, T, D, HIGH, LOW, True)


@triton.jit(do_not_specialize=["n_blocks", "H", "S"])
def _statistics_kernel(k, v, length_ptr, hadamard_ptr, partial_ptr, count_ptr, mean_ptr,
                       rotated_ptr, v_scale_ptr, n_blocks, H, S, ROWS: tl.constexpr,
                       T: tl.constexpr, D: tl.constexpr, DV: tl.constexpr):
    """Per channel of a head: mean of K over finite values, E4M3 scale of V.

    Blocks of ROWS keys leave partial results; the last block of a head to finish combines them, in
    an order that neither timing nor unused keys beyond the length change.
    """
    i_block, b, h = program_ids(n_blocks, H)
    plane = b * H + h
    _, length = sequence(b, None, length_ptr, S, S)
    offs_d = tl.arange(0, D)
    offs_v = tl.arange(0, DV)
    WIDTH: tl.constexpr = 2 * D + DV
    total = tl.zeros([T, D], tl.float32)
    count = tl.zeros([T, D], tl.float32)
    amax = tl.zeros([T, DV], tl.int32)
    begin = i_block.to(tl.int64) * ROWS
    for i in tl.range(0, ROWS, T, loop_unroll_factor=4):
        rows = begin + i + tl.arange(0, T)
        mask_t = rows < length
        if mean_ptr is not None:
            x = _load_tile(k, b, h, rows, mask_t, D).to(tl.float32)
            finite = mask_t[:, None] & (abs_bits(x) < 0x7F800000)
            total += tl.where(finite, x, 0.0)
            count += tl.where(finite, 1.0, 0.0)
        if v_scale_ptr is not None:
            raw = abs_bits(_load_tile(v, b, h, rows, mask_t, DV).to(tl.float32))
            amax = tl.maximum(amax, tl.where(raw < 0x7F800000, raw, 0))
    at = partial_ptr + (plane * n_blocks + i_block) * WIDTH
    tl.store(at + offs_d, tl.sum(total, 0))
    tl.store(at + D + offs_d, tl.sum(count, 0))
    tl.store(at + 2 * D + offs_v, tl.max(amax, 0).to(tl.float32, bitcast=True))
    tl.debug_barrier()
    finished = tl.atomic_add(count_ptr + plane, 1, sem="acq_rel")
    if finished == n_blocks - 1:
        at = partial_ptr + plane * n_blocks * WIDTH
        used = tl.cdiv(length, ROWS)
        total = tl.zeros([T, D], tl.float32)
        count = tl.zeros([T, D], tl.float32)
        amax = tl.zeros([T, DV], tl.int32)
        for c in range(0, used, T):
            chunk = c + tl.arange(0, T)
            mask = (chunk < used)[:, None]
            row = at + chunk[:, None] * WIDTH
            total += tl.load(row + offs_d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
            count += tl.load(row + D + offs_d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
            amax = tl.maximum(amax, tl.load(row + 2 * D + offs_v[None, :], mask=mask, other=0.0,
                                            cache_modifier=".cg").to(tl.int32, bitcast=True))
        if mean_ptr is not None:
            mean = tl.div_rn(tl.sum(total, 0), tl.maximum(tl.sum(count, 0), 1.0))
            tl.store(mean_ptr + plane * D + offs_d, mean)
            if hadamard_ptr is not None:
                tl.debug_barrier()
                signs = tl.load(hadamard_ptr + offs_d[:, None] * D + offs_d[None, :])
                column = tl.load(mean_ptr + plane * D + offs_d)
                rotated = tl.sum(column[:, None] * signs.to(tl.float32), 0)
                dims = ((offs_d & 7) >> 1) * (D // 4) + (offs_d >> 3) * 2 + (offs_d & 1)
                tl.store(rotated_ptr + plane * D + dims, rotated * rotation_norm(D))
        if v_scale_ptr is not None:
            scale = tl.max(amax, 0).to(tl.float32, bitcast=True) / constant("E4M3_MAX")
            tl.store(v_scale_ptr + plane * DV + offs_v, tl.where(scale < 2.0**-100, 1.0, scale))


def fold_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    high: tuple[BlockFormat, str] | None,
    low: tuple[BlockFormat, str],
    length: torch.Tensor | None,
    config: DMAConfig,
) -> FoldedKV:
    """K (B, H, S, D) and V (B, H, S, Dv), 16-bit, any strides, for the Hopper kernel.

    Args:
        high, low: Format and span of its fp32 scale; high is None with one class.
        length: int32 (B,) keys that hold data, or None for all.
    """
    batch, heads, size, head_dim = k.shape
    value_dim = v.shape[3]
    n_tiles = tile_count(size)
    planes = batch * heads

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=k.device)

    fp8 = config.pv == "fp8"
    matrix = _hadamard(head_dim, k.dtype, k.device) if config.rotate else None
    mean = empty(batch, heads, 1, head_dim) if config.smooth_k else None
    v_scale = empty(batch, heads, 1, value_dim) if fp8 else None
    rotated = mean
    k_arg, v_arg = Strided(k, k.stride()), Strided(v, v.stride())
    if mean is not None or fp8:
        n_blocks = -(-size // STATISTICS_ROWS)
        if mean is not None and matrix is not None:
            rotated = torch.empty_like(mean)
        _statistics_kernel[(n_blocks * planes,)](
            k_arg,
            v_arg,
            length,
            matrix,
            empty(planes * n_blocks * (2 * head_dim + value_dim)),
            torch.zeros(planes, dtype=torch.int32, device=k.device),
            mean,
            rotated,
            v_scale,
            n_blocks,
            heads,
            size,
            ROWS=STATISTICS_ROWS,
            T=16,
            D=head_dim,
            DV=value_dim,
            num_warps=8,
        )
    classes = 1 if high is None else 2
    codes = empty(classes, batch, heads, n_tiles * TILE, head_dim, dtype=torch.uint8)
    scales = empty(classes, batch, heads, n_tiles)
    v_codes = empty(batch, heads, value_dim, n_tiles * TILE, dtype=torch.uint8) if fp8 else None
    _fold_kv_kernel[(-(-n_tiles // KEY_TILES) * planes * (1 + fp8),)](
        k_arg,
        v_arg,
        length,
        rotated,
        matrix,
        codes,
        scales,
        v_codes,
        v_scale,
        n_tiles,
        planes,
        heads,
        size,
        T=TILE,
        TILES=KEY_TILES,
        D=head_dim,
        DV=value_dim,
        HIGH=_class_spec(high, config.scale_rule),
        LOW=_class_spec(low, config.scale_rule),
        num_warps=8 * classes,
        num_stages=KEY_TILES,
    )
    return FoldedKV(codes, scales, mean, v_codes, v_scale)


def fold_q(
    q: torch.Tensor,
    high: tuple[BlockFormat, str] | None,
    low: tuple[BlockFormat, str],
    length: torch.Tensor | None,
    n_kv: int,
    config: DMAConfig,
    scale: float,
    mean: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Q (B, H, S, D): codes, scales, and scale * q . mean (B, H, S) where mean (of K) is given.

    A negative `scale` goes into the codes: the kernel's maxima need factors >= 0.
    """
    batch, heads, size, head_dim = q.shape
    if length is None:
        n_tiles = tile_count(((n_kv - size) & (TILE - 1)) + size)
    else:
        n_tiles = tile_count(size) + 1
    classes = 1 if high is None else 2
    # A scale that spans a tile of queries needs them in one program; else two halves run better
    rows = TILE if "tile" in [cls[1] for cls in (high, low) if cls] else TILE // 2
    shape = (classes, batch, heads, n_tiles * TILE)
    codes = torch.empty(*shape, head_dim, dtype=torch.uint8, device=q.device)
    scales = torch.empty(shape, dtype=torch.float32, device=q.device)
    shift = None
    if mean is not None:
        shift = torch.empty(batch, heads, size, dtype=torch.float32, device=q.device)
    n_tiles *= TILE // rows
    _fold_q_kernel[(-(-n_tiles // QUERY_TILES) * batch * heads,)](
        Strided(q, q.stride()),
        length,
        _hadamard(head_dim, q.dtype, q.device) if config.rotate else None,
        codes,
        scales,
        shift,
        mean,
        n_tiles,
        batch * heads,
        heads,
        1 if mean is None else heads // mean.shape[1],
        size,
        n_kv,
        -1.0 if scale < 0 else 1.0,
        scale,
        T=rows,
        TILES=QUERY_TILES,
        D=head_dim,
        HIGH=_class_spec(high, config.scale_rule),
        LOW=_class_spec(low, config.scale_rule),
        num_warps=rows // 16,
    )
    return codes, scales, shift


@functools.cache
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The unnormalised Hadamard matrix, its columns in the order that `_rotated` wants."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    columns = torch.arange(size).view(4, size // 8, 2).transpose(0, 1).flatten()
    return matrix[:, columns].to(device, dtype)


def _class_spec(
    cls: tuple[BlockFormat, str] | None, scale_rule: str
) -> tuple[str, str, str] | None:
    return None if cls is None else (cls[0].name, cls[0].resolve_rule(scale_rule), cls[1])
