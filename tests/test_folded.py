"""Folding block scales into E4M3: its bounds, worked values, and the kernels on the GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dma_attn import DMAConfig, dma_attention, quantize
from dma_attn.attention.dispatch import use_native
from dma_attn.attention.prepare import class_spans
from dma_attn.formats import NVFP4_OVERSHOOT
from dma_attn.quant.reference import fold_reference
from dma_attn.testing import fold, quantised_oracle, random_qkv
from tests.impls import DEVICE, needs_gpu, needs_hopper

if TYPE_CHECKING:
    from dma_attn.quant.folded import FoldedKV

E4M3 = torch.float8_e4m3fn


def decoded(values: torch.Tensor, by_row: bool) -> torch.Tensor:
    codes, scales = fold_reference(values, by_row)
    rows = 1 if by_row else 128
    per_row = scales.repeat_interleave(rows, -1)[..., : values.shape[-2]]
    return codes.view(E4M3).double() * per_row.double()[..., None]


def test_worked_values() -> None:
    """448 fits with power 1, 449 needs 2; ties go to even; a row of zeros has codes 0."""
    x = torch.tensor([[448.0, 1.0, 2.0**-9], [449.0, 1.0, 2.0**-9], [0.0, -0.0, 0.0],
                      [3.5, 17 / 16, -19 / 16]])
    codes, scales = fold_reference(x, by_row=True)
    assert scales.tolist()[:2] == [1.0, 2.0] and scales.tolist()[3] == 2.0**-7
    values = codes.view(E4M3).float() * scales[:, None]
    assert values.tolist()[0] == [448.0, 1.0, 2.0**-9]
    assert values.tolist()[1] == [448.0, 1.0, 0.0]  # 224.5 -> 224; half a quantum ties to 0
    assert not values[2].any() and scales[2] == 1.0
    assert values.tolist()[3] == [3.5, 1.0, -1.25]
    assert fold_reference(torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0]]), True)[0][:, 0].tolist(
    ) == [0x7F, 0x7F]


@pytest.mark.parametrize("by_row", [True, False])
def test_reference_equals_the_oracle(by_row: bool) -> None:
    x = torch.randn(2, 3, 300, 40) * torch.exp(2 * torch.randn(2, 3, 300, 1))
    assert torch.equal(decoded(x, by_row), fold(x, 1 if by_row else 128))


def test_mxfp4_is_exact_14_binades_below_the_maximum() -> None:
    """e2m1 times a power of two is an E4M3 value as long as its quantum is at least 2^-9."""
    steps = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6])
    x = torch.stack([6.0 * torch.ones(7), *(steps * 2.0**-e for e in range(15))])
    x = torch.cat([x, x.roll(1, 0)], 1)
    folded = decoded(x, by_row=False)
    assert torch.equal(folded, x.double())


def test_mxfp8_keeps_its_mantissas() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 4, 32, generator=generator).clamp(-3.5, 3.5)
    x[..., 0] = 3.5  # every block has the same exponent before it is spread
    for span, bound in ((8, 1e-5), (30, 1e-2)):
        spread = 2.0 ** torch.randint(0, span + 1, (128, 4, 1), generator=generator)
        values = quantize((x * spread).flatten(1), "mxfp8").dequantize(torch.float32)
        gap = decoded(values, by_row=False) - values
        assert gap.norm() <= bound * values.norm()
        assert gap.abs().max() <= 2.0**-10 * values.abs().max()


def test_nvfp4_is_rounded_once_more() -> None:
    """Folded against plain quantised attention on N(0,1): 6e-2 in the output, 0.1 in the LSE."""
    q, k, v = random_qkv(1, (4, 2), (300, 300), 128)
    for config in (DMAConfig(), DMAConfig.preset("nvfp4")):
        out, lse = quantised_oracle(q, k, v, config, folded=True, is_causal=True)
        ref, ref_lse = quantised_oracle(q, k, v, config, is_causal=True)
        assert 1e-3 * ref.norm() < (out - ref).norm() <= 6e-2 * ref.norm()
        assert (lse - ref_lse).abs().max() <= 0.1


@pytest.mark.parametrize("rule", ["amax", "mse"])
def test_nvfp4_overshoot(rule: str) -> None:
    """What the kernels take for NVFP4's largest value is one, and hardly more than it can be."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20000, 128, generator=generator)
    x *= torch.exp2(4 * torch.rand(20000, 8, 1, generator=generator)).expand(-1, -1, 16).flatten(1)
    values = quantize(x, "nvfp4", scale_rule=rule).dequantize(torch.float32)
    ratio = values.unflatten(1, (8, 16)).abs().amax(2) / x.unflatten(1, (8, 16)).abs().amax(2)
    assert NVFP4_OVERSHOOT - 0.01 < ratio.max() < NVFP4_OVERSHOOT


@pytest.mark.parametrize("text", ["default,pv=fp8", "hopper", "default"])
def test_dependent_launches_wait(text: str, tmp_path: Path) -> None:
    """Who starts early waits in every program, since what follows counts on that."""
    pytest.importorskip("triton")
    from tests.compiling import compile_only, device_tensor, machine_code

    q, k = device_tensor(1, 4, 300, 128), device_tensor(1, 2, 300, 128)
    with use_native(), compile_only(90) as kernels:
        dma_attention(q, k, k, config=DMAConfig.parse(text), impl="triton")
    named = {kernel.metadata.name: kernel for kernel in kernels}
    early = {name for name, kernel in named.items() if kernel.metadata.launch_pdl}
    assert early == {"statistics_kernel", "combine_kernel", "fold_kv_tma_kernel"}
    # The fold reads K and V ahead of its wait: the kernel that wrote them must have ended by then
    start = "griddepcontrol.launch_dependents"
    ptx = named["statistics_kernel"].asm["ptx"]
    assert ptx.index("griddepcontrol.wait") < ptx.index(start)
    assert start in named["combine_kernel"].asm["ptx"]
    for name in early:
        ptx = named[name].asm["ptx"]  # no lengths: all that is loaded comes from kernels before
        assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global")
        sass = machine_code(named[name], tmp_path)
        assert 0 < sass.index("ACQBULK") < re.search(r"\bEXIT\b", sass).start()  # type: ignore[union-attr]


