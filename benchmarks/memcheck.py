"""Small calls of each kernel, for NVIDIA's compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python benchmarks/memcheck.py

Odd lengths, queries that start within a tile, a window, lengths on the device, an odd output
layout; caches whose rows begin late, in steps of 1 to 16 tokens. Without PyTorch's caching every
tensor is an allocation of its own, and an access beyond it is found. Compilation takes nearly all
of the time: `--part 1/8` to `--part 8/8`, side by side, share it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dma_attn import (
    DMAConfig,
    MixedKVCache,
    dma_attention,
    dma_attention_with_kvcache,
    quantize_pair,
)
from dma_attn.attention.dispatch import use_native
from dma_attn.attention.kernels import hopper_call
from dma_attn.testing import random_qkv

CONFIGS = ("default", "default,pv=fp8", "default,high=none,pv=fp8", "hopper", "nvfp4", "paper")


CACHES = (("default,high=none,low=int4", "none", "int4"), ("default", "mxfp8", "nvfp4"),
          ("default,low=mxfp4,sink=256", "nvfp4", "mxfp4"), ("default,low=fp4", "int8", "fp4"),
          ("mxfp8,diag=full", "mxfp8", "mxfp8"), ("default,high=none,low=none", "none", "none"))


def main() -> int:
    """Run every call, or those of a part; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     epilog="Example: python benchmarks/memcheck.py --part 1/8")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="one of N parts of the calls")
    text = parser.parse_args().part
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        parser.error(f"--part: expected I/N with 1 <= I <= N, got {text!r}")
    if not torch.cuda.is_available():
        print("memcheck: a CUDA device is needed, and torch sees none here", file=sys.stderr)
        return 2
    calls = 0
    for name, run in tasks()[int(index) - 1 :: int(count)]:
        print(name, flush=True)
        calls += run()
        torch.cuda.synchronize()
    print(f"{calls} calls")
    return 0


def tasks() -> list[tuple[str, Callable[[], int]]]:
    """Names and functions that make some calls and return how many."""
    found: list[tuple[str, Callable[[], int]]] = []
    for head_dim in (64, 128):
        for low in ("mxfp4", "nvfp4", "int8", "int4"):
            found.append((f"quantiser, D {head_dim}, {low}", partial(quantise, head_dim, low)))
        for text in CONFIGS:
            for hopper in (False, True):
                found.append((f"attention, D {head_dim}, {text}{', Hopper' * hopper}",
                              partial(attend, head_dim, text, hopper)))
        for text in ("default", "default,high=none"):
            found.append((f"attention, D {head_dim}, {text}, blocks done again",
                          partial(attend, head_dim, text, True, outlier=True)))
        for cache in CACHES:
            found.append((f"cache, D {head_dim}, {cache}", partial(decode, head_dim, *cache)))
    return found


def quantise(head_dim: int, low: str) -> int:
    """Both copies of a rotated tensor."""
    q, _, _ = random_qkv(1, (2, 2), (130, 130), head_dim, device="cuda")
    quantize_pair(q, "mxfp8", low, rotate=True)
    return 1


def attend(head_dim: int, text: str, hopper: bool, outlier: bool = False) -> int:
    """Calls of one configuration; with an outlier, a key that makes blocks be done again."""
    config = DMAConfig.parse(text)
    q, k, v = random_qkv(2, (6, 2), (77, 300), head_dim, device="cuda")
    if outlier:
        q[1] += 8
        k[1, :, 4] = 8
    ends = torch.tensor([300, 131], dtype=torch.int32, device="cuda")
    odd = torch.empty(2, 6, 77, head_dim + 3, dtype=q.dtype, device="cuda")[..., :head_dim]
    fixed = 0 if outlier else hopper_call.FIXED_KEYS
    with use_native(hopper), mock.patch.object(hopper_call, "FIXED_KEYS", fixed):
        dma_attention(q, k, v, is_causal=True, config=config, return_lse=True)
        dma_attention(q, k, v, config=config, window_size=100, is_causal=True)
        dma_attention(q, k, v, config=config, kv_len=ends, is_causal=True, return_lse=True)
        dma_attention(q, k, v, config=config, out=odd)
    return 4


def decode(head_dim: int, text: str, v_high: str, v_low: str) -> int:
    """Appends and steps of one kind of cache: one row's tokens begin late, the other's at once."""
    cache = MixedKVCache(2, 2, head_dim, 700, config=DMAConfig.parse(text), v_high=v_high,
                         v_low=v_low, device="cuda")
    q, k, v = random_qkv(2, (6, 2), (16, 650), head_dim, device="cuda")
    counts = torch.ones(2, 650, dtype=torch.bool, device="cuda")
    counts[0, :600] = False
    cache.append(k, v, key_padding_mask=counts)
    for n, window in ((1, None), (3, 333), (16, None)):
        dma_attention_with_kvcache(q[:, :, :n], cache, k=k[:, :, :n], v=v[:, :, :n],
                                   window_size=window, return_lse=True)
    return 4


if __name__ == "__main__":
    sys.exit(main())
