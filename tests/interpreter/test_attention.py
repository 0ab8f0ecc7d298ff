"""The attention kernel under the Triton interpreter, on tiny shapes.

Run in a process of its own: `TRITON_INTERPRET=1 python -m pytest tests/interpreter`.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from dma_attn import (
    DMAConfig,
    dma_attention,
    dma_attention_prepared,
    dma_attention_varlen,
    merge_states,
    prepare_kv,
    scaled_dot_product_attention,
)
from dma_attn.testing import (
    assert_rel_l2,
    class_map,
    index_values,
    probe_key,
    probe_query,
    quantised_oracle,
    random_qkv,
)
from tests.impls import INTERPRETED, check_against_oracle, check_result

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
DEFAULT = DMAConfig()


@pytest.mark.parametrize(
    ("lengths", "is_causal"),
    [
        ((1, 1), True),
        ((1, 130), True),
        ((5, 17), False),
        ((17, 5), True),
        ((40, 280), True),
        ((130, 140), False),
    ],
    ids=str,
)
def test_lengths(lengths: tuple[int, int], is_causal: bool) -> None:
    q, k, v = random_qkv(1, (2, 1), lengths, 32)
    check_against_oracle(q, k, v, DEFAULT, "triton", is_causal=is_causal)


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [((64, 64), FP16), ((32, 32), FP32), ((80, 24), BF16), ((16, 48), FP16), ((96, 96), FP32)],
    ids=str,
)
def test_head_dims_and_dtypes(dims: tuple[int, int], dtype: torch.dtype) -> None:
    q, k, v = random_qkv(1, (1, 1), (20, 150), dims, dtype=dtype)
    check_against_oracle(q, k, v, DMAConfig(sink=0), "triton", is_causal=True)


@pytest.mark.parametrize("heads", [(3, 1), (4, 4), (7, 1), (8, 1)], ids=str)
def test_grouped_query_heads(heads: tuple[int, int]) -> None:
    q, k, v = random_qkv(1, heads, (3, 20), 32)
    check_against_oracle(q, k, v, DEFAULT, "triton", is_causal=True)


@pytest.mark.parametrize(
    "config",
    [
        DMAConfig(high="mxfp8_e5m2", low="mxfp4", sink=0),
        DMAConfig(high="none", low="nvfp4", sink=0),
        DMAConfig(high="none", low="int4", sink=0, smooth_k=False),
        DMAConfig(high="int8", low="fp4", sink=0, rotate=False),
        DMAConfig(low="nvfp4", sink=0, granularity="tile", scale_rule="amax"),
        DMAConfig(low="nvfp4", diag=0, sink=0, granularity="tensor"),
        DMAConfig(pv="fp8"),
        DMAConfig.preset("paper"),
        DMAConfig.preset("hopper"),
        DMAConfig.preset("off"),
    ],
    ids=str,
)
def test_configs(config: DMAConfig) -> None:
    q, k, v = random_qkv(1, (2, 1), (12, 150), 32)
    check_against_oracle(q, k, v, config, "triton", is_causal=True)


@pytest.mark.parametrize("limit", ["window", "padding", "kv_len", "all"])
@pytest.mark.parametrize("pv", ["fp16", "fp8"])
def test_masks_with_poisoned_memory(pv: str, limit: str) -> None:
    q, k, v = random_qkv(2, (2, 1), (10, 150), 32)
    ends, pads = torch.tensor([140, 5], dtype=torch.int32), torch.tensor([[30], [1]])
    arguments: dict[str, object] = {"is_causal": True}
    keys = torch.arange(150)
    hidden = torch.zeros(2, 150, dtype=torch.bool)
    if limit in ("window", "all"):
        arguments["window_size"] = 20
    if limit in ("padding", "all"):
        arguments["key_padding_mask"] = keys >= pads
        hidden |= keys < pads
    if limit in ("kv_len", "all"):
        arguments["kv_len"] = ends
        hidden |= keys >= ends[:, None]
    k, v = (x.masked_fill(hidden[:, None, :, None], math.nan) for x in (k, v))
    check_against_oracle(q, k, v, DMAConfig(pv=pv), "triton", **arguments)


def test_never_visible_keys_do_not_leak() -> None:
    """The window hides keys 0-12 from every query; they hold NaN."""
    q, k, v = random_qkv(1, (2, 1), (8, 40), 32)
    k[:, :, :13] = v[:, :, :13] = math.nan
    check_against_oracle(q, k, v, DEFAULT, "triton", is_causal=True, window_size=20)


@pytest.mark.parametrize("kind", ["bool", "float", "causal"])
def test_sdpa_masks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA's signature has no `impl`, and "auto" takes the reference on the CPU."""
    monkeypatch.setattr("dma_attn.attention.api.use_triton", lambda device, impl: True)
    q, k, v = random_qkv(2, (2, 2), (20, 140), 32)
    if kind == "causal":
        k[:, :, 20:] = v[:, :, 20:] = math.nan
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        check_result(out, None, q, k, v, DEFAULT, is_causal=True, top_left=True)
        return
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(2, 1, 20, 140, generator=generator) < 0.6
    mask[..., :3] = mask[:, :, 1] = False
    k[:, :, :3] = v[:, :, :3] = math.nan
    if kind == "float":
        bias = torch.randn(mask.shape, generator=generator).to(q.dtype)
        mask = bias.masked_fill(~mask, torch.finfo(q.dtype).min)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    check_result(out, None, q, k, v, DEFAULT, attn_mask=mask)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_precision_probe(is_causal: bool) -> None:
    s_q, s_kv = 140, 300
    config = DMAConfig(low="mxfp4", sink=0, smooth_k=False, rotate=False)
    q = probe_query(32, dtype=FP16).expand(1, 1, s_q, 32)
    k = torch.zeros(1, 1, s_kv, 32, dtype=FP16)
    k[0, 0, 130] = probe_key(32, dtype=FP16)
    _, lse = dma_attention(
        q,
        k,
        k,
        is_causal=is_causal,
        scale=0.2,
        config=config,
        return_lse=True,
        impl="triton",
    )
    position = torch.arange(s_kv - s_q, s_kv)
    high = class_map(config, position[None], torch.zeros(1, dtype=torch.int64), s_kv)[0, :, 130]
    seen = position + 1 if is_causal else torch.full_like(position, s_kv)
    logit = torch.where(high, 38.75, 31.0).double() * 0.2
    torch.testing.assert_close(
        lse[0, 0].double(), torch.log(seen - 1 + logit.exp()), atol=5e-3, rtol=0
    )


