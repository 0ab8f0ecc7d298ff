"""What the commands show in a terminal: progress bars and the table of perplexities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..evaluation.demo import NATIVE, DemoResults
from .results import change_percent, signed_percent

Report = Callable[[int, int], None]


@contextmanager
def progress_stages() -> Iterator[Callable[[str, int], Report]]:
    """Progress on stderr: `stage(title, steps)` begins a part and returns its `report(done, all)`.

    Bars in a terminal; elsewhere, as in a log file, one line when a part begins.
    """
    console = Console(stderr=True)
    bars = Progress(
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )

    def stage(title: str, steps: int) -> Report:
        if not console.is_terminal:
            console.print(title, markup=False, highlight=False, soft_wrap=True)
        task = bars.add_task(title, total=steps)
        return lambda done, total: bars.update(task, completed=done, total=total)

    with bars:
        yield stage


def perplexity_table(results: DemoResults) -> Table:
    """One row a configuration: perplexity, and its change against native with a standard error."""
    native = results.perplexity[NATIVE]
    table = Table(title="Perplexity", title_justify="left")
    for column in ("configuration", "perplexity", "change", "± std. error"):
        table.add_column(column, justify="left" if column == "configuration" else "right")
    for label, result in results.perplexity.items():
        change, error = change_percent(result, native)
        table.add_row(
            label,
            f"{result.value:.3f}",
            "" if label == NATIVE else signed_percent(change),
            "" if label == NATIVE or error is None else f"{error:.2f}%",
            style="bold" if label == "default" else None,
        )
    return table
