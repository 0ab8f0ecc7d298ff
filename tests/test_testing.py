"""The oracles of `dma_attn.testing` on values worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from dma_attn import DMAConfig
from dma_attn.testing import (
    Masking,
    assert_lse,
    assert_rel_l2,
    class_map,
    dense_oracle,
    error_budget,
    index_values,
    probe_key,
    probe_query,
    quantised_oracle,
    random_qkv,
)

BF16, FP32 = torch.bfloat16, torch.float32


def test_dense_oracle_on_a_worked_row() -> None:
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([0.0, math.log(2), math.log(5)])[None, None, :, None]
    v = torch.tensor([1.0, 10.0, 100.0])[None, None, :, None]
    out, lse = dense_oracle(q, k, v, scale=1.0)
    assert float(out) == pytest.approx((1 + 20 + 500) / 8)
    assert float(lse) == pytest.approx(math.log(8))


def test_causal_is_bottom_right_and_sdpa_top_left() -> None:
    q, k = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 10, 8)
    v = index_values(1, 1, 10, 1, dtype=FP32)
    out, lse = dense_oracle(q, k, v, is_causal=True)
    assert out[0, 0, :, 0].tolist() == pytest.approx([3.0, 3.5, 4.0, 4.5])
    torch.testing.assert_close(lse[0, 0].exp(), torch.arange(7, 11).double())
    out, _ = dense_oracle(q, k, v, is_causal=True, top_left=True)
    assert out[0, 0, :, 0].tolist() == pytest.approx([0.0, 0.5, 1.0, 1.5])
    out, lse = dense_oracle(q.expand(1, 1, 4, 8), k[:, :, :2], v[:, :, :2], is_causal=True)
    assert not out[0, 0, :2].any() and (lse[0, 0, :2] == -math.inf).all()


def test_masks_select_and_never_multiply() -> None:
    q, k, v = random_qkv(1, (2, 1), (5, 9), 16, dtype=FP32)
    ref, ref_lse = dense_oracle(q, k[:, :, :6], v[:, :, :6])
    k[:, :, 6:] = v[:, :, 6:] = math.nan
    keep = torch.arange(9) < 6
    floats = torch.zeros(9).masked_fill(~keep, torch.finfo(FP32).min)
    for arguments in (
        {"kv_len": 6},
        {"kv_len": torch.tensor([6], dtype=torch.int32)},
        {"key_padding_mask": keep[None]},
        {"attn_mask": keep.expand(5, 9)},
        {"attn_mask": floats.expand(5, 9)},
    ):
        out, lse = dense_oracle(q, k, v, **arguments)
        torch.testing.assert_close(out, ref)
        torch.testing.assert_close(lse, ref_lse)
        out, _ = quantised_oracle(q, k, v, DMAConfig(), **arguments)
        assert out.isfinite().all()
    out, _ = dense_oracle(q, k, v)
    assert out.isnan().all()


def test_additive_mask_adds() -> None:
    q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 2, 8)
    v = index_values(1, 1, 2, 1, dtype=FP32)
    out, _ = dense_oracle(q, k, v, attn_mask=torch.tensor([[0.0, math.log(3)]]))
    assert float(out) == pytest.approx(0.75)


def test_without_formats_both_oracles_are_the_same() -> None:
    q, k, v = random_qkv(2, (4, 2), (70, 150), 16, dtype=FP32)
    off = DMAConfig.preset("off")
    for arguments in ({}, {"is_causal": True}, {"is_causal": True, "window_size": 9}):
        dense = dense_oracle(q, k, v, **arguments)
        quantised = quantised_oracle(q, k, v, off, **arguments)
        torch.testing.assert_close(quantised[0], dense[0])
        torch.testing.assert_close(quantised[1], dense[1])


@pytest.mark.parametrize(("preset", "raw"), [("mxfp8", 38.75), ("mxfp4", 31.0), ("off", 38.75)])
def test_precision_probe(preset: str, raw: float) -> None:
    k = torch.zeros(1, 1, 256, 32, dtype=BF16)
    k[:, :, 9] = probe_key(32, dtype=BF16)
    q = probe_query(32, dtype=BF16)[None, None, None]
    config = DMAConfig.preset(preset).replace(smooth_k=False, rotate=False)
    _, lse = quantised_oracle(q, k, k, config, scale=0.1)
    assert float(lse) == pytest.approx(math.log(255 + math.exp(raw / 10)))
    assert float(lse) == pytest.approx(5.7143 if raw == 38.75 else 5.6247, abs=1e-4)


def test_class_map_of_a_left_padded_row() -> None:
    """Queries at 500..511 (tile 3), S_kv 512; the sink [200, 328) covers tiles 1 and 2."""
    position = torch.arange(500, 512)[None]
    for start, high in ((0, [0, 3]), (128, [1, 3]), (200, [1, 2, 3]), (384, [3])):
        tiles = class_map(DMAConfig(), position, torch.tensor([start]), 512)[0, 0, ::128]
        assert tiles.nonzero().flatten().tolist() == high
    tiles = class_map(DMAConfig(sink=0, diag=256), position, torch.tensor([0]), 512)[0, 0, ::128]
    assert tiles.tolist() == [False, False, True, True]
    negative = class_map(DMAConfig(sink=0), torch.tensor([[-1, 0]]), torch.tensor([0]), 130)[0]
    assert not negative[0].any() and negative[1].tolist() == [True] * 128 + [False] * 2


@pytest.mark.parametrize("low", ["mxfp8", "nvfp4", "mxfp4", "int8", "int4", "fp4"])
@pytest.mark.parametrize("smooth_k", [False, True])
def test_quantised_oracle_is_near_the_dense_one(smooth_k: bool, low: str) -> None:
    """Also the LSE, which is that of the unsmoothed logits."""
    q, k, v = random_qkv(1, (2, 1), (150, 300), 64, dtype=FP32)
    k += 3.0 * smooth_k
    config = DMAConfig(low=low, smooth_k=smooth_k)
    out, lse = quantised_oracle(q, k, v, config, is_causal=True)
    dense, dense_lse = dense_oracle(q, k, v, is_causal=True)
    assert_rel_l2(out, dense, 0.2)
    assert float((lse - dense_lse).abs().max()) < 0.5


@pytest.mark.parametrize("granularity", ["token", "tile"])
def test_chunks_of_queries_do_not_change_the_oracle(granularity: str) -> None:
    """Tiles are absolute: any chunk that starts on a tile gives the same rows."""
    config = DMAConfig(granularity=granularity, smooth_k=False)
    q, k, v = random_qkv(1, (2, 1), (300, 300), 64)
    whole, _ = quantised_oracle(q, k, v, config, is_causal=True)
    part, _ = quantised_oracle(q[:, :, 128:], k, v, config, is_causal=True)
    torch.testing.assert_close(part, whole[:, :, 128:])


def test_masking_counts_valid_keys() -> None:
    q, k, _ = random_qkv(2, (1, 1), (3, 6), 8)
    keep = torch.zeros(2, 1, 3, 6, dtype=torch.bool)
    keep[0, 0, 2, 4] = keep[1, 0, :, 1:3] = True
    rules = Masking(attn_mask=keep)
    assert rules.valid(k).sum(1).tolist() == [1, 2]
    assert rules.positions(q, k).tolist() == [[3, 4, 5]] * 2
    ends = torch.tensor([4, 2], dtype=torch.int32)
    assert Masking(kv_len=ends).positions(q, k).tolist() == [[1, 2, 3], [-1, 0, 1]]


def test_comparisons_fail_when_they_should() -> None:
    ref = torch.ones(8)
    assert_rel_l2(ref + 9e-3, ref, 1e-2)
    with pytest.raises(AssertionError, match="exceeds"):
        assert_rel_l2(ref + 2e-2, ref, 1e-2)
    with pytest.raises(AssertionError, match="exceeds"):
        assert_rel_l2(ref, torch.zeros(8), 1e-2)
    with pytest.raises(AssertionError, match="shape"):
        assert_rel_l2(ref[:4], ref, 1e-2)
    budget = error_budget(DMAConfig(), 8)
    lse = torch.tensor([0.0, -math.inf])
    assert_lse(lse, lse.double(), budget, 0.0)
    with pytest.raises(AssertionError, match="-inf"):
        assert_lse(torch.zeros(2), lse.double(), budget, 0.0)
    with pytest.raises(AssertionError, match="off by"):
        assert_lse(lse + 0.03, lse.double(), budget, 0.0)
    with pytest.raises(AssertionError, match="off by"):
        assert_lse(torch.tensor([math.nan, -math.inf]), lse.double(), budget, 0.0)
