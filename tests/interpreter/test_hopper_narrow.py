"""The kernel for narrow heads on Hopper, plain Triton, under the interpreter."""

from __future__ import annotations

import pytest
import torch

from dma_attn import DMAConfig
from dma_attn.attention.api import check_call
from dma_attn.attention.prepare import folded_queries, prepare_folded
from dma_attn.quant.rows import Rows
from dma_attn.testing import assert_lse, assert_rel_l2, error_budget, quantised_oracle, random_qkv
from tests.impls import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize(
    ("text", "lengths", "arguments"),
    [
        ("default,pv=fp8", (300, 300), {"is_causal": True}),
        ("default", (130, 450), {"is_causal": False}),
        ("default,pv=fp8", (70, 450), {"is_causal": True, "window_size": 100}),
        ("default,diag=256,sink=0", (200, 333), {"is_causal": True, "window_size": 150}),
        ("hopper", (100, 300), {"is_causal": True, "kv_len": torch.tensor([300, 0, 130])}),
        ("nvfp4", (150, 40), {"is_causal": True, "scale": -0.2}),
        ("default,low=mxfp4,pv=fp8", (1, 260), {"is_causal": True}),
    ],
    ids=str,
)
def test_oracle(text: str, lengths: tuple[int, int], arguments: dict[str, object]) -> None:
    from dma_attn.attention.kernels import hopper_narrow

    config = DMAConfig.parse(text)
    ends = arguments.get("kv_len")
    batch = 1 if ends is None else 3
    q, k, v = random_qkv(batch, (4, 2), lengths, 64, dtype=torch.float16)
    k += 0.5
    if isinstance(ends, torch.Tensor):
        for b, end in enumerate(ends.tolist()):
            k[b, :, end:], v[b, :, end:] = torch.nan, torch.nan
        ends = arguments["kv_len"] = ends.int()
    window = arguments.get("window_size")
    if window is not None:
        v[:, :, : max(lengths[1] - lengths[0] - window + 1, 0)] = torch.nan
    kv = prepare_folded(k, v, config, Rows(batch, lengths[1], length=ends), "HND")
    call = check_call(q, k.shape, arguments["is_causal"], arguments.get("scale"), window, True)
    out = torch.full_like(q, torch.nan)
    lse = torch.full(q.shape[:3], torch.nan)
    hopper_narrow.run(folded_queries(q, kv, call.scale, True), kv, call, out, lse)
    ref, ref_lse = quantised_oracle(q, k, v, config, folded=True, **arguments)
    budget = error_budget(config, out.numel())
    assert_rel_l2(out, ref, budget.rel_l2)
    seen = ref_lse[ref_lse.isfinite()]
    assert_lse(lse, ref_lse, budget, float(seen.abs().max()) if seen.numel() else 0.0)


@pytest.mark.parametrize("text", ["default,pv=fp8", "hopper"])
def test_zeros_attend_evenly(text: str) -> None:
    """Zero queries and keys: every score is 0, whatever becomes of scales of zeros."""
    from dma_attn.attention.kernels import hopper_narrow

    config = DMAConfig.parse(text)
    q, k = torch.zeros(1, 1, 130, 64).half(), torch.zeros(1, 1, 130, 64).half()
    v = torch.randn(1, 1, 130, 64).half()
    kv = prepare_folded(k, v, config, Rows(1, 130), "HND")
    call = check_call(q, k.shape, True, None, None, False)
    out = torch.empty_like(q)
    hopper_narrow.run(folded_queries(q, kv, call.scale, False), kv, call, out, None)
    mean = v.float().cumsum(2) / torch.arange(1, 131)[:, None]
    assert (out.float() - mean).norm() <= 5e-2 * mean.norm()
