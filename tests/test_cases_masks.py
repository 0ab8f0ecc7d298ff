"""Masks, padding and rows without a key: CASES section A."""

from __future__ import annotations

import math

import pytest
import torch

from dma_attn import (
    DMAConfig,
    dma_attention,
    dma_attention_prepared,
    prepare_kv,
    scaled_dot_product_attention,
)
from dma_attn.testing import assert_rel_l2, dense_oracle, index_values, random_qkv
from tests.impls import DEVICE, check_against_oracle, check_result, each_impl, pick

FP16, BF16 = torch.float16, torch.bfloat16
SIXTEEN_BITS = pytest.mark.parametrize("dtype", pick([FP16, BF16], [FP16], [BF16]), ids=str)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def assert_equal_values(out: torch.Tensor, expected: list[float], tolerance: float = 0.0) -> None:
    """out (1, 1, S, D): row i is expected[i] in every channel."""
    wanted = torch.tensor(expected, dtype=torch.float64, device=out.device)
    torch.testing.assert_close(
        out[0, 0].double(),
        wanted[:, None].expand(out.shape[2:]),
        atol=tolerance,
        rtol=0,
        equal_nan=False,
    )


@each_impl
@SIXTEEN_BITS
@pytest.mark.parametrize("pv", pick(["fp16", "fp8"], ["fp16"], ["fp16"]))
def test_case_001_more_queries_than_keys(pv: str, dtype: torch.dtype, impl: str) -> None:
    v = index_values(1, 1, 4, 64, dtype=dtype, device=DEVICE)
    out, lse = dma_attention(
        zeros(1, 1, 10, 64, dtype=dtype),
        zeros(1, 1, 4, 64, dtype=dtype),
        v,
        is_causal=True,
        config=DMAConfig(pv=pv),
        return_lse=True,
        impl=impl,
    )
    assert not out[:, :, :6].any()
    assert (lse[0, 0, :6] == -math.inf).all()
    assert_equal_values(out[:, :, 6:], [0, 0.5, 1, 1.5], 0.0 if pv == "fp16" else 0.1)
    wanted = torch.arange(1, 5, device=DEVICE).double().log()
    torch.testing.assert_close(lse[0, 0, 6:].double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", pick([FP16, BF16], [BF16]), ids=str)
def test_case_002_bool_mask_with_an_all_false_row(dtype: torch.dtype) -> None:
    q, k, v = random_qkv(1, (2, 2), (6, 10), 64, dtype=dtype, device=DEVICE)
    mask = torch.ones(6, 10, dtype=torch.bool, device=DEVICE).tril()
    mask[5] = False
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert not out[:, :, 5].any()
    check_result(out, None, q, k, v, DMAConfig(), attn_mask=mask)


@each_impl
def test_case_002_row_of_padding_only(impl: str) -> None:
    q, k, v = random_qkv(2, (2, 1), (6, 10), 64, device=DEVICE)
    mask = torch.ones(2, 10, dtype=torch.bool, device=DEVICE)
    mask[1] = False
    out, lse = dma_attention(q, k, v, key_padding_mask=mask, return_lse=True, impl=impl)
    assert not out[1].any() and (lse[1] == -math.inf).all()
    check_result(out, lse, q, k, v, DMAConfig(), key_padding_mask=mask)


def test_case_004_sum_of_two_finfo_min_masks() -> None:
    q, k, v = random_qkv(1, (2, 2), (8, 8), 64, device=DEVICE)
    lowest = torch.finfo(BF16).min
    future = torch.ones(8, 8, dtype=torch.bool, device=DEVICE).triu(1)
    mask = zeros(1, 1, 8, 8).masked_fill(future, lowest)
    padding = zeros(1, 1, 1, 8)
    padding[..., :3] = lowest
    mask = mask + padding
    assert mask[0, 0, 0, 1] == -math.inf and mask[0, 0, 0, 0] == lowest
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert not out[:, :, :3].any()
    alone = scaled_dot_product_attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], is_causal=True)
    assert_rel_l2(out[:, :, 3:], alone, 5e-3)


@each_impl
@pytest.mark.parametrize("s_q", [1, 5])
@pytest.mark.parametrize("is_causal", pick([False, True], [True], [True]))
@pytest.mark.parametrize("preset", pick(DMAConfig.PRESETS, ("default",), ("default",)))
def test_case_005_unwritten_tail(preset: str, is_causal: bool, s_q: int, impl: str) -> None:
    config = DMAConfig.preset(preset)
    q, k, v = random_qkv(1, (2, 1), (s_q, 70), 64, device=DEVICE)
    buffers = [torch.full((1, 1, 192, 64), math.nan, dtype=BF16, device=DEVICE) for _ in range(2)]
    for buffer, filled in zip(buffers, (k, v), strict=True):
        buffer[:, :, :70] = filled
    kwargs = {"is_causal": is_causal, "return_lse": True, "impl": impl}
    ref, ref_lse = dma_attention(q, k, v, config=config, **kwargs)
    for kv_len in (70, torch.tensor([70], dtype=torch.int32, device=DEVICE)):
        out, lse = dma_attention(q, *buffers, config=config, kv_len=kv_len, **kwargs)
        assert torch.equal(out, ref) and torch.equal(lse, ref_lse)
        prepared = prepare_kv(*buffers, config, kv_len=kv_len, impl=impl)
        out, lse = dma_attention_prepared(q, prepared, **kwargs)
        assert torch.equal(out, ref) and torch.equal(lse, ref_lse)


