"""Perplexity through the decode path over mixed-precision KV caches, on the GPU.

    python benchmarks/cache_perplexity.py --model DIR

Expected values: float-in, float-out fake quantisers on SmolLM2-135M-Instruct (Q4_1 weights, float32
arithmetic), text of Python 3.12's `pydoc_data.topics`, 12 windows of 8192 tokens, 16-bit queries.
Here the cache itself is read, 16 tokens a step; `--step 1 --windows 2 --tokens 2048` goes token
by token. Queries, and a prompt's first step, are in 16 bits. The fake quantisers subtract K's mean
over the window, as here `--mean window` does (the window is appended, then cropped away: the mean
stays); `--mean first` is what generation without a prompt would do: the mean of the first step's
tokens, be they few. Rows are judged by their ratio to the 16-bit cache. Exit code 1 when, by the
window's mean, one is off by more than `--tolerance` percent, or when the default cache loses more
than `--loss` percent.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import DynamicCache

from dma_attn import DMAConfig
from dma_attn.bench.results import write_csv
from dma_attn.evaluation.attention import using_config
from dma_attn.evaluation.decode_perplexity import evaluate_decode_perplexity
from dma_attn.evaluation.environment import environment
from dma_attn.evaluation.models import BUILT_IN, load_model
from dma_attn.evaluation.text import read_text, token_ids, windows
from dma_attn.integrations.transformers import DMACache

NATIVE = "16-bit"
# Far K, far V, near K, near V, and the expected perplexity at 8192 tokens (16-bit cache: 9.866)
ROWS = {
    "mxfp4, V 16-bit": ("mxfp4", "none", "mxfp8", "none", 10.060),
    "nvfp4, V 16-bit": ("nvfp4", "none", "mxfp8", "none", 9.997),
    "fp4, V 16-bit": ("fp4", "none", "mxfp8", "none", 10.017),
    "int4, V 16-bit": ("int4", "none", "mxfp8", "none", 9.987),
    "nvfp4, near mxfp8": ("nvfp4", "nvfp4", "mxfp8", "mxfp8", 10.000),
    "int4, near mxfp8": ("int4", "int4", "mxfp8", "mxfp8", 10.006),
    "default": ("int4", "int4", "none", "none", 9.948),
}
NATIVE_EXPECTED = 9.866
TURNED = {"nvfp4, near mxfp8": False}  # V rotated, unless said otherwise
COLUMNS = ("row", "window", "windows", "step", "mean", "perplexity", "change_percent",
           "expected_change_percent", "seconds")


def main() -> int:
    """Measure, print and write the table; returns the exit code."""
    options = parse_arguments()
    torch.backends.cuda.matmul.allow_tf32 = False
    loaded = load_model(options.model, device=options.device, notify=print)
    ids = token_ids(loaded.tokenizer, read_text()).to(options.device)
    lines: list[list[str]] = []
    bad: list[str] = []
    native = 0.0
    for name in [NATIVE, *(name for name in options.rows if name != NATIVE)]:
        with using_config(loaded.model, DMAConfig.preset("off")):
            found = evaluate_decode_perplexity(
                loaded.model, ids, options.tokens, options.windows,
                lambda name=name: cache_of(loaded.model, name, options, ids), step=options.step,
            )
        native = native or found.value
        change = 100 * (found.value / native - 1)
        expected = 0.0 if name == NATIVE else 100 * (ROWS[name][4] / NATIVE_EXPECTED - 1)
        lines.append([name, str(options.tokens), str(options.windows), str(options.step),
                      "" if name == NATIVE else options.mean,
                      f"{found.value:.4f}", f"{change:+.3f}", f"{expected:+.3f}",
                      f"{found.seconds:.1f}"])
        print("  ".join(lines[-1]), flush=True)
        judged = options.tokens == 8192 and options.mean == "window"
        if judged and not abs(change - expected) <= options.tolerance:
            bad.append(f"{name}: {change:+.3f} %, expected {expected:+.3f} %")
        if name == "default" and not change <= options.loss:
            bad.append(f"the default cache loses {change:.3f} %")
    write_csv(options.out, environment(options.device), COLUMNS, lines)
    print(f"{options.out} written", *bad, sep="\n")
    return 1 if bad else 0


def cache_of(model: Any, name: str, options: argparse.Namespace, ids: torch.Tensor) -> Any:
    """An empty cache for a row, with K's mean over each window if that is asked for."""
    if name == NATIVE:
        return DynamicCache(config=model.config)
    k_low, v_low, k_high, v_high, _ = ROWS[name]
    cache = DMACache(model.config, DMAConfig(high=k_high, low=k_low), v_high=v_high, v_low=v_low,
                     rotate_v=TURNED.get(name, True), max_len=options.tokens)
    if options.mean == "window":
        rows = windows(ids, options.tokens, options.windows).to(model.device)
        model(input_ids=rows, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.crop(-options.tokens)
    return cache


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0],
                                     epilog="rows: " + ", ".join(ROWS))
    parser.add_argument("--model", default=BUILT_IN, help="a local folder or .gguf file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", nargs="+", choices=[NATIVE, *ROWS], default=list(ROWS),
                        metavar="ROW")
    parser.add_argument("--tokens", type=int, default=8192, help="of a window")
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--step", type=int, default=16, help="tokens of a forward pass")
    parser.add_argument("--mean", choices=("window", "first"), default="window",
                        help="what K's mean is taken over")
    parser.add_argument("--tolerance", type=float, default=0.3, help="in percent, at 8192 tokens")
    parser.add_argument("--loss", type=float, default=1.2, help="of the default cache, in percent")
    parser.add_argument("--out", type=Path,
                        default=Path("benchmarks/results/h200/cache_perplexity.csv"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
