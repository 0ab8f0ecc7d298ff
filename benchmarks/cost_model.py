"""The cost model (`dma_attn.bench.model`) against measured times, and what it says of Blackwell.

    python benchmarks/cost_model.py benchmarks/results/h200/prefill*.csv

Fits one constant to an H200's kernel times at 8k and 16k tokens (D 128, causal) and predicts the
other lengths, masks and the other head dim, at each row's own clock; then the cycles of a tile's
parts, and the times of a causal call of 8192 tokens and 32 heads on a B200 and an RTX 5090 by the
share of high tiles, with the first configuration's constant. Exit code 1 when a prediction is off
by more than `--tolerance` percent.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dma_attn import DMAConfig
from dma_attn.bench.model import B200, RTX5090, calibrate, over_shares, tile
from dma_attn.bench.prefill import KERNEL, Workload
from dma_attn.bench.results import PREFILL_COLUMNS, read_csv, write_csv

PREDICTED = ("workload", "config", "ms", "cycles_of_a_tile", "modelled", "error_percent", "fitted")
SHARES = ("gpu", "config", "parts", *(f"ms_at_{share}_percent" for share in (0, 25, 50, 75, 100)))
TILES = ("gpu", "format", "values", "scores", "values_cycles", "exp2", "kilobytes",
         "bytes_a_cycle_in_turn")
FORMATS = ("mxfp8", "nvfp4", "mxfp4", "none")
ON_BLACKWELL = ("default", "default,low=mxfp4", "default,pv=fp8", "default,high=none")


def main() -> int:
    """Print and write the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0],
                                     epilog="Example: python benchmarks/cost_model.py prefill.csv")
    parser.add_argument("files", nargs="+", type=Path, help="CSV files of `dma-attn bench prefill`")
    parser.add_argument("--config", nargs="+", default=["default,pv=fp8", "hopper", "default"])
    parser.add_argument("--tolerance", type=float, default=20.0, help="in percent")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/model"))
    options = parser.parse_args()
    try:
        rows = [row for file in options.files for row in kernel_rows(file)]
        fits = {config: calibrate(rows, config) for config in options.config}
    except (OSError, ValueError) as problem:
        parser.error(str(problem))
    lines = [[p.workload, p.config, f"{p.ms:.4f}", f"{p.measured:.0f}", f"{p.modelled:.0f}",
              f"{p.error:+.1f}", "yes" if p.fitted else "no"]
             for _, predictions in fits.values() for p in predictions]
    rest = next(iter(fits.values()))[0]
    shares = [line for gpu in (B200, RTX5090) for line in over_shares(gpu, ON_BLACKWELL, rest)]
    parts = [(gpu, fmt, pv, tile(gpu, DMAConfig(low=fmt, pv=pv), False, 128))
             for gpu in (B200, RTX5090) for fmt in FORMATS for pv in ("fp16", "fp8")]
    tiles = [[gpu.name, fmt, pv, f"{t.scores:.0f}", f"{t.values:.0f}", f"{t.exp2:.0f}",
              f"{t.bytes / 1e3:.1f}", f"{t.bytes / t.cycles(rest):.1f}"]
             for gpu, fmt, pv, t in parts]
    facts = {"measured": " ".join(file.name for file in options.files),
             "rest": ", ".join(f"{config} {fit[0]:.0f} cycles" for config, fit in fits.items())}
    for name, columns, table in (("model", PREDICTED, lines), ("model_tiles", TILES, tiles),
                                 ("model_shares", SHARES, shares)):
        print(*("  ".join(line) for line in (columns, *table)), sep="\n")
        write_csv(options.out / f"{name}.csv", facts, columns, table)
    off = [p for _, found in fits.values() for p in found if abs(p.error) > options.tolerance]
    for p in off:
        print(f"{p.workload}, {p.config}: off by {p.error:+.1f} %", file=sys.stderr)
    return 1 if off else 0


def kernel_rows(file: Path) -> list[tuple[Workload, str, float, float]]:
    """Workload, configuration, ms and MHz of a file's kernels whose clock is known."""
    _, columns, lines = read_csv(file)
    if tuple(columns) != PREFILL_COLUMNS:
        raise ValueError(f"expected a prefill CSV, got {file}")
    rows = [dict(zip(columns, line, strict=True)) for line in lines]
    return [(Workload.parse(row["workload"]), row["candidate"], float(row["ms"]),
             float(row["clock_mhz"])) for row in rows if row["kind"] == KERNEL and row["clock_mhz"]]


if __name__ == "__main__":
    sys.exit(main())
