"""Figures of an evaluation, as PNG, and of what caches weigh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..cache.mixed import MixedKVCache
from ..config import DMAConfig
from ..evaluation.subjects import NATIVE, Subject
from ..evaluation.summary import NeedleRow, PerplexityRow, Summary
from .figures import MARKERS, config_colours, declutter, figure_of, png

CACHES = {
    "16 bits": ("default,high=none,low=none", "none", "none"),
    "mxfp8": ("mxfp8,diag=full", "mxfp8", "mxfp8"),
    "default (int4 far)": ("default,high=none,low=int4", "none", "int4"),
    "nvfp4 far": ("default,high=none,low=nvfp4", "none", "nvfp4"),
}
_LENGTHS = tuple(256 * 2**i for i in range(10))


def draw(
    summary: Summary, settings: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, list[tuple[str, bytes]]]:
    """Metric to (what it shows, PNG)."""
    found: dict[str, list[tuple[str, bytes]]] = {}
    changed = [row for row in summary.perplexity if row.change is not None]
    if changed:
        dims = int(environment.get("head_dim", 128))
        found["perplexity"] = [
            ("Change of perplexity against the model as it is, 95 % intervals over windows",
             change_bars(changed)),
            ("Quality against the bits that a key has on average",
             quality_over_bits(changed, int(settings["tokens"]), dims)),
        ]
    if summary.needles:
        found["needles"] = [("Passkeys found by length and depth", needle_maps(summary.needles))]
    if summary.layers:
        colours = config_colours(row.subject for row in summary.layers)
        figure, axes = figure_of(3.9)
        for i, row in enumerate(summary.layers):
            axes.plot(row.by_layer, label=row.subject, color=colours[row.subject],
                      marker=MARKERS[i % len(MARKERS)], markersize=4)
        axes.set_yscale("log")
        axes.set_xlabel("layer")
        axes.set_ylabel("relative error, mean over heads")
        axes.legend(frameon=False, fontsize=9)
        declutter(axes)
        found["layers"] = [("Error of the attention output by layer", png(figure))]
    return found


def change_bars(rows: Sequence[PerplexityRow]) -> bytes:
    """Change of perplexity in percent, with whiskers where there is an interval."""
    colours = config_colours(row.subject for row in rows)
    figure, axes = figure_of(0.42 * len(rows) + 1.5)
    for i, row in enumerate(rows):
        assert row.change is not None  # rows have one
        x = row.change
        spread = [[x.estimate - x.low], [x.high - x.estimate]]
        known = bool(np.isfinite(spread).all())
        axes.barh(i, x.estimate, color=colours[row.subject], height=0.62,
                  xerr=spread if known else None,
                  error_kw={"elinewidth": 1.2, "capsize": 3, "ecolor": "#333333"})
    axes.set_yticks(range(len(rows)), [row.subject for row in rows])
    axes.invert_yaxis()
    axes.axvline(0, color="#444444", linewidth=0.8)
    axes.set_xlabel("change of perplexity, %")
    declutter(axes)
    return png(figure)


def quality_over_bits(rows: Sequence[PerplexityRow], tokens: int, head_dim: int) -> bytes:
    """Change of perplexity over bits a key's element: keys that a query sees, averaged over a
    window of attention; those that a cache of a window's tokens keeps."""
    colours = config_colours(row.subject for row in rows)
    figure, axes = figure_of(3.9)
    for i, row in enumerate(rows):
        assert row.change is not None  # rows have one
        bits = key_bits(Subject.parse(row.subject), tokens, head_dim)
        axes.plot(bits, row.change.estimate, color=colours[row.subject], label=row.subject,
                  marker=MARKERS[i % len(MARKERS)], linestyle="none", markersize=8)
    axes.axhline(0, color="#444444", linewidth=0.8)
    axes.set_xlabel("bits for each element of a key")
    axes.set_ylabel("change of perplexity, %")
    axes.legend(frameon=False, fontsize=9)
    declutter(axes)
    return png(figure)


def key_bits(subject: Subject, tokens: int, head_dim: int) -> float:
    """Bits for each element of K; 16 for the model as it is."""
    from .figures import high_share

    if subject.label == NATIVE:
        return 16.0
    config = subject.config or DMAConfig()
    if subject.cached:
        config = subject.k_config or DMAConfig(high="none", low="int4")
        cache = MixedKVCache(1, 1, head_dim, tokens, device="meta", config=config)
        kept = sum(x.element_size() * x.numel() for s in cache.k.stores for x in s.parts)
        return 8 * kept / (tokens * head_dim)
    high = high_share(tokens, config)

    def of(name: str) -> float:
        cache = MixedKVCache(1, 1, head_dim, 128, device="meta", v_high="none", v_low="none",
                             config=DMAConfig(high=name, low=name))
        return sum(x.element_size() * x.numel() for x in cache.k.low.parts) * 8 / 128 / head_dim

    return high * of(config.high) + (1 - high) * of(config.low)


def needle_maps(rows: Sequence[NeedleRow]) -> bytes:
    """One map a subject: lengths by depths, the share of passkeys found."""
    subjects = list(dict.fromkeys(row.subject for row in rows))
    depths = sorted({depth for row in rows for depth, _, _ in row.depths})
    figure, all_axes = figure_of(0.9 + (0.5 + 0.4 * len(depths)) * len(subjects), len(subjects))
    for axes, subject in zip(np.atleast_1d(all_axes), subjects, strict=True):
        own = [row for row in rows if row.subject == subject]
        share = np.full((len(depths), len(own)), np.nan)
        for x, row in enumerate(own):
            for depth, rate, _ in row.depths:
                share[depths.index(depth), x] = rate.estimate
        axes.imshow(share, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        for (y, x), value in np.ndenumerate(share):
            if np.isnan(value):
                continue
            axes.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=9,
                      color="black" if value > 0.6 else "white")
        axes.set_xticks(range(len(own)), [str(row.tokens) for row in own])
        axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
        axes.set_title(f"{subject}: % found, depth over tokens", fontsize=9, loc="left")
    return png(figure)


def memory_lines() -> bytes:
    """Bytes of a layer's cache for one KV head of 128 dims, over its length."""
    colours = config_colours(CACHES)
    figure, axes = figure_of(3.9)
    for i, (name, (text, v_high, v_low)) in enumerate(CACHES.items()):
        sizes = [MixedKVCache(1, 1, 128, n, config=DMAConfig.parse(text), v_high=v_high,
                              v_low=v_low, device="meta").nbytes() for n in _LENGTHS]
        axes.loglog(_LENGTHS, sizes, label=name, color=colours[name],
                    marker=MARKERS[i % len(MARKERS)], markersize=4, base=2)
    axes.set_xlabel("tokens")
    axes.set_ylabel("bytes")
    axes.legend(frameon=False, fontsize=9)
    declutter(axes)
    return png(figure)
