"""The report's figures as PNG bytes: perplexity bars, error by layer, and the precision map.

Drawn on matplotlib figures of their own (no pyplot, no display), small enough that the text stays
readable at the width of a phone.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, MultipleLocator

from ..config import DMAConfig
from ..evaluation.layer_error import AttentionMap, LayerError
from ..schedule import TILE, is_high
from .results import signed_percent

# Okabe and Ito's palette and two more: told apart by colour-blind readers and in grey print.
_OWN_COLOURS = {"default": "#0072B2", "paper": "#D55E00"}
_COLOURS = ("#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#444444", "#8A5A2B", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DIAGONAL, _SINK, _LOW = "#0072B2", "#E69F00", "#7A7A7A"
_WIDTH = 6.0


def config_colours(labels: Iterable[str]) -> dict[str, str]:
    """One colour a configuration, for all figures; "default" and "paper" always have their own."""
    others = itertools.cycle(_COLOURS)
    return {label: _OWN_COLOURS.get(label) or next(others) for label in labels}


def perplexity_bars(
    changes: Mapping[str, tuple[float, float | None]],
    values: Mapping[str, float],
    native: str,
    colours: Mapping[str, str],
) -> bytes:
    """Change of perplexity against native, in percent, one bar a configuration.

    Args:
        changes: Label to (change in percent, its standard error or None), native left out.
        values: Label to perplexity, native too.
        colours: What `config_colours` gives for the labels.
    """
    return png(_perplexity_figure(changes, values, native, colours))


def _perplexity_figure(
    changes: Mapping[str, tuple[float, float | None]],
    values: Mapping[str, float],
    native: str,
    colours: Mapping[str, str],
) -> Figure:
    labels = list(changes)
    figure, axes = figure_of(0.42 * len(labels) + 1.5)
    rows = np.arange(len(labels))
    drawn = [_finite(change) for change, _error in changes.values()]
    errors = [_finite(error) for _change, error in changes.values()]
    axes.barh(
        rows,
        drawn,
        xerr=errors,
        color=[colours[label] for label in labels],
        error_kw={"elinewidth": 1.2, "capsize": 3, "ecolor": "#333333"},
        height=0.62,
    )
    low = min([0.0, *(width - error for width, error in zip(drawn, errors, strict=True))])
    high = max([0.1, *(width + error for width, error in zip(drawn, errors, strict=True))])
    for row, label in zip(rows, labels, strict=True):
        text = f"{values[label]:.3f}  ({signed_percent(*changes[label])})"
        place = axes.get_yaxis_transform()  # right of the axes: no bar or whisker reaches it
        axes.text(1.02, row, text, va="center", fontsize=9, transform=place)
    margin = 0.04 * (high - low)
    axes.set_xlim(low - margin, high + margin)
    axes.set_yticks(rows, labels)
    axes.invert_yaxis()
    axes.axvline(0, color="#333333", linewidth=1)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"change against native ({values[native]:.3f}), %; lower is better")
    declutter(axes)
    return figure


def layer_error_lines(
    layers: Mapping[str, Sequence[LayerError]], colours: Mapping[str, str]
) -> bytes:
    """Relative L2 error of the attention output by layer, one line a configuration.

    Args:
        colours: What `config_colours` gives for the labels.
    """
    figure, axes = figure_of(3.9)
    for index, (label, rows) in enumerate(layers.items()):
        axes.plot(
            [row.layer for row in rows],
            [row.rel_l2 for row in rows],
            label=label,
            color=colours[label],
            marker=MARKERS[index % len(MARKERS)],
            markersize=3.5,
            linewidth=2.4 if label == "default" else 1.2,
        )
    if any(row.rel_l2 > 0 for rows in layers.values() for row in rows):
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        axes.yaxis.set_minor_formatter(_percent)
    axes.yaxis.set_major_formatter(_percent)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layer")
    axes.set_ylabel("relative L2 error of the output")
    axes.grid(True, which="both", color="#E4E4E4", linewidth=0.7)
    axes.legend(fontsize=9, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    declutter(axes)
    return png(figure)


def precision_map(attention: AttentionMap, config: DMAConfig) -> bytes:
    """Which tiles are high precision, drawn over the attention weights of a real head."""
    figure, axes = figure_of(6.0)
    weights, size = attention.weights.numpy(), attention.tokens
    extent = weights.shape[0] * attention.cell
    floor = max(float(np.quantile(weights[weights > 0], 0.02)), 1e-9)
    axes.imshow(
        np.maximum(weights, floor),
        norm=LogNorm(floor, max(float(weights.max()), 2 * floor)),
        cmap="Greys",
        extent=(0, extent, extent, 0),
        interpolation="nearest",
    )
    styles: dict[str, dict[str, Any]] = {
        "low": {"facecolor": "none", "edgecolor": _LOW, "linewidth": 0.7, "zorder": 2},
        "diagonal": {
            "facecolor": (_DIAGONAL, 0.15),
            "edgecolor": _DIAGONAL,
            "linewidth": 2.0,
            "zorder": 3,
        },
        "sink": {"facecolor": (_SINK, 0.15), "edgecolor": _SINK, "linewidth": 2.0, "zorder": 3},
    }
    for q_tile, k_tile, kind in tile_kinds(size, config):
        corner = (k_tile * TILE, q_tile * TILE)
        axes.add_patch(Rectangle(corner, TILE, TILE, clip_on=True, **styles[kind]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MultipleLocator(TILE * max(1, -(-size // TILE) // 8)))
    axes.set_xlim(0, size)
    axes.set_ylim(size, 0)
    axes.set_xlabel("key position")
    axes.set_ylabel("query position")
    formats = {"diagonal": config.high, "sink": config.high, "low": config.low}
    handles = [
        Patch(**{**style, "label": f"{kind}: {formats[kind]}"}) for kind, style in styles.items()
    ]
    axes.legend(handles=handles, fontsize=10, loc="upper right", framealpha=1)
    return png(figure)


def tile_kinds(tokens: int, config: DMAConfig) -> list[tuple[int, int, str]]:
    """(query tile, key tile, "diagonal" | "sink" | "low") of every causally visible tile."""
    tiles = -(-tokens // TILE)
    diag = TILE * tiles if config.diag == "full" else int(config.diag)
    kinds = []
    for q_tile in range(tiles):
        for k_tile in range(q_tile + 1):
            kind = "low"
            if is_high(q_tile, k_tile, 0, diag, 0):
                kind = "diagonal"
            elif is_high(q_tile, k_tile, 0, diag, config.sink):
                kind = "sink"
            kinds.append((q_tile, k_tile, kind))
    return kinds


def high_share(tokens: int, config: DMAConfig) -> float:
    """Share of a prompt's causally visible tiles that are high precision; it falls with length."""
    kinds = tile_kinds(tokens, config)
    return sum(kind != "low" for _q_tile, _k_tile, kind in kinds) / len(kinds)


