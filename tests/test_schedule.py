"""The schedule against brute force over every key, and its range functions against `is_high`."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dma_attn.schedule import TILE, common_keys, is_high, key_ranges

DIAGS = (0, 128, 256, 512)
SINKS = (0, 128, 256)


def check_block(q_lo, q_hi, start, kv_len, window, diag, sink, causal) -> None:
    """Every visible key of the block is covered once, in the class that the definition gives."""
    lo, sink_end, diag_lo, diag_hi, hi = key_ranges(
        q_lo, q_hi, start, kv_len, window, diag, sink, causal
    )
    assert lo <= sink_end <= diag_lo <= diag_hi <= hi
    for bound in (lo, sink_end, diag_lo, diag_hi):
        assert bound % TILE == 0 or bound == hi
    classes = {}
    for begin, end, high in (
        (lo, sink_end, True),
        (sink_end, diag_lo, False),
        (diag_lo, diag_hi, True),
        (diag_hi, hi, False),
    ):
        for tile in range(begin // TILE, -(-end // TILE)) if begin < end else ():
            assert tile not in classes
            classes[tile] = high
    seen_by_all = None
    for i in range(q_lo, q_hi):
        visible = {
            j
            for j in range(start, kv_len)
            if (not causal or j <= i) and (not window or j > i - window)
        }
        for j in visible:
            # Worked from the method's own words, not from the schedule.
            near = abs((i // TILE) - (j // TILE)) * TILE < diag
            first_keys = range(start // TILE * TILE, -(-(start + sink) // TILE) * TILE)
            assert classes[j // TILE] == (near or (sink > 0 and j in first_keys))
            assert classes[j // TILE] == is_high(i // TILE, j // TILE, start, diag, sink)
            assert lo <= j < hi
        seen_by_all = visible if seen_by_all is None else seen_by_all & visible
    common = common_keys(q_lo, q_hi, kv_len, window, causal)
    for j in range(start, kv_len):
        if common[0] <= j < common[1]:
            assert j in seen_by_all
        elif lo <= j < hi:
            assert j not in seen_by_all


def blocks(n_q: int, offset: int, block_m: int):
    """Query blocks cut at absolute multiples of block_m, as the kernels cut them."""
    for first in range(offset // block_m * block_m, offset + n_q, block_m):
        q_lo, q_hi = max(first, offset), min(first + block_m, offset + n_q)
        if q_lo < q_hi:
            yield q_lo, q_hi


@pytest.mark.parametrize(("n_q", "n_kv"), [(1, 1), (1, 300), (300, 300), (130, 515), (200, 70)])
def test_every_visible_key_once_in_the_right_class(n_q, n_kv):
    for diag, sink, causal, window in itertools.product(DIAGS, SINKS, (True, False), (0, 1, 100)):
        if window and not causal:
            continue
        for q_lo, q_hi in blocks(n_q, n_kv - n_q, TILE):
            check_block(q_lo, q_hi, 0, n_kv, window, diag, sink, causal)


@given(
    n_q=st.integers(1, 300),
    n_kv=st.integers(0, 700),
    start=st.integers(0, 700),
    window=st.sampled_from([0, 1, 2, 127, 128, 129, 400]),
    diag=st.sampled_from(DIAGS),
    sink=st.sampled_from(SINKS),
    causal=st.booleans(),
    block_m=st.sampled_from([16, 64, 128]),
    top_left=st.booleans(),
    pick=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_any_block(n_q, n_kv, start, window, diag, sink, causal, block_m, top_left, pick):
    offset = 0 if top_left else n_kv - n_q
    all_blocks = list(blocks(n_q, offset, block_m))
    q_lo, q_hi = all_blocks[pick % len(all_blocks)]
    start = min(start, n_kv)
    check_block(q_lo, q_hi, start, n_kv, window if causal else 0, diag, sink, causal)


def test_negative_positions_floor():
    # 10 queries, 4 keys: the first queries sit at -6 .. -1, in query tile -1.
    assert key_ranges(-6, 0, 0, 4, 0, 128, 128, True) == (0, 0, 0, 0, 0)
    assert key_ranges(0, 4, 0, 4, 0, 128, 128, True) == (0, 4, 4, 4, 4)


def test_left_padding_moves_the_sink_not_the_grid():
    # First valid key 130: its sink [130, 258) rounds out to tiles 1 and 2.
    assert key_ranges(640, 768, 130, 768, 0, 128, 128, True) == (128, 384, 640, 768, 768)