@needs_gpu
@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_on_the_gpu(head_dim: int, dtype: torch.dtype, special: bool) -> None:
    pytest.importorskip("triton")
    from tests.folded_checks import CONFIGS, check_fold

    for text in CONFIGS:
        check_fold(text, head_dim, dtype, DEVICE, special)


@needs_gpu
def test_e2m1_of_every_float() -> None:
    pytest.importorskip("triton")
    from tests.folded_checks import check_e2m1

    check_e2m1(DEVICE, 1)


@needs_hopper
@pytest.mark.parametrize("processors", [132, 1])
@pytest.mark.parametrize("ends", [None, (300, 130), (0, 5)], ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (64, 128), (128, 64)], ids=str)
def test_both_folds_agree(
    dims: tuple[int, int], ends: tuple[int, int] | None, processors: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel that TMA feeds makes what the other one makes, and zeros of V's unused keys."""
    from dma_attn.quant import folded

    empty = torch.empty

    def filled(*shape: int, **options: Any) -> torch.Tensor:  # not with an older result
        x = empty(*shape, **options)
        return x.fill_(0xAA if x.dtype == torch.uint8 else torch.nan)

    monkeypatch.setattr(torch, "empty", filled)
    monkeypatch.setattr(folded, "processor_count", lambda device: processors)
    k, v = (torch.randn(2, 3, 300, d, device=DEVICE).bfloat16() for d in dims)
    k[0, 1, 7, 3], v[1, 2, 4, 5] = torch.nan, torch.inf
    length = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    for b, end in enumerate(ends or ()):
        k[b, :, end:], v[b, :, end:] = torch.nan, torch.nan
    column = torch.arange(384, device=DEVICE)
    key = (column & -16) + (column & 1) + 4 * (column & 2) + ((column & 12) >> 1)
    for text in ("default,pv=fp8", "hopper", "default", "nvfp4,smooth_k=false,pv=fp8"):
        config = DMAConfig.parse(text)
        spans = class_spans(config, query=False)
        out = folded.fold_kv(k, v, *spans, length, config)
        with monkeypatch.context() as m:
            m.setattr(folded, "fits_tma", lambda x: False)
            ref = folded.fold_kv(k, v, *spans, length, config)
        for b, end in enumerate(ends or (300, 300)):
            tiles = -(-end // 128)
            rows = slice(0, 128 * tiles)
            assert torch.equal(out.codes[:, b, :, rows], ref.codes[:, b, :, rows])
            scales, expected = (x.scales[:, b, :, :tiles] for x in (out, ref))
            torch.testing.assert_close(scales, expected, rtol=0, atol=0, equal_nan=True)
            if out.v is not None and ref.v is not None:
                kept = torch.where(key[rows] < end, ref.v[b, :, :, rows], 0)
                assert torch.equal(out.v[b, :, :, rows], kept)


@needs_hopper
@pytest.mark.parametrize(
    "text", ["default,pv=fp8", "hopper", "default", "mxfp8,smooth_k=false,pv=fp8"]
)
@pytest.mark.parametrize("ends", [None, (2000, 0), (130, 1999), (0, 0)], ids=str)
def test_dependent_launches(
    text: str, ends: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches that start early read what was written just before, eagerly and replayed; programs
    of many tiles make what those of one do."""
    from dma_attn.quant import folded

    config = DMAConfig.parse(text)
    spans = class_spans(config, query=False)
    inputs = [random_qkv(2, (8, 8), (1, 2000), 128, device=DEVICE, seed=i)[1:] for i in range(2)]
    length = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    used = [slice(0, -(-end // 128) * 128) for end in ends or (2000, 2000)]

    def parts(x: FoldedKV) -> list[torch.Tensor]:
        rows = [x.codes[:, b, :, s] for b, s in enumerate(used)]
        rows += [x.scales[:, b, :, : s.stop // 128] for b, s in enumerate(used)]
        if x.v is not None:
            rows += [x.v[b, :, :, s] for b, s in enumerate(used)]
        return [r.clone() for r in rows] + [t.clone() for t in (x.mean, x.v_scale) if t is not None]

    with monkeypatch.context() as m:
        m.setattr(folded, "_DEPENDENT", {})
        expected = [parts(folded.fold_kv(*kv, *spans, length, config)) for kv in inputs]
    monkeypatch.setattr(folded, "processor_count", lambda device: 3)
    k, v = (torch.empty_like(x) for x in inputs[0])

    def call() -> FoldedKV:
        return folded.fold_kv(k, v, *spans, length, config)

    def check(run: Callable[[], FoldedKV], n: int) -> None:
        for i in range(n):
            k.copy_(inputs[i % 2][0])
            v.copy_(inputs[i % 2][1])
            for out, ref in zip(parts(run()), expected[i % 2], strict=True):
                assert torch.equal(out, ref)

    check(call, 50)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()

    def replay() -> FoldedKV:
        graph.replay()
        return captured

    check(replay, 20)
