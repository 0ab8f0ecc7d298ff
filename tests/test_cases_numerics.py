"""Formats inside attention, scale, LSE and smoothing: CASES sections E (attention), F and I."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from dma_attn import (
    DMAConfig,
    dma_attention,
    merge_states,
    scaled_dot_product_attention,
)
from dma_attn.attention.dispatch import use_native
from dma_attn.testing import (
    assert_rel_l2,
    dense_oracle,
    index_values,
    poison_free_memory,
    random_qkv,
)
from tests.impls import DEVICE, INTERPRETED, check_against_oracle, each_impl, pick

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SIXTEEN_BITS = pytest.mark.parametrize("dtype", pick([FP16, BF16], [FP16], [BF16]), ids=str)
PRESETS = pick(DMAConfig.PRESETS, ("default",), ("default",))


def rel_l2(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float((out.double() - ref.double()).norm() / ref.double().norm())


@each_impl
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_case_050_zero_channel_of_v(is_causal: bool, impl: str) -> None:
    config = DMAConfig(pv="fp8")
    q, k, v = random_qkv(1, (2, 1), pick((50, 200), (10, 40)), 64, device=DEVICE)
    arguments = {"is_causal": is_causal, "config": config, "return_lse": True, "impl": impl}
    other, _ = dma_attention(q, k, v, **arguments)
    v[..., 5] = 0.0
    out, _ = dma_attention(q, k, v, **arguments)
    assert not out[..., 5].any()
    keep = [c for c in range(64) if c != 5]
    assert torch.equal(out[..., keep], other[..., keep])
    assert out.isfinite().all()


@each_impl
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("zero", ["k", "q", "both"])
def test_case_052_all_zero_tensors(zero: str, preset: str, impl: str) -> None:
    q, k, v = random_qkv(1, (2, 1), (64, 64), 64, device=DEVICE)
    q, k = q * (zero == "k"), k * (zero == "q")
    config = DMAConfig.preset(preset)
    out, lse = dma_attention(q, k, v, config=config, return_lse=True, impl=impl)
    mean = v.double().mean(2, keepdim=True).expand(1, 2, 64, 64)
    assert_rel_l2(out, mean, 1e-2 if config.pv == "fp16" else 7e-2)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(64)), atol=1e-5, rtol=0)


@each_impl
@pytest.mark.parametrize("dtype", pick([FP32, BF16], [FP32], [BF16]), ids=str)
@pytest.mark.parametrize(
    "preset", pick(["default", "mxfp8", "mxfp4", "nvfp4"], ["mxfp8"], ["default"])
)
@pytest.mark.parametrize("smooth_k", pick([False, True], [True], [True]))
def test_case_055_subnormal_keys(
    smooth_k: bool, preset: str, dtype: torch.dtype, impl: str
) -> None:
    q, k, v = random_qkv(1, (2, 1), (40, 40), 64, dtype=dtype, device=DEVICE)
    k.fill_(1e-38)
    config = DMAConfig.preset(preset).replace(smooth_k=smooth_k)
    out, lse = dma_attention(q, k, v, config=config, return_lse=True, impl=impl)
    mean = v.double().mean(2, keepdim=True).expand(1, 2, 40, 64)
    assert_rel_l2(out, mean, 5e-3)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(40)), atol=1e-4, rtol=0)


@each_impl
@pytest.mark.parametrize("preset", PRESETS)
def test_case_061_poisoned_free_memory(preset: str, impl: str) -> None:
    config = DMAConfig.preset(preset)
    q, k, v = random_qkv(1, (2, 1), (100, 100), 80, device=DEVICE)
    clean = dma_attention(q, k, v, is_causal=True, config=config, return_lse=True, impl=impl)
    sizes = [200 * 2**n for n in range(12)] + [512, 2048, 8000, 16000, 32000, 2**20, 2**21, 2**24]
    for _ in range(3):
        poison_free_memory(*sizes, *sizes, device=DEVICE)
        dirty = dma_attention(q, k, v, is_causal=True, config=config, return_lse=True, impl=impl)
        assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])


@each_impl
@pytest.mark.parametrize("preset", pick(["default", "hopper"], ["default"], ["default"]))
def test_case_065_diffuse_tail_survives_fp8(preset: str, impl: str) -> None:
    s = pick(4096, 256)
    q = torch.zeros(1, 1, 2, 64, dtype=FP16, device=DEVICE)
    k = torch.zeros(1, 1, s, 64, dtype=FP16, device=DEVICE)
    q[..., 0], k[:, :, 0, 0] = 8.0, 8.0
    config = DMAConfig.preset(preset).replace(pv="fp8")
    out, _ = dma_attention(
        q, k, torch.ones_like(k), scale=1 / 8, config=config, return_lse=True, impl=impl
    )
    assert float((out.float() - 1).abs().max()) <= 1e-2


@pytest.mark.skipif(INTERPRETED, reason="long sequences take too long under the interpreter")
@each_impl
def test_case_068_accumulation_over_a_long_row(impl: str) -> None:
    """v = 1 is exact; for v = 1 +- 1/8 the error is V's rounding and must not grow with S."""
    arguments = {"config": DMAConfig(pv="fp8"), "return_lse": True, "impl": impl}
    errors = {}
    for s in (256, 65536):
        q = torch.zeros(1, 1, 1, 64, dtype=FP16, device=DEVICE)
        k = torch.zeros(1, 1, s, 64, dtype=FP16, device=DEVICE)
        out, _ = dma_attention(q, k, torch.ones_like(k), **arguments)
        assert float((out - 1).abs().max()) < 1e-3
        v = torch.ones_like(k)
        v[:, :, ::2] += 0.125
        v[:, :, 1::2] -= 0.125
        out, _ = dma_attention(q, k, v, **arguments)
        errors[s] = float((out.float() - 1).abs().max())
    assert errors[65536] <= errors[256] + 1e-3
    assert errors[256] < 2.0**-4


