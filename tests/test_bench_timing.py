"""Interleaved timing: the order of turns, medians, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dma_attn.bench import timing
from dma_attn.bench.timing import Candidate, Timing, summarise, time_candidates


def test_summary() -> None:
    assert summarise([3.0, 1.0, 2.0], [1700, 1800]) == Timing(2.0, 1.0, 1750)
    assert summarise([2.0], []).clock is None


def test_turns_alternate_after_a_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def prepared(candidate: Candidate, _: float) -> tuple[Callable[[], object], int, int]:
        return (lambda: log.append(candidate.name)), 4, 1 if candidate.name == "a" else 6

    def elapsed(run: Callable[[], object], repeats: int, *_: object) -> tuple[float, None]:
        log.append(f"time {repeats}")
        return 8.0 * repeats, None

    monkeypatch.setattr(timing, "_warm_up", lambda candidate: 0.5)
    monkeypatch.setattr(timing, "_prepare", prepared)
    monkeypatch.setattr(timing, "_elapsed", elapsed)
    candidates = [Candidate(name, [lambda: None]) for name in "ab"]
    result = time_candidates(candidates, rounds=5)
    assert result["a"] == Timing(2.0, 0.0, None, 0.5)
    a, b = ["a", "time 1"], ["b", "b", "b", "time 6"]
    assert log == [*a, *b, *b, *a, *a, *b, *b, *a, *a, *b]


def test_timing_refuses_too_few_rounds_and_twins() -> None:
    with pytest.raises(ValueError, match="rounds"):
        time_candidates([], rounds=4)
    twin = Candidate("a", [lambda: None])
    with pytest.raises(ValueError, match="one each"):
        time_candidates([twin, twin])
