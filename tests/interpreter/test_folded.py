"""The kernels that prepare Hopper's operands, under the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.folded_checks import CONFIGS, check_e2m1, check_fold
from tests.impls import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("text", CONFIGS)
def test_fold(text: str, special: bool) -> None:
    check_fold(text, 64, torch.bfloat16 if special else torch.float16, "cpu", special)


@pytest.mark.parametrize("text", ["default,pv=fp8", "default", "mxfp8,smooth_k=false,pv=fp8"])
def test_many_blocks_of_statistics(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one program combines at a time, with keys in use and not, finite and not."""
    from dma_attn import DMAConfig
    from dma_attn.attention.prepare import class_spans
    from dma_attn.quant import folded
    from dma_attn.quant.transforms import key_mean

    monkeypatch.setattr(folded, "STATISTICS_ROWS", 8)
    k, v = torch.randn(2, 2, 1, 1300, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    k, v = k + 1, v * torch.arange(1, 65)
    v[0, 0, 7], k[0, 0, 1290, 3] = torch.nan, torch.inf
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


def test_e2m1() -> None:
    check_e2m1("cpu", 9973)
