"""Decode steps where kernels go wrong: every format of the low keys, many rows, hidden NaN, scores
that grow, scales of any sign, little shared memory."""

from __future__ import annotations

import pytest
import torch

from dma_attn import DMAConfig
from dma_attn.cache import MixedKVCache, dma_attention_with_kvcache
from dma_attn.testing import assert_rel_l2
from tests.impls import DEVICE, each_impl, pick
from tests.test_decode import BOUND, DEFAULT, dense

LOW = pick(("int4", "fp4", "nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2", "int8", "none"),
           ("int4", "nvfp4"))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def filled(
    k: torch.Tensor, v: torch.Tensor, config: DMAConfig = DEFAULT, v_low: str = "int4",
    mask: torch.Tensor | None = None,
) -> MixedKVCache:
    cache = MixedKVCache(*k.shape[:2], k.shape[3], head_dim_v=v.shape[3], config=config,
                         v_low=v_low, dtype=k.dtype, device=DEVICE)
    cache.append(k, v, key_padding_mask=mask)
    return cache


def step(
    q: torch.Tensor, cache: MixedKVCache, impl: str, **arguments: float
) -> tuple[torch.Tensor, torch.Tensor]:
    result = dma_attention_with_kvcache(
        q, cache, return_lse=True, impl=impl, **arguments)  # type: ignore[arg-type]
    assert isinstance(result, tuple)
    return result


def check(q: torch.Tensor, cache: MixedKVCache, impl: str, scale: float = 0.1) -> None:
    out, lse = step(q, cache, impl, scale=scale)
    ref, ref_lse = dense(q, cache, scale, None)
    assert_rel_l2(out.double(), ref, BOUND[impl])
    torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-4, atol=1e-4)


@each_impl
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_low_keys_of_every_format(head_dim: int, n: int, low: str, impl: str) -> None:
    length = pick(1400, 400)
    k, v = normal(2, 2, length, head_dim), normal(2, 2, length, head_dim, seed=1)
    cache = filled(k + 0.5, v, DMAConfig(high="none", low=low), low)
    check(normal(2, 8, n, head_dim, seed=2), cache, impl)


@each_impl
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group", pick([1, 2, 3, 7, 16], [3]))
def test_many_rows(group: int, dtype: torch.dtype, impl: str) -> None:
    """Up to 256 rows a KV head, in programs of 8, 16 or 32; of queries in two tiles."""
    k, v = normal(1, 2, 520, 64, dtype=dtype), normal(1, 2, 520, 64, seed=1, dtype=dtype)
    cache = filled(k, v)
    for n in (2, 16):
        check(normal(1, 2 * group, n, 64, seed=2, dtype=dtype), cache, impl)


@each_impl
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_padding_cannot_harm(bad: float, low: str, impl: str) -> None:
    """Left padding, and holes among the low keys, of NaN or Inf."""
    k, v = normal(2, 2, 500, 64), normal(2, 2, 500, 64, seed=1)
    counts = torch.ones(2, 500, dtype=torch.bool, device=DEVICE)
    counts[0, :140] = counts[1, 250:300] = False
    hidden = ~counts[:, None, :, None]
    config = DMAConfig(high="none", low=low)
    harmed = filled(k.masked_fill(hidden, bad), v.masked_fill(hidden, bad), config, low, counts)
    clean = filled(k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0), config, low, counts)
    q = normal(2, 8, 2, 64, seed=2)
    for x, y in zip(step(q, harmed, impl), step(q, clean, impl), strict=True):
        assert torch.equal(x, y) and x.isfinite().all()


@each_impl
@pytest.mark.parametrize("low", LOW)
def test_what_a_window_hides_cannot_harm(low: str, impl: str) -> None:
    """Also in the block in which the window begins; padding there, too."""
    k, v = normal(1, 1, 600, 128), normal(1, 1, 600, 128, seed=1)
    config = DMAConfig(high="none", low=low, smooth_k=False)
    for n, window in ((1, 333), (3, 301)):
        bad = [x.clone() for x in (k, v)]
        counts = torch.ones(1, 600, dtype=torch.bool, device=DEVICE)
        counts[:, 350:370] = False
        for x in bad:
            x[:, :, : 600 - n - window + 1] = torch.nan
        q = normal(1, 4, n, 128, seed=2)
        for mask in (None, counts):
            if mask is not None:
                for x in bad:
                    x[:, :, 350:370] = torch.nan
            for x, y in zip(step(q, filled(*bad, config, low, mask), impl, window_size=window),
                            step(q, filled(k, v, config, low, mask), impl, window_size=window),
                            strict=True):
                assert torch.equal(x, y) and x.isfinite().all()


