"""The append's kernels write what its PyTorch twin writes, bit by bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from dma_attn import DMAConfig
from dma_attn.cache import MixedKVCache
from tests.impls import DEVICE, INTERPRETED, ON_GPU, pick

pytestmark = pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="needs Triton to run")

CACHES = pick((
    ("default,high=none,low=int4", ("none", "int4")), ("default", ("mxfp8", "nvfp4")),
    ("default,low=mxfp4,diag=256,sink=0", ("mxfp8_e5m2", "fp4")), ("mxfp8", ("none", "int4")),
    ("default,high=int8,low=fp4,diag=0,sink=256", ("nvfp4", "mxfp8")),
    ("default,diag=full", ("mxfp8", "none")), ("nvfp4,smooth_k=false", ("none", "none")),
    ("default,low=int4,rotate=false,scale_rule=mse", ("int8", "int8")),
    ("default,diag=0,sink=0", ("int4", "mxfp4")),
), (("default,high=none,low=int4", ("none", "int4")), ("default,sink=256", ("mxfp8", "nvfp4"))))


def both(text: str, v: tuple[str, str], dims: tuple[int, int], dtype: torch.dtype,
         ) -> list[MixedKVCache]:
    return [MixedKVCache(2, 2, dims[0], head_dim_v=dims[1], config=DMAConfig.parse(text),
                         v_high=v[0], v_low=v[1], dtype=dtype, device=DEVICE) for _ in range(2)]


def assert_same(kernel: MixedKVCache, twin: MixedKVCache) -> None:
    """All that counts: the last token of the store of the first is nobody's."""
    assert (kernel.length, kernel.high_from) == (twin.length, twin.high_from)
    for name in ("lengths", "starts", "near", "valid", "mean"):
        a, b = getattr(kernel, name), getattr(twin, name)
        assert (a is None and b is None) or torch.equal(a, b), name
    for a, b in ((kernel.k, twin.k), (kernel.v, twin.v)):
        for kind in ("low", "newest", "first"):
            one, two = getattr(a, kind), getattr(b, kind)
            for i, (x, y) in enumerate(zip(one.parts, two.parts, strict=True) if one else ()):
                if kind == "first":
                    x, y = x[:, :, :-1], y[:, :, :-1]
                same = (x == y) | (x.isnan() & y.isnan()) if x.is_floating_point() else x == y
                assert same.all(), (kind, i, int((~same).sum()))


@pytest.mark.parametrize("dims", pick([(64, 64), (128, 128), (96, 40), (8, 256)],
                                      [(64, 64), (96, 40)], [(128, 128), (96, 40), (8, 256)]),
                         ids=str)
@pytest.mark.parametrize("text, v", CACHES, ids=str)
def test_same_bits(text: str, v: tuple[str, str], dims: tuple[int, int]) -> None:
    """Pieces of all lengths, over tile borders and more than the ring holds; then a crop."""
    generator = torch.Generator().manual_seed(0)
    caches = both(text, v, dims, torch.bfloat16)
    pieces = pick((300, 1, 1, 16, 5, 70, 1, 500, 3), (300, 1, 16, 3))
    for n in pieces:
        k = (torch.randn(2, 2, n, dims[0], generator=generator) * 3).to(DEVICE, torch.bfloat16)
        values = torch.randn(2, n, 2, dims[1], generator=generator).to(DEVICE, torch.bfloat16)
        for cache, impl in zip(caches, ("triton", "reference"), strict=True):
            cache.append(k, values.transpose(1, 2), impl=impl)
        assert_same(*caches)
    kept = caches[0].length - 20
    for cache, impl in zip(caches, ("triton", "reference"), strict=True):
        cache.crop(kept)
        cache.append(k, values.transpose(1, 2), impl=impl)
    assert_same(*caches)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_padding_and_odd_values(dtype: torch.dtype) -> None:
    """Rows that begin in different pieces, or never; zeros, NaN, Inf, subnormal numbers."""
    generator = torch.Generator().manual_seed(1)
    caches = both("default,sink=256", ("mxfp8", "int4"), (64, 64), dtype)
    odd = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-7, -6e-8, 6e4])
    for n, counted in ((20, (False, False)), (1, (True, False)), (40, (False, True)),
                       (1, (False, False)), (130, (True, True)), (1, None)):
        k = torch.randn(2, 2, n, 64, generator=generator)
        k[:, :, ::7, : len(odd)] = odd
        k[:, :, ::5] = 0.0
        k = k.to(DEVICE, dtype)
        mask = None
        if counted is not None:
            mask = torch.zeros(2, n, dtype=torch.bool)
            for row, last in itertools.product(range(2), range(0, n, 3)):
                mask[row, n - 1 - last] = counted[row] and last < n // 2 + 1
            mask = mask.to(DEVICE)
        for cache, impl in zip(caches, ("triton", "reference"), strict=True):
            cache.append(k, k * 2, key_padding_mask=mask, impl=impl)
        assert_same(*caches)
    assert caches[0].starts.tolist() != caches[1].starts.new_full((2,), -1).tolist()


def test_beyond_the_capacity() -> None:
    """As replays may: nothing else is written, and the next look at the length says so."""
    from dma_attn.quant.append import launch_advance, launch_append

    cache, other = both("default,high=none,low=int4", ("none", "int4"), (64, 64), torch.bfloat16)
    for x in (cache, other):
        k = torch.ones(2, 2, 128, 64, device=DEVICE, dtype=torch.bfloat16)
        x.append(k, k, key_padding_mask=torch.ones(2, 128, dtype=torch.bool, device=DEVICE))
    assert cache.capacity == 128
    new = 7 * k[:, :, :2]
    launch_advance(cache.lengths, cache.starts, cache.near, cache.valid, None, 2, cache.diag)
    for copies in (cache.k, cache.v):
        launch_append(new, copies, cache.lengths, cache.starts, 0, mean=None, rotate=True,
                      scale_rule="auto")
    for a, b in ((cache.k, other.k), (cache.v, other.v)):
        for x, y in zip(a.low.parts, b.low.parts, strict=True):
            assert torch.equal(x, y)
    assert cache.valid is not None and other.valid is not None
    assert torch.equal(cache.valid, other.valid)
    with pytest.raises(RuntimeError, match="max_len"):
        cache.sync_length()