def high_shares(attention: AttentionMap, config: DMAConfig) -> tuple[float, float]:
    """Share of the visible tiles that are high, and of the head's attention weight in them."""
    kinds = tile_kinds(attention.tokens, config)
    high = {(q_tile, k_tile) for q_tile, k_tile, kind in kinds if kind != "low"}
    tile_of = [row * attention.cell // TILE for row in range(attention.weights.shape[0])]
    mask = np.array([[(q, k) in high for k in tile_of] for q in tile_of])
    weights = attention.weights.numpy()
    return len(high) / len(kinds), float((weights * mask).sum() / weights.sum())


def _finite(value: float | None) -> float:
    """What a bar can show: 0 for None, NaN and infinities."""
    return value if value is not None and math.isfinite(value) else 0.0


def figure_of(height: float, rows: int = 1) -> tuple[Figure, Any]:
    """A figure as wide as the page, and its axes, one below the other."""
    figure = Figure(figsize=(_WIDTH, height), dpi=150, layout="constrained")
    return figure, figure.subplots(rows)


@FuncFormatter
def _percent(value: float, _position: int) -> str:
    return f"{100 * value:g}%"


def declutter(axes: Any) -> None:
    """Without the upper and the right border."""
    axes.spines[["top", "right"]].set_visible(False)


def png(figure: Figure) -> bytes:
    """A figure's bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return buffer.getvalue()
