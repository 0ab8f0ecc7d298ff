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

from .hopper_blocks import slot

TINY = gl.constexpr(2.0**-126)
HIDDEN = gl.constexpr(0xFF800000 - 2**32 - 0x4B400000)  # an integer score that becomes -inf


@dataclass(frozen=True)
class Spec:
    """What a compiled variant depends on, besides operand types.

    Attributes:
        D, DV: Head dims.
        CLASSES: 2 with copies of Q and K for high and low tiles, else 1.
        RAW: High tiles multiply the 16-bit Q and K themselves.
        STAGES, BLOCKS: Tiles of K and V, and blocks of Q, that shared memory holds.
        CAUSAL, WINDOW: Visibility rules in use.
        TAIL: V may hold anything beyond a row's length.
        PV8: P V in FP8, else in V's 16-bit dtype.
        LSE: The log-sum-exp is wanted.
        FIXED: The first tile's maxima serve all tiles; blocks where they do not are left for REDO.
        REDO: Only the blocks that FIXED left.
        SHIFT: log2 of the factor on P.
        BIAS: What is added to integer scores to read them as fp32; 0 for FP8.
        S_LAYOUT, SUM_LAYOUT, O_LAYOUT, P_LAYOUT: Register layouts of the scores, the row sums by
            tensor core, the output, and P as operand.
        RAW_LAYOUT: Registers of the scores of 16-bit Q and K.
        K_LAYOUT, EIGHTHS_LAYOUT: Shared memory of a tile of codes, and of the constant that sums
            rows.
    """

    D: int
    DV: int
    CLASSES: int
    RAW: bool
    STAGES: int
    BLOCKS: int
    CAUSAL: bool
    WINDOW: bool
    TAIL: bool
    PV8: bool
    LSE: bool
    FIXED: bool
    REDO: bool
    SHIFT: float
    BIAS: float
    S_LAYOUT: Any
    SUM_LAYOUT: Any
    O_LAYOUT: Any
    P_LAYOUT: Any
    RAW_LAYOUT: Any
    K_LAYOUT: Any
    EIGHTHS_LAYOUT: Any


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
def add_sums(row_sum, decay, p):
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
    """(128 keys, DV) of V. Keys before every query's window, and those of 16-bit V beyond the
    length, become zeros: their P is zero, but zero times NaN is not. All warpgroups write the same
    bytes."""
    window, kv_len, seen_lo, common_lo, common_hi = limits
    tile = matrix(v_smem.index(stage))
    if SPEC.WINDOW or SPEC.TAIL:
        hidden = begin < seen_lo
        if SPEC.TAIL:
            hidden = hidden | (begin + 128 > kv_len)
        if hidden:
            LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
            KEYS: gl.constexpr = gl.SliceLayout(0 if SPEC.PV8 else 1, LAYOUT)
            x = tile.load(LAYOUT)
            j = gl.arange(0, 128, KEYS)
            if SPEC.PV8:  # column j holds this key; beyond the length the last one repeats
                pos = (j & -16) + (j & 1) + 4 * (j & 2) + ((j & 12) >> 1)
                seen = (begin + pos >= seen_lo)[None, :]
                x = x.to(gl.int8, bitcast=True)
                tile.store(gl.where(seen, x, x ^ x).to(gl.float8e4nv, bitcast=True))
            else:
                seen = (begin + j >= seen_lo) & (begin + j < kv_len)
                tile.store(gl.where(seen[:, None], x, 0.0))
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
def _hidden(s, row_pos, begin, limits, SPEC: gl.constexpr):
    """Scores of the keys from `begin` on, hidden ones at -inf."""
    window, kv_len, seen_lo, common_lo, common_hi = limits
    pos = _opaque(begin) + gl.arange(0, 128, gl.SliceLayout(0, s.type.layout))
    seen = (row_pos[:, None] * 0 + pos[None, :]) < kv_len
    if SPEC.CAUSAL:
        seen = seen & (pos[None, :] <= row_pos[:, None])
    if SPEC.WINDOW:
        seen = seen & (pos[None, :] > (row_pos - window)[:, None])
    return gl.where(seen, s, float("-inf") if SPEC.BIAS == 0.0 else HIDDEN)


@gluon.jit
def coded_keys(k_smem, stage, SPEC: gl.constexpr):
    """A stage of the ring as a tile of codes, (1, 128, D)."""
    tile = k_smem.index(stage)
    if SPEC.RAW:
        return tile._reinterpret(gl.float8e4nv, [1, 128, SPEC.D], SPEC.K_LAYOUT)
    else:
        return tile


