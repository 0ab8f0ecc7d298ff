"""Perplexity of every attention configuration with a known fake-quantised value, on the GPU.

    python benchmarks/perplexity_table.py --model DIR

The expected values were measured with float-in, float-out fake quantisers on
SmolLM2-135M-Instruct (Q4_1 weights, float32 arithmetic), text of Python 3.12's `pydoc_data.topics`,
consecutive windows: 24 of 2048 tokens and 12 of 8192. This script measures the same with the
library's own kernels. Under another Python the text differs, and rows are judged by their ratio to
native instead. Exit code 1 when a row is off by more than `--tolerance` percent.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dma_attn import DMAConfig
from dma_attn.bench.results import write_csv
from dma_attn.device import device_status
from dma_attn.evaluation.attention import using_config
from dma_attn.evaluation.environment import environment
from dma_attn.evaluation.models import BUILT_IN, load_model
from dma_attn.evaluation.perplexity import evaluate_perplexity
from dma_attn.evaluation.text import read_text, token_ids

WINDOWS = {2048: 24, 8192: 12}
NATIVE = "native"
COLUMNS = (
    "row",
    "window",
    "windows",
    "perplexity",
    "expected",
    "deviation_percent",
    "change_percent",
)


@dataclass(frozen=True)
class Row:
    """A configuration (None: the model's own attention) and its expected value by window length."""

    config: str | None
    expected: dict[int, float]


PLAIN = "smooth_k=false,rotate=false"
ROWS = {
    NATIVE: Row(None, {2048: 11.535, 8192: 9.866}),
    "mxfp8-floor-plain": Row(f"mxfp8,scale_rule=floor,{PLAIN}", {2048: 11.885}),
    "mxfp8-plain": Row(f"mxfp8,{PLAIN}", {2048: 11.786, 8192: 10.172}),
    "mxfp8": Row("mxfp8", {2048: 11.616, 8192: 9.943}),
    "nvfp4": Row("nvfp4", {2048: 12.387, 8192: 10.819}),
    "paper": Row("paper", {2048: 12.566, 8192: 10.974}),
    "default-amax-plain": Row(f"default,scale_rule=amax,{PLAIN}", {2048: 12.099, 8192: 10.546}),
    "default": Row("default", {2048: 11.714, 8192: 10.073}),
    "low-mxfp4": Row("default,low=mxfp4", {2048: 11.840, 8192: 10.224}),
    "diag-512": Row("default,diag=512", {2048: 11.634, 8192: 9.996}),
    "low-mxfp4-pv-fp8": Row("default,low=mxfp4,pv=fp8", {2048: 11.871, 8192: 10.255}),
    "default,high=none": Row("default,high=none", {8192: 9.989}),
    "int8": Row("default,high=int8,low=int8", {8192: 9.869}),
    "int8-pv-fp8": Row("default,high=int8,low=int8,pv=fp8", {8192: 9.875}),
    "int8-plain": Row(f"default,high=int8,low=int8,{PLAIN}", {8192: 9.877}),
    "int8-nvfp4": Row("default,high=int8", {8192: 9.997}),
    "int8-int4": Row("default,high=int8,low=int4", {8192: 10.034}),
    "int4": Row("default,high=int4,low=int4", {8192: 10.789}),
}


@dataclass(frozen=True)
class Measured:
    """One measured row at one window length; `deviation` and `change` are in percent."""

    name: str
    window: int
    count: int
    value: float
    expected: float
    deviation: float
    change: float | None
    seconds: float

    def cells(self) -> list[str]:
        """The row's text for the table and the CSV file, in the order of `COLUMNS`."""
        return [
            self.name,
            str(self.window),
            str(self.count),
            f"{self.value:.4f}",
            f"{self.expected:.3f}",
            f"{self.deviation:+.3f}",
            "" if self.change is None else f"{self.change:+.3f}",
        ]


def main() -> int:
    """Measure, print and write the table; returns the exit code."""
    options = parse_arguments()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    status = device_status(options.device)
    print(f"{options.device}: {status.path} path, {status.kernel} kernel ({status.reason})")
    loaded = load_model(options.model, device=options.device, notify=print)
    ids = token_ids(loaded.tokenizer, read_text()).to(options.device)
    by_ratio = sys.version_info[:2] != (3, 12)
    rows = measure(loaded.model, ids, options, by_ratio)
    facts = {**environment(options.device), "path": f"{status.path}, {status.kernel}"}
    facts["judged by"] = "ratio to native" if by_ratio else "value"
    lines = [[*row.cells(), f"{row.seconds:.1f}"] for row in rows]
    write_csv(options.out, facts, [*COLUMNS, "seconds"], lines)
    print(f"{options.out} written")
    bad = [row for row in rows if not abs(row.deviation) <= options.tolerance]
    for row in bad:
        print(
            f"off by more than {options.tolerance}%: {row.name} at {row.window}: {row.deviation}%"
        )
    return 1 if bad else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="rows: " + ", ".join(ROWS),
    )
    parser.add_argument("--model", default=BUILT_IN, help="a local folder or .gguf file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    parser.add_argument(
        "--windows", nargs="+", type=int, choices=list(WINDOWS), default=list(WINDOWS)
    )
    parser.add_argument("--limit", type=int, help="windows at most, to try the script out")
    parser.add_argument("--batch-tokens", type=int, default=16384, help="tokens of a forward pass")
    parser.add_argument("--tolerance", type=float, default=0.5, help="in percent")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/perplexity.csv"))
    return parser.parse_args()


def measure(
    model: Any, ids: torch.Tensor, options: argparse.Namespace, by_ratio: bool
) -> list[Measured]:
    """Every chosen row at every chosen window length; native first, for the ratios."""
    names = [NATIVE, *(name for name in options.rows if name != NATIVE)]
    print_cells(COLUMNS)
    rows: list[Measured] = []
    for window in options.windows:
        count = min(WINDOWS[window], options.limit or WINDOWS[window])
        batch = max(1, options.batch_tokens // window)
        native: float | None = None
        for name in names:
            row = ROWS[name]
            if window not in row.expected:
                continue
            start = time.perf_counter()
            config = None if row.config is None else DMAConfig.parse(row.config)
            with using_config(model, config):
                value = evaluate_perplexity(model, ids, window, count, batch_size=batch).value
            native = value if native is None else native
            expected = row.expected[window]
            base = native / ROWS[NATIVE].expected[window] if by_ratio else 1.0
            measured = Measured(
                name=name,
                window=window,
                count=count,
                value=value,
                expected=expected,
                deviation=100 * (value / (expected * base) - 1),
                change=None if name == NATIVE else 100 * (value / native - 1),
                seconds=time.perf_counter() - start,
            )
            rows.append(measured)
            print_cells([*measured.cells(), f"{measured.seconds:.1f} s"])
    return rows


def print_cells(cells: Any) -> None:
    """One line of the table, printed at once."""
    print(
        "  ".join(f"{cell:<18}" if i == 0 else f"{cell:>9}" for i, cell in enumerate(cells)),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
