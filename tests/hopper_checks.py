"""Calls of the Hopper kernel against its oracle, whose copies are folded into E4M3."""

from __future__ import annotations

from unittest import mock

import torch

from dma_attn import DMAConfig, dma_attention, explain
from dma_attn.attention.dispatch import use_native
from dma_attn.attention.kernels import hopper_call
from dma_attn.testing import error_budget, quantised_oracle


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: str, **arguments: object
) -> tuple[torch.Tensor, torch.Tensor]:
    with use_native():
        assert "hopper kernel" in explain(q, k, v, config=DMAConfig.parse(config), impl="triton")
        return dma_attention(q, k, v, config=DMAConfig.parse(config), return_lse=True,
                             impl="triton", **arguments)  # type: ignore[arg-type, return-value]


def check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: str, **arguments: object
) -> None:
    """Within the bounds of docs/numerics.md of the oracle with folded copies; deterministic; with
    bf16 P V, by the first tile's maxima and by running ones."""
    for least in (0, 10**9):
        with mock.patch.object(hopper_call, "FIXED_KEYS", least):
            check_once(q, k, v, config, **arguments)
        if "pv=fp8" in config or config == "hopper":
            break


def check_once(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: str, **arguments: object
) -> None:
    out, lse = attend(q, k, v, config, **arguments)
    again = attend(q, k, v, config, **arguments)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    parsed = DMAConfig.parse(config)
    ref, ref_lse = quantised_oracle(q, k, v, parsed, folded=True, **arguments)  # type: ignore[arg-type]
    budget = error_budget(parsed, out.numel())
    blind = ref_lse == -torch.inf
    assert not out[blind].any() and torch.equal(lse == -torch.inf, blind)
    gap = (out.double() - ref).norm() / ref.norm().clamp(min=1e-30)
    assert gap <= budget.rel_l2, f"rel-L2 {gap:.2e}"
    seen = ~blind
    if seen.any():
        bound = budget.lse + budget.lse_relative * ref_lse[seen].abs().max()
        assert (lse.double() - ref_lse)[seen].abs().max() <= bound