@each_impl
@pytest.mark.parametrize("low", LOW)
def test_nan_is_not_lost(low: str, impl: str) -> None:
    """A query, or a value that counts, of NaN: NaN where it is seen, and nowhere else."""
    k, v = normal(2, 1, 500, 64), normal(2, 1, 500, 64, seed=1)
    config = DMAConfig(high="none", low=low, diag=0, sink=0)
    q = normal(2, 4, 2, 64, seed=2)
    q[0, 1, 0] = torch.nan
    out, lse = step(q, filled(k, v, config, low), impl)
    expected = torch.zeros(2, 4, 2, dtype=torch.bool, device=DEVICE)
    expected[0, 1, 0] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan(), expected[..., None].expand_as(out))
    q = normal(2, 4, 2, 64, seed=2)
    v[1, 0, 200, 7] = torch.nan
    out, lse = step(q, filled(k, v, config, low), impl)
    assert out[1, :, :, 7].isnan().all() and not out[0].isnan().any()
    assert not lse.isnan().any()


@each_impl
def test_nan_of_a_key_that_weighs_nothing(impl: str) -> None:
    """One far key has all the weight; a NaN among the other values is not lost with its split."""
    k, v = normal(1, 1, 600, 64), normal(1, 1, 600, 64, seed=1)
    k[..., 590, 0] = 40.0
    v[..., 10, 5] = torch.nan
    q = normal(1, 4, 1, 64, seed=2)
    q[..., 0] = 30.0
    config = DMAConfig(high="none", low="int4", smooth_k=False)
    out, lse = step(q, filled(k, v, config), impl)
    assert out[..., 5].isnan().all() and int(out.isnan().sum()) == 4 and not lse.isnan().any()


@each_impl
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("scale", [-0.2, 0.0, 0.3])
def test_scores_that_grow(scale: float, low: str, impl: str) -> None:
    """By little and by much from block to block: sums are rescaled, or not."""
    length = 700
    k, v = normal(1, 2, length, 64), normal(1, 2, length, 64, seed=1)
    size = torch.linspace(0, 4, length, device=DEVICE) + 6.0 * (
        torch.arange(length, device=DEVICE) > 420)
    k[..., 0] += size.to(k.dtype)
    q = normal(1, 8, 4, 64, seed=2)
    q[:, ::2, :, 0] += 9
    q[:, 1::2, :, 0] -= 9
    config = DMAConfig(high="none", low=low, rotate=False, diag=0, sink=0)
    check(q, filled(k, v, config, low), impl, scale)


@each_impl
def test_a_row_without_low_keys(impl: str) -> None:
    """One row's tokens are all near or hidden, the other row has low ones."""
    k, v = normal(2, 2, 400, 128), normal(2, 2, 400, 128, seed=1)
    counts = torch.ones(2, 400, dtype=torch.bool, device=DEVICE)
    counts[0, :256] = False
    check_padded = filled(k, v, mask=counts)
    check(normal(2, 8, 1, 128, seed=2), check_padded, impl)
    short = filled(k[:, :, :90], v[:, :, :90])
    check(normal(2, 8, 1, 128, seed=2), short, impl)


@pytest.mark.parametrize("capability", [80, 89, 120])
@pytest.mark.parametrize("text, v_low, dtype, heads, n", [
    ("default,high=none,low=int4", "int4", torch.bfloat16, 16, 16),
    ("default,high=none,low=int4", "int4", torch.float32, 16, 16),
    ("default,high=none,low=none", "none", torch.float32, 4, 1),
    ("mxfp8", "nvfp4", torch.float32, 4, 4), ("default", "none", torch.bfloat16, 1, 1),
])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_fits_the_smallest_shared_memory(
    head_dim: int, text: str, v_low: str, dtype: torch.dtype, heads: int, n: int, capability: int
) -> None:
    pytest.importorskip("triton")
    from tests.compiling import SHARED_MEMORY, compile_only

    k = torch.zeros(1, 1, 200, head_dim, dtype=dtype)
    cache = MixedKVCache(1, 1, head_dim, config=DMAConfig.parse(text), v_low=v_low, dtype=dtype)
    cache.append(k, k)
    with compile_only(capability) as kernels:
        dma_attention_with_kvcache(k[:, :, :n].expand(-1, heads, -1, -1), cache, impl="triton")
    for kernel in kernels:
        assert kernel.metadata.shared <= SHARED_MEMORY[capability], kernel.metadata.name