@pytest.mark.parametrize("pv", ["fp16", "fp8"])
def test_mean_and_ones_probes(pv: str) -> None:
    q = torch.zeros(1, 1, 10, 32, dtype=FP16)
    k = torch.zeros(1, 1, 4, 32, dtype=FP16)
    config = DMAConfig(pv=pv)
    arguments = {"is_causal": True, "config": config, "return_lse": True, "impl": "triton"}
    out, lse = dma_attention(q, k, torch.ones_like(k), **arguments)
    assert not out[:, :, :6].any() and (lse[:, :, :6] == -math.inf).all()
    assert float((out[:, :, 6:] - 1).abs().max()) <= 1e-3
    torch.testing.assert_close(lse[0, 0, 6:].exp(), torch.arange(1.0, 5.0))
    if pv == "fp16":
        out, _ = dma_attention(q, k, index_values(1, 1, 4, 32, dtype=FP16), **arguments)
        assert out[0, 0, 6:, 0].tolist() == [0, 0.5, 1, 1.5]


def test_layouts_strides_and_repeats_are_bit_equal() -> None:
    q, k, v = random_qkv(2, (2, 1), (10, 40), (32, 16))
    arguments = {"is_causal": True, "impl": "triton"}
    ref = dma_attention(q, k, v, **arguments)
    assert torch.equal(dma_attention(q, k, v, **arguments), ref)
    views = [torch.stack((x, -x), -1).flatten(-2)[..., ::2] for x in (q, k, v)]
    out = torch.full((2, 2, 10, 33), math.nan, dtype=BF16)[..., 1::2]
    dma_attention(*views, out=out, **arguments)
    assert torch.equal(out, ref)
    swapped = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out = dma_attention(*swapped, tensor_layout="NHD", **arguments)
    assert torch.equal(out.transpose(1, 2), ref)


def test_prepared_equals_one_call_bitwise() -> None:
    q, k, v = random_qkv(2, (2, 1), (10, 140), 32)
    kv_len = torch.tensor([140, 100], dtype=torch.int32)
    one = dma_attention(q, k, v, is_causal=True, kv_len=kv_len, impl="triton")
    prepared = prepare_kv(k, v, kv_len=kv_len, impl="triton")
    assert torch.equal(dma_attention_prepared(q, prepared, is_causal=True, impl="triton"), one)


def test_varlen_equals_a_loop() -> None:
    lens_q, lens_k = [3, 0, 20, 1], [3, 5, 140, 0]
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)
        for lens in (lens_q, lens_k)
    )
    q, k, v = (x[0].transpose(0, 1) for x in random_qkv(1, (2, 1), (26, 148), 32))
    out = dma_attention_varlen(q, k, v, cu_q, cu_k, 20, 140, is_causal=True, impl="triton")
    assert not out[23:].any()
    for row in (0, 2):
        a, b = slice(*cu_q[row : row + 2].tolist()), slice(*cu_k[row : row + 2].tolist())
        one = (q[a], k[b], v[b])
        ref, _ = quantised_oracle(*(x.transpose(0, 1)[None] for x in one), is_causal=True)
        assert_rel_l2(out[a].transpose(0, 1)[None], ref, 1e-2)


def test_merged_key_splits_equal_the_whole() -> None:
    config = DMAConfig.preset("mxfp8").replace(smooth_k=False)
    q, k, v = random_qkv(1, (2, 1), (5, 40), 32, dtype=FP32)
    arguments = {"config": config, "return_lse": True, "impl": "triton"}
    whole, whole_lse = dma_attention(q, k, v, **arguments)
    parts = [
        dma_attention(q, k[:, :, part], v[:, :, part], **arguments)
        for part in (slice(0, 13), slice(13, 40))
    ]
    out, lse = merge_states([part[0] for part in parts], [part[1] for part in parts])
    assert_rel_l2(out, whole, 1e-3)
    torch.testing.assert_close(lse, whole_lse, atol=1e-3, rtol=0)
