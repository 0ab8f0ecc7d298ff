"""Write a finished demo into a folder: `report.html`, `results.json` and the figures as PNG."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from ..config import DMAConfig
from ..evaluation.demo import NATIVE, DemoResults
from . import figures
from .html import render_html
from .results import change_percent, finite, results_dict, signed_percent, write_json

_LONG = 8192  # a prompt length at which most tiles are low


def write_report(results: DemoResults, folder: Path) -> Path:
    """Write the report, replacing an older one of the same name; returns the path of the page.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    native = results.perplexity[NATIVE]
    changes = {
        label: change_percent(result, native)
        for label, result in results.perplexity.items()
        if label != NATIVE
    }
    values = {label: result.value for label, result in results.perplexity.items()}
    colours = figures.config_colours(changes)
    config = results.configs["default"] or DMAConfig()
    prompt_tokens = results.answers["default"].prompt_tokens
    attention = results.layer_error.attention_map
    images = {
        "perplexity": figures.perplexity_bars(changes, values, NATIVE, colours),
        "layer_error": figures.layer_error_lines(results.layer_error.layers, colours),
        "precision_map": figures.precision_map(attention, config),
    }
    tile_share, weight_share = figures.high_shares(attention, config)
    mean_error = {
        label: fmean(row.rel_l2 for row in rows)
        for label, rows in results.layer_error.layers.items()
    }
    content = results_dict(results)
    write_json(folder / "results.json", content)
    for name, png in images.items():
        (folder / f"{name}.png").write_bytes(png)
    page = folder / "report.html"
    text = render_html(
        content,
        images,
        signed=signed_percent,
        config=config.to_dict(),
        window_share=figures.high_share(results.settings.tokens, config),
        long_tokens=_LONG,
        long_share=figures.high_share(_LONG, config),
        prompt_tokens=prompt_tokens,
        prompt_share=figures.high_share(prompt_tokens, config),
        tile_share=tile_share,
        weight_share=weight_share,
        mean_error=finite(mean_error),
    )
    page.write_text(text, encoding="utf-8")
    return page
