"""One page of many results: evaluations, ablations and benchmarks, in the order of their files.

    *.jsonl            of `dma-attn eval`
    *.csv              of `dma-attn bench` and `ablate`
    results.json       of `dma-attn demo`
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..bench.results import PREFILL_COLUMNS, read_csv
from ..config import DMAConfig
from ..evaluation.errors import SettingError
from ..evaluation.layer_error import AttentionMap
from ..evaluation.records import Measured
from ..evaluation.subjects import Subject
from ..evaluation.summary import Summary, summarise
from . import bench_figures, eval_figures
from .eval_tables import summary_tables
from .figures import precision_map
from .html import data_uri, render

TITLE = "Mixed-precision attention: results"


@dataclass(frozen=True)
class Figure:
    """An image, PNG or SVG, and what it shows."""

    image: bytes
    alt: str


@dataclass(frozen=True)
class Section:
    """A heading with figures and a table; `folded`: the table is shown on demand."""

    title: str
    text: str = ""
    figures: Sequence[Figure] = ()
    columns: Sequence[str] = ()
    lines: Sequence[Sequence[str]] = ()
    facts: str = ""
    folded: bool = field(default=False)


def write_merged(paths: Iterable[Path], page: Path) -> None:
    """Write the page.

    Raises:
        SettingError: a file that is none of these, or none at all.
        OSError: a file cannot be read, or the page written.
    """
    files = [file for path in paths for file in _files(path)]
    if not files:
        raise SettingError("expected some .jsonl, .csv or results.json, got none", "results")
    sections = [section for file in files for section in _sections(file)]
    rates = [file for file in files if file.suffix == ".csv" and _is_prefill(file)]
    if rates:
        drawn = bench_figures.draw(bench_figures.read_rates(rates))
        sections.insert(0, Section("Speed over length", figures=[
            Figure(svg, name.removesuffix(".svg").replace("_", " ")) for name, svg in
            drawn.items()]))
    sections.insert(0, Section(
        "Memory over length", "Bytes that a KV cache keeps of one layer's keys and values, for "
        "each KV head of 128 dims, allocated for the length.",
        [Figure(eval_figures.memory_lines(), "KV cache bytes over length, by formats")]))
    text = render("merged.html", title=TITLE, sections=sections, image=data_uri,
                  sources=[file.name for file in files])
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return [x for x in sorted(path.iterdir())
            if x.suffix in (".jsonl", ".csv") or x.name == "results.json"]


def _sections(file: Path) -> list[Section]:
    if file.suffix == ".jsonl":
        try:
            measured = Measured(file)
        except SettingError as error:
            raise SettingError(error.problem, "results") from error
        return _evaluation(file.stem, measured, summarise(measured))
    if file.suffix == ".csv":
        try:
            facts, columns, lines = read_csv(file)
        except ValueError as error:
            raise SettingError(str(error), "results") from error
        return [Section(file.stem.replace("_", " "), columns=columns, lines=lines,
                        facts=_shown(facts), folded=len(lines) > 12)]
    if file.suffix == ".json":
        return [_demo(file)]
    raise SettingError(f"expected a .jsonl, .csv or .json file, got {file}", "results")


def _evaluation(name: str, measured: Measured, summary: Summary) -> list[Section]:
    figures = eval_figures.draw(summary, measured.settings, measured.environment)
    facts = _shown({**measured.environment, **measured.settings})
    drawn = [x for x in measured.lines if x["task"] == "maps"
             and (w := torch.tensor(x["weights"])).isfinite().all() and w.max() > 0]
    maps = [
        Figure(precision_map(AttentionMap(x["layer"], x["head"], x["tokens"], x["cell"],
                                          torch.tensor(x["weights"])),
                             Subject.parse(x["subject"]).config or DMAConfig()),
               f"{x['subject']}: layer {x['layer']}, head {x['head']}")
        for x in drawn
    ]
    sections = [
        Section(f"{title} ({name})", columns=columns, lines=lines, facts=facts,
                figures=[Figure(png, alt) for alt, png in figures.get(metric, ())])
        for metric, title, columns, lines in summary_tables(summary)
    ]
    empty = [x["subject"] for x in measured.lines if x["task"] == "maps" and x not in drawn]
    if maps or empty:
        text = "|P quantised - P|, means over squares, logarithmic, with the borders of the tiles."
        if empty:
            text += f" Nothing to draw, since without error or not finite: {', '.join(empty)}."
        sections.append(Section(f"Error of the attention weights ({name})", text, maps,
                                facts=facts))
    return sections


def _demo(file: Path) -> Section:
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        lines = [[label, f"{row['value']:.3f}", "" if row["change_percent"] is None else
                  f"{row['change_percent']:+.2f}"] for label, row in results["perplexity"].items()]
        facts = _shown({**results["environment"], **results["settings"]})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(f"expected a demo's results.json, got {file}", "results") from error
    return Section(f"Perplexity ({file.parent.name or file.stem})",
                   columns=("configuration", "perplexity", "change, %"), lines=lines, facts=facts)


def _is_prefill(file: Path) -> bool:
    return tuple(read_csv(file)[1]) == PREFILL_COLUMNS


def _shown(facts: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
