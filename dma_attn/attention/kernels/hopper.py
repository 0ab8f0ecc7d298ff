"""The Hopper attention kernel (sm_90): FP8 or INT8 wgmma for Q K^T, FP8 or 16-bit wgmma for P V.

    O = softmax(scale * (Q_class K_class^T) + mask) V    over the tiles of `schedule.key_ranges`

A block of work is 128 queries of one head: two consumer warpgroups of 64 queries and one producer
warp, which fetches 128-key tiles of K and V by TMA into a ring. One program an SM takes blocks in
turn, the longest first; the producer fetches the next block's Q and K under the end of this one.
Both classes are 8-bit codes of the same kind, so a tile's class only selects which copy of Q and K
is read and which scales apply:

    score = code_q . code_k * (scale_q[class, query] * scale_k[class, tile] * scale * log2(e))

    warpgroup 0   QK(i) PV(i-1) | max(i) | exp(i) ..................... |  QK(i+1) PV(i) | ...
    warpgroup 1            exp(i-1) ... |  QK(i) PV(i-1) | max(i) | exp(i) .................

PV(i-1) runs under the softmax of tile i, and the warpgroups take turns at starting theirs. FP8
wgmma accumulates with about 14 bits: every FLUSH tiles the partial output moves to an fp32 sum in
shared memory, the second level.

Operands: K codes (classes * B * H_kv, tiles * 128, D), Q codes (classes * B * H_q, blocks * 128, D)
at absolute positions, V as E4M3 transposed (B * H_kv, Dv, tiles * 128) with keys permuted in groups
of 16 so that P needs no shuffles, or V itself; see `quant.folded`. Needs compute capability 9.0.
"""

from __future__ import annotations

import functools

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

from ... import formats, schedule
from ...device import processor_count
from ...schedule import TILE
from ..types import CallOptions, PreparedKV
from .hopper_call import CallSpec, Queries, hopper_call
from .hopper_step import (
    STAGES,
    Spec,
    as_operand,
    step,
    thread_sums,
    tile_class,
    value_tile,
    with_sum,
)

FLUSH = gl.constexpr(8)  # tiles between two moves of the FP8 accumulator into the fp32 sum
FLOOR = gl.constexpr(-1e30)  # below every logit: the running maximum before the first key
LN_2 = gl.constexpr(formats.LN_2)
INT_BIAS = 12582912.0  # 1.5 * 2^23: its bits plus a small integer are their sum

key_ranges = gluon.jit(schedule.key_ranges)
common_keys = gluon.jit(schedule.common_keys)


