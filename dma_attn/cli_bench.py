"""`dma-attn bench`: timings against peers, as tables, CSV files and Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Time this library against its peers on a CUDA device.",
)

RoundsOption = Annotated[int, typer.Option(min=5, help="Interleaved rounds; the median counts.")]
SecondsOption = Annotated[
    float, typer.Option(min=0.001, help="Time that a candidate runs in each round.")
]
OutOption = Annotated[Path, typer.Option(help="Folder for the CSV files.")]
RESULTS = Path("benchmarks/results/gpu")


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def prefill(
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequence length (repeatable).")
    ] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(min=8, help="Head dim (repeatable).")
    ] = None,
    causal: Annotated[
        bool | None, typer.Option("--causal/--full", help="One mask only, instead of both.")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option("--config", help="A configuration (repeatable).")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option("--peer", help="A peer (repeatable), or 'none'.")
    ] = None,
    rounds: RoundsOption = 5,
    seconds: SecondsOption = 0.1,
    out: OutOption = RESULTS,
) -> None:
    """Attention of 32 query and 8 KV heads: batch 1 causal, batch 2 full. Exit code 1 when a
    speed that the project aims at is missed, or could not be checked.

    Example: dma-attn bench prefill --length 8192 --head-dim 128 --causal
    """
    from .bench.peers import PEERS
    from .bench.prefill import CONFIGS, Row, Workload, judge, measure
    from .bench.results import (
        CLAIM_COLUMNS,
        PREFILL_COLUMNS,
        claim_cells,
        prefill_cells,
        write_csv,
    )
    from .config import DMAConfig

    facts = _facts()
    for text in config or []:
        try:
            DMAConfig.parse(text)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise typer.BadParameter(str(error), param_hint="--config") from error
    peers = [] if peer == ["none"] else list(peer or PEERS)
    if unknown := [name for name in peers if name not in PEERS]:
        raise typer.BadParameter(
            f"expected one of {list(PEERS)} or none, got {unknown[0]!r}", param_hint="--peer"
        )
    workloads = [
        Workload(1 if mask else 2, 32, 8, n, d, mask)
        for d in head_dim or [128, 64]
        for mask in ([True, False] if causal is None else [causal])
        for n in length or [8192, 16384, 32768, 65536]
    ]
    rows: list[Row] = []
    for workload in workloads:
        typer.echo(str(workload), err=True)
        rows += measure(workload, config or CONFIGS, peers, rounds, seconds,
                        notify=lambda text: typer.echo(text, err=True))
        write_csv(out / "prefill.csv", facts, PREFILL_COLUMNS, prefill_cells(rows))
    verdicts = judge(rows)
    write_csv(out / "prefill_claims.csv", facts, CLAIM_COLUMNS, claim_cells(verdicts))
    _table("Prefill", PREFILL_COLUMNS, prefill_cells(rows))
    _table("Aims: times as fast as the fastest of the others", CLAIM_COLUMNS,
           claim_cells(verdicts))
    if not all(verdict.holds for verdict in verdicts):
        raise typer.Exit(1)


@app.command()
def quant(
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequence length (repeatable).")
    ] = None,
    rounds: RoundsOption = 5,
    seconds: SecondsOption = 0.05,
    out: OutOption = RESULTS,
) -> None:
    """The quantisers: the Hopper pre-pass against a device copy, fused against unfused.

    Example: dma-attn bench quant --length 8192
    """
    from .bench.quantise import measure_fold, measure_fusion
    from .bench.results import QUANT_COLUMNS, quant_cells, write_csv

    facts = _facts()
    fold = [row for n in length or [8192, 16384, 32768] for row in measure_fold(n, rounds=rounds,
                                                                            seconds=seconds)]
    fusion = [row for n in length or [2048, 8192] for row in measure_fusion(n, rounds=rounds,
                                                                            seconds=seconds)]
    for name, rows in (("fold", fold), ("fusion", fusion)):
        write_csv(out / f"quant_{name}.csv", facts, QUANT_COLUMNS, quant_cells(rows))
        _table(f"Quantiser: {name}", QUANT_COLUMNS, quant_cells(rows))


@app.command()
def table(files: Annotated[list[Path], typer.Argument(help="CSV files of earlier runs.")]) -> None:
    """Print CSV files as Markdown, for docs/results.md.

    Example: dma-attn bench table benchmarks/results/h200/prefill.csv
    """
    from .bench.results import markdown

    for path in files:
        if not path.is_file():
            raise typer.BadParameter(f"expected a file, got {path}", param_hint="FILES")
        typer.echo(markdown(path))


def _facts() -> dict[str, str]:
    """What the run is measured on; a benchmark needs a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("a benchmark needs a CUDA device, and torch sees none here")
    from .evaluation.environment import environment

    return environment("cuda")


def _table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(*columns, title=title, title_justify="left")
    for line in lines:
        shown.add_row(*line)
    Console(width=None).print(shown)
