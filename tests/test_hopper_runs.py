"""The runs of steps of the Hopper kernel, with its own functions called on Python's numbers."""

from __future__ import annotations

import itertools
import re

import pytest

pytest.importorskip("triton")

from dma_attn import DMAConfig, dma_attention
from dma_attn.attention.dispatch import use_native
from dma_attn.attention.kernels import hopper_blocks
from dma_attn.schedule import key_ranges
from tests.compiling import compile_only, device_tensor


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


@pytest.mark.parametrize(
    ("config", "runs"), [("default,pv=fp8", 1), ("default", 1), ("default,high=none,pv=fp8", 2)]
)
def test_runs_begin_where_they_should(config: str, runs: int) -> None:
    """Triton's passes once made every run begin at step 0, and the GPU waited for ever: the loops
    over a run's tiles, in both warpgroups, must not have a constant for their first step."""
    q, k = device_tensor(1, 4, 300, 128), device_tensor(1, 2, 300, 128)
    with use_native(), compile_only(90) as kernels:
        dma_attention(q, k, k, config=DMAConfig.parse(config), impl="triton", is_causal=True)
    (kernel,) = [x for x in kernels if x.metadata.name == "hopper_kernel"]
    loops = re.findall(r"scf\.for %\w+ = (%\w+) to .*iter_args\(.*tensor<64x128xf32",
                       kernel.asm["ttgir"])
    assert len([first for first in loops if not re.match(r"%c\d", first)]) == 2 * runs