@gluon.jit
def start_scores(count, q_slot, c, W: gl.constexpr, smem, bars, RAW: gl.constexpr,
                 SPEC: gl.constexpr):
    """Issue Q K^T of the count-th tile of the program, of class c; the product and K's scale."""
    ROW: gl.constexpr = gl.SliceLayout(1, SPEC.S_LAYOUT)
    q_smem, q_raw, k_smem, v_smem, q_scales, k_scale_smem, eighths, out_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    stage, phase = slot(count, SPEC.STAGES)
    S_LAYOUT: gl.constexpr = SPEC.S_LAYOUT
    if RAW:
        zero = gl.full([64, 128], 0.0, gl.float32, SPEC.RAW_LAYOUT)
        mbarrier.wait(k_full.index(stage), phase)
        pending = warpgroup_mma(matrix(q_raw.index(q_slot * 2 + W)),
                                matrix(k_smem.index(stage)).permute((1, 0)), zero,
                                use_acc=False, is_async=True)
    else:
        if SPEC.CLASSES == 1:
            c = 0
        integer: gl.constexpr = q_smem.dtype == gl.int8
        zero = gl.full([64, 128], 0, gl.int32 if integer else gl.float32, S_LAYOUT)
        mbarrier.wait(k_full.index(stage), phase)
        pending = warpgroup_mma(matrix(q_smem.index((q_slot * SPEC.CLASSES + c) * 2 + W)),
                                matrix(coded_keys(k_smem, stage, SPEC)).permute((1, 0)), zero,
                                use_acc=False, is_async=True)
    return pending, k_scale_smem.index(stage).load(ROW)


