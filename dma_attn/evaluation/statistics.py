"""Error bars: 95 % intervals of means, of success rates and of paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, stdev

Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval; -inf and inf where the data give none."""

    estimate: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of independent values, by Student's t; one value, or one that is not finite, has no
    interval.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("values: expected at least one")
    mean = sum(values) / len(values)
    if len(values) == 1 or not math.isfinite(mean):
        return Interval(mean, -math.inf, math.inf)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def rate_interval(successes: int, trials: int) -> Interval:
    """A success rate, by Wilson's score interval (JASA 22, 1927).

    Raises:
        ValueError: no trials, or successes out of range.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"expected 0 <= successes <= trials, trials >= 1, got {successes} of "
                         f"{trials}")
    rate = successes / trials
    middle = (rate + Z * Z / (2 * trials)) / (1 + Z * Z / trials)
    half = Z * math.sqrt(rate * (1 - rate) / trials + Z * Z / (4 * trials * trials))
    half /= 1 + Z * Z / trials
    return Interval(rate, min(max(middle - half, 0.0), rate), max(min(middle + half, 1.0), rate))


def paired_interval(before: Sequence[bool], after: Sequence[bool]) -> Interval:
    """after - before of success rates over the same trials, with half a trial added to each of the
    four outcomes (Agresti and Min, Statistics in Medicine 24, 2005).

    Raises:
        ValueError: no trials, or not the same number.
    """
    if not before or len(before) != len(after):
        raise ValueError(f"expected as many trials of both, got {len(before)} and {len(after)}")
    gained = sum(not a and b for a, b in zip(before, after, strict=True)) + 0.5
    lost = sum(a and not b for a, b in zip(before, after, strict=True)) + 0.5
    n = len(before) + 2
    middle = (gained - lost) / n
    half = Z * math.sqrt(gained + lost - (gained - lost) ** 2 / n) / n
    estimate = (sum(after) - sum(before)) / len(before)
    return Interval(estimate, max(middle - half, -1.0), min(middle + half, 1.0))


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t (G. W. Hill, Algorithm 396, CACM 13, 1970); off by less
    than 0.1 % for 3 degrees of freedom, exact for 1 and 2.

    Raises:
        ValueError: freedom < 1.
    """
    if freedom < 1:
        raise ValueError(f"freedom: expected at least 1, got {freedom}")
    p = 0.05  # of both tails
    if freedom == 1:
        return 1 / math.tan(p * math.pi / 2)
    if freedom == 2:
        return math.sqrt(2 / (p * (2 - p)) - 2)
    a = 1 / (freedom - 0.5)
    b = 48 / (a * a)
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * freedom
    y = (d * p) ** (2 / freedom)
    if y > 0.05 + a:
        x = -Z
        y = x * x
        if freedom < 5:
            c += 0.3 * (freedom - 4.5) * (x + 0.6)
        c += (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = math.expm1(a * y * y)
    else:
        y = ((1 / (((freedom + 6) / (freedom * y) - 0.089 * d - 0.822) * (freedom + 2) * 3)
              + 0.5 / (freedom + 4)) * y - 1) * (freedom + 1) / (freedom + 2) + 1 / y
    return math.sqrt(freedom * y)
