"""The Hopper kernel for narrow heads (D and Dv of 64), in plain Triton: FP8 or INT8 wgmma.

    O = softmax(scale * (Q_class K_class^T) + mask) V    over the tiles of `schedule.key_ranges`

One program = 64 queries of one head, 4 warps, several programs an SM: at D = 64 the exponential
unit is the limit, and more warps keep it busy. Three loops: over the high and the low 128-key tiles
that every row sees whole, and over the edges, where the mask is; there the class is chosen at run
time.

    keys   edge | high ... | low ..... | high | edge (diagonal)

Operands are those of `kernels.hopper`. FP8 products are promoted to fp32 after every tile. Needs
compute capability 9.0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...quant.fold_jit import INTERPRETED, e4m3_code
from ...quant.jit import common_keys, constant, decode_e4m3, key_ranges
from ...quant.kernels import Strided
from ..types import CallOptions, PreparedKV
from .hopper_call import Queries, hopper_call
from .tiles import key_block

BLOCK_M = 64


@triton.jit
def _product(a, b, acc):
    """a @ b + acc; FP8 products are promoted to fp32 at the end of the tile."""
    if INTERPRETED:
        return tl.dot(_upcast(a), _upcast(b), acc, input_precision="ieee")
    elif a.dtype.is_fp8():
        return tl.dot(a, b, acc, max_num_imprecise_acc=a.shape[1])
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _upcast(x):
    """fp32 values, for the interpreter, which multiplies neither FP8 nor bf16."""
    if x.dtype.is_fp8():
        return decode_e4m3(x.to(tl.uint8, bitcast=True).to(tl.int32))
    else:
        return x.to(tl.float32)


@triton.jit
def _tile(state, q, q_scale, k_ptr, k_scale_ptr, v, t, pos_m, limits, n_tiles, EDGE: tl.constexpr,
          SPEC: tl.constexpr):
    """Online softmax over one tile of 128 keys; k_ptr, k_scale_ptr point at the class's plane."""
    acc, row_max, row_sum = state
    window, kv_len, seen_lo = limits
    D: tl.constexpr = SPEC.D
    DV: tl.constexpr = SPEC.DV
    M: tl.constexpr = q.shape[0]
    offs_n = t.to(tl.int64) * 128 + tl.arange(0, 128)
    offs_d = tl.arange(0, DV)
    k = tl.load(k_ptr + offs_n[None, :] * D + tl.arange(0, D)[:, None])
    factor = q_scale * tl.load(k_scale_ptr + t)
    if q.dtype.is_int8() and not INTERPRETED:
        scores = tl.dot(q, k).to(tl.float32)
    else:
        scores = _product(q, k, tl.zeros([M, 128], tl.float32))
    scores *= factor[:, None]
    if EDGE:
        pos_n = t * 128 + tl.arange(0, 128)
        seen = (pos_n < kv_len)[None, :]
        if SPEC.CAUSAL:
            seen = seen & (pos_n[None, :] <= pos_m[:, None])
        if SPEC.WINDOW:
            seen = seen & (pos_n[None, :] > pos_m[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    p = tl.math.exp2(scores - (new_max - SPEC.SHIFT)[:, None])
    decay = tl.math.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(p, 1)
    acc = acc * decay[:, None]
    if SPEC.PV8:
        v_tile = tl.load(v.ptr + offs_d[None, :] * (n_tiles.to(tl.int64) * 128) + offs_n[:, None])
        if SPEC.WINDOW and EDGE:
            j = tl.arange(0, 128)  # position j of V's codes holds this key
            pos_v = t * 128 + (j & -16) + (j & 1) + 4 * (j & 2) + ((j & 12) >> 1)
            codes = tl.where((pos_v >= seen_lo)[:, None], v_tile.to(tl.uint8, bitcast=True), 0)
            v_tile = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        p = e4m3_code(p).to(tl.float8e4nv, bitcast=True)
        p = p.reshape(M, 4, 2, 2, 4, 2).permute(0, 1, 2, 4, 3, 5).reshape(M, 128)
        acc = _product(p, v_tile, acc)
    else:
        at = offs_n[:, None] * v.strides[2] + offs_d.to(tl.int64)[None, :] * v.strides[3]
        hidden = seen_lo if SPEC.WINDOW else 0
        mask = ((offs_n >= hidden) & (offs_n < kv_len))[:, None] & (offs_d < DV)[None, :]
        v_tile = tl.load(v.ptr + at, mask=mask, other=0.0)
        acc = _product(p.to(v_tile.dtype), v_tile, acc)
    return acc, new_max, row_sum


@triton.jit
def _inner(state, q, q_scale, k_ptr, k_scale_ptr, v, ranges, bounds, pos_m, limits, n_tiles,
           SPEC: tl.constexpr):
    """Tiles of one class that every row sees whole: [lo, gap_lo) and [gap_hi, hi) within bounds."""
    lo, gap_lo, gap_hi, hi = ranges
    first, end = bounds
    lo = tl.maximum(lo, first)
    gap_lo = tl.maximum(tl.minimum(gap_lo, end), lo)
    gap_hi = tl.maximum(tl.maximum(gap_hi, first), gap_lo)
    hi = tl.maximum(tl.minimum(hi, end), gap_hi)
    for i in tl.range(0, gap_lo - lo + hi - gap_hi):
        t = key_block(i, lo, gap_lo, gap_hi, 1)
        state = _tile(state, q, q_scale, k_ptr, k_scale_ptr, v, t, pos_m, limits, n_tiles, False,
                      SPEC)
    return state


@triton.jit(do_not_specialize=["n_blocks", "q_planes", "H_Q", "GROUP", "S_Q", "S_KV", "n_tiles",
                               "window", "diag", "sink"])
def _narrow_kernel(q_ptr, k_ptr, v, out, q_scale_ptr, k_scale_ptr, v_scale_ptr, shift_ptr, lse_ptr,
                   length_ptr, n_blocks, q_planes, H_Q, GROUP, S_Q, S_KV, n_tiles, scale, window,
                   diag, sink, SPEC: tl.constexpr):
    D: tl.constexpr = SPEC.D
    DV: tl.constexpr = SPEC.DV
    M: tl.constexpr = 64
    # Ids and offsets: heads side by side share K and V; the longest causal blocks start first
    q_plane = (tl.program_id(0) % q_planes).to(tl.int64)
    block = n_blocks - 1 - tl.program_id(0) // q_planes
    b = q_plane // H_Q
    h = q_plane % H_Q
    kv_len = S_KV
    if length_ptr is not None:
        kv_len = tl.minimum(tl.maximum(tl.load(length_ptr + b), 0), S_KV)
    offset = kv_len - S_Q
    pos_0 = (offset & -128) + block * M
    q_lo = tl.maximum(pos_0, offset)
    q_hi = tl.minimum(pos_0 + M, offset + S_Q)
    if q_lo >= q_hi:
        return
    lo, sink_end, diag_lo, diag_hi, hi = key_ranges(q_lo, q_hi, 0, kv_len, window, diag, sink,
                                                    SPEC.CAUSAL)
    common_lo, common_hi = common_keys(q_lo, q_hi, kv_len, window, SPEC.CAUSAL)
    seen_lo = lo
    if SPEC.WINDOW:
        seen_lo = q_lo - window + 1
    limits = (window, kv_len, seen_lo)
    # In tiles; the edges are [lo, whole_lo) and [whole_hi, hi)
    t_lo = lo >> 7
    t_sink = (sink_end + 127) >> 7
    t_near = (diag_lo + 127) >> 7
    t_far = (diag_hi + 127) >> 7
    t_hi = (hi + 127) >> 7
    whole_lo = tl.minimum(tl.maximum((common_lo + 127) >> 7, t_lo), t_hi)
    whole_hi = tl.minimum(tl.maximum(common_hi >> 7, whole_lo), t_hi)
    # Operands
    k_plane = b * (H_Q // GROUP) + h // GROUP
    k_planes = q_planes // GROUP
    low: tl.constexpr = SPEC.CLASSES - 1
    pos_m = pos_0 + tl.arange(0, M)
    q_rows = ((n_blocks * M).to(tl.int64) * q_plane) + block * M + tl.arange(0, M)
    q_class = (n_blocks * M).to(tl.int64) * q_planes
    at = q_rows[:, None] * D + tl.arange(0, D)[None, :]
    q_high = tl.load(q_ptr + at)
    q_low = tl.load(q_ptr + low * q_class * D + at)
    high_scale = tl.load(q_scale_ptr + q_rows) * scale
    low_scale = tl.load(q_scale_ptr + low * q_class + q_rows) * scale
    k_rows = n_tiles.to(tl.int64) * 128
    k_high = k_ptr + k_plane * k_rows * D
    k_low = k_ptr + (low * k_planes + k_plane) * k_rows * D
    k_high_scale = k_scale_ptr + k_plane * n_tiles
    k_low_scale = k_scale_ptr + (low * k_planes + k_plane) * n_tiles
    if SPEC.PV8:
        values = Strided(v.ptr + k_plane * DV * k_rows, v.strides)
    else:
        values = Strided(v.ptr + b * v.strides[0] + (h // GROUP) * v.strides[1], v.strides)
    # State
    state = (tl.zeros([M, DV], tl.float32), tl.full([M], -1e30, tl.float32),
             tl.zeros([M], tl.float32))
    # Tiles that every row sees whole, then the edges
    if SPEC.CLASSES == 2:
        state = _inner(state, q_high, high_scale, k_high, k_high_scale, values,
                       (t_lo, t_sink, t_near, t_far), (whole_lo, whole_hi), pos_m, limits, n_tiles,
                       SPEC)
    else:
        t_sink, t_near = t_lo, t_hi
        t_far = t_hi
    state = _inner(state, q_low, low_scale, k_low, k_low_scale, values,
                   (t_sink, t_near, t_far, t_hi), (whole_lo, whole_hi), pos_m, limits, n_tiles,
                   SPEC)
    for i in range(0, whole_lo - t_lo + t_hi - whole_hi):
        t = key_block(i, t_lo, whole_lo, whole_hi, 1)
        high = (t < t_sink) | ((t >= t_near) & (t < t_far))
        q = tl.where(high, q_high.to(tl.uint8, bitcast=True), q_low.to(tl.uint8, bitcast=True)).to(
            q_high.dtype, bitcast=True)
        q_scale = tl.where(high, high_scale, low_scale)
        if high:
            keys, key_scales = k_high, k_high_scale
        else:
            keys, key_scales = k_low, k_low_scale
        state = _tile(state, q, q_scale, keys, key_scales, values, t, pos_m, limits, n_tiles, True,
                      SPEC)
    acc, row_max, row_sum = state
    # Store
    lowest = tl.zeros([M], tl.int32)
    if SPEC.WINDOW:
        lowest = tl.maximum(lowest, pos_m - window + 1)
    highest = lowest * 0 + kv_len
    if SPEC.CAUSAL:
        highest = tl.minimum(highest, pos_m + 1)
    blind = highest <= lowest  # rows without a visible key: 0 and -inf, whatever q and V hold
    acc = acc * (1.0 / row_sum)[:, None]
    offs_d = tl.arange(0, DV)
    if SPEC.PV8:
        acc = acc * tl.load(v_scale_ptr + k_plane * DV + offs_d)[None, :]
    acc = tl.where(blind[:, None], 0.0, acc)
    i_q = (pos_m - offset).to(tl.int64)
    at = i_q[:, None] * out.strides[2] + offs_d.to(tl.int64)[None, :] * out.strides[3]
    stored = (pos_m >= q_lo) & (pos_m < q_hi)
    tl.store(out.ptr + b * out.strides[0] + h * out.strides[1] + at,
             acc.to(out.ptr.dtype.element_ty), mask=stored[:, None] & (offs_d < DV)[None, :])
    if lse_ptr is not None:
        row = q_plane * S_Q + i_q
        lse = (row_max + tl.math.log2(row_sum) - SPEC.SHIFT) * constant("LN_2")
        if shift_ptr is not None:
            lse += tl.load(shift_ptr + row, mask=stored, other=0.0)
        tl.store(lse_ptr + row, tl.where(blind, float("-inf"), lse), mask=stored)


def run(
    queries: Queries,
    kv: PreparedKV,
    call: CallOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Fill out (B, H_q, S_q, Dv) and lse (B, H_q, S_q) from what `folded_queries` returned."""
    if out.numel() == 0:
        return
    c = hopper_call(queries, kv, call, out, lse, BLOCK_M)
    _narrow_kernel[(c.blocks * c.planes,)](
        q_ptr=c.q,
        k_ptr=c.k,
        v=Strided(c.v, c.v.stride()),
        **c.arguments,
        SPEC=c.spec,
        num_warps=4,
        num_stages=3 if c.spec.PV8 else 2,
        maxnreg=168 if c.spec.PV8 and not c.spec.WINDOW else None,  # three programs an SM
    )
