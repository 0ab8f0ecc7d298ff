"""`precision_metrics`: worked values, and never a pass on NaN or Inf."""

from __future__ import annotations

import math

import pytest
import torch

from dma_attn import precision_metrics
from dma_attn.testing import assert_rel_l2
from tests.impls import DEVICE

FIELDS = ("cosine", "rel_l1", "rmse", "psnr", "rel_l2", "max_abs", "worst_row")


def test_worked_values() -> None:
    ref = torch.tensor([[3.0, 4.0], [0.0, 8.0]], device=DEVICE)
    out = torch.tensor([[3.0, 5.0], [0.0, 6.0]], device=DEVICE)
    m = precision_metrics(out, ref)
    assert m.rel_l1 == pytest.approx(3 / 15)
    assert m.rmse == pytest.approx(math.sqrt(5 / 4))
    assert m.psnr == pytest.approx(20 * math.log10(8 / math.sqrt(5 / 4)))
    assert m.rel_l2 == pytest.approx(math.sqrt(5 / 89))
    assert m.cosine == pytest.approx((9 + 20 + 48) / math.sqrt((9 + 25 + 36) * 89))
    assert m.max_abs == pytest.approx(2.0)
    assert m.worst_row == pytest.approx(0.25)


def test_equal_tensors() -> None:
    ref = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    m = precision_metrics(ref.clone(), ref)
    assert m.cosine == pytest.approx(1.0)
    assert m.psnr == math.inf
    assert [getattr(m, name) for name in ("rel_l1", "rmse", "rel_l2", "max_abs", "worst_row")] == [
        0.0
    ] * 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sums_do_not_overflow_in_16_bits(dtype: torch.dtype) -> None:
    ref = torch.full((4, 4096), 200.0, dtype=dtype, device=DEVICE)
    m = precision_metrics(ref * 1.25, ref)
    assert m.rel_l1 == pytest.approx(0.25)
    assert m.rel_l2 == pytest.approx(0.25)
    assert m.cosine == pytest.approx(1.0)


def test_other_dtype_than_the_reference() -> None:
    ref = torch.randn(3, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    m = precision_metrics(ref.to(torch.bfloat16), ref)
    assert 0 < m.rel_l2 < 2.0**-8


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"shape|out|ref"):
        precision_metrics(torch.zeros(2, 3), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"shape|out|ref"):
        precision_metrics(torch.zeros(2, 3), torch.zeros(3))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["ref", "out", "both"])
@pytest.mark.parametrize("all_values", [False, True])
def test_case_109_nan_and_inf_never_pass(all_values: bool, where: str, bad: float) -> None:
    tensors = {name: torch.zeros(4, 8, device=DEVICE) + 1 for name in ("out", "ref")}
    for name in tensors if where == "both" else (where,):
        if all_values:
            tensors[name].fill_(bad)
        else:
            tensors[name][2, 3] = bad
    metrics = precision_metrics(tensors["out"], tensors["ref"])
    for name in FIELDS:
        assert math.isnan(getattr(metrics, name)), name


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["ref", "out", "both"])
def test_case_109_the_comparator_of_these_tests_fails_too(where: str, bad: float) -> None:
    tensors = {name: torch.zeros(4, device=DEVICE) for name in ("out", "ref")}
    for name in tensors if where == "both" else (where,):
        tensors[name][1] = bad
    with pytest.raises(AssertionError, match="not finite"):
        assert_rel_l2(tensors["out"], tensors["ref"], 1.0)