@each_impl
@pytest.mark.parametrize("s", pick([128, 300], [128]))
@pytest.mark.parametrize("preset", PRESETS)
def test_case_070_a_later_token_leaves_earlier_rows_alone(preset: str, s: int, impl: str) -> None:
    config = DMAConfig.preset(preset).replace(smooth_k=False, pv="fp16", granularity="token")
    q, k, v = random_qkv(1, (2, 1), (s, s), 64, device=DEVICE)
    arguments = {"is_causal": True, "config": config, "return_lse": True, "impl": impl}
    with use_native(False):  # its folded keys share a scale with the later token
        before = dma_attention(q, k, v, **arguments)
        k[:, :, -1] *= 100
        v[:, :, -1] *= 100
        after = dma_attention(q, k, v, **arguments)
    assert torch.equal(before[0][:, :, :-1], after[0][:, :, :-1])
    assert torch.equal(before[1][:, :, :-1], after[1][:, :, :-1])


@each_impl
def test_case_070_with_smoothing_only_quantisation_noise_moves(impl: str) -> None:
    q, k, v = random_qkv(1, (2, 1), (128, 128), 64, device=DEVICE)
    arguments = {"is_causal": True, "return_lse": True, "impl": impl}
    before, _ = dma_attention(q, k, v, **arguments)
    k[:, :, -1] *= 100
    v[:, :, -1] *= 100
    after, _ = dma_attention(q, k, v, **arguments)
    assert_rel_l2(after[:, :, :-1], before[:, :, :-1], 0.1)


@each_impl
@SIXTEEN_BITS
@pytest.mark.parametrize(("scale", "wanted"), [(0.125, 0.5312), (1.0, 0.7311), (4.0, 0.9820)])
def test_case_074_custom_scale(scale: float, wanted: float, dtype: torch.dtype, impl: str) -> None:
    q = torch.zeros(1, 1, 1, 64, dtype=dtype, device=DEVICE)
    k = torch.zeros(1, 1, 2, 64, dtype=dtype, device=DEVICE)
    q[..., 0], k[:, :, 0, 0] = 1.0, 1.0
    v = torch.zeros(1, 1, 2, 64, dtype=dtype, device=DEVICE)
    v[:, :, 0] = 1.0
    every = [DMAConfig(), DMAConfig.preset("off")]
    for config in pick(every, every, every[:1]):
        out, _ = dma_attention(q, k, v, scale=scale, config=config, return_lse=True, impl=impl)
        assert float((out.double() - wanted).abs().max()) < 4e-3


