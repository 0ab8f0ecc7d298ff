"""bf16 P V by the maxima of the first tile, and what is done again with running maxima."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from dma_attn import DMAConfig, dma_attention
from dma_attn.attention.dispatch import use_hopper
from tests.impls import DEVICE

pytest.importorskip("triton")

from dma_attn.attention.kernels import hopper_call
from tests.compiling import compile_only, device_tensor, hot_loops, machine_code
from tests.hopper_checks import attend, needs_hopper

CONFIGS = ["default", "nvfp4", "hopper,pv=fp16", "default,high=none"]


@pytest.mark.parametrize("config", CONFIGS)
def test_loops(config: str, tmp_path: Path) -> None:
    """Two launches: one that takes no maxima within its loops, one for what that leaves."""
    n = hopper_call.FIXED_KEYS
    q, k = device_tensor(1, 4, n, 128), device_tensor(1, 2, n, 128)
    with use_hopper(), compile_only(90) as kernels:
        dma_attention(q, k, k, config=DMAConfig.parse(config), impl="triton", is_causal=True)
    first, second = [x for x in kernels if x.metadata.name == "hopper_kernel"]
    assert second.metadata.launch_pdl and not first.metadata.launch_pdl
    for kernel, maxima in ((first, False), (second, True)):
        loops = hot_loops(machine_code(kernel, tmp_path))
        assert len(loops) == (4 if "none" in config else 2)
        for loop in loops:
            assert ("MNMX" in loop) == maxima
            assert loop.count("STL") <= 8


@pytest.mark.parametrize(
    ("config", "dtype", "n", "arguments"),
    [
        ("default", torch.bfloat16, hopper_call.FIXED_KEYS - 1, {}),
        ("default", torch.float16, 4096, {}),
        ("default,pv=fp8", torch.bfloat16, 4096, {}),
        ("default", torch.bfloat16, 4096, {"window_size": 100, "is_causal": True}),
    ],
    ids=str,
)
def test_others_take_one_launch(
    config: str, dtype: torch.dtype, n: int, arguments: dict[str, object]
) -> None:
    """fp16 has too few exponents, FP8 far too few; windows mask every tile; short calls gain less
    than a launch takes."""
    k = device_tensor(1, 1, n, 64, dtype=dtype)
    with use_hopper(), compile_only(90) as kernels:
        dma_attention(k[:, :, :1], k, k, config=DMAConfig.parse(config), impl="triton",
                      **arguments)  # type: ignore[arg-type]
    assert [x.metadata.name for x in kernels].count("hopper_kernel") == 1


class TestOnHopper:
    """Against the kernel that keeps running maxima."""

    pytestmark = needs_hopper

    def both(
        self, *inputs: torch.Tensor, config: str, **arguments: object
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        results = []
        for least in (0, 10**9):
            with mock.patch.object(hopper_call, "FIXED_KEYS", least):
                results.append(attend(*inputs, config, **arguments))  # type: ignore[arg-type]
        return results

    @pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("config", CONFIGS)
    @pytest.mark.parametrize("dim", [64, 128])
    def test_blocks_done_again(self, dim: int, config: str, causal: bool) -> None:
        """One head's fifth key draws logits hundreds of octaves above the others'."""
        q, k, v = (torch.randn(2, 4, 1000, dim, device=DEVICE) for _ in range(3))
        q[1, 2] += 8
        k[1, 2, 4] = 8
        q, k, v = (x.bfloat16() for x in (q, k, v))
        (out, lse), (ref, ref_lse) = self.both(q, k, v, config=config, is_causal=causal)
        assert out.isfinite().all() and lse.isfinite().all()
        # Blocks of the head after the one that holds that key in its first tile
        begin = 128 if causal else 0
        assert torch.equal(out[1, 2, begin:], ref[1, 2, begin:])
        assert torch.equal(lse[1, 2, begin:], ref_lse[1, 2, begin:])
        assert (ref[1, 2, begin:].float() - v[1, 2, 4].float()).abs().max() < 0.1
        torch.testing.assert_close(out, ref, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, ref_lse, atol=1e-3, rtol=1e-5)
        assert not torch.equal(lse, ref_lse)  # the rest is summed from other references

    def test_products_that_overflow(self) -> None:
        """Sums within bounds, P V beyond fp32: V of 1e36, P of up to 2^40."""
        q, k, v = (torch.randn(1, 1, 600, 128, device=DEVICE) for _ in range(3))
        q += 1
        k[0, 0, 3] = 2.5
        q, k, v = q.bfloat16(), k.bfloat16(), (1e36 * v).bfloat16()
        (out, _), (ref, _) = self.both(q, k, v, config="mxfp8")
        assert ref.isfinite().all() and out.isfinite().all()
        assert (out.double() - ref.double()).norm() <= 1e-2 * ref.double().norm()

    def test_unused_rows_leave_nothing(self) -> None:
        """Q's codes of rows beyond the last query hold anything; NaN in V reaches who sees it."""
        q, k, v = (torch.randn(1, 2, n, 128, device=DEVICE).bfloat16() for n in (5, 700, 700))
        v[0, 1, 699] = torch.nan
        (out, lse), (ref, ref_lse) = self.both(q, k, v, config="default", is_causal=True)
        assert torch.equal(out.isnan(), ref.isnan()) and out.isnan().any()
        torch.testing.assert_close(lse, ref_lse, atol=1e-3, rtol=1e-5)
