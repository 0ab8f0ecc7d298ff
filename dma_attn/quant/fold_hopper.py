"""The fold of K and V with TMA fetching the next tiles while those before are computed.

    program   tile of K: wait, rotate | fetch the next one | each class, store
              tile of V: wait, to registers | fetch the next one | E4M3, store      item after item

Two programs an SM share out all tiles. What they make equals what `fold_kernels.fold_kv_kernel`
makes, bit for bit, but for V beyond the length, which is 0. A thread gets 16 values that lie side
by side in the output: of K by the order of the matrix's columns, of V by a register layout whose
loads from shared memory transpose, so that nothing is exchanged before it is stored.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..schedule import TILE
from .fold_jit import e4m3_code, fold, in_format, int8_codes, reciprocal, tile_max
from .fold_kernels import _wait_for_kernel_before
from .jit import item, rotation_norm, scale_kind
from .tma import descriptor


@functools.cache
def layouts(head_dim: int, value_dim: int) -> dict[str, Any]:
    """Registers of the product, of K's codes (keys, dims) and of V (keys, dims), for 8 warps."""
    halves = [[0, 64]] if head_dim == 128 else []
    more = [[0, 8]] if value_dim == 128 else []
    dim = value_dim // 8
    return {
        "Y_LAYOUT": gl.NVMMADistributedLayout([3, 0], [8, 1], [16, head_dim, 16]),
        "K_LAYOUT": gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [0, 8], *halves, [8, 0]],
            [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0], [64, 0]],
            [],
            [TILE, head_dim],
        ),
        "V_LAYOUT": gl.DistributedLinearLayout(
            [[1, 0], [8, 0], [2, 0], [4, 0], [64, 0], *more],
            [[16, 0], [32, 0], [0, 1], [0, 2], [0, 4]],
            [[0, dim], [0, 2 * dim], [0, 4 * dim]],
            [],
            [TILE, value_dim],
        ),
    }


@functools.cache
def matrix_descriptor(matrix: torch.Tensor) -> TensorDescriptor:
    """TMA of a rotation's matrix, which lives as long as the process."""
    return descriptor(matrix, (matrix.shape[0], matrix.shape[1]))


@gluon.jit
def _split(index, n_tiles, H):
    """Batch row, head and tile of an index over all tiles."""
    plane = index // n_tiles
    return plane // H, plane % H, index % n_tiles


@gluon.jit
def _before(b, h, tile, back, n_tiles, H):
    """The tile that lies `back`, a `_split`, before: without divisions. b < 0 when none does."""
    back_b, back_h, back_tile = back
    tile -= back_tile
    borrow = (tile < 0).to(gl.int32)
    tile += borrow * n_tiles
    h -= back_h + borrow
    borrow = (h < 0).to(gl.int32)
    return b - back_b - borrow, h + borrow * H, tile


@gluon.jit
def _seek(b, h, tile, back, n_tiles, H, S, length_ptr, T: gl.constexpr):
    """This tile, or the next one of this program that holds keys, and the keys of its row."""
    length = S
    if length_ptr is not None:
        length = gl.minimum(gl.maximum(gl.load(length_ptr + gl.maximum(b, 0)), 0), S)
        while (b >= 0) & (tile * T >= length):
            b, h, tile = _before(b, h, tile, back, n_tiles, H)
            length = gl.minimum(gl.maximum(gl.load(length_ptr + gl.maximum(b, 0)), 0), S)
    return b, h, tile, length


@gluon.jit
def _barrier():
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    return bar


@gluon.jit
def _fetch(desc, smem, bar, b, h, tile):
    """A tile to shared memory. `bar` completes when its bytes have come and `expect` was told how
    many, in either order."""
    rows: gl.constexpr = desc.block_type.shape[2]
    tma.async_copy_global_to_shared(desc, [b, h, tile * rows, 0], bar, smem, pred=b >= 0)


