"""Benchmark results as CSV, with what they were measured on, and as Markdown tables."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .compile import CompileRow
from .decode import DecodeRow, DecodeVerdict
from .error import ErrorRow
from .prefill import Row, Verdict
from .quantise import QuantRow, QuantVerdict

PREFILL_COLUMNS = ("workload", "candidate", "kind", "ms", "spread_percent", "tflops", "error",
                   "clock_mhz", "host_us")
CLAIM_COLUMNS = ("workload", "candidate", "kind", "against", "ratio", "must", "target", "holds")
QUANT_CLAIM_COLUMNS = ("length", "aim", "ratio", "must", "holds")
QUANT_COLUMNS = ("length", "candidate", "ms", "spread_percent", "gb_per_s", "share_of_copy",
                 "time_in_copies")
ERROR_COLUMNS = ("layer", "candidate", "error")
DECODE_COLUMNS = ("workload", "candidate", "us", "spread_percent", "mb", "gb_per_s", "error")
DECODE_CLAIM_COLUMNS = ("workload", "candidate", "against", "ratio", "must", "target", "holds")
COMPILE_COLUMNS = ("head_dim", "config", "seconds", "kernels_first_call", "kernels_all_calls")


def prefill_cells(rows: Iterable[Row]) -> list[list[str]]:
    """One line a measured candidate, in the order of `PREFILL_COLUMNS`."""
    return [
        [str(r.workload), r.candidate, r.kind, f"{r.timing.ms:.4f}", f"{100 * r.timing.spread:.1f}",
         f"{r.tflops:.0f}", f"{r.error:.4f}", str(r.timing.clock or ""),
         "" if r.timing.host is None else f"{1000 * r.timing.host:.0f}"]
        for r in rows
    ]


def claim_cells(verdicts: Iterable[Verdict]) -> list[list[str]]:
    """One line a claim on a workload, in the order of `CLAIM_COLUMNS`."""
    return [
        [str(v.workload), v.claim.candidate, v.claim.kind, " / ".join(v.claim.against),
         "not measured" if v.ratio is None else f"{v.ratio:.3f}", f"{v.claim.must:.2f}",
         f"{v.claim.target:.2f}", "yes" if v.holds else "no"]
        for v in verdicts
    ]


def quant_cells(rows: Iterable[QuantRow]) -> list[list[str]]:
    """One line a measured pass, in the order of `QUANT_COLUMNS`."""
    return [
        [str(r.length), r.candidate, f"{r.timing.ms:.4f}", f"{100 * r.timing.spread:.1f}",
         f"{r.gbytes_per_s:.0f}", f"{r.share:.3f}", f"{r.copies:.2f}"]
        for r in rows
    ]


def quant_claim_cells(verdicts: Iterable[QuantVerdict]) -> list[list[str]]:
    """One line an aim at a length, in the order of `QUANT_CLAIM_COLUMNS`."""
    return [
        [str(v.length), v.aim, f"{v.ratio:.3f}", f"{v.must:.2f}", "yes" if v.holds else "no"]
        for v in verdicts
    ]


def error_cells(rows: Iterable[ErrorRow]) -> list[list[str]]:
    """One line a candidate in a layer, in the order of `ERROR_COLUMNS`."""
    return [[r.layer, r.candidate, f"{r.error:.5f}"] for r in rows]


def decode_cells(rows: Iterable[DecodeRow]) -> list[list[str]]:
    """One line a measured candidate, in the order of `DECODE_COLUMNS`."""
    return [
        [str(r.workload), r.candidate, f"{1000 * r.timing.ms:.1f}", f"{100 * r.timing.spread:.1f}",
         f"{r.bytes / 1e6:.0f}", f"{r.gbytes_per_s:.0f}", f"{r.error:.4f}"]
        for r in rows
    ]


def decode_claim_cells(verdicts: Iterable[DecodeVerdict]) -> list[list[str]]:
    """One line an aim on a workload, in the order of `DECODE_CLAIM_COLUMNS`."""
    return [
        [str(v.workload), v.candidate, " / ".join(v.against),
         "not measured" if v.ratio is None else f"{v.ratio:.3f}", f"{v.must:.2f}",
         f"{v.target:.2f}", "yes" if v.holds else "no"]
        for v in verdicts
    ]


def compile_cells(rows: Iterable[CompileRow]) -> list[list[str]]:
    """One line a configuration and head dim, in the order of `COMPILE_COLUMNS`."""
    return [
        [str(r.head_dim), r.config, f"{r.seconds:.1f}", str(r.first_kernels), str(r.kernels)]
        for r in rows
    ]


def write_csv(
    path: Path, facts: Mapping[str, str], columns: Sequence[str], lines: Iterable[Sequence[str]]
) -> None:
    """Comment lines `# name: value` that say what was measured on, then the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        for name, value in facts.items():
            file.write(f"# {name}: {value}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(lines)


def read_csv(path: Path) -> tuple[dict[str, str], list[str], list[list[str]]]:
    """Facts, columns and lines of a file that `write_csv` wrote.

    Raises:
        ValueError: the file holds no table.
    """
    text = path.read_text(encoding="utf-8").splitlines()
    facts = dict(line[2:].split(": ", 1) for line in text if line.startswith("# "))
    table = list(csv.reader(line for line in text if line and not line.startswith("#")))
    if not table:
        raise ValueError(f"{path}: expected a CSV table, got none")
    return facts, table[0], table[1:]
