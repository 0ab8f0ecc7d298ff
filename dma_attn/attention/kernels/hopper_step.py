"""The inner step of the Hopper kernel: scores of one tile, P V of the one before, online softmax.

The scores of a warpgroup are (64 queries, 128 keys) fp32 in the accumulator layout of wgmma, where
four threads share a row. Tiles of Q, K and V lie in shared memory as TMA wrote them. `Spec` says
what a compiled variant depends on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_call import CallSpec

STAGES = gl.constexpr(2)  # tiles of K and V in flight, a power of two


@dataclass(frozen=True)
class Spec(CallSpec):
    """Everything that a compiled variant depends on, besides operand types.

    Attributes:
        BIAS: What is added to integer scores to read them as fp32; 0 for FP8.
        S_LAYOUT, O_LAYOUT, P_LAYOUT: Register layouts of the scores, the output, and P as operand.
    """

    BIAS: float
    S_LAYOUT: Any
    O_LAYOUT: Any
    P_LAYOUT: Any


@gluon.jit
def tile_class(t, ranges, CLASSES: gl.constexpr):
    """0 (high) or 1 (low) with two classes, 0 with one; ranges in tiles."""
    if CLASSES == 1:
        return t * 0
    else:
        sink_end, diag_lo, diag_hi = ranges
        high = (t < sink_end) | ((t >= diag_lo) & (t < diag_hi))
        return 1 - high.to(gl.int32)


@gluon.jit
def _row_max(s):
    """Row maxima; four independent chains in each thread."""
    ROW: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    m = gl.max(gl.max(s.reshape(s.shape[0], 4, s.shape[1] // 4), 1), 1)
    return gl.convert_layout(m, ROW, assert_trivial=True)


@gluon.jit
def thread_sums(p):
    """(M, 4): what each of the four threads of a row holds, summed without shuffles."""
    return gl.sum(gl.sum(p.reshape(p.shape[0], p.shape[1] // 8, 4, 2), 3), 1)


@gluon.jit
def _add_sums(row_sum, decay, p):
    decay = gl.convert_layout(decay, gl.SliceLayout(1, row_sum.type.layout))
    return row_sum * decay[:, None] + thread_sums(p)


@gluon.jit
def as_operand(p, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """P as the left operand of P V; FP8 columns go to where their registers already are."""
    p = p.to(DTYPE)
    if DTYPE.primitive_bitwidth == 8:
        M: gl.constexpr = p.shape[0]
        N: gl.constexpr = p.shape[1]
        p = p.reshape(M, N // 32, 2, 2, 4, 2).permute(0, 1, 2, 4, 3, 5).reshape(M, N)
    return gl.convert_layout(p, LAYOUT)


@gluon.jit
def matrix(tile):
    """The (rows, columns) of a tile in shared memory that TMA wrote with leading dims of one."""
    RANK: gl.constexpr = tile.rank
    return tile.reshape((tile.shape[RANK - 2], tile.shape[RANK - 1]))


@gluon.jit
def value_tile(v_smem, stage, begin, limits, SPEC: gl.constexpr):
    """(128 keys, DV) of V. With a window, keys that no query of the block sees become zeros:
    their P is zero, but zero times NaN is not. Both warpgroups write the same bytes."""
    window, kv_len, seen_lo, common_lo, common_hi = limits
    tile = matrix(v_smem.index(stage))
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
    """Scaled scores of the keys from `begin` on, hidden ones at -inf."""
    window, kv_len, seen_lo, common_lo, common_hi = limits
    pos = _opaque(begin) + gl.arange(0, 128, gl.SliceLayout(0, s.type.layout))
    seen = (row_pos[:, None] * 0 + pos[None, :]) < kv_len
    if SPEC.CAUSAL:
        seen = seen & (pos[None, :] <= row_pos[:, None])
    if SPEC.WINDOW:
        seen = seen & (pos[None, :] > (row_pos - window)[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def step(state, i, done, turns, W: gl.constexpr, smem, bars, row_scales, row_pos, limits, ranges,
         first, EDGE: gl.constexpr, TURNS: gl.constexpr, SPEC: gl.constexpr):
    """Scores of tile i, P V of tile i - 1 under the softmax of tile i.

    done, turns: Tiles, and turns with the other warpgroup, of the blocks before this one.
    EDGE: the tile may hold hidden keys. TURNS: take turns with the other warpgroup.
    """
    S_LAYOUT: gl.constexpr = SPEC.S_LAYOUT
    P_LAYOUT: gl.constexpr = SPEC.P_LAYOUT
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    q_smem, k_smem, v_smem, k_scale_smem, sum_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    window, kv_len, seen_lo, common_lo, common_hi = limits
    acc, row_max, row_sum, p = state
    count = done + i
    stage = count & (STAGES - 1)
    last = gl.where(i > 0, i - 1, 0)
    before = (done + last) & (STAGES - 1)
    # Q K^T of this tile, P V of the one before
    mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
    c = tile_class(first + i, ranges, SPEC.CLASSES)
    factor = row_scales[0]
    if SPEC.CLASSES == 2:
        factor = gl.where(c == 0, row_scales[0], row_scales[1])
    zero = gl.full([64, 128], 0, gl.int32 if q_smem.dtype == gl.int8 else gl.float32, S_LAYOUT)
    pending_s = warpgroup_mma(matrix(q_smem.index(2 * c + W)),
                              matrix(k_smem.index(stage)).permute((1, 0)), zero, use_acc=False,
                              is_async=True)
    factor *= k_scale_smem.index(stage).load(ROW)
    p_op = as_operand(p, v_smem.dtype, P_LAYOUT)
    mbarrier.wait(v_full.index(before), ((done + last) // STAGES) & 1)
    v_tile = value_tile(v_smem, before, (first + last) * 128, limits, SPEC)
    pending_o = warpgroup_mma(p_op, v_tile, acc, is_async=True)
    raw = warpgroup_mma_wait(1, deps=[pending_s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    # Integers plus INT_BIAS are floats, by one addition instead of a cast
    s = raw
    if SPEC.BIAS != 0.0:
        s = (raw + 0x4B400000).to(gl.float32, bitcast=True)
    # Online softmax
    if EDGE:
        # Masked once they are scaled: a factor may underflow to 0, and 0 * -inf is NaN
        begin = (first + i) * 128
        s = (s - SPEC.BIAS) * factor[:, None]
        if begin < common_lo or begin + 128 > common_hi:
            s = _visible(s, row_pos, begin, limits, SPEC)
        new_max = gl.maximum(row_max, _row_max(s))
    else:
        tile_max = _row_max(raw).to(gl.float32)  # of integers: three-way maxima
        new_max = gl.maximum(row_max, tile_max * factor)
    # Before the exponentials of P, so that ptxas spreads the rescaling of acc between them
    decay = gl.exp2(row_max - new_max)
    base = new_max - SPEC.SHIFT
    if SPEC.BIAS != 0.0 and not EDGE:
        base += SPEC.BIAS * factor
    if TURNS:
        mbarrier.wait(turn.index(W), (turns + i) & 1)
    if not EDGE:
        s = s * factor[:, None]
    p = gl.exp2(s - base[:, None])
    row_sum = _add_sums(row_sum, decay, p)
    if TURNS:
        mbarrier.arrive(turn.index(1 - W), count=1)
    acc = warpgroup_mma_wait(0, deps=[pending_o])
    mbarrier.arrive(v_empty.index(before), count=1, pred=i > 0)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, SPEC.O_LAYOUT))[:, None]
    return acc, new_max, row_sum, p


@gluon.jit
def with_sum(acc, sum_tile, sum_max, row_max, LAYOUT: gl.constexpr):
    """acc plus the fp32 sum in shared memory, which is relative to the maxima sum_max."""
    decay = gl.convert_layout(gl.exp2(sum_max - row_max), gl.SliceLayout(1, LAYOUT))
    return acc + sum_tile.load(LAYOUT) * decay[:, None]
