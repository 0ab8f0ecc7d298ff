"""An evaluation's summary, and an ablation's rows, as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from rich.table import Table

from ..evaluation.ablation import METRICS, AblationRow, FusionRow
from ..evaluation.statistics import Interval
from ..evaluation.summary import NeedleRow, Summary

Lines = list[list[str]]


def summary_tables(summary: Summary) -> Iterator[tuple[str, str, list[str], Lines]]:
    """Metric, title, columns and lines of each that was measured."""
    if summary.perplexity:
        yield ("perplexity", "Perplexity, 95 % intervals over windows",
               ["subject", "windows", "perplexity", "change, %"],
               [[p.subject, str(p.windows), _shown(p.perplexity, ".3f"),
                 "" if p.change is None else _shown(p.change, "+.2f")]
                for p in summary.perplexity])
    if summary.needles:
        depths = sorted({d for n in summary.needles for d, _, _ in n.depths})
        yield ("needles", "Passkeys found, %, 95 % intervals",
               ["subject", "tokens", "trials", *(f"at {d:g}" for d in depths), "in all",
                "difference, points"],
               [[n.subject, str(n.tokens), str(n.trials),
                 *(_at(n, d) for d in depths),
                 _shown(Interval(*(100 * x for x in (n.rate.estimate, n.rate.low, n.rate.high))),
                        ".0f"),
                 "" if n.difference is None else _shown(n.difference, "+.1f")]
                for n in summary.needles])
    if summary.layers:
        yield ("layers", "Error of the attention output against 32 bits, by head",
               ["subject", "mean", "largest", "its layer, head", "least cosine", "worst row",
                "outlying layers"],
               [[r.subject, f"{r.mean:.4f}", f"{r.largest:.4f}", f"{r.where[0]}, {r.where[1]}",
                 f"{r.cosine:.5f}", f"{r.worst_row:.3f}",
                 ", ".join(f"layer {i}" for i in r.outlying) or "none"]
                for r in summary.layers])
    if summary.agreement:
        yield ("agreement", "Greedy tokens as the model writes them, 95 % intervals over prompts",
               ["subject", "prompts", "before the first difference", "of", "prompts all the same"],
               [[a.subject, str(a.prompts), _shown(a.shared, ".1f"), str(a.new_tokens),
                 str(a.same)] for a in summary.agreement])

    if summary.tasks:
        yield ("tasks", "Tasks of lm-evaluation-harness",
               ["subject", "task", "metric", "value", "standard error", "native"],
               [[t.subject, t.task, t.metric, f"{t.value:.4f}",
                 "" if t.standard_error is None else f"{t.standard_error:.4f}",
                 "" if t.native is None else f"{t.native:.4f}"] for t in summary.tasks])


def _at(row: NeedleRow, depth: float) -> str:
    return "".join(f"{100 * r.estimate:.0f}" for d, r, _ in row.depths if d == depth)


def eval_tables(summary: Summary) -> Iterator[Table]:
    """One table a metric that was measured."""
    for _, title, (first, *others), lines in summary_tables(summary):
        table = _table(title, first, *others)
        for line in lines:
            table.add_row(*line)
        yield table


_SHOWN = ("high_percent", *METRICS, "ms")
ABLATION_COLUMNS = ("variant", "numerics", *_SHOWN, *(f"paper_{name}" for name in _SHOWN))


def ablation_cells(rows: Iterable[AblationRow]) -> list[list[str]]:
    """One line a row, in the order of `ABLATION_COLUMNS`; empty where nothing was measured."""

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.5g}"

    return [[r.variant, r.numerics, *(cell(getattr(r, name)) for name in _SHOWN),
             *(cell(r.reported.get(name)) for name in _SHOWN)] for r in rows]


def ablation_table(name: str, rows: Iterable[AblationRow]) -> Table:
    """The rows, what the paper reports in brackets, without columns that are empty."""
    rows = list(rows)
    kept = [x for x in _SHOWN if any(getattr(r, x) is not None or x in r.reported for r in rows)]
    table = _table(f"Ablation: {name} (in brackets: the paper)", "variant", "numerics",
                   *(x.replace("_", " ").replace("percent", "%") for x in kept))
    for r in rows:
        cells = []
        for x in kept:
            value, reported = getattr(r, x), r.reported.get(x)
            cells.append(("" if value is None else f"{value:.4g}")
                         + ("" if reported is None else f" ({reported:.4g})"))
        table.add_row(r.variant, r.numerics, *cells)
    return table


FUSION_COLUMNS = ("stage", "numerics", "tokens", "us", "host_us", "paper_us")


def fusion_cells(rows: Iterable[FusionRow]) -> list[list[str]]:
    """One line a row, in the order of `FUSION_COLUMNS`."""
    return [[r.stage, r.numerics, str(r.tokens), f"{r.us:.1f}", f"{r.host_us:.0f}",
             "" if r.reported_us is None else f"{r.reported_us:g}"] for r in rows]


def fusion_table(rows: Iterable[FusionRow]) -> Table:
    """The rows as they are written."""
    first, *others = FUSION_COLUMNS
    table = _table("Ablation: fusion of the quantiser", first, *others)
    for line in fusion_cells(rows):
        table.add_row(*line)
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _shown(x: Interval, form: str) -> str:
    """`1.2 (1.0 to 1.4)`; without the interval where there is none."""
    if not math.isfinite(x.low + x.high) or x.high > 1e300:
        return format(x.estimate, form)
    return f"{x.estimate:{form}} ({x.low:{form}} to {x.high:{form}})"