@each_impl
def test_case_076_lse_is_a_natural_logarithm(impl: str) -> None:
    q, k, v = random_qkv(1, (2, 1), (9, 256), 64, device=DEVICE)
    _, lse = dma_attention(torch.zeros_like(q), k, v, return_lse=True, impl=impl)
    torch.testing.assert_close(lse, torch.full_like(lse, 5.5452), atol=1e-4, rtol=0)


@each_impl
@pytest.mark.parametrize("dtype", pick([FP32, FP16], [FP32]), ids=str)
def test_case_076_two_halves_merge_to_the_whole(dtype: torch.dtype, impl: str) -> None:
    config = DMAConfig.preset("mxfp8").replace(smooth_k=False)
    q, k, v = random_qkv(1, (2, 1), (9, 256), 64, dtype=dtype, device=DEVICE)
    kwargs = {"config": config, "return_lse": True, "impl": impl}
    whole, whole_lse = dma_attention(q, k, v, **kwargs)
    halves = [
        dma_attention(q, k[:, :, part], v[:, :, part], **kwargs)
        for part in (slice(0, 128), slice(128, 256))
    ]
    out, lse = merge_states([h[0] for h in halves], [h[1] for h in halves])
    assert_rel_l2(out, whole, 1e-3)
    torch.testing.assert_close(lse, whole_lse, atol=1e-3, rtol=0)


