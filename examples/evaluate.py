"""Evaluate your own model: what two configurations cost, from Python.

    python examples/evaluate.py [MODEL]

`dma-attn eval MODEL --config default --config cache` does the same and more.
"""

import sys
from pathlib import Path

from dma_attn.evaluation.evaluate import EvalSettings, run_eval
from dma_attn.evaluation.models import BUILT_IN
from dma_attn.evaluation.summary import summarise

settings = EvalSettings(
    model=sys.argv[1] if len(sys.argv) > 1 else BUILT_IN,
    tokens=512, windows=3, subjects=("default", "nvfp4"), metrics=("perplexity", "layers"),
)
records = run_eval(settings, Path("dma-eval/example.jsonl"),
                   lambda title, _: lambda done, of: print(f"{title}: {done} of {of}"))
summary = summarise(records)
for row in summary.perplexity:
    change = "" if row.change is None else (
        f", {row.change.estimate:+.2f} % ({row.change.low:+.2f} to {row.change.high:+.2f})")
    print(f"{row.subject:10} perplexity {row.perplexity.estimate:.3f}{change}")
for layer in summary.layers:
    print(f"{layer.subject:10} attention error {layer.mean:.4f}, largest {layer.largest:.4f} in "
          f"layer {layer.where[0]}, head {layer.where[1]}")
