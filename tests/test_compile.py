"""Every kernel compiles for sm_80, sm_90, sm_100 and sm_120 on a machine without a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from dma_attn import (
    DMAConfig,
    MixedKVCache,
    dma_attention,
    dma_attention_varlen,
    quantize_pair,
)

pytest.importorskip("triton")

from dma_attn.attention.api import masked_attention
from dma_attn.attention.dispatch import use_native
from tests.compiling import SHARED_MEMORY, check_fp8_products, compile_only, device_tensor

TARGETS = (80, 90, 100, 120)


def check(kernels, capability):
    assert kernels
    for kernel in kernels:
        assert kernel.metadata.shared <= SHARED_MEMORY[capability], kernel.metadata.name
        assert f".target sm_{capability}" in kernel.asm["ptx"]
    return {kernel.metadata.name: kernel.asm["ptx"] for kernel in kernels}


@pytest.mark.parametrize("capability", TARGETS)
def test_default_call_compiles_everywhere(capability):
    q, k = device_tensor(1, 4, 300, 128), device_tensor(1, 2, 300, 128)
    with use_native(False), compile_only(capability) as kernels:
        dma_attention(q, k, k, is_causal=True, return_lse=True, impl="triton")
    ptx = check(kernels, capability)
    assert set(ptx) == {
        "_mean_partial_kernel",
        "_mean_final_kernel",
        "_quantise_kernel",
        "_portable_kernel",
    }
    product = r"wgmma\.mma_async\S*\.bf16" if capability == 90 else r"mma\S*(bf16|f16)"
    assert re.search(product, ptx["_portable_kernel"])


@pytest.mark.parametrize("capability", TARGETS)
def test_quantiser_contracts_and_approximates_nothing(capability):
    """Bit rules: IEEE division only, no fused multiply-add, no approximate exponent."""
    with compile_only(capability) as kernels:
        quantize_pair(device_tensor(1, 2, 300, 64), "mxfp8", "nvfp4", rotate=True, impl="triton")
        quantize_pair(device_tensor(1, 2, 300, 80), "int8", "int4", impl="triton")
    for ptx in check(kernels, capability).values():
        assert "div.rn.f32" in ptx
        assert not re.search(r"\b(fma|div\.(full|approx)|ex2|rcp)\b", ptx)


@pytest.mark.parametrize("capability", TARGETS)
def test_conversions_by_the_hardware(capability):
    """FP8 from sm_89 on, E2M1 on Blackwell; the authors' encoder is none that hardware has."""
    x = device_tensor(1, 2, 300, 64)
    for formats, rule in ((("mxfp8", "nvfp4"), "auto"), (("mxfp8_e5m2", "mxfp4"), "auto"),
                          (("mxfp8", "mxfp4"), "paper")):
        with compile_only(capability) as kernels:
            quantize_pair(x, *formats, scale_rule=rule, impl="triton")
        (ptx,) = check(kernels, capability).values()
        kind = "e5m2" if "e5m2" in formats[0] else "e4m3"
        assert (f"cvt.rn.satfinite.{kind}x2.f32" in ptx) == (capability >= 89)
        e2m1 = capability >= 100 and rule != "paper"
        assert ("cvt.rn.satfinite.e2m1x2.f32" in ptx) == e2m1


@pytest.mark.parametrize("capability", TARGETS)
def test_no_tile_is_too_small_for_a_conversion(capability):
    """Block scales are encoded, too, and of a narrow head they are fewer than threads."""
    for head_dim in (8, 16, 256):
        with compile_only(capability) as kernels:
            for length in (1, 300):
                x = device_tensor(1, 1, length, head_dim)
                quantize_pair(x, "mxfp8", "nvfp4", impl="triton")
                quantize_pair(x, "mxfp8_e5m2", "mxfp4", impl="triton")
        check(kernels, capability)


@pytest.mark.parametrize("head_dim", (8, 128, 256))
@pytest.mark.parametrize("capability", TARGETS)
def test_appends_to_a_cache(capability, head_dim):
    cache = MixedKVCache(2, 2, head_dim, config=DMAConfig(high="mxfp8", low="nvfp4"))
    with compile_only(capability) as kernels:
        for length in (300, 1):
            keys = device_tensor(2, 2, length, head_dim)
            cache.append(keys, keys, impl="triton")
    assert list(check(kernels, capability)) == ["advance_kernel", "append_kernel"]


@pytest.mark.parametrize("capability", (80, 120))
def test_wide_heads_fit_the_shared_memory(capability):
    """Case 114: D = 256 on a part with 99 KB of shared memory takes smaller tiles."""
    q = device_tensor(1, 2, 300, 256, dtype=torch.float32)
    with compile_only(capability) as kernels:
        dma_attention(q, q, q, config=DMAConfig.preset("nvfp4"), impl="triton")
    check(kernels, capability)


def test_packed_sequences_and_fp8_values_compile():
    q = device_tensor(300, 2, 64, dtype=torch.float16)
    cu = torch.tensor([0, 100, 300], dtype=torch.int32)
    config = DMAConfig.parse("hopper,high=none,sink=128")
    with compile_only(90) as kernels:
        dma_attention_varlen(q, q, q, cu, cu, 200, 200, config=config, impl="triton")
    assert "_v_fp8_kernel" in check(kernels, 90)


@pytest.mark.parametrize("capability", (80, 89, 90))
def test_fp8_values_without_block_scales(capability):
    """FP8 tensor cores on 8.9, for 16-bit operands of up to 128 dims, and sums beside theirs."""
    for dim, dtype in ((64, torch.bfloat16), (128, torch.float16), (64, torch.float32),
                       (256, torch.bfloat16)):
        q = device_tensor(1, 2, 300, dim, dtype=dtype)
        with use_native(False), compile_only(capability) as kernels:
            dma_attention(q, q, q, config=DMAConfig(pv="fp8"), is_causal=True, impl="triton")
        check(kernels, capability)
        (kernel,) = [x for x in kernels if x.metadata.name == "_portable_kernel"]
        native = capability == 89 and dtype != torch.float32 and dim <= 128
        assert check_fp8_products(kernel) == (2 if native else 0), (dim, dtype)
        assert "cvt.rz" not in kernel.asm["ptx"], "P is rounded once"


def test_a_new_length_never_recompiles():
    """Lengths, head counts and masks are run-time values: the signature does not depend on them."""
    seen = set()
    for heads, n in ((2, 1000), (16, 1024), (3, 1337)):
        q = device_tensor(1, heads, n, 64)
        padding = torch.ones(1, n, dtype=torch.bool)
        with compile_only(90) as kernels:
            dma_attention(q, q, q, is_causal=True, impl="triton")
            dma_attention(q, q, q, key_padding_mask=padding, impl="triton")
            masked_attention(q, q, q, padding[None, None], impl="triton")
        seen.add(tuple(kernel.hash for kernel in kernels))
    assert len(seen) == 1
