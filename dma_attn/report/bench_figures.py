"""Figures of prefill benchmarks as SVG: TFLOP/s over length, and against the limits of an H200.

Peers are grey, this library's configurations in colours. Rates are those of the kernel alone.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..bench.peers import PEERS
from ..bench.prefill import KERNEL, Workload
from ..bench.results import PREFILL_COLUMNS, read_csv

Rates = Mapping[tuple[Workload, str], float]
"""(workload, candidate) to TFLOP/s of its kernel."""

SMS, CLOCK_HZ = 132, 1.83e9
BF16_FLOP, FP8_FLOP, EXP2 = 4096, 8192, 16
"""Dense tensor-core FLOP and exponentials that an SM of an H200 does in a clock."""

_OWN = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8A5A2B")
_GREYS = ("#222222", "#777777", "#A0A0A0", "#505050", "#8C8C8C", "#B8B8B8")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def read_rates(paths: Iterable[Path]) -> dict[tuple[Workload, str], float]:
    """`Rates` of prefill CSV files; the last file counts where several have the same.

    Raises:
        ValueError: a file is no prefill CSV, or there is no kernel among them.
    """
    rates = {}
    for path in paths:
        try:
            _facts, columns, lines = read_csv(path)
            if tuple(columns) != PREFILL_COLUMNS:
                raise ValueError(f"columns {', '.join(columns)}")
            for line in lines:
                row = dict(zip(columns, line, strict=True))
                if row["kind"] == KERNEL:
                    workload = Workload.parse(row["workload"])
                    rates[workload, row["candidate"]] = float(row["tflops"])
        except ValueError as error:
            raise ValueError(f"expected a prefill CSV, got {path} ({error})") from error
    if not rates:
        raise ValueError(f"expected rows of kind {KERNEL}, got none")
    return rates


def draw(rates: Rates) -> dict[str, bytes]:
    """File name to SVG: one by length for each head dim and mask, limits for each causal dim."""
    styles = _styles(dict.fromkeys(name for _workload, name in rates))
    images = {}
    for head_dim, causal in dict.fromkeys((w.head_dim, w.causal) for w, _name in rates):
        chosen = {
            (w, name): rate
            for (w, name), rate in rates.items()
            if (w.head_dim, w.causal) == (head_dim, causal)
        }
        mask = "causal" if causal else "full"
        images[f"prefill_d{head_dim}_{mask}.svg"] = _svg(length_figure(chosen, styles))
        if causal:
            images[f"limits_d{head_dim}.svg"] = _svg(limit_figure(chosen, styles))
    return images


def length_figure(rates: Rates, styles: Mapping[str, dict[str, Any]]) -> Figure:
    """TFLOP/s over sequence length of workloads with one head dim and mask."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for (workload, name), rate in rates.items():
        lines.setdefault(name, []).append((workload.length, rate))
    figure, axes = _figure(8.0, 4.4)
    for name in sorted(lines, key=lambda name: -max(lines[name])[1]):  # as the lines end
        lengths, values = zip(*sorted(lines[name]), strict=True)
        axes.plot(lengths, values, label=name, markersize=5, linewidth=1.8, **styles[name])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted({w.length for w, _name in rates})))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: _tokens(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, 1.05 * max(rates.values()))
    axes.set_xlabel("sequence length, tokens")
    axes.set_ylabel("TFLOP/s")
    some = next(iter(rates))[0]
    axes.set_title(f"head dim {some.head_dim}, {'causal' if some.causal else 'full'} attention")
    axes.grid(True, color="#E4E4E4", linewidth=0.7)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def limit_figure(rates: Rates, styles: Mapping[str, dict[str, Any]]) -> Figure:
    """TFLOP/s at the longest length of one head dim and mask, against `limits`."""
    longest = max((w for w, _name in rates), key=lambda w: w.length)
    bars = {name: rate for (w, name), rate in rates.items() if w == longest}
    names = sorted(bars, key=lambda name: bars[name])
    figure, axes = _figure(8.0, 5.2)
    drawn = axes.bar(names, [bars[n] for n in names], color=[styles[n]["color"] for n in names])
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over a limit's line
    axes.bar_label(drawn, fmt="%.0f", padding=2, fontsize=9, bbox=paper)
    ceilings = limits(longest.head_dim)
    for rate, label in ceilings.items():
        axes.axhline(rate, color="#444444", linewidth=1.0, linestyle="--")
        place = axes.get_yaxis_transform()  # right of the axes: no bar reaches it
        axes.text(1.01, rate, f"{rate}  {label}", va="center", fontsize=9, transform=place)
    axes.set_ylim(0, 1.05 * max(*ceilings, *bars.values()))
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{longest}; limits of {SMS} SMs at {CLOCK_HZ / 1e9} GHz")
    return figure


def limits(head_dim: int) -> dict[int, str]:
    """TFLOP/s to the label of what allows no more, equal ones joined.

    A score costs 4 * D FLOP and one exponential. With FP8 for Q K^T and bf16 for P V each product
    is half of the FLOP, so that the rates combine to their harmonic mean.
    """
    mixed = 2 / (1 / BF16_FLOP + 1 / FP8_FLOP)
    joined: dict[int, str] = {}
    for label, flop in (
        ("bf16", BF16_FLOP),
        ("FP8 QK, bf16 PV", mixed),
        ("FP8", FP8_FLOP),
        ("exp", EXP2 * 4 * head_dim),
    ):
        rate = round(SMS * CLOCK_HZ * flop / 1e12)
        joined[rate] = f"{joined[rate]} and {label}" if rate in joined else label
    return joined


def _styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and dashes of each candidate, alike in all figures."""
    markers = itertools.cycle(_MARKERS)
    own, greys = itertools.cycle(_OWN), itertools.cycle(_GREYS)
    return {
        name: {
            "color": next(greys if name in PEERS else own),
            "marker": next(markers),
            "linestyle": "--" if name in PEERS else "-",
        }
        for name in names
    }


def _tokens(length: float) -> str:
    return f"{length / 1024:g}k" if length >= 1024 else f"{length:g}"


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Figure) -> bytes:
    """The same bytes for the same figure, its text as text."""
    buffer = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "dma-attn"}):
        figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None})
    return buffer.getvalue()
