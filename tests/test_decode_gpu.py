"""Decode steps on a GPU: graphs, memory, and many splits."""

from __future__ import annotations

import gc

import pytest
import torch

from dma_attn import DMAConfig
from dma_attn.cache import MixedKVCache, dma_attention_with_kvcache
from dma_attn.testing import assert_rel_l2
from tests.impls import needs_gpu

CACHES = [
    ("default,high=none,low=int4", ("none", "int4")),
    ("mxfp8,diag=full", ("mxfp8", "mxfp8")),
    ("default", ("mxfp8", "nvfp4")),
]


def make(text: str, v: tuple[str, str], batch: int, size: int, heads: int = 2) -> MixedKVCache:
    return MixedKVCache(batch, heads, 128, size, config=DMAConfig.parse(text), v_high=v[0],
                        v_low=v[1], device="cuda")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@needs_gpu
@pytest.mark.parametrize("text, v", CACHES, ids=str)
def test_steps_in_a_graph(text: str, v: tuple[str, str]) -> None:
    """One captured step, replayed over a tile boundary: lengths are the device's."""
    torch.manual_seed(0)
    prompt = normal(2, 2, 500, 128)
    caches = [make(text, v, 2, 1024) for _ in range(2)]
    for cache in caches:
        cache.append(prompt, prompt)
    captured, eager = caches
    q, k, values = normal(2, 8, 1, 128), normal(2, 2, 1, 128), normal(2, 2, 1, 128)
    for cache in caches:
        dma_attention_with_kvcache(q, cache, k=k, v=values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dma_attention_with_kvcache(q, captured, k=k, v=values)
    assert captured.sync_length() == 501  # capturing appended nothing
    for _ in range(150):
        for x in (q, k, values):
            x.copy_(normal(*x.shape))
        graph.replay()
        expected = dma_attention_with_kvcache(q, eager, k=k, v=values)
        assert isinstance(out, torch.Tensor) and isinstance(expected, torch.Tensor)
        assert torch.equal(out, expected)
    assert captured.sync_length() == eager.length == 651
    ref = dma_attention_with_kvcache(q, captured, impl="reference")
    assert isinstance(ref, torch.Tensor)
    assert_rel_l2(out.double(), ref.double(), 1e-2)


@needs_gpu
@pytest.mark.parametrize("queries", [1, 4, 16])
@pytest.mark.parametrize("text, v", CACHES, ids=str)
def test_a_step_makes_no_16_bit_copies(text: str, v: tuple[str, str], queries: int) -> None:
    """Nothing that grows with K and V: parts of outputs only."""
    cache = make(text, v, 1, 65536, 8)
    for _ in range(16):
        new = normal(1, 8, 4096, 128)
        cache.append(new, new)
    q = normal(1, 32, queries, 128)
    dma_attention_with_kvcache(q, cache)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    dma_attention_with_kvcache(q, cache)
    used = torch.cuda.max_memory_allocated() - before
    assert used <= 20e6, used  # K and V in 16 bits are 268 MB


@needs_gpu
@pytest.mark.parametrize("text, v", CACHES, ids=str)
def test_allocated_as_counted(text: str, v: tuple[str, str]) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    cache = make(text, v, 4, 32768, 8)
    new = normal(4, 8, 100, 128)
    cache.append(new, new)
    del new
    used = torch.cuda.memory_allocated() - before
    assert 0.95 <= used / cache.nbytes() <= 1.05
    assert used <= (0.29 if "int4" in text else 0.32 if text == "default" else 0.53) * (
        2 * 2 * 4 * 8 * 32768 * 128)


@needs_gpu
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("text, v", CACHES, ids=str)
def test_long(text: str, v: tuple[str, str], queries: int) -> None:
    """Many splits, more than the combination takes at once, and left padding."""
    torch.manual_seed(1)
    cache = make(text, v, 1, 40000, 1)
    mask = torch.ones(1, 40000, dtype=torch.bool, device="cuda")
    mask[:, :3333] = False
    keys, values = normal(1, 1, 40000, 128), normal(1, 1, 40000, 128) + 0.5
    cache.append(keys, values, key_padding_mask=mask)
    q = normal(1, 4, queries, 128)
    out, lse = dma_attention_with_kvcache(q, cache, return_lse=True)
    ref, ref_lse = dma_attention_with_kvcache(q, cache, return_lse=True, impl="reference")
    assert_rel_l2(out.double(), ref.double(), 1e-2)
    torch.testing.assert_close(lse, ref_lse, rtol=1e-3, atol=1e-3)
