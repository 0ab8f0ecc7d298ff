"""Strides, 64-bit indexing, devices and peak memory: CASES section D, and 116 and 120 of J."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dma_attn import (
    DMAConfig,
    dma_attention,
    dma_attention_prepared,
    prepare_kv,
    scaled_dot_product_attention,
)
from dma_attn.testing import random_qkv
from tests.impls import (
    DEVICE,
    assert_same,
    each_impl,
    free_gpu_bytes,
    needs_gpu,
    pick,
    takes_hopper,
)

BF16, FP16 = torch.bfloat16, torch.float16
GIB = 2**30


def peak_extra_bytes(call: Callable[[], object]) -> int:
    """GPU memory that the second of two calls needs beyond what was allocated before it."""
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@needs_gpu
@each_impl
def test_case_038_strides_beyond_32_bits(impl: str) -> None:
    """q, k, v and out with two rows 2**31 elements apart, each in a 4.3 GB buffer."""
    if free_gpu_bytes() < 20 * GIB:
        pytest.skip("needs 20 GB of free GPU memory")
    tensors = random_qkv(1, (1, 1), (2, 2), 64, device=DEVICE)
    ref = dma_attention(*tensors, is_causal=True, impl=impl)
    buffers = [torch.empty(2**31 + 4096, dtype=BF16, device=DEVICE) for _ in range(4)]
    far = [buffer.as_strided((1, 1, 2, 64), (1, 1, 2**31, 1)) for buffer in buffers]
    for view, tensor in zip(far[:3], tensors, strict=True):
        view.copy_(tensor)
    dma_attention(*far[:3], is_causal=True, out=far[3], impl=impl)
    assert torch.equal(far[3], ref)


@needs_gpu
@each_impl
def test_case_038_prepared_copies_beyond_32_bits(impl: str) -> None:
    """Many heads of a long sequence: the low-bit copies pass 2**31 elements too."""
    if free_gpu_bytes() < 40 * GIB:
        pytest.skip("needs 40 GB of free GPU memory")
    if impl == "reference":
        pytest.skip("slow, and PyTorch does the indexing there")
    config = DMAConfig()
    heads, s, d = 130, 131072, 128
    base = torch.randn(1, 1, s, d, device=DEVICE, dtype=BF16)
    k = base.expand(1, heads, s, d).contiguous()  # one layout, so that both calls take one kernel
    q = torch.randn(1, heads, 1, d, device=DEVICE, dtype=BF16)
    arguments = {"is_causal": True, "return_lse": True, "impl": impl}
    out, _ = dma_attention_prepared(q, prepare_kv(k, k, config, impl=impl), **arguments)
    for head in (0, heads - 1):
        one, _ = dma_attention(q[:, head : head + 1], base, base, **arguments)
        torch.testing.assert_close(out[:, head : head + 1], one, atol=2e-3, rtol=2e-2)


@each_impl
@pytest.mark.parametrize("pv", pick(["fp16", "fp8"], ["fp16"], ["fp16"]))
def test_case_039_many_tiny_sequences(pv: str, impl: str) -> None:
    batch = 8300 if DEVICE == "cuda" and impl == "triton" else pick(83, 3)
    q, k, v = random_qkv(batch, (16, 16), (1, 1), pick(128, 32), device=DEVICE)
    config = DMAConfig(pv=pv)
    out, _ = dma_attention(q, k, v, is_causal=True, config=config, return_lse=True, impl=impl)
    if pv == "fp16":
        assert torch.equal(out, v)
    else:
        torch.testing.assert_close(out, v, atol=0, rtol=1e-2)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "fused qkv": lambda x: torch.stack((x, -x, x), 3)[:, :, :, 0],
    "channels outside": lambda x: x.mT.contiguous().mT,
    "every second channel": lambda x: torch.stack((x, -x), -1).flatten(-2)[..., ::2],
    "every second token": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "odd row stride": lambda x: torch.cat((x[..., :1], x, x[..., :2]), -1)[..., 1:-2],
    "batch inside": lambda x: x.movedim(0, 2).contiguous().movedim(2, 0),
}
ODD = ("channels outside", "odd row stride", "every second channel")
VIEWS_OF_QKV = [
    *[(name, name, name) for name in VIEWS if name not in ODD],
    *[ODD[i:] + ODD[:i] for i in pick([0, 1, 2], [0], [1])],
]


@each_impl
@pytest.mark.parametrize("names", VIEWS_OF_QKV, ids=", ".join)
@pytest.mark.parametrize(
    "config", pick([DMAConfig(), DMAConfig.preset("hopper")], [DMAConfig()], [DMAConfig()]), ids=str
)
def test_case_041_043_views_are_bit_equal_to_contiguous(
    config: DMAConfig, names: tuple[str, str, str], impl: str
) -> None:
    s = pick(130, 30)
    q, k, v = random_qkv(2, (4, 2), (s, s), 64, device=DEVICE)
    v += torch.arange(2, device=DEVICE)[None, :, None, None]
    arguments = {"is_causal": True, "config": config, "return_lse": True, "impl": impl}
    ref = dma_attention(q, k, v, **arguments)
    tensors = [VIEWS[name](x) for name, x in zip(names, (q, k, v), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(tensors, (q, k, v), strict=True))
    for _ in range(pick(5, 1)):
        out = dma_attention(*tensors, **arguments)
        assert_same(out, ref, tensors, (q, k, v), config, impl)


@each_impl
@pytest.mark.parametrize("dtype", pick([BF16, FP16], [FP16]), ids=str)
def test_case_043_odd_row_stride_and_offset(dtype: torch.dtype, impl: str) -> None:
    generator = torch.Generator().manual_seed(0)
    buffers = [torch.randn(1, 2, 65, 67, generator=generator).to(DEVICE, dtype) for _ in range(3)]
    tensors = [buffer[..., 1:65] for buffer in buffers]
    packed = [x.contiguous() for x in tensors]
    arguments = {"is_causal": True, "return_lse": True, "impl": impl}
    ref = dma_attention(*packed, **arguments)
    out = dma_attention(*tensors, **arguments)
    assert_same(out, ref, tensors, packed, DMAConfig(), impl)
    target = torch.empty_like(buffers[0])[..., 1:65]
    dma_attention(*tensors, is_causal=True, out=target, impl=impl)
    assert torch.equal(target, out[0])


@each_impl
def test_case_044_tensors_on_different_devices(impl: str) -> None:
    q, k, v = random_qkv(1, (1, 1), (4, 4), 32, device=DEVICE)
    other = torch.empty(1, 1, 4, 32, dtype=q.dtype, device="meta")
    for tensors in ((q, other, v), (q, k, other)):
        with pytest.raises(ValueError, match="meta"):
            dma_attention(*tensors, impl=impl)


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@each_impl
def test_case_044_second_device_while_the_first_is_current(impl: str) -> None:
    q, k, v = random_qkv(1, (4, 2), (130, 300), 64)
    first = [x.to("cuda:0") for x in (q, k, v)]
    second = [x.to("cuda:1") for x in (q, k, v)]
    assert torch.cuda.current_device() == 0
    ref = dma_attention(*first, is_causal=True, impl=impl)
    for _ in range(2):
        out = dma_attention(*second, is_causal=True, impl=impl)
        assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
        assert torch.equal(out.cpu(), ref.cpu())
    with pytest.raises(ValueError, match="cuda:1"):
        dma_attention(first[0], second[1], second[2], impl=impl)


@needs_gpu
@pytest.mark.parametrize("kind", ["gqa", "padding", "sdpa mask", "window", "varying kv_len"])
def test_case_116_no_score_matrix_in_memory(kind: str) -> None:
    s = 16384
    q, k, v = random_qkv(1, (8, 2), (s, s), 64, device=DEVICE)
    padding = torch.ones(1, s, dtype=torch.bool, device=DEVICE)
    padding[:, :77] = False
    dense = torch.ones(s, s, dtype=torch.bool, device=DEVICE).tril()
    ends = torch.tensor([s - 3], dtype=torch.int32, device=DEVICE)

    def attend(**limits: object) -> object:
        return dma_attention(q, k, v, is_causal=True, return_lse=True, **limits)

    calls: dict[str, Callable[[], object]] = {
        "gqa": lambda: attend(),
        "padding": lambda: attend(key_padding_mask=padding),
        "sdpa mask": lambda: scaled_dot_product_attention(
            q, k, v, attn_mask=dense, enable_gqa=True
        ),
        "window": lambda: attend(window_size=1000),
        "varying kv_len": lambda: attend(kv_len=ends),
    }
    inputs = sum(x.numel() * x.element_size() for x in (q, k, v))
    assert peak_extra_bytes(calls[kind]) < 4 * inputs


@needs_gpu
def test_case_116_the_reference_has_no_score_matrix_either() -> None:
    s, heads = 16384, 4
    q, k, v = random_qkv(1, (heads, heads), (s, s), 64, device=DEVICE)
    scores = heads * s * s * 4
    peak = peak_extra_bytes(lambda: dma_attention(q, k, v, is_causal=True, impl="reference"))
    assert peak < scores / 4


@needs_gpu
def test_case_120_interleaved_views_without_hidden_copies() -> None:
    s, heads, d = 131072, 8, 128
    packed = torch.randn(1, s, 3, heads, d, device=DEVICE, dtype=BF16)
    q, k, v = packed.unbind(2)
    values = s * heads * d
    mxfp8, nvfp4 = 1 + 1 / 32, 1 / 2 + 1 / 16 + 4 / d
    copies = 2 * values * (mxfp8 + nvfp4)
    if takes_hopper(*(x.transpose(1, 2) for x in (k, v)), DMAConfig(), "triton"):
        folded = 2 * values  # a byte a value in each class
        copies = 2 * folded + 4 * s * heads * (2 + 1)  # Q: two scales and the share of K's mean
    output = 2 * values + 4 * s * heads
    peak = peak_extra_bytes(
        lambda: dma_attention(q, k, v, is_causal=True, tensor_layout="NHD", return_lse=True)
    )
    assert peak <= 1.05 * (copies + output)
