"""Passkey retrieval over the default mixed-precision KV cache against a 16-bit cache.

    python benchmarks/passkey.py --tokens 768 --trials 200

Exit code 1 when the 16-bit cache finds fewer than 80 % (the length says nothing then), or when the
paired 95 % interval of the difference does not exclude a loss of more than 5 points.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cache_perplexity import NATIVE, ROWS, cache_of

from dma_attn import DMAConfig
from dma_attn.bench.results import write_csv
from dma_attn.evaluation.attention import using_config
from dma_attn.evaluation.environment import environment
from dma_attn.evaluation.models import BUILT_IN, load_model
from dma_attn.evaluation.passkey import evaluate_passkey, passkey_prompts
from dma_attn.evaluation.statistics import paired_interval

COLUMNS = ("row", "tokens", "trials", "found", "difference_points", "low_points", "high_points")
REACHED, LOSS = 0.8, -0.05


def main() -> int:
    """Measure, print and write the table; returns the exit code."""
    options = parse_arguments()
    loaded = load_model(options.model, device=options.device, notify=print)
    lines: list[list[str]] = []
    bad: list[str] = []
    for tokens in options.tokens:
        prompts = passkey_prompts(loaded.tokenizer, tokens, options.trials)
        native: list[bool] = []
        for name in (NATIVE, *options.rows):
            with using_config(loaded.model, DMAConfig.preset("off")):
                found = evaluate_passkey(
                    loaded.model, prompts,
                    lambda name=name, n=tokens: cache_of(loaded.model, name, n + 32),
                    batch=options.batch,
                )
            native = native or found
            gap = paired_interval(native, found)
            lines.append([name, str(tokens), str(len(found)), str(sum(found)),
                          *(f"{100 * x:+.2f}" for x in (gap.estimate, gap.low, gap.high))])
            print("  ".join(lines[-1]), flush=True)
            if name == NATIVE and sum(found) < REACHED * len(found):
                bad.append(f"{tokens} tokens: the 16-bit cache finds {sum(found)}")
            if name != NATIVE and gap.low < LOSS:
                bad.append(f"{tokens} tokens, {name}: may lose {-100 * gap.low:.1f} points")
    write_csv(options.out, environment(options.device), COLUMNS, lines)
    print(f"{options.out} written", *bad, sep="\n")
    return 1 if bad else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0],
                                     epilog="rows: " + ", ".join(ROWS))
    parser.add_argument("--model", default=BUILT_IN, help="a local folder or .gguf file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=["default"],
                        metavar="ROW")
    parser.add_argument("--tokens", type=int, nargs="+", default=[768], help="of a text")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="trials at a time")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/passkey.csv"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
