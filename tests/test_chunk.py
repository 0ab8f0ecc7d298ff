"""Chunks of more than 16 queries over a cache: the chunked-prefill law."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dma_attn import DMAConfig, dma_attention, dma_attention_prepared, prepare_kv
from dma_attn.cache import MixedKVCache, dma_attention_with_kvcache
from dma_attn.testing import assert_rel_l2
from tests.impls import DEVICE, each_impl, pick

CONFIGS = ["default,high=none,low=int4", "default", "default,low=mxfp4,diag=256,sink=0",
           "default,diag=full", "default,high=int8,low=fp4,diag=0,sink=256", "nvfp4",
           "default,high=nvfp4,low=none", "off"]
PIECES = [[200, 17, 300, 130], [17] * 9, [647]]


def case(
    length: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 4, length, 64, generator=generator)
    k = torch.randn(2, 2, length, 64, generator=generator) + 0.5
    v = torch.randn(2, 2, length, 32, generator=generator)
    return q.to(DEVICE, dtype), k.to(DEVICE, dtype), v.to(DEVICE, dtype)


def cache_of(config: DMAConfig, v: tuple[str, str] = ("none", "none")) -> MixedKVCache:
    return MixedKVCache(2, 2, 64, head_dim_v=32, config=config, v_high=v[0], v_low=v[1],
                        device=DEVICE)


def chunked(
    cache: MixedKVCache, qkv: tuple[torch.Tensor, ...], pieces: list[int], impl: str,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    outs, lses, begin = [], [], 0
    for n in pieces:
        q, k, v = (x[:, :, begin : begin + n] for x in qkv)
        part = None if mask is None else mask[:, begin : begin + n]
        out, lse = dma_attention_with_kvcache(q, cache, k=k, v=v, key_padding_mask=part,
                                              return_lse=True, impl=impl)
        outs.append(out)
        lses.append(lse)
        begin += n
    return torch.cat(outs, 2), torch.cat(lses, 2)


@each_impl
@pytest.mark.parametrize("pieces", pick(PIECES, PIECES[:1]), ids=len)
@pytest.mark.parametrize("text", pick(CONFIGS, CONFIGS[:2]))
def test_chunked_equals_one_shot(text: str, pieces: list[int], impl: str) -> None:
    config = DMAConfig.parse(text + ",smooth_k=false")
    qkv = case(sum(pieces))
    out, lse = chunked(cache_of(config), qkv, pieces, impl)
    ref, ref_lse = dma_attention(*qkv, config=config, is_causal=True, return_lse=True, impl=impl)
    assert_rel_l2(out, ref, 1e-3)
    torch.testing.assert_close(lse, ref_lse, rtol=1e-3, atol=1e-3)


@each_impl
def test_left_padding(impl: str) -> None:
    config = DMAConfig.parse("default,high=mxfp8,low=int4,smooth_k=false")
    qkv = case(400)
    mask = torch.ones(2, 400, dtype=torch.bool, device=DEVICE)
    mask[0, :170], mask[1, :3] = False, False
    out, lse = chunked(cache_of(config), qkv, [150, 250], impl, mask)
    ref, ref_lse = dma_attention(*qkv, config=config, is_causal=True, return_lse=True, impl=impl,
                                 key_padding_mask=mask)
    assert_rel_l2(out, ref, 1e-3)
    torch.testing.assert_close(lse, ref_lse, rtol=1e-3, atol=1e-3)
    assert not out[0, :, :170].any()


@each_impl
@pytest.mark.parametrize("text", ["default,high=none,low=int4", "default"])
def test_quantised_values_and_a_frozen_mean(text: str, impl: str) -> None:
    """What one-shot prefill does not have: old V in the cache's formats, the first chunk's mean."""
    qkv = case(600)
    cache = cache_of(DMAConfig.parse(text), ("none", "int4"))
    out, _ = chunked(cache, qkv, [300, 300], impl)
    ref = dma_attention(*qkv, config=DMAConfig.preset("off"), is_causal=True, impl=impl)
    error = (out.float() - ref.float()).norm() / ref.float().norm()
    assert 0.02 < error < 0.2
    # A chunk sees its own V as it is, and the first one has the mean of its own keys
    first = dma_attention(*(x[:, :, :300] for x in qkv), config=cache.config, is_causal=True,
                          impl=impl)
    assert_rel_l2(out[:, :, :300], first, 1e-3)


@each_impl
@pytest.mark.parametrize("kept", [100, 260, 384])
def test_cropped(kept: int, impl: str) -> None:
    """Tokens whose high copy is gone are seen in the low one, also where their tile is high."""
    config = DMAConfig.parse("default,high=none,low=int4,smooth_k=false,sink=0")
    q, k, v = case(700)
    cache = cache_of(config)
    chunked(cache, (q, k, v), [600], impl)
    cache.crop(kept)
    old = cache.dequantize(query_position=kept)[0]
    new_k, new_v = k[:, :, 600:], v[:, :, 600:]
    out = dma_attention_with_kvcache(q[:, :, 600:], cache, k=new_k, v=new_v, impl=impl)
    keys, values = (torch.cat((x[:, :, :kept], x[:, :, 600:]), 2) for x in (k, v))
    prepared = prepare_kv(keys, values, config, impl=impl)
    prepared = replace(prepared, k=torch.cat((old, new_k), 2))
    ref = dma_attention_prepared(q[:, :, 600:], prepared, is_causal=True, impl=impl)
    assert_rel_l2(out, ref, 1e-3)
    assert cache.length == kept + 100


@each_impl
def test_queries_of_tokens_that_are_there(impl: str) -> None:
    """Without new tokens, V is what the cache keeps of it, the queries are quantised."""
    config = DMAConfig.parse("default,high=mxfp8,low=int4,smooth_k=false")
    q, k, v = case(300)
    cache = cache_of(config)
    cache.append(k, v)
    out = dma_attention_with_kvcache(q[:, :, -40:], cache, impl=impl)
    ref = dma_attention(q[:, :, -40:], k, v, config=config, is_causal=True, impl=impl)
    assert_rel_l2(out, ref, 1e-3)


@each_impl
def test_window_out_and_scale(impl: str) -> None:
    config = DMAConfig.parse("default,smooth_k=false")
    q, k, v = case(300)
    cache = cache_of(config)
    cache.append(k[:, :, :150], v[:, :, :150])
    out = torch.empty(2, 4, 150, 32, dtype=q.dtype, device=DEVICE)
    q, n_k, n_v = (x[:, :, 150:] for x in (q, k, v))
    result = dma_attention_with_kvcache(q, cache, k=n_k, v=n_v, window_size=77, scale=0.3, out=out,
                                        impl=impl)
    ref = dma_attention(q, k, v, config=config, is_causal=True, window_size=77, scale=0.3,
                        impl=impl)
    assert result is out
    assert_rel_l2(out, ref, 1e-3)
