"""`dma-attn bench`: timings and errors against peers: tables, CSV files, Markdown and figures."""

from __future__ import annotations

import re
import shlex
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

app = typer.Typer(
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Time this library against its peers on a CUDA device, and compare their errors.",
)

RoundsOption = Annotated[int, typer.Option(min=5, help="Interleaved rounds; the median counts.")]
SecondsOption = Annotated[
    float, typer.Option(min=0.001, help="Time that a candidate runs in each round.")
]
ConfigOption = Annotated[
    list[str] | None, typer.Option("--config", help="A configuration (repeatable).")
]
PeerOption = Annotated[
    list[str] | None, typer.Option("--peer", help="A peer (repeatable), or 'none'.")
]
OutOption = Annotated[Path, typer.Option(help="Folder for the CSV files.")]
RESULTS = Path("benchmarks/results/gpu")


class QuantTable(str, Enum):
    """The tables of `bench quant`."""

    fold = "fold"
    fusion = "fusion"


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
    config: ConfigOption = None,
    peer: PeerOption = None,
    rounds: RoundsOption = 5,
    seconds: SecondsOption = 0.1,
    out: OutOption = RESULTS,
) -> None:
    """Attention of 32 query and 8 KV heads: batch 1 causal, batch 2 full. Exit code 1 when a
    speed or error that the project aims at is missed, or could not be checked.

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

    facts = _facts()
    configs = _configs(config or CONFIGS)
    peers = _known(peer or list(PEERS), PEERS, "--peer")
    workloads = [
        Workload(1 if mask else 2, 32, 8, n, d, mask)
        for d in head_dim or [128, 64]
        for mask in ([True, False] if causal is None else [causal])
        for n in length or [8192, 16384, 32768, 65536]
    ]
    rows: list[Row] = []
    for workload in workloads:
        typer.echo(str(workload), err=True)
        rows += measure(workload, configs, peers, rounds, seconds,
                        notify=lambda text: typer.echo(text, err=True))
        verdicts = judge(rows)
        write_csv(out / "prefill.csv", facts, PREFILL_COLUMNS, prefill_cells(rows))
        write_csv(out / "prefill_claims.csv", facts, CLAIM_COLUMNS, claim_cells(verdicts))
    _table("Prefill", PREFILL_COLUMNS, prefill_cells(rows))
    _table("Aims: times as fast, or as exact, as the best of the others", CLAIM_COLUMNS,
           claim_cells(verdicts))
    if not all(verdict.holds for verdict in verdicts):
        raise typer.Exit(1)


@app.command()
def decode(
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="BxS", help="Batch and tokens of the cache (repeatable)."),
    ] = None,
    queries: Annotated[
        list[int] | None, typer.Option(min=1, max=16, help="Tokens of a step (repeatable).")
    ] = None,
    cache: Annotated[
        list[str] | None, typer.Option("--cache", help="A cache (repeatable).")
    ] = None,
    peer: PeerOption = None,
    rounds: RoundsOption = 5,
    seconds: SecondsOption = 0.05,
    out: OutOption = RESULTS,
) -> None:
    """A decode step of 32 query and 8 KV heads over mixed-precision caches. Exit code 1 when a
    speed that the project aims at is missed, or could not be checked.

    Example: dma-attn bench decode --shape 16x32768 --queries 1
    """
    from .bench.decode import CACHES, PEERS, DecodeRow, DecodeWorkload, judge_decode, measure_decode
    from .bench.results import (
        DECODE_CLAIM_COLUMNS,
        DECODE_COLUMNS,
        decode_cells,
        decode_claim_cells,
        write_csv,
    )

    facts = _facts()
    shapes = [_shape(text) for text in shape or ["16x32768", "1x131072", "1x16384", "1x4096"]]
    caches = _known(cache or list(CACHES), CACHES, "--cache", none=False)
    peers = _known(peer or list(PEERS), PEERS, "--peer")
    rows: list[DecodeRow] = []
    for batch, length in shapes:
        for n in queries or [1, 4]:
            workload = DecodeWorkload(batch, length, n)
            typer.echo(str(workload), err=True)
            rows += measure_decode(workload, caches, peers, rounds, seconds,
                                   notify=lambda text: typer.echo(text, err=True))
            verdicts = judge_decode(rows)
            write_csv(out / "decode.csv", facts, DECODE_COLUMNS, decode_cells(rows))
            write_csv(out / "decode_claims.csv", facts, DECODE_CLAIM_COLUMNS,
                      decode_claim_cells(verdicts))
    _table("Decode", DECODE_COLUMNS, decode_cells(rows))
    _table("Aims: times as fast as the best of the others", DECODE_CLAIM_COLUMNS,
           decode_claim_cells(verdicts))
    if not all(verdict.holds for verdict in verdicts):
        raise typer.Exit(1)


@app.command()
def quant(
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequence length (repeatable).")
    ] = None,
    table: Annotated[
        list[QuantTable] | None, typer.Option(help="fold or fusion (repeatable); both by default.")
    ] = None,
    rounds: RoundsOption = 5,
    seconds: SecondsOption = 0.05,
    out: OutOption = RESULTS,
) -> None:
    """The quantisers: the Hopper pre-pass against a device copy (fold), fused against unfused
    quantisation (fusion). Exit code 1 when a speed that the project aims at is missed.

    Example: dma-attn bench quant --table fold --length 16384
    """
    from .bench.quantise import FOLD_CONFIGS, judge_fold, judge_fusion, measure_fold, measure_fusion
    from .bench.results import (
        QUANT_CLAIM_COLUMNS,
        QUANT_COLUMNS,
        quant_cells,
        quant_claim_cells,
        write_csv,
    )

    facts = _facts()
    holds = True
    for name in dict.fromkeys(table or QuantTable):
        if name == QuantTable.fold:
            rows = [row for n in length or [8192, 16384, 32768] for config in FOLD_CONFIGS
                    for row in measure_fold(n, config, rounds=rounds, seconds=seconds)]
            verdicts = judge_fold(rows)
        else:
            rows = [row for n in length or [2048, 8192]
                    for row in measure_fusion(n, rounds=rounds, seconds=seconds)]
            verdicts = judge_fusion(rows)
        write_csv(out / f"quant_{name.value}.csv", facts, QUANT_COLUMNS, quant_cells(rows))
        _table(f"Quantiser: {name.value}", QUANT_COLUMNS, quant_cells(rows))
        cells = quant_claim_cells(verdicts)
        write_csv(out / f"quant_{name.value}_claims.csv", facts, QUANT_CLAIM_COLUMNS, cells)
        _table("Aims", QUANT_CLAIM_COLUMNS, cells)
        holds = holds and all(verdict.holds for verdict in verdicts)
    if not holds:
        raise typer.Exit(1)


@app.command()
def error(
    file: Annotated[Path, typer.Argument(help="A capture of benchmarks/capture_qkv.py.")],
    config: ConfigOption = None,
    peer: PeerOption = None,
    out: OutOption = RESULTS,
) -> None:
    """Error against exact attention on captured queries, keys and values of a model. Exit code 1
    when hopper has more than half the error of FlashAttention-3 with FP8, or one is missing; not
    judged with --peer none or without hopper among the configurations.

    Example: dma-attn bench error qkv.safetensors --config hopper --config default
    """
    from .bench.error import (
        COMPARED,
        CONFIGS,
        MUST,
        error_ratio,
        load_capture,
        measure_errors,
    )
    from .bench.peers import PEERS
    from .bench.prefill import FA3_FP8
    from .bench.results import ERROR_COLUMNS, error_cells, write_csv

    facts = _facts()
    configs = _configs(config or CONFIGS)
    peers = _known(peer or COMPARED, PEERS, "--peer")
    _check_files([file], "FILE")
    try:
        layers = load_capture(file)
    except ValueError as problem:
        raise typer.BadParameter(str(problem), param_hint="FILE") from problem
    rows = measure_errors(layers, configs, peers, notify=lambda text: typer.echo(text, err=True))
    cells = error_cells(rows)
    write_csv(out / "error.csv", {**facts, "capture": file.name}, ERROR_COLUMNS, cells)
    _table(f"Rel-L2 error on {file.name}", ERROR_COLUMNS, cells)
    if peers and "hopper" in configs:
        ratio = error_ratio(rows)
        reached = "not measured" if ratio is None else f"{ratio:.3f}"
        typer.echo(f"hopper's error relative to {FA3_FP8[0]}: {reached}, aim at most {MUST}")
        if ratio is None or not ratio <= MUST:
            raise typer.Exit(1)


@app.command("compile")
def first_call(
    head_dim: Annotated[
        list[int] | None, typer.Option(min=8, help="Head dim (repeatable).")
    ] = None,
    config: ConfigOption = None,
    out: OutOption = RESULTS,
) -> None:
    """Seconds of a first call with an empty Triton cache, and how many kernels are compiled for
    all lengths, masks and with the LSE. Exit code 1 beyond 60 seconds or 12 kernels.

    Example: dma-attn bench compile --head-dim 128 --config default
    """
    from .bench.compile import CONFIGS, measure_compile
    from .bench.results import COMPILE_COLUMNS, compile_cells, write_csv

    facts = _facts()
    rows = []
    for row in measure_compile(head_dim or [128, 64], _configs(config or CONFIGS)):
        rows.append(row)
        typer.echo(f"{row.config}, head dim {row.head_dim}: {row.seconds:.1f} s", err=True)
        write_csv(out / "compile.csv", facts, COMPILE_COLUMNS, compile_cells(rows))
    _table("First calls", COMPILE_COLUMNS, compile_cells(rows))
    if not all(row.holds for row in rows):
        raise typer.Exit(1)


@app.command()
def table(
    files: Annotated[
        list[Path], typer.Argument(help="CSV files of earlier runs, .jsonl files of `eval`.")
    ],
    out: Annotated[Path | None, typer.Option(help="Markdown file to write instead.")] = None,
) -> None:
    """Print results as Markdown. A file that is written shows what `dma-attn bench figures` left
    in a folder `figures` beside it.

    Example: dma-attn bench table benchmarks/results/h200/prefill.csv --out docs/results.md
    """
    from .report.markdown import markdown

    _check_files(files, "FILES")
    stems = [path.stem for path in files]
    try:
        sections = [markdown(path, f"{path.stem} ({path.parent.name})"
                             if stems.count(path.stem) > 1 else None) for path in files]
    except ValueError as problem:
        raise typer.BadParameter(str(problem), param_hint="FILES") from problem
    if out is None:
        for section in sections:
            typer.echo(section)
        return
    command = shlex.join(["dma-attn", "bench", "table", *map(str, files), "--out", str(out)])
    drawn = sorted((out.parent / "figures").glob("*.svg"))
    shown = [f"![{path.stem}](figures/{path.name})\n" for path in drawn]
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = ["# Results\n", f"Made by `{command}`.\n", *shown, *sections]
    out.write_text("\n".join(lines), "utf-8")


@app.command()
def figures(
    files: Annotated[list[Path], typer.Argument(help="CSV files of `dma-attn bench prefill`.")],
    out: Annotated[Path, typer.Option(help="Folder for the SVG files.")] = RESULTS,
) -> None:
    """Draw prefill results: TFLOP/s over length for each head dim and mask, and against the
    limits of an H200. Of a workload that stands in several files the last counts.

    Example: dma-attn bench figures benchmarks/results/h200/prefill.csv --out docs/figures
    """
    from .report.bench_figures import draw, read_rates

    _check_files(files, "FILES")
    try:
        rates = read_rates(files)
    except ValueError as problem:
        raise typer.BadParameter(str(problem), param_hint="FILES") from problem
    out.mkdir(parents=True, exist_ok=True)
    for name, image in draw(rates).items():
        (out / name).write_bytes(image)
        typer.echo(out / name)


def _configs(texts: Sequence[str]) -> Sequence[str]:
    """The same, once each is known to be a configuration."""
    from .config import DMAConfig

    for text in texts:
        try:
            DMAConfig.parse(text)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise typer.BadParameter(str(error), param_hint="--config") from error
    return texts


def _known(
    names: Sequence[str], known: Collection[str], option: str, none: bool = True
) -> Sequence[str]:
    """The same, once each is known; none for "none"."""
    if none and list(names) == ["none"]:
        return []
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(
            f"expected one of {list(known)}{' or none' * none}, got {unknown[0]!r}",
            param_hint=option,
        )
    return names


def _shape(text: str) -> tuple[int, int]:
    """Batch and length of "16x32768"."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise typer.BadParameter(f"expected BxS like 16x32768, got {text!r}", param_hint="--shape")
    return int(match[1]), int(match[2])


def _check_files(files: Sequence[Path], hint: str) -> None:
    for path in files:
        if not path.is_file():
            raise typer.BadParameter(f"expected a file, got {path}", param_hint=hint)


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