@each_impl
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("pv", ["fp16", "fp8"])
def test_case_005_garbage_in_padded_keys(pv: str, garbage: float, impl: str) -> None:
    config = DMAConfig(pv=pv)
    q, k, v = random_qkv(2, (2, 1), (40, 150), 64, device=DEVICE)
    mask = torch.ones(2, 150, dtype=torch.bool, device=DEVICE)
    mask[0, :20] = mask[1, 130:] = False
    arguments = {"key_padding_mask": mask, "config": config, "return_lse": True, "impl": impl}
    clean, _ = dma_attention(q, k, v, **arguments)
    for x in (k, v):
        x.masked_fill_(~mask[:, None, :, None], garbage)
    out, _ = dma_attention(q, k, v, **arguments)
    assert torch.equal(out, clean)


@each_impl
def test_case_005_never_visible_keys_do_not_leak(impl: str) -> None:
    """The window hides keys 0-20 from every query; they hold NaN."""
    q, k, v = random_qkv(1, (2, 1), (40, 80), 64, device=DEVICE)
    k[:, :, :21] = v[:, :, :21] = math.nan
    for pv in pick(("fp16", "fp8"), ("fp16",), ("fp16",)):
        check_against_oracle(q, k, v, DMAConfig(pv=pv), impl, is_causal=True, window_size=20)


@SIXTEEN_BITS
def test_case_009_bool_float_and_int_masks(dtype: torch.dtype) -> None:
    q = zeros(1, 1, 64, 64, dtype=dtype)
    _, k, _ = random_qkv(1, (1, 1), (64, 64), 64, dtype=dtype, device=DEVICE)
    v = index_values(1, 1, 64, 64, dtype=dtype, device=DEVICE)
    keep = (torch.arange(64, device=DEVICE) % 2 == 0).expand(64, 64)
    floats = torch.zeros(64, 64, dtype=dtype, device=DEVICE).masked_fill(~keep, -math.inf)
    for mask in (keep, floats):
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert_equal_values(out, [31.0] * 64)
    with pytest.raises(TypeError, match="attn_mask"):
        scaled_dot_product_attention(q, k, v, attn_mask=keep.int())


@each_impl
def test_case_009_key_padding_mask_must_be_bool(impl: str) -> None:
    q, k, v = random_qkv(1, (1, 1), (4, 4), 64, device=DEVICE)
    for mask in (torch.ones(1, 4, device=DEVICE), torch.ones(1, 4, device=DEVICE).int()):
        with pytest.raises(TypeError, match="key_padding_mask"):
            dma_attention(q, k, v, key_padding_mask=mask, impl=impl)
    with pytest.raises(ValueError, match="key_padding_mask"):
        wrong = torch.ones(1, 5, dtype=torch.bool, device=DEVICE)
        dma_attention(q, k, v, key_padding_mask=wrong, impl=impl)


@each_impl
@pytest.mark.parametrize("pv", pick(["fp16", "fp8"], ["fp16"], ["fp16"]))
def test_case_012_buffer_longer_than_its_valid_part(pv: str, impl: str) -> None:
    k = zeros(1, 1, 128, 64)
    v = zeros(1, 1, 128, 64)
    v[:, :, :20] = 1.0
    out, lse = dma_attention(
        zeros(1, 1, 1, 64),
        k,
        v,
        is_causal=True,
        kv_len=20,
        config=DMAConfig(pv=pv),
        return_lse=True,
        impl=impl,
    )
    assert_equal_values(out, [1.0])
    assert abs(float(lse) - math.log(20)) < 1e-5


@each_impl
@pytest.mark.parametrize("form", pick(["dma_attention", "sdpa"], ["sdpa"], ["sdpa"]))
def test_case_013_joint_image_and_text_keys(form: str, impl: str) -> None:
    q, k, v = random_qkv(2, (2, 2), (128, 128), 64, device=DEVICE)
    keys = torch.arange(128, device=DEVICE)
    mask = keys < 96 + torch.tensor([20, 5], device=DEVICE)[:, None]
    if form == "sdpa":
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
    else:
        out, _ = dma_attention(q, k, v, key_padding_mask=mask, return_lse=True, impl=impl)
        _, lse = dma_attention(
            torch.zeros_like(q), k, v, key_padding_mask=mask, return_lse=True, impl=impl
        )
        for row, count in enumerate((116, 101)):
            wanted = torch.full_like(lse[row], math.log(count))
            torch.testing.assert_close(lse[row], wanted, atol=1e-5, rtol=0)
    check_result(out, None, q, k, v, DMAConfig(), key_padding_mask=mask)
    for row, count in enumerate((116, 101)):
        own = [x[row : row + 1, :, :count] for x in (k, v)]
        dense, _ = dense_oracle(q[row : row + 1], *own)
        assert_rel_l2(out[row : row + 1], dense, 6e-2)