@gluon.jit
def start_sums(p, eighths, SPEC: gl.constexpr):
    """Issue P times eighths, (64, 8): sums of P without an FADD for each value."""
    LAYOUT: gl.constexpr = SPEC.SUM_LAYOUT
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, SPEC.P_LAYOUT.k_width)
    zero = gl.full([64, 8], 0.0, gl.float32, LAYOUT)
    p = gl.convert_layout(p, OPERAND, assert_trivial=True)
    return warpgroup_mma(p, eighths.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def start_values(acc, p, t, count, smem, bars, limits, SPEC: gl.constexpr):
    """Issue P V of tile t: on top of acc, or of nothing in FP8."""
    q_smem, q_raw, k_smem, v_smem, q_scales, k_scale_smem, eighths, out_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    stage, phase = slot(count, SPEC.STAGES)
    mbarrier.wait(v_full.index(stage), phase)
    v_tile = value_tile(v_smem, stage, t * 128, limits, SPEC)
    if SPEC.PV8:
        zero = gl.full([64, SPEC.DV], 0.0, gl.float32, SPEC.O_LAYOUT)
        return warpgroup_mma(p, v_tile, zero, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(p, v_tile, acc, is_async=True)


@gluon.jit
def hide(s, scales, t, row_pos, limits, SPEC: gl.constexpr):
    """Scores of tile t, hidden ones at -inf or HIDDEN, and their scales, the factor positive."""
    window, kv_len, seen_lo, common_lo, common_hi = limits
    if t * 128 < common_lo or t * 128 + 128 > common_hi:
        s = _hidden(s, row_pos, t * 128, limits, SPEC)
    factor = gl.where(scales[0] < TINY, TINY, scales[0])  # 0 * -inf would be NaN
    if SPEC.RAW:
        return s, (factor, scales[1])
    else:
        return s, (factor,)


@gluon.jit
def online_maximum(s, scales, row_max, SPEC: gl.constexpr):
    """New maxima, and the decay of what came before; logits are scores * scales[0] - scales[1]."""
    tile_max = _row_max(s)
    if SPEC.BIAS != 0.0:  # of integers: three-way maxima
        tile_max = gl.where(tile_max == HIDDEN, float("-inf"), tile_max.to(gl.float32))
    tile_max = tile_max * scales[0]
    if SPEC.RAW:
        tile_max -= scales[1]
    new_max = gl.maximum(row_max, tile_max)
    return new_max, gl.exp2(row_max - new_max)


@gluon.jit
def tile_scales(q_scale, k_scale, shift, RAW: gl.constexpr, SPEC: gl.constexpr):
    """What makes logits of a tile's scores: a factor, and where classes differ a shift, which
    takes q . mean_k from the scores of 16-bit keys, as smoothing took it from the others."""
    if SPEC.RAW:
        return q_scale * k_scale, shift if RAW else shift * 0.0
    else:
        return (q_scale * k_scale,)


@gluon.jit
def probabilities(s, scales, row_max, row_sum, decay, smem, SPEC: gl.constexpr):
    """P as the operand of P V, and row sums of P before its rounding where they are wanted."""
    q_smem, q_raw, k_smem, v_smem, q_scales, k_scale_smem, eighths, out_smem = smem
    factor = scales[0]
    base = row_max - SPEC.SHIFT
    if SPEC.RAW:
        base += scales[1]
    if SPEC.BIAS != 0.0:  # integers plus the bias are floats, by one addition instead of a cast
        base += SPEC.BIAS * factor
        s = (s + 0x4B400000).to(gl.float32, bitcast=True)
    p = gl.exp2(s * factor[:, None] - base[:, None])
    if SPEC.LSE or not SPEC.PV8:
        row_sum = add_sums(row_sum, decay, p)
    P_LAYOUT: gl.constexpr = SPEC.P_LAYOUT
    return as_operand(p, v_smem.dtype, P_LAYOUT), row_sum


@gluon.jit
def step(state, i, last, done, q_slot, c, q_scale, W: gl.constexpr, smem, bars, row_pos, shift,
         limits, RAW: gl.constexpr, SPEC: gl.constexpr):
    """P of tile last - i; its P V under the scores of the next tile and their maxima.

    done: Tiles of the blocks before this one. q_slot: Where Q is. c, q_scale, RAW: Class of the
    next tile, its row scales, whether it multiplies 16-bit Q and K.
    """
    q_smem, q_raw, k_smem, v_smem, q_scales, k_scale_smem, eighths, out_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    acc, row_max, row_sum, lse_sum, s, scales, decay = state
    count = done + i
    stage, phase = slot(count, SPEC.STAGES)
    next_stage, _ = slot(count + 1, SPEC.STAGES)
    p, lse_sum = probabilities(s, scales, row_max, lse_sum, decay, smem, SPEC)
    acc_decay = gl.convert_layout(decay, gl.SliceLayout(1, SPEC.O_LAYOUT))[:, None]
    if not (SPEC.PV8 or SPEC.FIXED):
        acc = acc * acc_decay
    pending_s, k_scale = start_scores(count + 1, q_slot, c, W, smem, bars, RAW, SPEC)
    if SPEC.PV8:
        pending_sum = start_sums(p, eighths, SPEC)
    pending_o = start_values(acc, p, last - i, count, smem, bars, limits, SPEC)
    s = as_scores(warpgroup_mma_wait(2 if SPEC.PV8 else 1, deps=[pending_s]), RAW, SPEC)
    if SPEC.FIXED:  # nothing else passes under P V
        mbarrier.arrive(k_empty.index(next_stage), count=1)
    scales = tile_scales(q_scale, k_scale, shift, RAW, SPEC)
    new_max, new_decay = row_max, decay
    if not (SPEC.WINDOW or SPEC.FIXED):
        new_max, new_decay = online_maximum(s, scales, row_max, SPEC)
        # Over already, but no code moves across: ptxas would take the maxima after P V
        mbarrier.wait(v_full.index(stage), phase)
    if SPEC.PV8:
        part, part_sum = warpgroup_mma_wait(0, deps=[pending_o, pending_sum])
        row_sum = add_sums(row_sum, decay, part_sum)
    else:
        part = warpgroup_mma_wait(0, deps=[pending_o])
    if not SPEC.FIXED:
        mbarrier.arrive(k_empty.index(next_stage), count=1)
    mbarrier.arrive(v_empty.index(stage), count=1)
    acc = acc * acc_decay + part if SPEC.PV8 else part
    if SPEC.WINDOW:  # masks need the registers of P V
        s, scales = hide(s, scales, last - i - 1, row_pos, limits, SPEC)
        new_max, new_decay = online_maximum(s, scales, row_max, SPEC)
    return acc, new_max, row_sum, lse_sum, s, scales, new_decay


@gluon.jit
def as_scores(product, RAW: gl.constexpr, SPEC: gl.constexpr):
    """A product of 16-bit operands in the layout of the others: the same registers."""
    if RAW:
        S_LAYOUT: gl.constexpr = SPEC.S_LAYOUT
        return gl.convert_layout(product, S_LAYOUT, assert_trivial=True)
    else:
        return product


@gluon.jit
def first_scores(count, q_slot, c, q_scale, W: gl.constexpr, smem, bars, shift, RAW: gl.constexpr,
                 SPEC: gl.constexpr):
    """Scores of the first tile of a block, and their scales."""
    pending, k_scale = start_scores(count, q_slot, c, W, smem, bars, RAW, SPEC)
    s = as_scores(warpgroup_mma_wait(0, deps=[pending]), RAW, SPEC)
    return s, tile_scales(q_scale, k_scale, shift, RAW, SPEC)
