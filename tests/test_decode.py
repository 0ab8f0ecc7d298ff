"""Attention over a cache: the law of a decode step, written out densely."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dma_attn import DMAConfig, dma_attention
from dma_attn.cache import MixedKVCache, dma_attention_with_kvcache
from dma_attn.testing import assert_rel_l2
from tests.impls import DEVICE, each_impl, pick

DEFAULT = DMAConfig(high="none", low="int4")
BOUND = {"reference": 5e-3, "triton": 1e-2}  # a bf16 result; bf16 P, too


def filled(
    length: int, config: DMAConfig = DEFAULT, *, batch: int = 2, mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16, seed: int = 0, v: tuple[str, str] = ("none", "int4"),
) -> tuple[MixedKVCache, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cache = MixedKVCache(batch, 2, 64, head_dim_v=32, config=config, dtype=dtype, v_high=v[0],
                         v_low=v[1], device=DEVICE)
    keys = (torch.randn(batch, 2, length, 64, generator=generator) + 0.5).to(DEVICE, dtype)
    values = torch.randn(batch, 2, length, 32, generator=generator).to(DEVICE, dtype)
    cache.append(keys, values, key_padding_mask=mask)
    return cache, keys, values


def queries(
    n: int, heads: int = 6, batch: int = 2, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(batch, heads, n, 64, generator=generator).to(DEVICE, dtype)


def dense(
    q: torch.Tensor, cache: MixedKVCache, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64, query by query, each over the cache as its own position sees it."""
    outs, lses = [], []
    n = q.shape[2]
    for i in range(n):
        p = cache.length - n + i
        k, v = (x.double().repeat_interleave(q.shape[1] // 2, 1)
                for x in cache.dequantize(query_position=p, dtype=torch.float32))
        s = scale * torch.einsum("bhd,bhsd->bhs", q[:, :, i].double(), k)
        j = torch.arange(cache.length, device=DEVICE)
        seen = (j <= p) & (j > p - (window or cache.length + 1))
        visible = seen[None] if cache.valid is None else seen & cache.valid[:, : cache.length]
        s = s.masked_fill(~visible[:, None], -torch.inf)
        lse = torch.logsumexp(s, -1)
        weights = torch.exp(s - lse[..., None]).nan_to_num(0.0)
        outs.append(torch.einsum("bhs,bhsd->bhd", weights, v))
        lses.append(lse)
    return torch.stack(outs, 2), torch.stack(lses, 2)


@each_impl
@pytest.mark.parametrize("window", [None, 1, 200], ids=str)
@pytest.mark.parametrize("n", pick([1, 4, 16], [1, 16]))
@pytest.mark.parametrize("length", pick([16, 130, 384, 391, 700], [16, 130, 391]))
def test_the_law(length: int, n: int, window: int | None, impl: str) -> None:
    """Also where queries lie in two tiles, and so see keys in other precisions."""
    cache, _, _ = filled(length)
    q = queries(n)
    out, lse = dma_attention_with_kvcache(q, cache, scale=0.3, window_size=window, return_lse=True,
                                          impl=impl)
    ref, ref_lse = dense(q, cache, 0.3, window)
    assert_rel_l2(out.double(), ref, BOUND[impl])
    torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-4, atol=1e-4)


@each_impl
@pytest.mark.parametrize("text, v", [
    ("default", ("mxfp8", "nvfp4")), ("default,low=mxfp4,diag=256,sink=0", ("mxfp8_e5m2", "fp4")),
    ("default,high=int8,low=fp4,diag=0,sink=256", ("none", "mxfp8")), ("mxfp8", ("none", "int4")),
    ("default,diag=full", ("mxfp8", "none")), ("default,low=int4,rotate=false", ("int8", "int8")),
    ("nvfp4,smooth_k=false", ("none", "none")),
])
def test_formats(text: str, v: tuple[str, str], impl: str) -> None:
    cache, _, _ = filled(391, DMAConfig.parse(text), v=v)
    q = queries(9)
    out, lse = dma_attention_with_kvcache(q, cache, return_lse=True, impl=impl)
    ref, ref_lse = dense(q, cache, 0.125, None)
    assert_rel_l2(out.double(), ref, BOUND[impl])
    torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-4, atol=1e-4)


@each_impl
@pytest.mark.parametrize("kept", [100, 260, 384])
def test_cropped(kept: int, impl: str) -> None:
    cache, k, v = filled(391)
    cache.crop(kept)
    cache.append(k[:, :, :20], v[:, :, :20])
    out = dma_attention_with_kvcache(queries(16), cache, impl=impl)
    assert_rel_l2(out.double(), dense(queries(16), cache, 0.125, None)[0], BOUND[impl])


@each_impl
def test_padding(impl: str) -> None:
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[0, :170], mask[1] = False, False
    cache, _, _ = filled(300, mask=mask.to(DEVICE))
    out, lse = dma_attention_with_kvcache(queries(3), cache, return_lse=True, impl=impl)
    ref, ref_lse = dense(queries(3), cache, 0.125, None)
    assert_rel_l2(out[0].double(), ref[0], BOUND[impl])
    assert not out[1].any() and (lse[1] == -torch.inf).all()
    torch.testing.assert_close(lse[0].double(), ref_lse[0], rtol=1e-4, atol=1e-4)