@gluon.jit
def _in_order(y):
    """A product with the matrix, its columns in the order of the dims."""
    T: gl.constexpr = y.shape[0]
    D: gl.constexpr = y.shape[1]
    return y.reshape(T, D // 64, 8, 4, 2).permute(0, 1, 3, 2, 4).reshape(T, D)


@gluon.jit
def _fold_class(x, gain, top, c, codes_ptr, scales_ptr, plane, planes, tile, n_tiles,
                CLASS: gl.constexpr, LAYOUT: gl.constexpr):
    """One class of a tile of rotated K, x (T, D)."""
    T: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    FORMAT: gl.constexpr = item(CLASS, 0)
    at_tile = (c * planes + plane).to(gl.int64) * n_tiles + tile
    if scale_kind(FORMAT) == "fp32":
        codes, scale = int8_codes(x, gain, item(CLASS, 2), False)
        row = gl.arange(0, T, scale.type.layout)
        gl.store(scales_ptr + at_tile + row * 0, scale, mask=row == 0)  # all rows share it
    else:
        elements, scale, bad, largest = in_format(x, gain, top, FORMAT, item(CLASS, 1),
                                                  item(CLASS, 2), False, T, D)
        codes, scale = fold(elements, scale, bad, largest, False, T, D)
        gl.store(scales_ptr + at_tile, scale)
    codes = gl.convert_layout(codes.to(gl.uint8, bitcast=True), LAYOUT, assert_trivial=True)
    rows = gl.arange(0, T, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    gl.store(codes_ptr + at_tile * (T * D) + (rows[:, None] * D + cols[None, :]), codes,
             eviction_policy="evict_first")


@gluon.jit
def _finite(x):
    """16-bit x in fp32, Inf as NaN: x * 0 + x, two at a time."""
    if x.dtype == gl.bfloat16:
        FORM: gl.constexpr = "bf16x2"
        UNPACK: gl.constexpr = "shl.b32 $0, y, 16;\nand.b32 $1, y, 0xffff0000;\n}"
    else:
        FORM: gl.constexpr = "f16x2"
        UNPACK: gl.constexpr = (".reg .b16 lo, hi;\nmov.b32 {lo, hi}, y;\n"
                                "cvt.f32.f16 $0, lo;\ncvt.f32.f16 $1, hi;\n}")
    return gl.inline_asm_elementwise(
        "{\n.reg .b32 y, zero;\nmov.b32 zero, 0;\nfma.rn." + FORM + " y, $2, zero, $2;\n" + UNPACK,
        "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def _fold_values(x, scale, codes_ptr, plane, tile, n_tiles, length):
    """A tile of V (T, Dv) -> E4M3 codes (Dv, T), keys permuted in groups of 16."""
    T: gl.constexpr = x.shape[0]
    DV: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = x.type.layout
    x = _finite(x)
    if tile * T + T > length:
        rows = tile * T + gl.arange(0, T, gl.SliceLayout(1, LAYOUT))
        x = gl.where((rows < length)[:, None], x, 0.0)
    codes = e4m3_code(x * reciprocal(scale)[None, :])
    codes = codes.reshape(T // 16, 2, 4, 2, DV).permute(4, 0, 2, 1, 3).reshape(DV, T)
    rows = gl.arange(0, DV, gl.SliceLayout(1, codes.type.layout))
    cols = gl.arange(0, T, gl.SliceLayout(0, codes.type.layout))
    to = (plane.to(gl.int64) * DV + rows)[:, None] * (n_tiles * T) + (tile * T + cols)[None, :]
    gl.store(codes_ptr + to, codes, eviction_policy="evict_first")


@gluon.jit(do_not_specialize=["n_tiles", "planes", "H", "S"])
def fold_kv_tma_kernel(k_desc, v_desc, matrix_desc, length_ptr, mean_ptr, codes_ptr, scales_ptr,
                       v_codes_ptr, v_scale_ptr, n_tiles, planes, H, S, HIGH: gl.constexpr,
                       LOW: gl.constexpr, Y_LAYOUT: gl.constexpr, K_LAYOUT: gl.constexpr,
                       V_LAYOUT: gl.constexpr):
    T: gl.constexpr = k_desc.block_type.shape[2]
    D: gl.constexpr = k_desc.block_type.shape[3]
    matrix = gl.allocate_shared_memory(matrix_desc.dtype, [D, D], matrix_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_type.shape, k_desc.layout)
    v_smem = k_smem
    if v_desc is not None:
        v_smem = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_type.shape, v_desc.layout)
    # Apart, and told what to expect where the threads meet anyway: else the compiler adds meetings
    k_bar, v_bar = _barrier(), _barrier()
    fence_async_shared()
    # Backwards: of what the statistics have read, L2 may still hold the end
    back = _split(gl.num_programs(0), n_tiles, H)
    b, h, tile = _split(planes * n_tiles - 1 - gl.program_id(0), n_tiles, H)
    b, h, tile, length = _seek(b, h, tile, back, n_tiles, H, S, length_ptr, T)
    mbarrier.expect(k_bar, k_desc.block_type.nbytes + matrix_desc.block_type.nbytes, pred=b >= 0)
    tma.async_copy_global_to_shared(matrix_desc, [0, 0], k_bar, matrix, pred=b >= 0)
    _fetch(k_desc, k_smem, k_bar, b, h, tile)
    if v_desc is not None:
        _fetch(v_desc, v_smem, v_bar, b, h, tile)
    phase = 0
    while b >= 0:
        plane = b * H + h
        next_b, next_h, next_tile = _before(b, h, tile, back, n_tiles, H)
        next_b, next_h, next_tile, next_length = _seek(next_b, next_h, next_tile, back, n_tiles, H,
                                                       S, length_ptr, T)
        # In flight while the tile is rotated: what K's mean and V's scales are
        _wait_for_kernel_before()
        zero = gl.full([T, D], 0.0, gl.float32, Y_LAYOUT)
        if mean_ptr is not None:
            dims = gl.arange(0, D, gl.SliceLayout(0, _in_order(zero).type.layout))
            mean = gl.load(mean_ptr + plane * D + dims)
        if v_desc is not None:
            v_scale = gl.load(v_scale_ptr + plane * V_LAYOUT.shape[1]
                              + gl.arange(0, V_LAYOUT.shape[1], gl.SliceLayout(0, V_LAYOUT)))
        mbarrier.wait(k_bar, phase)
        y = warpgroup_mma(k_smem.reshape((T, D)), matrix, zero, use_acc=False, is_async=True)
        y = warpgroup_mma_wait(0, deps=[y])
        gl.thread_barrier()
        _fetch(k_desc, k_smem, k_bar, next_b, next_h, next_tile)
        if v_desc is not None:
            mbarrier.expect(v_bar, v_desc.block_type.nbytes)
        y = _in_order(y)
        gain = gl.to_tensor(rotation_norm(D))
        if mean_ptr is not None:
            y = gl.fma(y, gain, (mean * -1.0)[None, :])
            gain = gl.to_tensor(1.0)
        if tile * T + T > length:
            rows = tile * T + gl.arange(0, T, gl.SliceLayout(1, y.type.layout))
            y = gl.where((rows < length)[:, None], y, 0.0)
        top = tile_max(y, T, D)
        if HIGH is not None:
            _fold_class(y, gain, top, 0, codes_ptr, scales_ptr, plane, planes, tile, n_tiles,
                        HIGH, K_LAYOUT)
        _fold_class(y, gain, top, 0 if HIGH is None else 1, codes_ptr, scales_ptr, plane,
                    planes, tile, n_tiles, LOW, K_LAYOUT)
        mbarrier.expect(k_bar, k_desc.block_type.nbytes, pred=next_b >= 0)
        if v_desc is not None:
            mbarrier.wait(v_bar, phase)
            DV: gl.constexpr = v_desc.block_type.shape[3]
            x = v_smem.reshape((T, DV)).load(V_LAYOUT)
            gl.thread_barrier()
            _fetch(v_desc, v_smem, v_bar, next_b, next_h, next_tile)
            _fold_values(x, v_scale, v_codes_ptr, plane, tile, n_tiles, length)
        b, h, tile, length = next_b, next_h, next_tile, next_length
        phase ^= 1
    # Even programs without keys: what comes next takes both kernels as done when this one is
    _wait_for_kernel_before()
