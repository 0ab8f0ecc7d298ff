"""Greedy generation end to end: sdpa over transformers' cache against DMA over a mixed one.

    python benchmarks/generate.py --batch 16 --prompt 7168 --new 64 --rounds 3

Without `--model`, a Llama of SmolLM2-135M's sizes with random weights, which takes the same time.
Prompt: seconds to the first token. Then tokens a second of the whole batch. Both are medians of
interleaved rounds; the host decides them, and its speed changes. "DMA default" and "DMA off" differ
in the prompt's attention only. Peak memory is what PyTorch allocated in all, the weights included.
Nothing is judged.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from dma_attn import DMAConfig
from dma_attn.bench.results import write_csv
from dma_attn.evaluation.attention import using_attention, using_config
from dma_attn.evaluation.environment import environment
from dma_attn.evaluation.models import load_model
from dma_attn.integrations.transformers import DMACache

ROWS = ("sdpa, DynamicCache", "DMA default, DMACache", "DMA off, DMACache")
COLUMNS = ("row", "batch", "prompt", "new", "prompt_s", "tokens_per_s", "peak_mb", "cache_mb")


def main() -> int:
    """Measure, print and write the table; returns the exit code."""
    options = parse_arguments()
    model = load_model(options.model, device="cuda", dtype=torch.bfloat16, notify=print).model if (
        options.model) else random_model()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 1000, (options.batch, options.prompt), generator=generator).to("cuda")
    length = options.prompt + 1 + options.new
    found: dict[str, list[tuple[float, float, int, int]]] = {row: [] for row in ROWS}
    for row in ROWS:
        run(model, row, ids, 2, length)  # compiles
    for _ in range(options.rounds):
        for row in ROWS:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            first, _ = run(model, row, ids, 1, length)
            whole, size = run(model, row, ids, 1 + options.new, length)
            found[row].append((first, whole - first, torch.cuda.max_memory_allocated(), size))
    lines = []
    for row in ROWS:
        first, others, peak, size = (median(x) for x in zip(*found[row], strict=True))
        lines.append([row, str(options.batch), str(options.prompt), str(options.new),
                      f"{first:.3f}", f"{options.batch * options.new / others:.0f}",
                      f"{peak / 1e6:.0f}", f"{size / 1e6:.0f}"])
        print("  ".join(lines[-1]), flush=True)
    write_csv(options.out, environment("cuda"), COLUMNS, lines)
    print(f"{options.out} written")
    return 0


def random_model() -> Any:
    """A Llama of SmolLM2-135M's sizes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        tie_word_embeddings=True, eos_token_id=None, pad_token_id=0, dtype=torch.bfloat16,
    )
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def run(model: Any, row: str, ids: torch.Tensor, new: int, length: int) -> tuple[float, int]:
    """Seconds of a generation of `new` tokens, and the bytes of its cache of `length` tokens."""
    if row == ROWS[0]:
        switch, cache = using_attention(model, "sdpa"), DynamicCache(config=model.config)
    else:
        config = DMAConfig.preset("default" if row == ROWS[1] else "off")
        switch, cache = using_config(model, config), DMACache(model.config, max_len=length)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with switch:
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
                       do_sample=False, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    size = cache.nbytes() if hasattr(cache, "nbytes") else sum(
        layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return seconds, int(size)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0],
                                     epilog="Example: python benchmarks/generate.py --batch 1")
    parser.add_argument("--model", help="a local folder or .gguf file")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=7168, help="tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens after the first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/generate.csv"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
