"""The runs of steps of the Hopper kernel, with its own functions called on Python's numbers."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

from dma_attn.attention.kernels import hopper_blocks
from dma_attn.schedule import key_ranges


class _Scalars:
    """Gluon's functions that the schedule uses, for Python's numbers."""

    minimum, maximum = min, max

    @staticmethod
    def where(condition: bool, x: int, y: int) -> int:
        return x if condition else y


def test_runs_of_steps_keep_to_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of a block is in one run, of the class of the tile that it leads to."""
    monkeypatch.setattr(hopper_blocks, "gl", _Scalars)
    for q_lo, size, window, diag, sink, causal in itertools.product(
        (0, 128, 640, 1024), (128, 640, 1100, 1152), (0, 200), (0, 128, 256, 1024), (0, 128, 384),
        (False, True)
    ):
        lo, *ranges, hi = key_ranges(q_lo, q_lo + 128, 0, size, window, diag, sink, causal)
        tiles = tuple(-(-x // 128) for x in ranges)
        first = lo >> 7
        n = max(-(-hi // 128) - first, 1)
        last = first + n - 1
        steps = 0
        for run in range(4):
            begin, end = hopper_blocks.run_steps.fn(run, first, last, tiles)
            assert begin in (steps, end)
            for i in range(begin, end):
                t = last - i - 1
                high = t < tiles[0] or tiles[1] <= t < tiles[2]
                assert high == (run % 2 == 1)
            steps = max(steps, end)
        assert steps == n - 1
