"""Where the tests run and with which implementation.

Plain CPU: `reference`. A CUDA device: `reference` and `triton`, both on it. `TRITON_INTERPRET=1`:
`triton` on the CPU, with tiny shapes only (`pick`).
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from dma_attn import DMAConfig, dma_attention
from dma_attn.attention.dispatch import hopper_gap
from dma_attn.device import device_info, hopper_runs
from dma_attn.quant.rows import Rows
from dma_attn.testing import assert_lse, assert_rel_l2, error_budget, quantised_oracle

T = TypeVar("T")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
IMPLS = ("triton",) if INTERPRETED else ("reference", "triton") if ON_GPU else ("reference",)

each_impl = pytest.mark.parametrize("impl", IMPLS)


def needs_gpu(test: T) -> T:
    """Mark a test `gpu`, and skip it where there is no CUDA device."""
    skip = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
    return pytest.mark.gpu(skip(test))


def needs_hopper(test: T) -> T:
    """Mark a test, or a class of them, `gpu`, and skip it where the Hopper kernels cannot run."""
    info = device_info("cuda") if ON_GPU else None
    skip = pytest.mark.skipif(info is None or not hopper_runs(info),
                              reason="needs compute capability 9.0 and Triton 3.6")
    return pytest.mark.gpu(skip(test))


def pick(usual: T, tiny: T, gpu: T | None = None) -> T:
    """`usual`, `tiny` under the Triton interpreter, or `gpu` (if given) on a CUDA device.

    On a GPU nearly all time goes into compiling: a short `gpu` list there stands for fewer kernel
    variants, not for fewer shapes.
    """
    if INTERPRETED:
        return tiny
    return gpu if ON_GPU and gpu is not None else usual


def free_gpu_bytes() -> int:
    """Free memory of the current CUDA device, 0 without one."""
    return int(torch.cuda.mem_get_info()[0]) if ON_GPU else 0


def check_against_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: DMAConfig,
    impl: str,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """Call `dma_attention` and hold output and LSE to the quantised oracle; returns both (HND)."""
    out, lse = dma_attention(q, k, v, config=config, return_lse=True, impl=impl, **arguments)
    assert out.dtype == q.dtype
    folded = takes_hopper(k, v, config, impl, **arguments)
    check_result(out, lse, q, k, v, config, folded=folded, **arguments)
    return out, lse


def takes_hopper(
    k: Tensor,
    v: Tensor,
    config: DMAConfig,
    impl: str,
    *,
    key_padding_mask: Tensor | None = None,
    kv_len: int | Tensor | None = None,
    **_: Any,
) -> bool:
    """True when a call reads copies that are folded into E4M3, which the oracle must do too."""
    if impl != "triton" or not ON_GPU:
        return False
    length = kv_len if isinstance(kv_len, Tensor) else None
    rows = Rows(k.shape[0], k.shape[2], length=length, valid=key_padding_mask)
    return not hopper_gap(k, v, config, rows, masked=False)


FOLDED_GAP = 7e-2  # rel-L2 between results of folded and of plain copies, with E4M3 P V


def assert_same(
    result: tuple[Tensor, Tensor],
    ref: tuple[Tensor, Tensor],
    one: tuple[Tensor, ...],
    two: tuple[Tensor, ...],
    config: DMAConfig,
    impl: str,
) -> None:
    """Output and LSE of inputs that hold the same values: bit-equal, unless their layouts brought
    q, k, v `one` and `two` to different kernels."""
    if takes_hopper(*one[1:], config, impl) == takes_hopper(*two[1:], config, impl):
        assert torch.equal(result[0], ref[0]) and torch.equal(result[1], ref[1])
    else:
        assert_rel_l2(result[0], ref[0], FOLDED_GAP)
        assert (result[1] - ref[1]).abs().max() <= 0.1


def check_result(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: DMAConfig,
    **arguments: Any,
) -> None:
    """Hold a result to the quantised oracle within the bounds of docs/numerics.md."""
    ref, ref_lse = quantised_oracle(q, k, v, config, **arguments)
    budget = error_budget(config, out.numel())
    assert_rel_l2(out, ref, budget.rel_l2)
    unseen = ref_lse == -torch.inf
    assert not out[unseen].any(), "a query without a visible key must return 0"
    if lse is not None:
        finite = ref_lse[~unseen]
        max_logit = float(finite.abs().max()) if finite.numel() else 0.0
        assert_lse(lse, ref_lse, budget, max_logit)
