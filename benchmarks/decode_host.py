"""Host time of an eager decode step with its append: launches repeated, and dispatched by Triton.

    python benchmarks/decode_host.py

One layer of SmolLM2-135M's sizes over the default cache, on a GPU; microseconds a step, medians of
interleaved rounds. Exit code 1 when repeated launches give other bits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dma_attn import MixedKVCache, dma_attention_with_kvcache
from dma_attn.bench.results import write_csv
from dma_attn.evaluation.environment import environment
from dma_attn.quant import launches

CASES = ((1, 2048, 1), (16, 7168, 1), (1, 2048, 4))  # batch, tokens, queries
COLUMNS = ("batch", "tokens", "queries", "repeated_us", "dispatched_us")


def main() -> int:
    """Measure, print and write the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0],
                                     epilog="Example: python benchmarks/decode_host.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/decode_host.csv"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a GPU")
    torch.set_num_threads(1)
    lines = []
    for batch, tokens, queries in CASES:
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(options.rounds):
            for repeated in (True, False):
                with launching(repeated):
                    times[repeated].append(step_time(batch, tokens, queries))
        lines.append([str(batch), str(tokens), str(queries),
                      *(f"{median(times[x]):.0f}" for x in (True, False))])
        print("  ".join(lines[-1]), flush=True)
    write_csv(options.out, environment("cuda"), COLUMNS, lines)
    outs = []
    for repeated in (True, False):
        with launching(repeated):
            outs.append(steps(400))
    same = torch.equal(*outs)
    print(f"400 steps with growth: {'the same bits' if same else 'OTHER BITS'}")
    return 0 if same else 1


@contextmanager
def launching(repeated: bool) -> Iterator[None]:
    """Repeat compiled kernels, or dispatch every launch."""
    if repeated:
        yield
        return
    with mock.patch.object(launches, "compiled_kernels_repeat", lambda device: False):
        yield


def step_time(batch: int, tokens: int, queries: int, steps: int = 200) -> float:
    """Microseconds a step, the GPU faster than the host."""
    cache = MixedKVCache(batch, 3, 64, tokens + queries * (steps + 20), device="cuda")
    keys = torch.randn(batch, 3, tokens, 64, dtype=torch.bfloat16, device="cuda")
    cache.append(keys, keys)
    new = keys[:, :, :queries].contiguous()
    q = torch.randn(batch, 9, queries, 64, dtype=torch.bfloat16, device="cuda")
    for i in range(20 + steps):
        if i == 20:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        dma_attention_with_kvcache(q, cache, k=new, v=new)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e6


def steps(n: int) -> torch.Tensor:
    """Outputs of n steps, each with tensors of its own, over a cache that grows."""
    generator = torch.Generator("cuda").manual_seed(0)

    def new(heads: int, tokens: int = 1) -> torch.Tensor:
        return torch.randn(3, heads, tokens, 128, dtype=torch.bfloat16, device="cuda",
                           generator=generator)

    cache = MixedKVCache(3, 2, 128, 400, device="cuda")
    cache.append(new(2, 300), new(2, 300))
    outs = []
    for _ in range(n):
        out = dma_attention_with_kvcache(new(8), cache, k=new(2), v=new(2))
        assert isinstance(out, torch.Tensor)
        outs.append(out)
    return torch.stack(outs)


if __name__ == "__main__":
    sys.exit(main())
