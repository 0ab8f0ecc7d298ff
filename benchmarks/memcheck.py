"""One small call of each kernel, for NVIDIA's compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python benchmarks/memcheck.py

Odd lengths, queries that start within a tile, a window, lengths on the device, an odd output
layout. Without PyTorch's caching every tensor is an allocation of its own, and an access beyond it
is found.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dma_attn import DMAConfig, dma_attention, quantize_pair
from dma_attn.attention.dispatch import use_hopper
from dma_attn.attention.kernels import hopper_call
from dma_attn.testing import random_qkv

CONFIGS = ("default", "default,pv=fp8", "default,high=none,pv=fp8", "hopper", "nvfp4", "paper")


def main() -> int:
    """Run every call; returns the exit code."""
    if not torch.cuda.is_available():
        print("memcheck: a CUDA device is needed, and torch sees none here", file=sys.stderr)
        return 2
    calls = 0
    for head_dim in (64, 128):
        for low in ("mxfp4", "nvfp4", "int8", "int4"):
            q, _, _ = random_qkv(1, (2, 2), (130, 130), head_dim, device="cuda")
            quantize_pair(q, "mxfp8", low, rotate=True)
            calls += 1
        for hopper in (False, True):
            with use_hopper(hopper):
                for text in CONFIGS:
                    calls += attend(head_dim, DMAConfig.parse(text))
        with use_hopper(), mock.patch.object(hopper_call, "FIXED_KEYS", 0):
            for text in ("default", "default,high=none"):
                calls += attend(head_dim, DMAConfig.parse(text), outlier=True)
    torch.cuda.synchronize()
    print(f"{calls} calls")
    return 0


def attend(head_dim: int, config: DMAConfig, outlier: bool = False) -> int:
    """Calls of one configuration, with a key that makes blocks be done again; returns how many."""
    q, k, v = random_qkv(2, (6, 2), (77, 300), head_dim, device="cuda")
    if outlier:
        q[1] += 8
        k[1, :, 4] = 8
    print(f"D {head_dim}, {config}", flush=True)
    ends = torch.tensor([300, 131], dtype=torch.int32, device="cuda")
    odd = torch.empty(2, 6, 77, head_dim + 3, dtype=q.dtype, device="cuda")[..., :head_dim]
    dma_attention(q, k, v, is_causal=True, config=config, return_lse=True)
    dma_attention(q, k, v, config=config, window_size=100, is_causal=True)
    dma_attention(q, k, v, config=config, kv_len=ends, is_causal=True, return_lse=True)
    dma_attention(q, k, v, config=config, out=odd)
    return 4


if __name__ == "__main__":
    sys.exit(main())