@gluon.jit
def _block(turn, shape, inputs, masks, SPEC: gl.constexpr):
    """This program's block of a round: where it lies, what its rows see, which tiles and classes.

    Rounds go over the programs forth and back, so that each gets long and short blocks alike. Heads
    that share K and V come side by side. A block without queries has n = 0 tiles; one whose queries
    see no key has one tile, whose result is dropped.
    """
    n_blocks, q_planes, H_Q, GROUP, S_Q, S_KV = shape
    window, diag, sink = masks
    length_ptr, v_scale_ptr = inputs
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = programs - 1 - place
    index = turn * programs + place
    q_plane = index % q_planes
    block = n_blocks - 1 - index // q_planes
    b = q_plane // H_Q
    h = q_plane % H_Q
    kv_len = S_KV
    if length_ptr is not None:
        kv_len = gl.minimum(gl.maximum(gl.load(length_ptr + b), 0), S_KV)
    offset = kv_len - S_Q
    pos_0 = (offset & -128) + block * 128
    q_lo = gl.maximum(pos_0, offset)
    q_hi = gl.minimum(pos_0 + 128, offset + S_Q)
    lo, sink_end, diag_lo, diag_hi, hi = key_ranges(q_lo, q_hi, 0, kv_len, window, diag, sink,
                                                    SPEC.CAUSAL)
    common_lo, common_hi = common_keys(q_lo, q_hi, kv_len, window, SPEC.CAUSAL)
    seen_lo = lo
    if SPEC.WINDOW:
        seen_lo = q_lo - window + 1
    first = lo >> 7
    n = gl.maximum(((hi + 127) >> 7) - first, 1)
    n = gl.where((block >= 0) & (q_lo < q_hi), n, 0)
    rows = (pos_0, q_lo, q_hi, offset)
    limits = (window, kv_len, seen_lo, common_lo, common_hi)
    ranges = ((sink_end + 127) >> 7, (diag_lo + 127) >> 7, (diag_hi + 127) >> 7)
    planes = (q_plane, b * (H_Q // GROUP) + h // GROUP, b, h)
    return n, first, block, planes, rows, limits, ranges


@gluon.jit
def _producer(descs, smem, bars, k_scale_ptr, rounds, shape, inputs, masks, n_tiles,
              SPEC: gl.constexpr):
    """Fetch each block's Q, then K, its tile scale and V, tile by tile."""
    CLASSES: gl.constexpr = SPEC.CLASSES
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem, k_scale_smem, sum_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    n_blocks, q_planes, H_Q, GROUP, S_Q, S_KV = shape
    LANES: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    spread = gl.arange(0, 64, LANES) * 0
    done = 0
    blocks = 0
    for round in range(rounds):
        n, first, block, planes, rows, limits, ranges = _block(round, shape, inputs, masks, SPEC)
        q_plane, k_plane, b, h = planes
        if n > 0:
            mbarrier.wait(q_empty, (blocks & 1) ^ 1)
            mbarrier.expect(q_full, q_desc.block_type.nbytes * 2 * CLASSES)
            for half in gl.static_range(2 * CLASSES):
                at = [(half // 2) * q_planes + q_plane, block * 128 + 64 * (half % 2), 0]
                tma.async_copy_global_to_shared(q_desc, at, q_full, q_smem.index(half))
            blocks += 1
        for i in range(n):
            count = done + i
            stage = count & (STAGES - 1)
            phase = ((count // STAGES) & 1) ^ 1
            t = first + i
            plane = tile_class(t, ranges, CLASSES) * (q_planes // GROUP) + k_plane
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
                tma.async_copy_global_to_shared(v_desc, [b, h // GROUP, t * 128, 0],
                                                v_full.index(stage), v_smem.index(stage))
        done += n


@gluon.jit
def _consumer(W: gl.constexpr, smem, bars, rounds, shape, inputs, masks, scale, q_scale_ptr,
              outputs, SPEC: gl.constexpr):
    """Warpgroup W: attention of 64 queries of each block."""
    done = 0
    turns = 0
    blocks = 0
    for round in range(rounds):
        n, first, block, planes, rows, limits, ranges = _block(round, shape, inputs, masks, SPEC)
        if n > 0:
            _attend(W, smem, bars, n, first, block, planes, rows, limits, ranges, done, turns,
                    blocks, shape, scale, q_scale_ptr, inputs, outputs, SPEC)
            blocks += 1
            turns += n - 1
        done += n


@gluon.jit
def _attend(W: gl.constexpr, smem, bars, n, first, block, planes, rows, limits, ranges, done, turns,
            blocks, shape, scale, q_scale_ptr, inputs, outputs, SPEC: gl.constexpr):
    """One block. done, turns, blocks: tiles, turns and blocks that came before."""
    DV: gl.constexpr = SPEC.DV
    O_LAYOUT: gl.constexpr = SPEC.O_LAYOUT
    P_LAYOUT: gl.constexpr = SPEC.P_LAYOUT
    WINDOW: gl.constexpr = SPEC.WINDOW
    ROW: gl.constexpr = gl.SliceLayout(1, SPEC.S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    O_COL: gl.constexpr = gl.SliceLayout(0, O_LAYOUT)
    q_smem, k_smem, v_smem, k_scale_smem, sum_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    n_blocks, q_planes, H_Q, GROUP, S_Q, S_KV = shape
    q_plane, k_plane, b, h = planes
    pos_0, q_lo, q_hi, offset = rows
    window, kv_len, seen_lo, common_lo, common_hi = limits
    out, lse_ptr, shift_ptr = outputs
    length_ptr, v_scale_ptr = inputs
    row_pos = pos_0 + W * 64 + gl.arange(0, 64, ROW)
    at = (q_plane.to(gl.int64) * n_blocks + block) * 128 + W * 64 + gl.arange(0, 64, ROW)
    low_at = at + (SPEC.CLASSES - 1) * (q_planes.to(gl.int64) * n_blocks * 128)
    row_scales = (gl.load(q_scale_ptr + at) * scale, gl.load(q_scale_ptr + low_at) * scale)
    # State; P of no tile, zeros, lets the first tile go through the loop like the others
    zero = gl.full([64, DV], 0.0, gl.float32, O_LAYOUT)
    p = gl.full([64, 128], 0.0, gl.float32, SPEC.S_LAYOUT)
    row_max = gl.full([64], FLOOR, gl.float32, ROW)
    state = (zero, row_max, thread_sums(p), p)
    sum_max = row_max
    if SPEC.PV8:
        if n - 1 > FLUSH:
            sum_smem.index(W).store(zero)
    # Tiles; the last one holds the diagonal or the end of the keys
    mbarrier.wait(q_full, blocks & 1)
    for begin in range(0, n - 1, FLUSH):
        for i in range(begin, gl.minimum(begin + FLUSH, n - 1)):
            state = step(state, i, done, turns, W, smem, bars, row_scales, row_pos, limits, ranges,
                         first, WINDOW, True, SPEC)
        if SPEC.PV8:
            acc, row_max, row_sum, p = state
            moves = begin + FLUSH < n - 1
            if moves:
                acc = with_sum(acc, sum_smem.index(W), sum_max, row_max, O_LAYOUT)
                sum_smem.index(W).store(acc)
                acc = zero
            sum_max = gl.where(moves, row_max, sum_max)
            state = (acc, row_max, row_sum, p)
    last = n - 1
    acc, row_max, row_sum, p = step(state, last, done, turns, W, smem, bars, row_scales, row_pos,
                                    limits, ranges, first, True, False, SPEC)
    mbarrier.arrive(q_empty, count=1)
    stage = (done + last) & (STAGES - 1)
    p_op = as_operand(p, v_smem.dtype, P_LAYOUT)
    mbarrier.wait(v_full.index(stage), ((done + last) // STAGES) & 1)
    v_tile = value_tile(v_smem, stage, (first + last) * 128, limits, SPEC)
    pending_o = warpgroup_mma(p_op, v_tile, acc, is_async=True)
    offs_d = gl.arange(0, DV, O_COL)
    if SPEC.PV8:
        v_scale = gl.load(v_scale_ptr + k_plane * DV + offs_d)
    acc = warpgroup_mma_wait(0, deps=[pending_o])
    mbarrier.arrive(v_empty.index(stage), count=1)
    if SPEC.PV8:
        if n - 1 > FLUSH:
            acc = with_sum(acc, sum_smem.index(W), sum_max, row_max, O_LAYOUT)
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
        row = q_plane.to(gl.int64) * S_Q + row_pos - offset
        stored = (row_pos >= q_lo) & (row_pos < q_hi)
        lse = (row_max + gl.log2(gl.convert_layout(total, ROW)) - SPEC.SHIFT) * LN_2
        if shift_ptr is not None:
            lse += gl.load(shift_ptr + row, mask=stored, other=0.0)
        blind = gl.convert_layout(blind, ROW)
        gl.store(lse_ptr + row, gl.where(blind, float("-inf"), lse), mask=stored)


@gluon.jit(do_not_specialize=["rounds", "n_blocks", "q_planes", "H_Q", "GROUP", "S_Q", "S_KV",
                              "n_tiles", "window", "diag", "sink"])
def _hopper_kernel(q_desc, k_desc, v_desc, q_scale_ptr, k_scale_ptr, v_scale_ptr, shift_ptr, out,
                   lse_ptr, length_ptr, rounds, n_blocks, q_planes, H_Q, GROUP, S_Q, S_KV, n_tiles,
                   scale, window, diag, sink, SPEC: gl.constexpr):
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
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)  # the consumers
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=2)  # TMA, and the scale's store
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    mbarrier.arrive(turn.index(0), count=1)
    fence_async_shared()
    # Roles
    smem = (q_smem, k_smem, v_smem, k_scale_smem, sum_smem)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, turn)
    shape = (n_blocks, q_planes, H_Q, GROUP, S_Q, S_KV)
    masks = (window, diag, sink)
    outputs = (out, lse_ptr, shift_ptr)
    inputs = (length_ptr, v_scale_ptr)
    gl.warp_specialize([
        (_consumer, (gl.constexpr(0), smem, bars, rounds, shape, inputs, masks, scale, q_scale_ptr,
                     outputs, SPEC)),
        (_consumer, (gl.constexpr(1), smem, bars, rounds, shape, inputs, masks, scale, q_scale_ptr,
                     outputs, SPEC)),
        (_producer, ((q_desc, k_desc, v_desc), smem, bars, k_scale_ptr, rounds, shape, inputs,
                     masks, n_tiles, SPEC)),
    ], [4, 1], [240, 24])


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
    c = hopper_call(queries, kv, call, out, lse, TILE)
    head_dim, value_dim = c.spec.D, c.spec.DV
    if c.spec.PV8:
        v_desc = _descriptor(c.v.flatten(0, 1), (1, value_dim, TILE))
    else:
        v_desc = _descriptor(c.v, (1, 1, TILE, value_dim))
    work = c.blocks * c.planes
    programs = min(work, processor_count(out.device))
    _hopper_kernel[(programs,)](
        q_desc=_descriptor(c.q.flatten(0, 2), (1, TILE // 2, head_dim)),
        k_desc=_descriptor(c.k.flatten(0, 2), (1, TILE, head_dim)),
        v_desc=v_desc,
        rounds=-(-work // programs),
        **c.arguments,
        SPEC=_spec(c.spec, c.q.dtype == torch.int8),
        num_warps=4,
    )


@functools.cache
def _spec(spec: CallSpec, integer: bool) -> Spec:
    """The variant with its register layouts."""
    o_shape = [16, spec.DV, 32 if spec.PV8 else 16]
    o_layout = gl.NVMMADistributedLayout([3, 0], [4, 1], o_shape)
    return Spec(
        **vars(spec),
        BIAS=INT_BIAS if integer else 0.0,
        S_LAYOUT=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32]),
        O_LAYOUT=o_layout,
        P_LAYOUT=gl.DotOperandLayout(0, o_layout, 4 if spec.PV8 else 2),
    )


def _descriptor(x: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """TMA boxes of x; beyond its ends they read zeros."""
    return TensorDescriptor.from_tensor(x, list(box), _shared_layout(box, x.dtype))


@functools.cache
def _shared_layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), _GLUON_TYPES[dtype])


_GLUON_TYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int8: gl.int8,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
}
