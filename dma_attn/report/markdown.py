"""Results as Markdown, for docs/results.md: a CSV file's table, an evaluation's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..bench.results import read_csv
from ..evaluation.records import Measured
from ..evaluation.summary import summarise
from .eval_tables import summary_tables


def markdown(path: Path, name: str | None = None) -> str:
    """Sections of a file: its name or the one given, its facts in one line, its table; for the
    .jsonl of `dma-attn eval` one for each metric that was measured.

    Raises:
        ValueError: the file holds no results.
    """
    name = name or path.stem
    if path.suffix != ".jsonl":
        return _section(name, *read_csv(path))
    measured = Measured(path)
    facts = {**measured.environment, **measured.settings}
    sections = [_section(f"{name}_{metric}", facts, columns, lines, f"{title}.\n\n")
                for metric, title, columns, lines in summary_tables(summarise(measured))]
    if not sections:
        raise ValueError(f"{path}: expected an evaluation with results, got none")
    return "\n".join(sections)


def _section(
    name: str,
    facts: Mapping[str, object],
    columns: Sequence[str],
    lines: Sequence[Sequence[str]],
    text: str = "",
) -> str:
    shown = ", ".join(f"{key} {value}" for key, value in facts.items())
    rows = [columns, ["---"] * len(columns), *lines]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"## {name}\n\n{text}{shown}\n\n{table}\n"
