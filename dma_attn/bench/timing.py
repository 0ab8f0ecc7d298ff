"""Interleaved GPU timing: candidates take turns, so that clocks and heat meet them all alike.

After `WARMUP` calls of each candidate every round times all of them, each over enough calls to last
`seconds`. A GPU at its power limit lowers its clock tens of milliseconds after the load that caused
it: half as many calls go before those that are timed, and every other round goes backwards, A B C
C B A, so that no candidate always pays for the same neighbour. Reported are the median over the
rounds and the spread (maximum - minimum) / median. With `graph` a candidate's calls are captured
once and replayed: what the GPU needs, without the host's launch overhead. How long the host takes
to enqueue a call is measured apart, as the median over the warm-up calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

WARMUP = 20
MIN_ROUNDS = 5
GRAPH_CALLS = 4
L2_BYTES = 50 * 2**20


@dataclass(frozen=True)
class Timing:
    """Median time of one call in milliseconds, relative spread over the rounds, SM clock in MHz,
    milliseconds that the host takes to enqueue a call."""

    ms: float
    spread: float
    clock: int | None
    host: float | None = None


@dataclass(frozen=True)
class Candidate:
    """Something to time: calls that do the same work, rotated so that inputs differ (cold L2)."""

    name: str
    calls: Sequence[Callable[[], object]]
    graph: bool = True


def time_candidates(
    candidates: Sequence[Candidate], rounds: int = MIN_ROUNDS, seconds: float = 0.1
) -> dict[str, Timing]:
    """Time all candidates in turn; name -> timing.

    Raises:
        ValueError: fewer than `MIN_ROUNDS` rounds, or two candidates with one name.
    """
    if rounds < MIN_ROUNDS:
        raise ValueError(f"rounds: expected at least {MIN_ROUNDS}, got {rounds}")
    if len({c.name for c in candidates}) < len(candidates):
        raise ValueError(f"candidates: expected one each, got {[c.name for c in candidates]}")
    host = {c.name: _warm_up(c) for c in candidates}
    prepared = [(c.name, *_prepare(c, seconds)) for c in candidates]
    times: dict[str, list[float]] = {name: [] for name, *_ in prepared}
    clocks: dict[str, list[int]] = {name: [] for name, *_ in prepared}
    for i in range(rounds):
        for name, run, calls, repeats in prepared[:: -1 if i % 2 else 1]:
            for _ in range(max(1, repeats // 2)):
                run()
            elapsed, clock = _elapsed(run, repeats, _sm_clock)
            times[name].append(elapsed / (calls * repeats))
            if clock is not None:
                clocks[name].append(clock)
    return {name: summarise(times[name], clocks[name], host[name]) for name in times}


def summarise(times: Sequence[float], clocks: Sequence[int], host: float | None = None) -> Timing:
    """Median and relative spread of the rounds' times."""
    middle = statistics.median(times)
    clock = round(statistics.median(clocks)) if clocks else None
    return Timing(middle, (max(times) - min(times)) / middle, clock, host)


def _warm_up(candidate: Candidate) -> float:
    """Milliseconds that the host takes to enqueue a call: the median."""
    times = []
    for i in range(WARMUP):
        start = time.perf_counter()
        candidate.calls[i % len(candidate.calls)]()
        times.append(1000 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times)


def _prepare(candidate: Candidate, seconds: float) -> tuple[Callable[[], object], int, int]:
    """What to run, how many calls it makes, and how often it lasts `seconds`."""
    calls = max(GRAPH_CALLS, len(candidate.calls))

    def all_calls() -> None:
        for i in range(calls):
            candidate.calls[i % len(candidate.calls)]()

    run: Callable[[], object] = all_calls
    if candidate.graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_calls()
        run = graph.replay
    run()
    once, _ = _elapsed(run, 1)
    return run, calls, max(1, round(1000 * seconds / once))


def _elapsed(
    run: Callable[[], object], repeats: int, meanwhile: Callable[[], int | None] = lambda: None
) -> tuple[float, int | None]:
    """Milliseconds on the GPU's clock, and what `meanwhile` found while the GPU was at work."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    found = meanwhile()
    end.synchronize()
    return float(start.elapsed_time(end)), found


def _sm_clock() -> int | None:
    """SM clock of the current GPU in MHz, None without nvidia-ml-py."""
    try:
        return torch.cuda.clock_rate()
    except (ImportError, RuntimeError):
        return None