@each_impl
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_none_equals_16_bit_attention(dtype: torch.dtype, impl: str) -> None:
    cache, k, v = filled(333, DMAConfig(high="none", low="none"), dtype=dtype, v=("none", "none"))
    q = queries(7, dtype=dtype)
    ref = dma_attention(q, k, v, is_causal=True, config=DMAConfig.preset("off"), impl="reference")
    assert_rel_l2(dma_attention_with_kvcache(q, cache, impl=impl), ref, BOUND[impl])


def test_appends_first() -> None:
    cache, k, v = filled(200)
    other, _, _ = filled(200)
    new_k, new_v = k[:, :, :5] * 2, v[:, :, :5] * 2
    out = torch.empty(2, 6, 5, 32, dtype=torch.bfloat16, device=DEVICE)
    result = dma_attention_with_kvcache(queries(5), cache, k=new_k, v=new_v, out=out)
    other.append(new_k, new_v)
    assert result is out and cache.length == 205
    assert torch.equal(out, dma_attention_with_kvcache(queries(5), other))


def test_case_100_no_dips_at_tile_edges() -> None:
    """Error against 16-bit attention stays level over lengths 1 to 300, but for the known step."""
    cache = MixedKVCache(1, 2, 64, head_dim_v=32, config=DEFAULT, device=DEVICE)
    _, k, v = filled(300, batch=1)
    q = queries(300, batch=1)
    for n in range(300):
        step = slice(n, n + 1)
        out = dma_attention_with_kvcache(q[:, :, step], cache, k=k[:, :, step], v=v[:, :, step])
        ref = dma_attention(q[:, :, step], k[:, :, : n + 1], v[:, :, : n + 1],
                            config=DMAConfig.preset("off"), impl="reference")
        cosine = torch.cosine_similarity(out.float().flatten(), ref.float().flatten(), 0)
        assert cosine > (0.9999 if n < 256 else 0.99), n


def test_bad_calls() -> None:
    cache, k, v = filled(20)
    q = queries(1)
    for arguments, message in (
        ({"k": k}, "both"), ({"key_padding_mask": k}, "key_padding_mask"),
        ({"window_size": 0}, "window_size"), ({"scale": "1"}, "scale"),
        ({"out": torch.empty(1)}, "out"), ({"impl": "cuda"}, "impl"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            dma_attention_with_kvcache(q, cache, **arguments)  # type: ignore[arg-type]
    for bad, message in ((queries(1, 5), "heads"), (queries(1).float(), "q:"),
                         (queries(1)[:1], "batch"), (queries(16).repeat(1, 1, 2, 1), "queries")):
        with pytest.raises((TypeError, ValueError), match=message):
            dma_attention_with_kvcache(bad, cache)
    with pytest.raises(TypeError, match="cache"):
        dma_attention_with_kvcache(q, (k, v))  # type: ignore[arg-type]
    assert cache.length == 20


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("text, v, head_dim", [
    ("default,high=none,low=int4", ("none", "int4"), 128), ("default", ("mxfp8", "nvfp4"), 64),
])
def test_compiles(capability: int, text: str, v: tuple[str, str], head_dim: int) -> None:
    pytest.importorskip("triton")
    from tests.compiling import compile_only

    cache = MixedKVCache(2, 2, head_dim, config=DMAConfig.parse(text), v_high=v[0], v_low=v[1])
    keys = torch.zeros(2, 2, 300, head_dim, dtype=torch.bfloat16)
    cache.append(keys, keys)
    with compile_only(capability) as kernels:
        dma_attention_with_kvcache(keys[:, :, :1], cache, impl="triton")
    names = ["decode_kernel", "low_keys_kernel", "_combine_kernel"]
    if text == "default":  # its newest keys are quantised; E4M3 -> fp16 came after 8.0
        names = ["query_kernel", "decode_kernel", *names[2 if capability == 80 else 1:]]
    assert [x.metadata.name for x in kernels] == names
    overlapping = [x for x in kernels if "griddepcontrol" in x.asm["ptx"]]
    assert len(overlapping) == (0 if capability == 80 else 3)


@pytest.mark.parametrize("queries_of_a_row", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_low_keys_fit_an_sm(head_dim: int, queries_of_a_row: int, tmp_path: Path) -> None:
    """Nearly no spills, and as many programs as planned run at a time."""
    pytest.importorskip("triton")
    from dma_attn.attention.kernels.decode_registers import FORMATS, resident, variant
    from tests.compiling import compile_only, machine_code

    keys = torch.zeros(1, 1, 200, head_dim, dtype=torch.bfloat16)
    query = keys[:, :, :queries_of_a_row].repeat(1, 4, 1, 1)
    for low in FORMATS:
        cache = MixedKVCache(1, 1, head_dim, v_low=low,
                             config=DMAConfig(high="none", low=low, diag=0, sink=0))
        cache.append(keys, keys)
        with compile_only(90) as kernels:
            dma_attention_with_kvcache(query, cache, impl="triton")
        assert [x.metadata.name for x in kernels] == ["low_keys_kernel", "_combine_kernel"]
        code = machine_code(kernels[0], tmp_path)
        spilled = len(re.findall(r"\bSTL\b", code))
        assert "HMMA" in code and spilled <= 3 * (low == "mxfp4"), low  # mxfp4: three numbers
        plan = resident(variant(low, low, head_dim, 4 * queries_of_a_row))
        assert plan * (kernels[0].metadata.shared + 1024) <= 227 * 1024
        registers = re.search(r"\.maxnreg (\d+)", kernels[0].asm["ptx"])
        assert registers and plan * 32 * -(-int(registers[1]) // 8) * 8 <= 65536
