"""Edges of the calls: strided small tensors, cut sequences, blind rows, aliasing, huge arguments.

Run twice by `make test`: with the reference, and with the kernels under Triton's interpreter.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from dma_attn import (
    DMAConfig,
    dma_attention,
    dma_attention_varlen,
    explain,
    quantize,
    scaled_dot_product_attention,
)
from dma_attn.attention.prepare import visible_keys
from dma_attn.testing import assert_rel_l2, random_qkv
from tests.impls import DEVICE, check_against_oracle, each_impl

OFF = DMAConfig.preset("off")


@each_impl
def test_mean_of_a_narrow_head_over_many_keys(impl: str) -> None:
    """D = 8 takes many rows at once; a chunk of the K mean still counts each row once."""
    q, k, v = random_qkv(1, (1, 1), (4, 400), 8, device=DEVICE)
    k[:, :, 256:] += 4
    config = DMAConfig(high="int4", low="int4")
    check_against_oracle(q, k, v, config, impl, is_causal=True)


@each_impl
def test_strided_lengths(impl: str) -> None:
    q, k, v = random_qkv(3, (1, 1), (3, 40), 32, device=DEVICE)
    lengths = torch.tensor([20, 7, 33], dtype=torch.int32, device=DEVICE)
    spread = lengths.repeat_interleave(2)[::2]
    one = lengths[:1].expand(3)
    for kv_len in (spread, one):
        out = dma_attention(q, k, v, is_causal=True, kv_len=kv_len, impl=impl)
        ref = dma_attention(q, k, v, is_causal=True, kv_len=kv_len.clone(), impl=impl)
        assert torch.equal(out, ref)
    x = q[0].transpose(0, 1)
    cu = torch.tensor([0, 9, 1, 9, 3, 9], dtype=torch.int32, device=DEVICE)[::2]
    packed = dma_attention_varlen(x, x, x, cu, cu, 2, 2, impl=impl)
    assert torch.equal(packed, dma_attention_varlen(x, x, x, cu.contiguous(), cu, 2, 2, impl=impl))


@each_impl
def test_longer_sequences_are_cut_at_max_seqlen(impl: str) -> None:
    q, k, v = (x[0].transpose(0, 1) for x in random_qkv(1, (1, 1), (60, 300), 32, device=DEVICE))
    cu_q = torch.tensor([0, 60], dtype=torch.int32, device=DEVICE)
    cu_k = torch.tensor([0, 300], dtype=torch.int32, device=DEVICE)
    for config in (DMAConfig(), DMAConfig(granularity="tile")):
        arguments = {"config": config, "is_causal": True, "return_lse": True, "impl": impl}
        out, lse = dma_attention_varlen(q, k, v, cu_q, cu_k, 20, 130, **arguments)
        ref, ref_lse = dma_attention(
            q[None, :20], k[None, :130], v[None, :130], tensor_layout="NHD", **arguments
        )
        assert torch.equal(out[:20], ref[0]) and torch.equal(lse[:, :20], ref_lse[0])
        assert not out[20:].any() and (lse[:, 20:] == -math.inf).all()


@each_impl
def test_blind_rows_ignore_their_own_query_and_every_value(impl: str) -> None:
    """Padded queries see no key: 0 and -inf, though q is NaN and V holds NaN that others see."""
    q, k, v = random_qkv(1, (1, 1), (12, 12), 32, device=DEVICE)
    q[:, :, :4] = math.nan
    v[:, :, 9] = math.nan
    mask = torch.arange(12, device=DEVICE)[None] >= 4
    out, lse = dma_attention(
        q, k, v, is_causal=True, key_padding_mask=mask, return_lse=True, impl=impl
    )
    assert not out[:, :, :4].any()
    assert (lse[:, :, :4] == -math.inf).all() and lse[:, :, 4:].isfinite().all()


@each_impl
def test_out_must_be_memory_of_its_own(impl: str) -> None:
    q, k, v = random_qkv(1, (1, 1), (8, 8), 32, device=DEVICE)
    for name, out in (("k", k), ("v", v)):
        with pytest.raises(ValueError, match=f"memory apart from {name}"):
            dma_attention(q, k, v, out=out, impl=impl)
    with pytest.raises(ValueError, match="distinct elements"):
        dma_attention(q, k, v, out=q[:, :, :1].expand(q.shape), impl=impl)
    with pytest.raises(TypeError, match="out"):
        dma_attention(q, k, v, out=[], impl=impl)
    arena = torch.empty(2, *q.shape, dtype=q.dtype, device=DEVICE)
    arena[0] = v
    result = dma_attention(q, k, arena[0], out=arena[1], impl=impl)  # apart, in one allocation
    assert torch.equal(dma_attention(q, k, v, out=q, impl=impl), result)
    raw = DMAConfig(high="none")  # q is read while out is written
    pair = torch.randn(2, 1, 8, 32, device=DEVICE).to(q.dtype)
    with pytest.raises(ValueError, match="memory apart from q"):
        dma_attention(pair[:1], k, v, out=pair.flatten()[32:][:256].view(q.shape), config=raw)
    result = dma_attention(pair[:1], k, v, config=raw, impl=impl)
    assert torch.equal(dma_attention(pair[:1], k, v, out=pair[:1], config=raw, impl=impl), result)


@each_impl
def test_arguments_wider_than_any_matrix(impl: str) -> None:
    q, k, v = random_qkv(1, (1, 1), (8, 300), 32, device=DEVICE)
    whole = dma_attention(q, k, v, is_causal=True, config=OFF, impl=impl)
    wide = dma_attention(q, k, v, is_causal=True, window_size=2**40, config=OFF, impl=impl)
    assert torch.equal(wide, whole)
    full = dma_attention(q, k, v, config=DMAConfig(diag="full"), impl=impl)
    for config in (DMAConfig(diag=2**40), DMAConfig(sink=2**40, diag=0)):
        assert_rel_l2(dma_attention(q, k, v, config=config, impl=impl), full, 1e-2)


@each_impl
def test_no_heads_and_no_rows(impl: str) -> None:
    q = torch.zeros(1, 0, 4, 16, device=DEVICE)
    assert dma_attention(q, q, q, impl=impl).shape == (1, 0, 4, 16)
    x = torch.zeros(2, 3, 0, 4, 32, device=DEVICE)
    assert quantize(x, "nvfp4", impl=impl).dequantize().shape == x.shape


@each_impl
def test_nothing_is_prepared_for_a_refused_call(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("prepared before the arguments were checked")

    monkeypatch.setattr("dma_attn.attention.api.prepare", fail)
    q, k, v = random_qkv(2, (2, 1), (4, 8), 32, device=DEVICE)
    bad = [
        ((q[:1], k, v), {}),
        ((q, k, v), {"window_size": 4}),
        ((q, k, v), {"scale": math.nan}),
        ((q[..., :16], k, v), {}),
        ((q, k, v), {"out": torch.empty(1, device=DEVICE)}),
    ]
    for tensors, arguments in bad:
        with pytest.raises(ValueError, match=r"^(q|window_size|scale|out): expected"):
            dma_attention(*tensors, impl=impl, **arguments)
        with pytest.raises(ValueError, match=r"^(q|window_size|scale|out): expected"):
            explain(*tensors, **arguments)
    mask = torch.ones(1, 1, 4, 8, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match=r"^q: expected batch 2"):
        scaled_dot_product_attention(q[:1], k, v, attn_mask=mask, enable_gqa=True)


def test_visible_keys_never_expands_a_mask() -> None:
    keys = torch.arange(8, device=DEVICE) % 2 == 0
    shape = (2, 4, 16, 8)
    for mask in (
        keys,
        keys.expand(16, 8),
        keys.expand(2, 1, 16, 8),
        torch.where(keys, 0.0, -math.inf).expand(shape),
    ):
        visible = visible_keys(mask, shape)
        assert visible.shape == (2, 8) and torch.equal(visible, keys.expand(2, 8))


def test_canonical_configs_are_traced_without_warnings() -> None:
    """torch.compile warns of caches that it meets."""
    config = DMAConfig(diag="full")
    traced = torch.compile(lambda x: x + len(config.canonical().low), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert traced(torch.zeros(1)) == len("mxfp8")
