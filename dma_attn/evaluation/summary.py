"""The tables of an evaluation, from its JSON lines: estimates with 95 % intervals, and differences
to the model as it is, paired over the same windows, trials and prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from .agreement import shared
from .head_error import HeadErrors, outlying_layers
from .records import Measured
from .statistics import Interval, mean_interval, paired_interval, rate_interval
from .subjects import NATIVE


@dataclass(frozen=True)
class PerplexityRow:
    """Perplexity, and its change against native in percent; intervals over windows."""

    subject: str
    windows: int
    perplexity: Interval
    change: Interval | None


@dataclass(frozen=True)
class NeedleRow:
    """Found passkeys at one length, by depth and in all, and the difference to native in points."""

    subject: str
    tokens: int
    depths: tuple[tuple[float, Interval, int], ...]
    rate: Interval
    trials: int
    difference: Interval | None


@dataclass(frozen=True)
class LayerRow:
    """Attention error over layers and heads: mean and largest relative Frobenius norm, smallest
    cosine, largest of a row; layers far above the others; the mean by layer."""

    subject: str
    mean: float
    largest: float
    where: tuple[int, int]
    cosine: float
    worst_row: float
    outlying: tuple[int, ...]
    by_layer: tuple[float, ...]


@dataclass(frozen=True)
class AgreementRow:
    """Greedy tokens written as the model writes them before the first difference, a prompt, and
    how many prompts have no difference."""

    subject: str
    prompts: int
    new_tokens: int
    shared: Interval
    same: int


@dataclass(frozen=True)
class TaskRow:
    """A metric of a task of lm-evaluation-harness, with its standard error and native's value."""

    subject: str
    task: str
    metric: str
    value: float
    standard_error: float | None
    native: float | None


@dataclass(frozen=True)
class Summary:
    """Whatever was measured."""

    perplexity: tuple[PerplexityRow, ...]
    needles: tuple[NeedleRow, ...]
    layers: tuple[LayerRow, ...]
    agreement: tuple[AgreementRow, ...]
    tasks: tuple[TaskRow, ...]


def summarise(records: Measured) -> Summary:
    """The tables; subjects in the order in which they came."""
    subjects = list(dict.fromkeys(x["subject"] for x in records.lines))
    return Summary(
        tuple(row for s in subjects for row in _perplexity(records, s)),
        tuple(row for s in subjects for row in _needles(records, s)),
        tuple(row for s in subjects for row in _layers(records, s)),
        tuple(row for s in subjects for row in _agreement(records, s)),
        tuple(row for s in subjects for row in _tasks(records, s)),
    )


def _perplexity(records: Measured, subject: str) -> list[PerplexityRow]:
    nll = _by_unit(records, "perplexity", subject, "nll")
    if not nll:
        return []
    native = _by_unit(records, "perplexity", NATIVE, "nll")
    pairs = [(nll[u], native[u]) for u in nll if u in native]
    change = None
    if subject != NATIVE and pairs:
        gap = mean_interval([a - b for a, b in pairs])
        change = Interval(*(100 * math.expm1(min(x, 700.0))
                            for x in (gap.estimate, gap.low, gap.high)))
    mean = mean_interval(list(nll.values()))
    value = Interval(*(math.exp(min(x, 700.0)) for x in (mean.estimate, mean.low, mean.high)))
    return [PerplexityRow(subject, len(nll), value, change)]


def _needles(records: Measured, subject: str) -> list[NeedleRow]:
    found = _by_unit(records, "needles", subject, "found")
    native = _by_unit(records, "needles", NATIVE, "found")
    rows = []
    for tokens in dict.fromkeys(u[0] for u in found):
        units = [u for u in found if u[0] == tokens]
        depths = tuple((u[1], rate_interval(sum(found[u]), len(found[u])), len(found[u]))
                       for u in units)
        every: list[bool] = [x for u in units for x in found[u]]
        both = [u for u in units if u in native]
        difference = None
        if subject != NATIVE and both:
            gap = paired_interval([x for u in both for x in native[u]],
                                  [x for u in both for x in found[u]])
            difference = Interval(*(100 * x for x in (gap.estimate, gap.low, gap.high)))
        rows.append(NeedleRow(subject, tokens, depths, rate_interval(sum(every), len(every)),
                              len(every), difference))
    return rows


def _layers(records: Measured, subject: str) -> list[LayerRow]:
    lines = records.of("layers", subject)
    if not lines:
        return []
    errors = [HeadErrors(x["layer"], tuple(x["rel_l2"]), tuple(x["cosine"]),
                         tuple(x["worst_row"])) for x in lines[0]["layers"]]
    heads = [(e, x.layer, h) for x in errors for h, e in enumerate(x.rel_l2)]
    largest, layer, head = max(heads, key=lambda x: math.inf if math.isnan(x[0]) else x[0])
    return [LayerRow(
        subject, fmean(e for e, _, _ in heads), largest, (layer, head),
        min(min(x.cosine) for x in errors), max(max(x.worst_row) for x in errors),
        tuple(outlying_layers(errors)), tuple(fmean(x.rel_l2) for x in errors),
    )]


def _agreement(records: Measured, subject: str) -> list[AgreementRow]:
    tokens = _by_unit(records, "agreement", subject, "tokens")
    native = _by_unit(records, "agreement", NATIVE, "tokens")
    pairs: Sequence[tuple[list[int], list[int]]] = [
        (tokens[u], native[u]) for u in tokens if u in native]
    if subject == NATIVE or not pairs:
        return []
    new = len(pairs[0][0])
    mean = mean_interval([float(shared(a, b)) for a, b in pairs])
    mean = Interval(mean.estimate, max(mean.low, 0.0), min(mean.high, float(new)))
    return [AgreementRow(subject, len(pairs), new, mean,
                         sum(a == b for a, b in pairs))]


def _tasks(records: Measured, subject: str) -> list[TaskRow]:
    native = _by_unit(records, "tasks", NATIVE, "results")
    rows = []
    for unit, results in _by_unit(records, "tasks", subject, "results").items():
        for task, metrics in results.items():
            for name, value in metrics.items():
                metric, _, kind = name.partition(",")
                if not metric.endswith("_stderr") and kind:
                    plain = native.get(unit, {}).get(task, {}).get(name)
                    rows.append(TaskRow(
                        subject, task, metric, value, metrics.get(f"{metric}_stderr,{kind}"),
                        None if subject == NATIVE else plain))
    return rows


def _by_unit(records: Measured, task: str, subject: str, value: str) -> dict[tuple[Any, ...], Any]:
    return {tuple(x["unit"]): x[value] for x in records.of(task, subject)}
