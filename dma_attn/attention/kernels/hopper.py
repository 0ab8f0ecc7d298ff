"""The Hopper attention kernel (sm_90): FP8 or INT8 wgmma for Q K^T, FP8 or 16-bit wgmma for P V.

    O = softmax(scale * (Q_class K_class^T) + mask) V    over the tiles of `schedule.key_ranges`

One block = 128 queries of one head: two consumer warpgroups of 64 queries and one producer warp,
which fetches 128-key tiles of K and V by TMA into a ring. Both classes are 8-bit codes of the same
kind, so a tile's class only selects which copy of Q and K is read and which scales apply:

    score = code_q . code_k * (scale_q[class, query] * scale_k[class, tile] * scale * log2(e))

    warpgroup 0   QK(i) PV(i-1) | max(i) | exp(i) ..................... |  QK(i+1) PV(i) | ...
    warpgroup 1            exp(i-1) ... |  QK(i) PV(i-1) | max(i) | exp(i) .................

PV(i-1) runs under the softmax of tile i, and the warpgroups take turns at starting theirs. FP8
wgmma accumulates with about 14 bits: every FLUSH tiles the partial output moves to an fp32 sum in
shared memory, the second level.

Operands: K codes (classes * B * H_kv, tiles * 128, D), Q codes (classes * B * H_q, blocks * 128, D)
at absolute positions, V as E4M3 transposed (B * H_kv, Dv, tiles * 128) with keys permuted in groups
of 32 so that P needs no shuffles, or V itself; see `quant.folded`. Needs compute capability 9.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
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

from ... import formats, schedule
from ...formats import LOG2_E
from ...quant.kernels import Strided
from ...schedule import TILE
from ..prepare import folded_queries
from ..types import CallOptions, PreparedKV

STAGES = gl.constexpr(2)  # tiles of K and V in flight; three bought nothing
FLUSH = gl.constexpr(16)  # tiles between two moves of the FP8 accumulator into the fp32 sum
FLOOR = gl.constexpr(-1e30)  # below every logit: the running maximum before the first key
INT_BIAS = gl.constexpr(12582912.0)  # 1.5 * 2^23: its bits plus a small integer are their sum
LN_2 = gl.constexpr(formats.LN_2)

key_ranges = gluon.jit(schedule.key_ranges)
common_keys = gluon.jit(schedule.common_keys)


@dataclass(frozen=True)
class Spec:
    """Everything that a compiled variant depends on, besides operand types.

    Attributes:
        D, DV: Head dims.
        CLASSES: 2 with high and low tiles, 1 with one class.
        CAUSAL, WINDOW: Visibility rules in use.
        PV8: P V in FP8, else in V's 16-bit dtype.
        BIAS: What is added to integer scores to read them as fp32; 0 for FP8.
        SHIFT: log2 of the factor on P.
        S_LAYOUT, O_LAYOUT, P_LAYOUT: Register layouts of the scores, the output, and P as operand.
    """

    D: int
    DV: int
    CLASSES: int
    CAUSAL: bool
    WINDOW: bool
    PV8: bool
    BIAS: float
    SHIFT: float
    S_LAYOUT: Any
    O_LAYOUT: Any
    P_LAYOUT: Any


@gluon.jit
def _tile_class(t, ranges, CLASSES: gl.constexpr):
    """0 (high) or 1 (low) with two classes, 0 with one; ranges in tiles."""
    if CLASSES == 1:
        return t * 0
    else:
        sink_end, diag_lo, diag_hi = ranges
        high = (t < sink_end) | ((t >= diag_lo) & (t < diag_hi))
        return 1 - high.to(gl.int32)


@gluon.jit
def _producer(descs, smem, bars, k_scale_ptr, planes, block, ranges, first, n, n_tiles,
              SPEC: gl.constexpr):
    """Fetch Q once, then K, its tile scale and V, tile by tile."""
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem, k_scale_smem, sum_smem = smem
    q_full, k_full, k_empty, v_full, v_empty, turn = bars
    q_plane, q_planes, k_plane, k_planes, batch, kv_head = planes
    LANES: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    spread = gl.arange(0, 64, LANES) * 0
    mbarrier.expect(q_full, q_desc.block_type.nbytes * 2 * SPEC.CLASSES)
    for half in gl.static_range(2 * SPEC.CLASSES):
        at = [(half // 2) * q_planes + q_plane, block * 128 + 64 * (half % 2), 0]
        tma.async_copy_global_to_shared(q_desc, at, q_full, q_smem.index(half))
    for i in range(n):
        stage = i & (STAGES - 1)
        phase = ((i // STAGES) & 1) ^ 1
        t = first + i
        plane = _tile_class(t, ranges, SPEC.CLASSES) * k_planes + k_plane
        k_scale = gl.load(k_scale_ptr + plane * n_tiles + t + spread)
        mbarrier.wait(k_empty.index(stage), phase)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [plane, t * 128, 0], k_full.index(stage),
                                        k_smem.index(stage))
        k_scale_smem.index(stage).store(k_scale)
        mbarrier.arrive(k_full.index(stage), count=1)
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        if SPEC.PV8:
            tma.async_copy_global_to_shared(v_desc, [k_plane, 0, t * 128], v_full.index(stage),
                                            v_smem.index(stage))
        else:
            tma.async_copy_global_to_shared(v_desc, [batch, kv_head, t * 128, 0],
                                            v_full.index(stage), v_smem.index(stage))


@gluon.jit
def _row_max(s):
    """Row maxima; four independent chains in each thread."""
    ROW: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    m = gl.max(gl.max(s.reshape(s.shape[0], 4, s.shape[1] // 4), 1), 1)
    return gl.convert_layout(m, ROW, assert_trivial=True)


@gluon.jit
def _thread_sums(p):
    """(M, 4): what each of the four threads of a row holds, summed without shuffles."""
    return gl.sum(gl.sum(p.reshape(p.shape[0], p.shape[1] // 8, 4, 2), 3), 1)


@gluon.jit
def _add_sums(row_sum, decay, p):
    decay = gl.convert_layout(decay, gl.SliceLayout(1, row_sum.type.layout))
    return row_sum * decay[:, None] + _thread_sums(p)


@gluon.jit
def _as_operand(p, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """P as the left operand of P V; FP8 columns go to where their registers already are."""
    p = p.to(DTYPE)
    if DTYPE.primitive_bitwidth == 8:
        M: gl.constexpr = p.shape[0]
        N: gl.constexpr = p.shape[1]
        p = p.reshape(M, N // 32, 2, 2, 4, 2).permute(0, 1, 2, 4, 3, 5).reshape(M, N)
    return gl.convert_layout(p, LAYOUT)


@gluon.jit
def _matrix(tile):
    """The (rows, columns) of a tile in shared memory that TMA wrote with leading dims of one."""
    RANK: gl.constexpr = tile.rank
    return tile.reshape((tile.shape[RANK - 2], tile.shape[RANK - 1]))


@gluon.jit
def _v_tile(v_smem, stage, begin, limits, SPEC: gl.constexpr):
    """(128 keys, DV) of V. With a window, keys that no query of the block sees become zeros:
    their P is zero, but zero times NaN is not."""
    window, kv_len, seen_lo, common_lo, common_hi = limits
    tile = _matrix(v_smem.index(stage))
    if SPEC.WINDOW:
        if begin < seen_lo:
            LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
            KEYS: gl.constexpr = gl.SliceLayout(0 if SPEC.PV8 else 1, LAYOUT)
            x = tile.load(LAYOUT)
            j = gl.arange(0, 128, KEYS)
            if SPEC.PV8:  # column j holds this key
                pos = (j & -16) + (j & 1) + 4 * (j & 2) + ((j & 12) >> 1)
                seen = (begin + pos >= seen_lo)[None, :]
                x = x.to(gl.int8, bitcast=True)
                tile.store(gl.where(seen, x, x ^ x).to(gl.float8e4nv, bitcast=True))
            else:
                tile.store(gl.where((begin + j >= seen_lo)[:, None], x, 0.0))
            fence_async_shared()
    if SPEC.PV8:
        return tile.permute((1, 0))
    else:
        return tile


@gluon.jit
def _opaque(x):
    """x, hidden from loop-invariant code motion: mask positions must not live in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32,
                                     is_pure=False, pack=1)