@each_impl
@pytest.mark.parametrize("heads", pick([(1, 1), (4, 2)], [(4, 2)], [(4, 2)]), ids=str)
@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("high", pick(["mxfp8", "none", "int8"], ["mxfp8"]))
def test_case_077_lse_of_the_unsmoothed_logits(
    high: str, smooth_k: bool, heads: tuple[int, int], impl: str
) -> None:
    q, k, v = random_qkv(1, heads, (40, pick(300, 60)), 64, dtype=FP32, device=DEVICE)
    k += 20 * torch.randn(64, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    cut = k.shape[2] // 2
    k[:, :, cut:] *= 0.9
    config = DMAConfig(high=high, diag="full", smooth_k=smooth_k)
    kwargs = {"config": config, "return_lse": True, "impl": impl}
    whole = dma_attention(q, k, v, **kwargs)
    halves = [
        dma_attention(q, k[:, :, part], v[:, :, part], **kwargs)
        for part in (slice(0, cut), slice(cut, None))
    ]
    merged = merge_states([h[0] for h in halves], [h[1] for h in halves])
    check_against_oracle(q, k, v, config, impl)
    if smooth_k:
        dense, dense_lse = dense_oracle(q, k, v)
        assert float((whole[1] - dense_lse).abs().max()) < 0.7
        assert float((merged[1] - dense_lse).abs().max()) < 0.7
        assert rel_l2(merged[0], dense) < 0.15
    elif high != "int8":
        assert_rel_l2(merged[0], whole[0], 1e-3)
        torch.testing.assert_close(merged[1], whole[1], atol=1e-2, rtol=1e-5)


def far_below() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw logits -131072 for key 0 and -196608 for the others."""
    q = torch.ones(1, 1, 2, 128, dtype=BF16, device=DEVICE)
    k = torch.full((1, 1, 64, 128), -1536.0, dtype=BF16, device=DEVICE)
    k[:, :, 0] = -1024.0
    return q, k, index_values(1, 1, 64, 32, dtype=BF16, device=DEVICE) + 1


@each_impl
@pytest.mark.parametrize("preset", pick(["default", "mxfp8", "mxfp4", "off"], ["mxfp4"]))
def test_case_079_logits_far_below_any_stand_in(preset: str, impl: str) -> None:
    """The values are exact in these formats as they are, without transforms."""
    config = DMAConfig.preset(preset).replace(smooth_k=False, rotate=False)
    out, lse = dma_attention(*far_below(), config=config, return_lse=True, impl=impl)
    torch.testing.assert_close(out, torch.ones_like(out), atol=0, rtol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, -11585.24), atol=0.02, rtol=0)


@each_impl
@pytest.mark.parametrize("preset", pick(DMAConfig.PRESETS, ("default",), ("default",)))
@pytest.mark.parametrize("smooth_k", pick([False, True], [True], [True]))
def test_case_079_with_transforms(smooth_k: bool, preset: str, impl: str) -> None:
    q, k, v = far_below()
    config = DMAConfig.preset(preset).replace(smooth_k=smooth_k)
    out, _ = check_against_oracle(q, k, v, config, impl)
    assert float((out.float() - 1).abs().max()) < (5e-3 if config.pv == "fp16" else 7e-2)


@each_impl
@SIXTEEN_BITS
def test_case_082_sliding_window(dtype: torch.dtype, impl: str) -> None:
    """The window counts the query's own key; S and more is plain causal, bit by bit."""
    q = torch.zeros(1, 1, 8, 64, dtype=dtype, device=DEVICE)
    k = torch.zeros(1, 1, 8, 64, dtype=dtype, device=DEVICE)
    v = index_values(1, 1, 8, 64, dtype=dtype, device=DEVICE)
    arguments = {"is_causal": True, "return_lse": True, "impl": impl}
    out, _ = dma_attention(q, k, v, window_size=4, **arguments)
    assert out[0, 0, :, 0].tolist() == [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5]
    causal, _ = dma_attention(q, k, v, **arguments)
    for window in (8, 9, 100000):
        same, _ = dma_attention(q, k, v, window_size=window, **arguments)
        assert torch.equal(same, causal)
    less, _ = dma_attention(q, k, v, window_size=7, **arguments)
    assert torch.equal(less[:, :, :7], causal[:, :, :7])
    assert less[0, 0, 7, 0] == 4.0 and causal[0, 0, 7, 0] == 3.5


@each_impl
def test_case_082_window_without_causal_and_empty_window_raise(impl: str) -> None:
    q, k, v = random_qkv(1, (1, 1), (4, 4), 32, device=DEVICE)
    with pytest.raises(ValueError, match="window_size"):
        dma_attention(q, k, v, window_size=2, impl=impl)
    for window in (0, -1):
        with pytest.raises(ValueError, match="window_size"):
            dma_attention(q, k, v, is_causal=True, window_size=window, impl=impl)


def test_case_086_arguments_mean_what_they_mean_in_torch() -> None:
    q, k, v = random_qkv(2, (4, 2), (48, 64), 64, device=DEVICE)
    full = [x.repeat_interleave(2, 1) for x in (k, v)]
    mask = torch.rand(48, 64, generator=torch.Generator().manual_seed(6)).to(DEVICE) < 0.7
    mask[:, 0] = True
    calls = [
        ((q, *full), {}),
        ((q, *full, None, 0.0, True), {}),
        ((q, *full, mask), {"scale": 0.3}),
        ((q, k, v), {"attn_mask": mask, "dropout_p": 0.0, "enable_gqa": True, "scale": None}),
        ((), {"query": q, "key": k, "value": v, "is_causal": True, "enable_gqa": True}),
    ]
    for args, kwargs in calls:
        out = scaled_dot_product_attention(*args, **kwargs)
        ref = F.scaled_dot_product_attention(*args, **kwargs)
        assert out.shape == ref.shape and out.dtype == ref.dtype
        assert rel_l2(out, ref) < 0.06


def test_case_086_what_is_not_supported_raises() -> None:
    q, k, v = random_qkv(1, (4, 2), (8, 8), 32, device=DEVICE)
    mask = torch.ones(8, 8, dtype=torch.bool, device=DEVICE)
    unsupported = (NotImplementedError, ValueError)
    with pytest.raises(unsupported, match="dropout_p"):
        scaled_dot_product_attention(q, k, v, dropout_p=0.1, enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa"):
        scaled_dot_product_attention(q, k, v)
    with pytest.raises(ValueError, match="is_causal"):
        scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True, enable_gqa=True)
    with pytest.raises(ValueError, match="attn_mask"):
        scaled_dot_product_attention(q, k, v, attn_mask=mask[:, :5], enable_gqa=True)
    with pytest.raises(TypeError):
        scaled_dot_product_attention(q, k, v, softcap=2.0, enable_gqa=True)


@each_impl
@pytest.mark.parametrize("name", ["softcap", "s_aux", "sinks", "dropout_p"])
def test_case_081_084_085_unknown_keywords_are_never_swallowed(name: str, impl: str) -> None:
    q, k, v = random_qkv(1, (1, 1), (4, 4), 32, device=DEVICE)
    with pytest.raises(TypeError, match=name):
        dma_attention(q, k, v, impl=impl, **{name: 2.0})


def row_error(k: torch.Tensor, q: torch.Tensor, config: DMAConfig, impl: str) -> float:
    """Mean L1 error of the rows of P: v = identity makes the output P itself."""
    eye = torch.eye(k.shape[2], dtype=k.dtype, device=DEVICE)[None, None]
    out = dma_attention(q, k, eye, config=config, impl=impl)
    ref, _ = dense_oracle(q, k, eye)
    return float((out.double() - ref).abs().sum(-1).mean())


@each_impl
@pytest.mark.parametrize("offset", pick([20.0, 200.0], [200.0]))
@pytest.mark.parametrize("rotate", pick([False, True], [False], [False]))
def test_case_103_bias_of_one_key_channel(rotate: bool, offset: float, impl: str) -> None:
    q, k, _ = random_qkv(1, (2, 1), (128, 128), 64, device=DEVICE)
    k[..., 7] += offset
    every = [("mxfp4", 0.16, 0.3), ("mxfp8", 0.04, 0.05)]
    for preset, smoothed, raw in every:
        config = DMAConfig.preset(preset).replace(rotate=rotate)
        assert row_error(k, q, config, impl) < smoothed
        if not rotate:
            assert row_error(k, q, config.replace(smooth_k=False), impl) > raw
    assert row_error(k, q, DMAConfig(), impl) < 0.04


@each_impl
@pytest.mark.parametrize("config", [DMAConfig(), DMAConfig(pv="fp8")], ids=str)
def test_case_106_inputs_are_not_modified(config: DMAConfig, impl: str) -> None:
    q, k, v = random_qkv(2, (2, 1), (40, 40), 64, device=DEVICE)
    views = [torch.cat((x, x), -1)[..., 32:96] for x in (q, k, v)]
    for tensors in ([q, k, v], views):
        copies = [x.clone() for x in tensors]
        dma_attention(*tensors, is_causal=True, config=config, return_lse=True, impl=impl)
        for tensor, copy in zip(tensors, copies, strict=True):
            assert torch.equal(tensor, copy)


@each_impl
@pytest.mark.parametrize("s", pick([12, 4096], [12]))
def test_case_106_smoothing_does_not_hurt(s: int, impl: str) -> None:
    errors = {True: 0.0, False: 0.0}
    for seed in range(pick(4, 4, 6)):
        q, k, v = random_qkv(2, (4, 2), (12, s), 64, device=DEVICE, seed=seed)
        dense, _ = dense_oracle(q, k, v)
        for smooth_k in errors:
            config = DMAConfig(smooth_k=smooth_k)
            out, _ = dma_attention(q, k, v, config=config, return_lse=True, impl=impl)
            errors[smooth_k] += rel_l2(out, dense) ** 2
    assert math.sqrt(errors[True] / errors[False]) <= 1.1


@each_impl
@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("preset", pick(DMAConfig.PRESETS, ("default",), ("default",)))
def test_case_108_huge_half_precision_keys(preset: str, smooth_k: bool, impl: str) -> None:
    s = pick(4096, 256)
    q, k, v = random_qkv(1, (1, 1), (4, s), 64, dtype=FP16, device=DEVICE)
    k += 30000.0
    v = (v * 2e4).clamp(-6e4, 6e4)
    config = DMAConfig.preset(preset).replace(smooth_k=smooth_k)
    check_against_oracle(q, k, v, config, impl)
