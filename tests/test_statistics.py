"""Error bars: quantiles against tables, coverage against known distributions."""

from __future__ import annotations

import math
import random

import pytest

from dma_attn.evaluation.statistics import (
    Interval,
    mean_interval,
    paired_interval,
    rate_interval,
    t_quantile,
)


@pytest.mark.parametrize("freedom, expected", [
    (1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (5, 2.57058), (7, 2.36462),
    (11, 2.20099), (23, 2.06866), (29, 2.04523), (120, 1.97993), (10000, 1.96020),
])
def test_quantiles_of_students_t(freedom: int, expected: float) -> None:
    """Against a printed table."""
    assert t_quantile(freedom) == pytest.approx(expected, rel=1e-3 if freedom == 3 else 2e-4)


def test_a_mean_by_hand() -> None:
    half = 4.30265 * 1.0 / math.sqrt(3)
    assert mean_interval([1.0, 2.0, 3.0]) == Interval(
        2.0, pytest.approx(2 - half, rel=1e-4), pytest.approx(2 + half, rel=1e-4))
    assert mean_interval([5.0]) == Interval(5.0, -math.inf, math.inf)
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([])
    for bad in ([1.0, math.inf], [1.0, math.nan, 2.0], [math.inf, -math.inf]):
        found = mean_interval(bad)
        assert not math.isfinite(found.estimate)
        assert (found.low, found.high) == (-math.inf, math.inf)


def test_a_rate_by_hand() -> None:
    """Wilson's interval for 0, 5 and 10 of 10, as tables have it."""
    for found, low, high in ((0, 0.0, 0.27753), (5, 0.23659, 0.76341), (10, 0.72247, 1.0)):
        interval = rate_interval(found, 10)
        assert interval.estimate == found / 10
        assert (interval.low, interval.high) == (pytest.approx(low, abs=1e-5),
                                                 pytest.approx(high, abs=1e-5))
    for bad in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="successes"):
            rate_interval(*bad)


def test_paired_by_hand() -> None:
    """200 trials, none discordant, then 7 lost and 2 gained of them."""
    same = paired_interval([True] * 200, [True] * 200)
    assert same == Interval(0.0, pytest.approx(-1.959964 / 202), pytest.approx(1.959964 / 202))
    after = [False] * 7 + [True] * 193
    before = [True] * 198 + [False] * 2
    found = paired_interval(before, after)
    half = 1.959964 * math.sqrt(10 - 25 / 202) / 202
    assert found == Interval(-0.025, pytest.approx(-5 / 202 - half), pytest.approx(-5 / 202 + half))
    lost = paired_interval([True] * 12, [False] * 12)
    assert lost.estimate == lost.low == -1.0 < lost.high < 0
    for bad in ([], [True]):
        with pytest.raises(ValueError, match="as many"):
            paired_interval(bad, [])


@pytest.mark.parametrize("size", [3, 6, 12])
def test_means_are_covered(size: int) -> None:
    """A normal distribution's mean is in 95 % of the intervals: within 4 standard errors here."""
    draw = random.Random(size)
    trials = 4000
    covered = 0
    for _ in range(trials):
        x = mean_interval([draw.gauss(2.3, 0.4) for _ in range(size)])
        covered += x.low <= 2.3 <= x.high
    assert abs(covered / trials - 0.95) <= 4 * math.sqrt(0.95 * 0.05 / trials)


@pytest.mark.parametrize("rate", [0.3, 0.9])
def test_rates_are_covered(rate: float) -> None:
    """Wilson's interval covers 95 % about, on average over numbers of trials."""
    draw = random.Random(1)
    covered, trials = 0, 0
    for size in range(20, 60):
        for _ in range(100):
            x = rate_interval(sum(draw.random() < rate for _ in range(size)), size)
            covered += x.low <= rate <= x.high
            trials += 1
    assert 0.94 <= covered / trials <= 0.97


def test_paired_differences_are_covered() -> None:
    """Discordant pairs of known probabilities."""
    draw = random.Random(2)
    covered = 0
    for _ in range(3000):
        before, after = [], []
        for _ in range(100):
            u = draw.random()
            before.append(u < 0.85)
            after.append(u < 0.75 or 0.85 <= u < 0.88)  # loses 10 %, gains 3 %
        x = paired_interval(before, after)
        covered += x.low <= -0.07 <= x.high
    assert 0.935 <= covered / 3000 <= 0.975