@gluon.jit
def _visible(s, row_pos, begin, limits, SPEC: gl.constexpr):
    """Scores of the keys from `begin` on, hidden ones at -inf."""
    window, kv_len, seen_lo, common_lo, common_hi = limits
    pos = _opaque(begin) + gl.arange(0, 128, gl.SliceLayout(0, s.type.layout))
    seen = (row_pos[:, None] * 0 + pos[None, :]) < kv_len
    if SPEC.CAUSAL:
        seen = seen & (pos[None, :] <= row_pos[:, None])
    if SPEC.WINDOW:
        seen = seen & (pos[None, :] > (row_pos - window)[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _step(state, i, W: gl.constexpr, smem, bars, row_scales, row_pos, limits, ranges, first,
          EDGE: gl.constexpr, TURNS: gl.constexpr, SPEC: gl.constexpr):
    """Scores of tile i, P V of tile i - 1 under the softmax of tile i.

    EDGE: the tile may hold hidden keys. TURNS: take turns with the other warpgroup.
    """
    S_LAYOUT: gl.constexpr = SPEC.S_LAYOUT
    P_LAYOUT: gl.constexpr = SPEC.P_LAYOUT
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    q_smem, k_smem, v_smem, k_scale_smem, sum_smem = smem
    q_full, k_full, k_empty, v_full, v_empty, turn = bars
    window, kv_len, seen_lo, common_lo, common_hi = limits
    acc, row_max, row_sum, p = state
    stage = i & (STAGES - 1)
    last = gl.where(i > 0, i - 1, 0)
    before = last & (STAGES - 1)
    # Q K^T of this tile, P V of the one before
    mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
    c = _tile_class(first + i, ranges, SPEC.CLASSES)
    factor = row_scales[0]
    if SPEC.CLASSES == 2:
        factor = gl.where(c == 0, row_scales[0], row_scales[1])
    zero = gl.full([64, 128], 0, gl.int32 if q_smem.dtype == gl.int8 else gl.float32, S_LAYOUT)
    pending_s = warpgroup_mma(_matrix(q_smem.index(2 * c + W)),
                              _matrix(k_smem.index(stage)).permute((1, 0)), zero, use_acc=False,
                              is_async=True)
    factor *= k_scale_smem.index(stage).load(ROW)
    p_op = _as_operand(p, v_smem.dtype, P_LAYOUT)
    mbarrier.wait(v_full.index(before), (last // STAGES) & 1)
    v_tile = _v_tile(v_smem, before, (first + last) * 128, limits, SPEC)
    pending_o = warpgroup_mma(p_op, v_tile, acc, is_async=True)
    raw = warpgroup_mma_wait(1, deps=[pending_s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    # Integers plus INT_BIAS are floats, by one addition instead of a cast
    s = raw
    if SPEC.BIAS != 0.0:
        s = (raw + 0x4B400000).to(gl.float32, bitcast=True)
    # Online softmax
    if EDGE:
        begin = (first + i) * 128
        if begin < common_lo or begin + 128 > common_hi:
            s = _visible(s, row_pos, begin, limits, SPEC)
        tile_max = _row_max(s) - SPEC.BIAS
    else:
        tile_max = _row_max(raw).to(gl.float32)  # of integers: three-way maxima
    new_max = gl.maximum(row_max, tile_max * factor)
    # Before the exponentials of P, so that ptxas spreads the rescaling of acc between them
    decay = gl.exp2(row_max - new_max)
    base = new_max - SPEC.SHIFT
    if SPEC.BIAS != 0.0:
        base += SPEC.BIAS * factor
    if TURNS:
        mbarrier.wait(turn.index(W), i & 1)
    p = gl.exp2(s * factor[:, None] - base[:, None])
    row_sum = _add_sums(row_sum, decay, p)
    if TURNS:
        mbarrier.arrive(turn.index(1 - W), count=1)
    acc = warpgroup_mma_wait(0, deps=[pending_o])
    mbarrier.arrive(v_empty.index(before), count=1, pred=i > 0)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, SPEC.O_LAYOUT))[:, None]
    return acc, new_max, row_sum, p


@gluon.jit
def _with_sum(acc, sum_tile, sum_max, row_max, LAYOUT: gl.constexpr):
    """acc plus the fp32 sum in shared memory, which is relative to the maxima sum_max."""
    decay = gl.convert_layout(gl.exp2(sum_max - row_max), gl.SliceLayout(1, LAYOUT))
    return acc + sum_tile.load(LAYOUT) * decay[:, None]


@gluon.jit
def _consumer(W: gl.constexpr, smem, bars, rows, limits, ranges, first, n, scale, q_scales,
              outputs, SPEC: gl.constexpr):
    """Attention of 64 queries: warpgroup W of the block."""
    DV: gl.constexpr = SPEC.DV
    O_LAYOUT: gl.constexpr = SPEC.O_LAYOUT
    P_LAYOUT: gl.constexpr = SPEC.P_LAYOUT
    WINDOW: gl.constexpr = SPEC.WINDOW
    ROW: gl.constexpr = gl.SliceLayout(1, SPEC.S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    O_COL: gl.constexpr = gl.SliceLayout(0, O_LAYOUT)
    q_smem, k_smem, v_smem, k_scale_smem, sum_smem = smem
    q_full, k_full, k_empty, v_full, v_empty, turn = bars
    pos_0, q_lo, q_hi, offset = rows
    window, kv_len, seen_lo, common_lo, common_hi = limits
    out, b, h, v_scale_ptr, k_plane, lse_ptr, shift_ptr, lse_row = outputs
    q_scale_ptr, q_row, q_class_rows = q_scales
    row_pos = pos_0 + W * 64 + gl.arange(0, 64, ROW)
    at = q_row + W * 64 + gl.arange(0, 64, ROW)
    row_scales = (gl.load(q_scale_ptr + at) * scale,
                  gl.load(q_scale_ptr + (SPEC.CLASSES - 1) * q_class_rows + at) * scale)
    # State; P of no tile, zeros, lets the first tile go through the loop like the others
    zero = gl.full([64, DV], 0.0, gl.float32, O_LAYOUT)
    p = gl.full([64, 128], 0.0, gl.float32, SPEC.S_LAYOUT)
    row_max = gl.full([64], FLOOR, gl.float32, ROW)
    state = (zero, row_max, _thread_sums(p), p)
    sum_max = row_max
    if SPEC.PV8:
        if n - 1 > FLUSH:
            sum_smem.index(W).store(zero)
    # Tiles; the last one holds the diagonal or the end of the keys
    mbarrier.wait(q_full, 0)
    for begin in range(0, n - 1, FLUSH):
        for i in range(begin, gl.minimum(begin + FLUSH, n - 1)):
            state = _step(state, i, W, smem, bars, row_scales, row_pos, limits, ranges, first,
                          WINDOW, True, SPEC)
        if SPEC.PV8:
            acc, row_max, row_sum, p = state
            moves = begin + FLUSH < n - 1
            if moves:
                acc = _with_sum(acc, sum_smem.index(W), sum_max, row_max, O_LAYOUT)
                sum_smem.index(W).store(acc)
                acc = zero
            sum_max = gl.where(moves, row_max, sum_max)
            state = (acc, row_max, row_sum, p)
    acc, row_max, row_sum, p = _step(state, n - 1, W, smem, bars, row_scales, row_pos, limits,
                                     ranges, first, True, False, SPEC)
    last = n - 1
    stage = last & (STAGES - 1)
    p_op = _as_operand(p, v_smem.dtype, P_LAYOUT)
    mbarrier.wait(v_full.index(stage), (last // STAGES) & 1)
    v_tile = _v_tile(v_smem, stage, (first + last) * 128, limits, SPEC)
    pending_o = warpgroup_mma(p_op, v_tile, acc, is_async=True)
    offs_d = gl.arange(0, DV, O_COL)
    if SPEC.PV8:
        v_scale = gl.load(v_scale_ptr + k_plane * DV + offs_d)
    acc = warpgroup_mma_wait(0, deps=[pending_o])
    if SPEC.PV8:
        if n - 1 > FLUSH:
            acc = _with_sum(acc, sum_smem.index(W), sum_max, row_max, O_LAYOUT)
    # Store
    pos = gl.convert_layout(row_pos, O_ROW)
    lowest = pos * 0
    if WINDOW:
        lowest = gl.maximum(lowest, pos - window + 1)
    highest = lowest * 0 + kv_len
    if SPEC.CAUSAL:
        highest = gl.minimum(highest, pos + 1)
    blind = highest <= lowest  # rows without a visible key: 0 and -inf, whatever q and V hold
    total = gl.sum(row_sum, 1)
    acc = acc * (1.0 / gl.convert_layout(total, O_ROW))[:, None]
    if SPEC.PV8:
        acc = acc * v_scale[None, :]
    acc = gl.where(blind[:, None], 0.0, acc)
    at = b.to(gl.int64) * out.strides[0] + h.to(gl.int64) * out.strides[1]
    at += (pos - offset).to(gl.int64)[:, None] * out.strides[2]
    at += offs_d.to(gl.int64)[None, :] * out.strides[3]
    stored = ((pos >= q_lo) & (pos < q_hi))[:, None] & (offs_d < DV)[None, :]
    gl.store(out.ptr + at, acc.to(out.ptr.dtype.element_ty), mask=stored)
    if lse_ptr is not None:
        row = lse_row + row_pos - offset
        stored = (row_pos >= q_lo) & (row_pos < q_hi)
        lse = (row_max + gl.log2(gl.convert_layout(total, ROW)) - SPEC.SHIFT) * LN_2
        if shift_ptr is not None:
            lse += gl.load(shift_ptr + row, mask=stored, other=0.0)
        blind = gl.convert_layout(blind, ROW)
        gl.store(lse_ptr + row, gl.where(blind, float("-inf"), lse), mask=stored)


@gluon.jit(do_not_specialize=["n_blocks", "q_planes", "H_Q", "GROUP", "S_Q", "S_KV", "n_tiles",
                              "window", "diag", "sink"])
def _hopper_kernel(q_desc, k_desc, v_desc, q_scale_ptr, k_scale_ptr, v_scale_ptr, shift_ptr, out,
                   lse_ptr, length_ptr, n_blocks, q_planes, H_Q, GROUP, S_Q, S_KV, n_tiles, scale,
                   window, diag, sink, SPEC: gl.constexpr):
    # Ids and offsets: heads side by side share K and V; the longest causal blocks start first
    q_plane = gl.program_id(0) % q_planes
    block = n_blocks - 1 - gl.program_id(0) // q_planes
    b = q_plane // H_Q
    h = q_plane % H_Q
    kv_len = S_KV
    if length_ptr is not None:
        kv_len = gl.minimum(gl.maximum(gl.load(length_ptr + b), 0), S_KV)
    offset = kv_len - S_Q
    pos_0 = (offset & -128) + block * 128
    q_lo = gl.maximum(pos_0, offset)
    q_hi = gl.minimum(pos_0 + 128, offset + S_Q)
    if q_lo >= q_hi:
        return
    lo, sink_end, diag_lo, diag_hi, hi = key_ranges(q_lo, q_hi, 0, kv_len, window, diag, sink,
                                                    SPEC.CAUSAL)
    common_lo, common_hi = common_keys(q_lo, q_hi, kv_len, window, SPEC.CAUSAL)
    seen_lo = lo
    if SPEC.WINDOW:
        seen_lo = q_lo - window + 1
    first = lo >> 7
    n = gl.maximum(((hi + 127) >> 7) - first, 1)  # without a key, one tile whose result is dropped
    ranges = ((sink_end + 127) >> 7, (diag_lo + 127) >> 7, (diag_hi + 127) >> 7)
    k_plane = b * (H_Q // GROUP) + h // GROUP
    # Shared memory and barriers
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * SPEC.CLASSES] + q_desc.block_type.shape,
                                       q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape,
                                       k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape,
                                       v_desc.layout)
    k_scale_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 64],
                                             gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sum_smem = k_scale_smem
    if SPEC.PV8:
        SUM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, SPEC.DV], gl.float32)
        sum_smem = gl.allocate_shared_memory(gl.float32, [2, 64, SPEC.DV], SUM)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=2)  # TMA, and the scale's store
        mbarrier.init(k_empty.index(i), count=2)  # the consumers
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    mbarrier.arrive(turn.index(0), count=1)
    fence_async_shared()
    # Roles
    smem = (q_smem, k_smem, v_smem, k_scale_smem, sum_smem)
    bars = (q_full, k_full, k_empty, v_full, v_empty, turn)
    rows = (pos_0, q_lo, q_hi, offset)
    limits = (window, kv_len, seen_lo, common_lo, common_hi)
    planes = (q_plane, q_planes, k_plane, q_planes // GROUP, b, h // GROUP)
    q_row = (q_plane.to(gl.int64) * n_blocks + block) * 128
    q_scales = (q_scale_ptr, q_row, q_planes.to(gl.int64) * n_blocks * 128)
    outputs = (out, b, h, v_scale_ptr, k_plane, lse_ptr, shift_ptr, q_plane.to(gl.int64) * S_Q)
    gl.warp_specialize([
        (_consumer, (gl.constexpr(0), smem, bars, rows, limits, ranges, first, n, scale, q_scales,
                     outputs, SPEC)),
        (_consumer, (gl.constexpr(1), smem, bars, rows, limits, ranges, first, n, scale, q_scales,
                     outputs, SPEC)),
        (_producer, ((q_desc, k_desc, v_desc), smem, bars, k_scale_ptr, planes, block, ranges,
                     first, n, n_tiles, SPEC)),
    ], [4, 1], [240, 24])


def launch(
    q: torch.Tensor,
    kv: PreparedKV,
    call: CallOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Fill out (B, H_q, S_q, Dv) and lse (B, H_q, S_q)."""
    if out.numel():
        run(folded_queries(q, kv, call.scale, lse is not None), kv, call, out, lse)


def run(
    queries: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    kv: PreparedKV,
    call: CallOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """The one launch, from what `folded_queries` returned."""
    assert kv.folded is not None  # what brought the call here
    k_codes, k_scales = kv.folded
    codes, scales, shift = queries
    config = kv.config.canonical()
    batch, kv_heads, n_kv, head_dim, value_dim = kv.shape
    heads, n_q = out.shape[1:3]
    classes, n_blocks, n_tiles = codes.shape[0], codes.shape[3] // TILE, k_codes.shape[3] // TILE
    integer = config.low == "int8"
    pv8 = kv.v_scale is not None
    if pv8:
        v_desc = _descriptor(kv.v.flatten(0, 1), [1, value_dim, TILE], torch.float8_e4m3fn)
    else:
        v_desc = _descriptor(kv.v, [1, 1, TILE, value_dim], kv.v.dtype)
    code_type = torch.int8 if integer else torch.float8_e4m3fn
    s_layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    o_layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, value_dim, 32 if pv8 else 16])
    spec = Spec(
        D=head_dim,
        DV=value_dim,
        CLASSES=classes,
        CAUSAL=call.causal,
        WINDOW=call.window > 0,
        PV8=pv8,
        BIAS=INT_BIAS.value if integer else 0.0,
        SHIFT=8.0 if pv8 else 0.0,
        S_LAYOUT=s_layout,
        O_LAYOUT=o_layout,
        P_LAYOUT=gl.DotOperandLayout(0, o_layout, 4 if pv8 else 2),
    )
    widest = TILE * triton.cdiv(n_q + n_kv + TILE, TILE)  # all of the matrix
    _hopper_kernel[(n_blocks * batch * heads,)](
        _descriptor(codes.flatten(0, 2), [1, TILE // 2, head_dim], code_type),
        _descriptor(k_codes.flatten(0, 2), [1, TILE, head_dim], code_type),
        v_desc,
        scales,
        k_scales,
        kv.v_scale,
        shift,
        Strided(out, out.stride()),
        lse,
        kv.rows.length,
        n_blocks,
        batch * heads,
        heads,
        heads // kv_heads,
        n_q,
        n_kv,
        n_tiles,
        max(abs(call.scale) * LOG2_E, 1e-30),  # above 0: hidden scores are -inf times it
        min(call.window, widest),
        min(int(config.diag), widest),
        min(config.sink, widest),
        SPEC=spec,
        num_warps=4,
    )


def _descriptor(x: torch.Tensor, box: list[int], dtype: torch.dtype) -> TensorDescriptor:
    """TMA boxes of x, seen as `dtype`; beyond its ends they read zeros."""
    layout = gl.NVMMASharedLayout.get_default_for(box, _GLUON_TYPES[dtype])
    return TensorDescriptor.from_tensor(x.view(dtype), box, layout)


_GLUON_TYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int8: gl.int8,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
}
