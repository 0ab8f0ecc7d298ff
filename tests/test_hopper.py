"""The Hopper kernel: which calls it takes, what it compiles to, and its results on an H200."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dma_attn import DMAConfig, dma_attention, dma_attention_prepared, explain, prepare_kv
from dma_attn.attention import prepare
from dma_attn.attention.dispatch import hopper_gap, use_native
from dma_attn.device import DeviceInfo, device_status, override_device
from dma_attn.quant.rows import Rows
from dma_attn.testing import error_budget, quantised_oracle, random_qkv
from tests.impls import DEVICE, needs_hopper

pytest.importorskip("triton")

from tests.compiling import compile_only, device_tensor, hot_loops, machine_code
from tests.hopper_checks import attend, check

HOPPER = DeviceInfo("test Hopper", (9, 0), 232448, "3.6.0")
CONFIGS = ["default", "default,pv=fp8", "hopper", "hopper,pv=fp16", "mxfp8,pv=fp8", "nvfp4",
           "default,high=none", "default,high=none,pv=fp8"]


def gap(config: str = "default,pv=fp8", *, capability: tuple[int, int] = (9, 0),
        dims: tuple[int, int] = (128, 128), dtype: torch.dtype = torch.bfloat16,
        view: int | None = None, k_view: int = 0, masked: bool = False,
        **rows: torch.Tensor) -> str:
    """Why the kernel does not take a call; "" when it does."""
    k = device_tensor(2, 2, 300, dims[0] + 8, dtype=dtype)[..., k_view:][..., : dims[0]]
    v = device_tensor(2, 2, 300, dims[1] + 8, dtype=dtype)[..., view or 0 :][..., : dims[1]]
    info = DeviceInfo("test GPU", capability, 232448, "3.6.0")
    with use_native(), override_device(info):
        return hopper_gap(k, v, DMAConfig.parse(config), Rows(2, 300, **rows), masked)


def test_covered_calls() -> None:
    for config in CONFIGS:
        assert gap(config) == "", config
    for dims in ((64, 64), (64, 128), (128, 64)):
        assert gap(dims=dims) == ""
    assert gap(dtype=torch.float16) == ""
    assert gap(length=torch.tensor([300, 5], dtype=torch.int32)) == ""
    assert gap(view=1) == ""  # FP8 V is made from any strides
    assert gap("default,high=mxfp4,low=mxfp4,granularity=tensor") == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"capability": (8, 0)}, "capability 9.0"),
        ({"capability": (10, 0)}, "capability 9.0"),
        ({"dtype": torch.float32}, "float32"),
        ({"dims": (96, 96)}, "96"),
        ({"dims": (128, 256)}, "256"),
        ({"config": "paper"}, "paper"),
        ({"config": "hopper,high=none,diag=128"}, "int8 in a pair"),
        ({"config": "default,high=none,pv=fp8", "k_view": 1}, "K's strides"),
        ({"config": "off"}, "none"),
        ({"config": "default,low=int4"}, "int4"),
        ({"config": "default,low=fp4"}, "fp4"),
        ({"config": "default,high=int8"}, "int8 in a pair"),
        ({"config": "default,high=int8,low=int8"}, "granularity"),
        ({"config": "nvfp4,granularity=tensor"}, "tensor"),
        ({"masked": True}, "mask"),
        ({"valid": torch.ones(2, 300, dtype=torch.bool)}, "mask"),
        ({"cu": torch.tensor([0, 1, 300], dtype=torch.int32)}, "packed"),
        ({"config": "default", "view": 1}, "strides"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_other_calls_name_the_reason(arguments: dict[str, object], words: str) -> None:
    assert words in gap(**arguments)  # type: ignore[arg-type]


def test_on_by_default_and_explained() -> None:
    q = device_tensor(1, 2, 300, 128)
    with override_device(HOPPER):
        if os.environ.get("DMA_ATTN_TEST_HOPPER") != "0":
            assert "(hopper kernel)" in explain(q, q, q, impl="triton")
    with use_native(), override_device(HOPPER):
        text = explain(q, q, q, impl="triton")
        assert "(hopper kernel)" in text and "8-bit" in text and "folded into 128 bytes" in text
        text = explain(q, q, q, impl="triton", config=DMAConfig.preset("paper"))
        assert "(portable kernel)" in text and "paper" in text
        with use_native(False):
            text = explain(q, q, q, impl="triton")
            assert "(portable kernel)" in text and "use_native(False)" in text
    with use_native(), override_device(replace(HOPPER, triton="3.7.1")):
        text = explain(q, q, q, impl="triton")
        assert "hopper" not in device_status("cuda").kernel and "16-bit tensor cores" in text
        assert "(portable kernel)" in text and "3.6 is needed, found 3.7.1" in text


def compiled(config: str, dims: tuple[int, int], **arguments: object) -> Any:
    """The attention kernel of one call, which must launch nothing of the portable path."""
    q = device_tensor(1, 4, 300, dims[0])
    k, v = device_tensor(1, 2, 300, dims[0]), device_tensor(1, 2, 300, dims[1])
    with use_native(), compile_only(90) as kernels:
        dma_attention(q, k, v, config=DMAConfig.parse(config), impl="triton", **arguments)
    by_name = {kernel.metadata.name: kernel for kernel in kernels}
    assert set(by_name) <= {"statistics_kernel", "combine_kernel", "fold_kv_tma_kernel",
                            "fold_q_kernel", "hopper_kernel"}
    kernel = by_name["hopper_kernel"]
    assert kernel.metadata.shared <= 232448
    return kernel


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("config", ["default", "default,pv=fp8", "hopper"])
def test_instructions(config: str, dims: tuple[int, int], tmp_path: Path) -> None:
    """8-bit products for Q K^T, FP8 or bf16 ones for P V, TMA loads; in the machine code few
    spills and few waits: ptxas puts one after each product when it cannot keep several in flight.
    """
    kernel = compiled(config, dims, is_causal=True)
    ptx, sass = kernel.asm["ptx"], machine_code(kernel, tmp_path)
    scores = "s32.s8.s8" if config == "hopper" else "f32.e4m3.e4m3"
    assert re.search(rf"wgmma\.mma_async\S*m64n128k32\.{re.escape(scores)}", ptx)
    values = rf"n{dims[1]}k16\.f32\.bf16" if config == "default" else rf"n{dims[1]}k32\.f32\.e4m3"
    assert re.search(rf"wgmma\.mma_async\S*m64{values}", ptx)
    assert ("m64n8k" in ptx) == (config != "default")  # row sums: beside 16-bit P V by FADD
    assert "cp.async.bulk.tensor" in ptx and "setmaxnreg" in ptx
    loops = hot_loops(sass)
    assert len(loops) == 2
    for loop in loops:
        assert len(re.findall(r"\b(STL|LDL)\b", loop)) <= 24
        assert loop.count("WARPGROUP.DEPBAR") == 2


@pytest.mark.parametrize("arguments", [
    {"is_causal": True, "return_lse": True},
    {"is_causal": True, "window_size": 200},
    {"kv_len": torch.tensor([100], dtype=torch.int32)},
], ids=lambda x: "-".join(x))
def test_other_variants_compile(arguments: dict[str, object], tmp_path: Path) -> None:
    for config, dim in (("default,pv=fp8", 128), ("hopper", 128), ("default,high=none", 128),
                        ("default,pv=fp8", 64), ("default,high=none,pv=fp8", 64),
                        ("default,high=none,pv=fp8", 128)):
        loops = hot_loops(machine_code(compiled(config, (dim, dim), **arguments), tmp_path))
        assert len(loops) == (4 if "none" in config else 2), config
        for loop in loops:
            assert len(re.findall(r"\bSTL\b", loop)) <= 32, config


def test_queries_that_tma_cannot_read() -> None:
    """An odd address, and a batch of one with an odd stride: Q of 16-bit tiles is copied."""
    k = device_tensor(1, 2, 300, 128)
    shape, size = (1, 4, 300, 128), 4 * 300 * 128
    flat = device_tensor(size + 8)
    for q in (flat[1 : 1 + size].view(shape),
              flat.as_strided(shape, (size + 4, 300 * 128, 128, 1))):
        with use_native(), compile_only(90) as kernels:
            dma_attention(q, k, k, config=DMAConfig(high="none"), impl="triton", is_causal=True)
        assert "hopper_kernel" in {kernel.metadata.name for kernel in kernels}


def test_no_queries_launch_nothing_for_them() -> None:
    q, k = device_tensor(1, 4, 0, 128), device_tensor(1, 2, 300, 128)
    with use_native(), compile_only(90) as kernels:
        out = dma_attention(q, k, k, impl="triton", is_causal=True)
    assert out.shape == q.shape
    assert not {"fold_q_kernel", "hopper_kernel"} & {k.metadata.name for k in kernels}


def test_a_new_length_never_recompiles() -> None:
    seen = set()
    for heads, n in ((2, 1000), (16, 1024), (3, 1337)):
        q = device_tensor(1, heads, n, 64)
        with use_native(), compile_only(90) as kernels:
            dma_attention(q, q, q, is_causal=True, impl="triton")
        seen |= {(k.metadata.name, k.hash) for k in kernels}
    assert len(seen) == len({name for name, _ in seen})


@needs_hopper
class TestOnHopper:
    """Against the oracle whose copies are folded into E4M3."""

    @pytest.mark.parametrize("config", CONFIGS)
    @pytest.mark.parametrize(
        ("heads", "lengths", "dims", "causal"),
        [
            ((4, 2), (512, 512), (128, 128), True),
            ((3, 3), (300, 300), (64, 64), True),
            ((7, 1), (200, 333), (64, 64), True),
            ((8, 2), (513, 513), (64, 64), False),
            ((8, 1), (77, 500), (128, 64), True),
            ((7, 1), (500, 77), (64, 128), True),
            ((4, 4), (1, 700), (128, 128), True),
            ((6, 2), (333, 1000), (128, 128), False),
            ((1, 1), (1, 1), (64, 64), False),
            ((2, 1), (2600, 2600), (128, 128), True),
        ],
        ids=str,
    )
    def test_oracle(
        self,
        heads: tuple[int, int],
        lengths: tuple[int, int],
        dims: tuple[int, int],
        causal: bool,
        config: str,
    ) -> None:
        q, k, v = random_qkv(2, heads, lengths, dims, device=DEVICE)
        check(q, k + 0.5, v, config, is_causal=causal)

    @pytest.mark.parametrize("config", ["default,pv=fp8", "default", "hopper", "default,high=none"])
    @pytest.mark.parametrize(
        "arguments",
        [{"window_size": 200}, {"window_size": 1}, {"scale": -0.1}, {"scale": 0.0}, {"kv_len": 77}],
        ids=str,
    )
    def test_options(self, config: str, arguments: dict[str, object]) -> None:
        for heads, dim in (((4, 2), 128), ((8, 2), 64)):
            q, k, v = random_qkv(1, heads, (300, 900), dim, device=DEVICE)
            check(q, k, v, config, is_causal=True, **arguments)

    @pytest.mark.parametrize("config", ["default,pv=fp8", "default", "hopper", "default,high=none"])
    def test_lengths_on_the_device(self, config: str) -> None:
        ends = torch.tensor([700, 0, 333], dtype=torch.int32, device=DEVICE)
        for heads, dim in (((4, 2), 128), ((8, 2), 64)):
            q, k, v = random_qkv(3, heads, (200, 700), dim, device=DEVICE)
            for b, end in enumerate(ends.tolist()):
                k[b, :, end:], v[b, :, end:] = torch.nan, torch.nan
            check(q, k, v, config, is_causal=True, kv_len=ends)

    def test_keys_before_every_window_may_hold_anything(self) -> None:
        for config in ("default,pv=fp8", "default", "default,high=none"):
            for heads in ((2, 2), (6, 2)):
                q, k, v = random_qkv(1, heads, (100, 600), 64, device=DEVICE)
                v[:, :, : 600 - 100 - 50 + 1] = torch.nan
                out = attend(q, k, v, config, is_causal=True, window_size=50)[0]
                assert out.isfinite().all()

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_second_level_sum(self, head_dim: int) -> None:
        """Ones probe over 65536 keys: P is exact, so only the accumulation could err; then values
        with a mean, where truncation in the accumulator would show as a bias."""
        q = torch.zeros(1, 1, 128, head_dim, dtype=torch.bfloat16, device=DEVICE)
        k = torch.randn(1, 1, 65536, head_dim, device=DEVICE).bfloat16()
        out, _ = attend(q, k, torch.ones_like(k), "default,pv=fp8")
        assert (out.float() - 1).abs().max() < 1e-3
        q, k, v = random_qkv(1, (1, 1), (256, 8192), head_dim, device=DEVICE)
        v = (1 + 0.3 * v.float()).bfloat16()
        out, _ = attend(q, k, v, "default,pv=fp8")
        ref, _ = quantised_oracle(q, k, v, DMAConfig(pv="fp8"), folded=True)
        assert abs(float((out.double() - ref).mean())) < 5e-3

    @pytest.mark.parametrize("config", ["default,pv=fp8", "default,high=none", "hopper"])
    def test_long(self, config: str) -> None:
        """The last queries of 131072."""
        q, k, v = random_qkv(1, (4, 2), (131072, 131072), 128, device=DEVICE)
        out, _ = attend(q, k, v, config, is_causal=True)
        parsed = DMAConfig.parse(config)
        ref, _ = quantised_oracle(q[:, :2, -128:], k[:, :1], v[:, :1], parsed, folded=True,
                                  is_causal=True)
        gap = (out[:, :2, -128:].double() - ref).norm() / ref.norm()
        assert gap <= error_budget(parsed, ref.numel()).rel_l2

    @pytest.mark.parametrize("tiles", [1, 2, 3, 4, 5, 8, 17])
    def test_every_number_of_tiles(self, tiles: int) -> None:
        """Around the number of stages."""
        q, k, v = random_qkv(1, (2, 1), (130, 128 * tiles - 3), 128, device=DEVICE)
        for causal in (False, True):
            check(q, k, v, "default,pv=fp8", is_causal=causal)

    @pytest.mark.parametrize("config", ["default,pv=fp8", "default", "hopper", "default,high=none"])
    def test_several_blocks_a_program(self, config: str) -> None:
        """More than three rounds over the SMs, with rows of no and of few keys among them."""
        ends = torch.tensor([1000, 0, 333], dtype=torch.int32, device=DEVICE)
        for dim in (64, 128):
            q, k, v = random_qkv(3, (21, 7), (1000, 1000), dim, device=DEVICE)
            check(q, k, v, config, is_causal=True, kv_len=ends)

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("config", CONFIGS)
    def test_zeros(self, config: str, head_dim: int) -> None:
        """Scales of zeros: masks still hide, nothing becomes NaN."""
        q, k, v = random_qkv(1, (2, 1), (300, 300), head_dim, device=DEVICE)
        zero_q, zero_k = torch.zeros_like(q), torch.zeros_like(k)
        for a, b in ((zero_q, k), (q, zero_k), (zero_q, zero_k), (q, torch.ones_like(k))):
            check(a, b, v, config, is_causal=True)

    def test_the_reference_refuses_folded_keys(self) -> None:
        q, k, v = random_qkv(1, (2, 2), (64, 64), 128, device=DEVICE)
        with use_native():
            kv = prepare_kv(k, v)
        with pytest.raises(ValueError, match="Hopper"):
            dma_attention_prepared(q, kv, impl="reference")

    def test_prepared_and_strided_calls_are_bit_equal(self) -> None:
        q, k, v = random_qkv(2, (4, 2), (300, 300), 128, device=DEVICE)
        for config in CONFIGS:
            ref = attend(q, k, v, config, is_causal=True)
            inside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
            out = attend(*inside, config, is_causal=True)
            assert torch.equal(out[0], ref[0]) and torch.equal(out[1], ref[1])
            odd = torch.empty(2, 4, 300, 131, dtype=q.dtype, device=DEVICE)[..., :128]
            with use_native():
                kv = prepare_kv(k, v, DMAConfig.parse(config))
                out = dma_attention_prepared(q, kv, is_causal=True, return_lse=True)
                assert torch.equal(out[0], ref[0]) and torch.equal(out[1], ref[1])
                alone = dma_attention_prepared(q, kv, is_causal=True, out=odd)  # not by TMA
                assert torch.equal(alone, ref[0])
                moved = torch.cat([q[..., :1], q], -1)[..., 1:]  # an address that TMA cannot read
                assert torch.equal(dma_attention_prepared(moved, kv, is_causal=True), ref[0])
                negative = dma_attention_prepared(-q, kv, is_causal=True, scale=-(128**-0.5))
                assert torch.equal(negative, ref[0])

    def test_queries_are_folded_beside_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a stream of its own, in memory of the current one: calls in a row, whose memory the
        next ones take, give what prepared keys give."""
        monkeypatch.setattr(prepare, "FORK_SIZE", 1)
        outs, refs = [], []
        for i in range(24):
            n = 700 + 300 * (i % 5)
            q, k, v = random_qkv(1, (8, 2), (n, n), 128, seed=i, device=DEVICE)
            config = DMAConfig.parse(CONFIGS[i % len(CONFIGS)])
            with use_native():
                outs.append(dma_attention(q, k, v, is_causal=True, config=config))
                kv = prepare_kv(k, v, config)
                refs.append(dma_attention_prepared(q, kv, is_causal=True))
        for out, ref in zip(outs, refs, strict=True):
            assert torch.equal(out, ref)

    def test_calls_on_two_streams(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In turn, each with a second stream of its own."""
        monkeypatch.setattr(prepare, "FORK_SIZE", 1)
        cases = [random_qkv(1, (8, 2), (1500, 1500), 128, seed=i, device=DEVICE) for i in range(8)]
        streams = [torch.cuda.Stream() for _ in range(2)]
        seconds = {prepare._second_stream(cases[0][0].device, s.cuda_stream) for s in streams}
        assert len(seconds) == 2
        outs = []
        torch.cuda.synchronize()
        with use_native():
            for i, case in enumerate(cases):
                with torch.cuda.stream(streams[i % 2]):
                    outs.append(dma_attention(*case, is_causal=True))
            torch.cuda.synchronize()
            for out, case in zip(outs, cases, strict=True):
                assert torch.equal(out, dma_attention(*case, is_causal=True))

    @pytest.mark.parametrize("fork_size", [1, 2**24], ids=["two streams", "one stream"])
    def test_graph_capture(self, fork_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prepare, "FORK_SIZE", fork_size)
        q, k, v = random_qkv(1, (4, 2), (300, 300), 128, device=DEVICE)
        ref, _ = attend(q, k, v, "default,pv=fp8", is_causal=True)
        out = torch.empty_like(q)
        graph = torch.cuda.CUDAGraph()
        with use_native(), torch.cuda.graph(graph):
            dma_attention(q, k, v, is_causal=True, config=DMAConfig(pv="fp8"), out=out)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, ref)
