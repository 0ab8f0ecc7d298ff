"""bf16 P V by the maxima of the first tile, and what is done again with running maxima."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from dma_attn import DMAConfig, dma_attention
from dma_attn.attention.dispatch import use_native
from tests.impls import DEVICE, needs_hopper

pytest.importorskip("triton")

from dma_attn.attention.kernels import hopper_call
from tests.compiling import compile_only, device_tensor, hot_loops, machine_code
from tests.hopper_checks import attend

CONFIGS = ["default", "nvfp4", "hopper,pv=fp16", "default,high=none"]


@pytest.mark.parametrize("config", CONFIGS)
def test_loops(config: str, tmp_path: Path) -> None:
    """Two launches: one that takes no maxima within its loops, one for what that leaves."""
    n = hopper_call.FIXED_KEYS
    q, k = device_tensor(1, 4, n, 128), device_tensor(1, 2, n, 128)
    with use_native(), compile_only(90) as kernels:
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
    with use_native(), compile_only(90) as kernels:
        dma_attention(k[:, :, :1], k, k, config=DMAConfig.parse(config), impl="triton",
                      **arguments)  # type: ignore[arg-type]
    assert [x.metadata.name for x in kernels].count("hopper_kernel") == 1


Results = list[tuple[torch.Tensor, torch.Tensor]]


@needs_hopper
class TestOnHopper:
    """Against the kernel that keeps running maxima."""

    @pytest.fixture(autouse=True)
    def rooms(self, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
        """The flags of every pair of launches, in turn."""
        found: list[torch.Tensor] = []
        room_for = hopper_call._flags

        def room(*arguments: object) -> torch.Tensor:
            found.append(room_for(*arguments))  # type: ignore[arg-type]
            return found[-1]

        monkeypatch.setattr(hopper_call, "_flags", room)
        return found

    def both(self, *inputs: torch.Tensor, config: str, **arguments: object) -> Results:
        """By the first tile's maxima, by running ones."""
        results = []
        for least in (0, 10**9):
            with mock.patch.object(hopper_call, "FIXED_KEYS", least):
                results.append(attend(*inputs, config, **arguments))  # type: ignore[arg-type]
        return results

    @pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("config", CONFIGS)
    @pytest.mark.parametrize("dim", [64, 128])
    def test_blocks_done_again(
        self, dim: int, config: str, causal: bool, rooms: list[torch.Tensor]
    ) -> None:
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
        flags = rooms[0][:, : 8 * 8].view(2, 8, 2, 4)  # the last block first, batch rows, heads
        expected = torch.zeros_like(flags)
        expected[:, : 7 if causal else 8, 1, 2] = 1
        assert torch.equal(flags, expected)

    @pytest.mark.parametrize("dims", [(128, 128), (64, 128)], ids=str)
    @pytest.mark.parametrize("config", ["default", "default,high=none"])
    def test_many_blocks_a_program(
        self, config: str, dims: tuple[int, int], rooms: list[torch.Tensor]
    ) -> None:
        """Some of a program's blocks are done again: those that some heads of some rows have
        beyond the first tile; lengths on the device, rows before the first key, any output."""
        q, k, v = (torch.randn(4, n, 1000, d, device=DEVICE) for n, d in
                   ((12, dims[0]), (3, dims[0]), (3, dims[1])))
        q[:, 5] += 8
        k[0, 1, 4], k[3, 1, 4] = 8, 8
        ends = torch.tensor([1000, 0, 333, 1000], dtype=torch.int32, device=DEVICE)
        v[1], v[2, :, 333:] = torch.nan, torch.nan
        q, k, v = (x.bfloat16() for x in (q, k, v))
        odd = torch.empty(4, 12, 1000, dims[1] + 3, dtype=q.dtype, device=DEVICE)[..., : dims[1]]
        arguments = {"config": config, "is_causal": True, "kv_len": ends}
        (out, lse), (ref, ref_lse) = self.both(q, k, v, **arguments)  # type: ignore[arg-type]
        torch.testing.assert_close(out, ref, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, ref_lse, atol=1e-3, rtol=1e-5)
        again = [(0, 5), (3, 5)]
        for b, h in again:
            assert torch.equal(out[b, h, 128:], ref[b, h, 128:])
        work = 9 * 4 * 12  # a block more than 1000 queries have: lengths decide where they start
        flags = rooms[0][:, :work].view(2, 9, 4, 12)
        assert sorted({tuple(x[2:]) for x in flags.nonzero().tolist()}) == again
        assert flags.sum() == 2 * 7 * 2
        with mock.patch.object(hopper_call, "FIXED_KEYS", 0), use_native():
            dma_attention(q, k, v, is_causal=True, kv_len=ends, config=DMAConfig.parse(config),
                          out=odd)
        assert torch.equal(odd, out)

    def test_large_sums(self, rooms: list[torch.Tensor]) -> None:
        """Sums of 2^40 are trusted."""
        q, k, v = (torch.randn(1, 1, 600, 128, device=DEVICE) for _ in range(3))
        q += 1
        k[0, 0, 3] = 2.5
        q, k, v = (x.bfloat16() for x in (q, k, v))
        (out, lse), (ref, ref_lse) = self.both(q, k, v, config="mxfp8")
        assert not rooms[0].any() and not torch.equal(lse, ref_lse)
        torch.testing.assert_close(out, ref, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, ref_lse, atol=1e-4, rtol=1e-5)
        # Beyond fp32 with V of 1e36
        (out, _), (ref, _) = self.both(q, k, (1e36 * v.float()).bfloat16(), config="mxfp8")
        assert rooms[1].all() and torch.equal(out, ref) and out.isfinite().all()

    def test_rows_that_do_not_count(self, rooms: list[torch.Tensor]) -> None:
        """Q's codes beyond the last query hold anything, and rows without a key see NaN."""
        q, k, v = (torch.randn(1, 2, n, 128, device=DEVICE).bfloat16() for n in (700, 600, 600))
        attend_to = {"config": "default", "is_causal": True}
        self.both(q[:, :, :5], k, v, **attend_to)  # type: ignore[arg-type]
        v[:, :, 0] = torch.nan  # the first 100 of 700 queries see no key, the others this one
        (out, _), (ref, _) = self.both(q, k, v, **attend_to)  # type: ignore[arg-type]
        assert not rooms[0].any() and torch.equal(out.isnan(), ref.isnan())
        assert not out[:, :, :100].any() and out[:, :, 100:].isnan().all()

    def test_output_in_place_of_queries(self, rooms: list[torch.Tensor]) -> None:
        """Blocks cannot be done again once 16-bit Q is overwritten."""
        q, k, v = (torch.randn(1, 2, 1000, 128, device=DEVICE) for _ in range(3))
        q += 8
        k[:, :, 4] = 8
        q, k, v = (x.bfloat16() for x in (q, k, v))
        with mock.patch.object(hopper_call, "FIXED_KEYS", 0), use_native():
            for config in ("default,high=none", "default"):
                arguments = {"is_causal": True, "config": DMAConfig.parse(config)}
                ref = dma_attention(q, k, v, **arguments)  # type: ignore[arg-type]
                out = q.clone()
                dma_attention(out, k, v, out=out, **arguments)  # type: ignore[arg-type]
                torch.testing.assert_close(out, ref, atol=2e-2, rtol=2e-2)
        assert len(rooms) == 3

    def test_graph(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replayed with blocks to do again and without."""
        monkeypatch.setattr(hopper_call, "FIXED_KEYS", 0)
        q, k, v = (torch.randn(1, 4, 2000, 128, device=DEVICE).bfloat16() for _ in range(3))
        q[:, 1:3] += 8
        plain, drawn = k.clone(), k.clone()
        drawn[:, 2, 4] = 8
        expected = [attend(q, x, v, "default", is_causal=True)[0] for x in (plain, drawn)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend(q, k, v, "default", is_causal=True)[0]
        for i in (0, 1, 0, 1, 1, 0) * 5:
            k.copy_((plain, drawn)[i])
            graph.replay()
            assert torch.equal(out, expected[i])
