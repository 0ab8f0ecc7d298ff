"""The kernels that prepare Hopper's operands, under the interpreter."""

from __future__ import annotations

import pytest
import torch

from dma_attn import DMAConfig
from dma_attn.attention.prepare import class_spans, quantise_operand
from dma_attn.quant import folded
from dma_attn.quant.reference import fold_reference
from dma_attn.quant.rows import Rows
from dma_attn.quant.transforms import key_mean
from tests.folded_checks import CONFIGS, check_e2m1, check_fold, decode, expected
from tests.impls import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("text", CONFIGS)
def test_fold(text: str, special: bool) -> None:
    check_fold(text, 64, torch.bfloat16 if special else torch.float16, "cpu", special)


@pytest.mark.parametrize("text", ["default,pv=fp8", "default", "mxfp8,smooth_k=false,pv=fp8"])
def test_many_blocks_of_statistics(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one program combines at a time, with keys in use and not, finite and not."""
    monkeypatch.setattr(folded, "STATISTICS_ROWS", 8)
    k, v = torch.randn(2, 2, 1, 1300, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    k, v = k + 1, v * torch.arange(1, 65)
    v[0, 0, 7], k[0, 0, 1290, 3], v[0, 0, 1291, 5] = torch.nan, torch.inf, -torch.inf
    k[1, 0, 1200:], v[1, 0, 1200:] = torch.nan, 1e30
    length = torch.tensor([1300, 1200], dtype=torch.int32)
    config = DMAConfig.parse(text)
    out = folded.fold_kv(k, v.bfloat16(), *class_spans(config, query=False), length, config)
    used = torch.arange(1300) < length[:, None]
    if config.smooth_k:
        assert out.mean is not None
        torch.testing.assert_close(out.mean, key_mean(k, used), rtol=1e-5, atol=1e-6)
    if config.pv == "fp8":
        amax = torch.where(used[:, None, :, None] & v.isfinite(), v.bfloat16().float().abs(), 0.0)
        torch.testing.assert_close(out.v_scale, amax.amax(2, keepdim=True) / 448)


@pytest.mark.parametrize("text, most", [("nvfp4", 2), ("mxfp8", 2), ("mxfp4", 1)])
def test_powers_of_tiles(text: str, most: int) -> None:
    """The reference's, or twice that where the largest before quantisation, or NVFP4's bound, does
    not fit what the largest after it does."""
    config = DMAConfig.parse(f"{text},smooth_k=false")
    generator = torch.Generator().manual_seed(5)
    k = torch.randn(1, 1, 20 * 128, 64, generator=generator)
    k *= torch.exp2(6 * torch.rand(20, generator=generator)).repeat_interleave(128)[:, None]
    k = k.half()
    out = folded.fold_kv(k, k, *class_spans(config, query=False), None, config)
    high, low = class_spans(config, query=False)
    assert high is None
    copy, _ = quantise_operand(k, low[0], None, Rows(1, 2560), config, None, None, False, False)
    assert copy is not None
    _, reference = fold_reference(copy.dequantize(torch.float32), by_row=False)
    ratio = out.scales[0] / reference
    assert set(ratio.flatten().tolist()) <= {1.0, float(most)} and (ratio == 1).sum() > 15


@pytest.mark.parametrize("rule", ["amax", "mse"])
def test_rows_below_the_reach_of_a_tiles_scale(rule: str) -> None:
    """With one NVFP4 scale a tile, small rows get subnormal block scales, which round up by a lot:
    their largest values must not saturate."""
    config = DMAConfig.parse("nvfp4,granularity=tile,rotate=false,smooth_k=false,"
                             f"scale_rule={rule}")
    q = torch.randn(1, 1, 128, 64, generator=torch.Generator().manual_seed(1))
    q = (q * torch.exp2(-torch.arange(128.0) / 7)[:, None]).half()
    spans = class_spans(config, query=True)
    codes, scales = room = folded.query_codes(q, spans[0], None, 128)
    folded.fold_q(q, *spans, None, 128, config, 1.0, None, room)
    out = decode(codes, scales, "nvfp4", 1)
    ref = expected(q, config, None, True, Rows(1, 128))
    top, ref_top = (x.abs().amax(-1) for x in (out, ref))
    assert 0 < ref_top[..., -1] < 2.0**-16 * ref_top.max()
    torch.testing.assert_close(top, ref_top, rtol=1e-5, atol=0.0)


def test_e2m1() -> None:
    check_e2m1("cpu", 9973)
