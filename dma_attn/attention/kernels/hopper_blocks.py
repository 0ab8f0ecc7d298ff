"""Which work falls to a program of the Hopper kernel, and which tiles it meets."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ... import schedule

key_ranges = gluon.jit(schedule.key_ranges)
common_keys = gluon.jit(schedule.common_keys)


@gluon.jit
def block_of(turn, shape, inputs, masks, SPEC: gl.constexpr):
    """This program's block of a round: where it lies, what its rows see, which tiles and classes,
    its index.

    Rounds go over the programs forth and back, so that each gets long and short blocks alike. A
    block without queries, or none to do again, has n = 0 tiles; one whose queries see no key has
    one tile, whose result is dropped.
    """
    n_blocks, k_planes, H_Q, GROUP, S_Q, S_KV = shape
    window, diag, sink = masks
    length_ptr, v_scale_ptr, left_ptr, work = inputs
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = programs - 1 - place
    index = turn * programs + place
    block = n_blocks - 1 - index // (k_planes * GROUP)
    q_plane = index % (k_planes * GROUP)
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
    if SPEC.REDO:
        left = gl.load(left_ptr + index) | gl.load(left_ptr + work + programs + index)
        n = gl.where(left != 0, n, 0)
    rows = (pos_0, q_lo, q_hi, offset)
    limits = (window, kv_len, seen_lo, common_lo, common_hi)
    ranges = ((sink_end + 127) >> 7, (diag_lo + 127) >> 7, (diag_hi + 127) >> 7)
    planes = (q_plane, q_plane // GROUP, b, h)
    return n, first, block, planes, rows, limits, ranges, index


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
def run_steps(run, first, last, ranges):
    """The steps [begin, end) that lead to one run of tiles of one class.

    Step i leads from tile last - i to the one before it, down to first. Runs 0 to 3 are the low
    tiles beyond the diagonal band, the band, the low ones before it, the sink; any may be empty.
    In closed form: Triton 3.6 makes a constant of a begin that is carried from run to run.
    """
    sink_end, diag_lo, diag_hi = ranges
    below = gl.where(run == 0, last, gl.where(run == 1, diag_hi,
                                              gl.where(run == 2, diag_lo, sink_end)))
    down_to = gl.where(run == 0, diag_hi, gl.where(run == 1, diag_lo,
                                                   gl.where(run == 2, sink_end, first)))
    begin = last - gl.maximum(gl.minimum(below, last), first)
    return begin, last - gl.maximum(gl.minimum(down_to, last), first)


@gluon.jit
def slot(count, SLOTS: gl.constexpr):
    """Where the count-th use of a ring of buffers falls, and the parity of its turn."""
    turn = count.to(gl.uint32) // SLOTS
    return (count - turn.to(gl.int32) * SLOTS), (turn & 1).to(gl.int32)
