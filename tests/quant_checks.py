"""The Triton quantiser against the PyTorch specification, bit for bit; for GPU and CPU runs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dma_attn import BlockScaledTensor, quantize, quantize_pair
from dma_attn.formats import FORMATS, get_format

INPUTS = ("normal", "heavy", "tiny", "huge", "special")
QUANTISED = tuple(name for name, fmt in FORMATS.items() if fmt.quantised)


def make_input(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """N(0, 1), heavy tails, subnormal or near-overflow values, or NaN, Inf, zeros and -0."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(shape, generator=generator)
    spread = torch.rand(shape, generator=generator)
    if kind == "heavy":
        x = x * torch.exp(3 * torch.randn(shape, generator=generator))
    elif kind == "tiny":
        x = x * 2.0 ** (-130 + 10 * spread)
    elif kind == "huge":
        x = x * 2.0 ** (115 + 12 * spread)
    elif kind == "special":
        x[..., : x.shape[-1] // 4] = 0
        flat = x.view(-1)
        flat[::37] = math.nan
        flat[5::91] = math.inf
        flat[3::17] *= -0.0
    return x.to(dtype).to(device)


def assert_bit_equal(out: BlockScaledTensor | None, ref: BlockScaledTensor | None) -> None:
    """Codes, block scales and second-level scales of two copies, NaN equal to NaN."""
    assert (out is None) == (ref is None)
    if out is None or ref is None:
        return
    assert out.format == ref.format and out.shape == ref.shape
    for name in ("data", "scales", "global_scale"):
        a, b = getattr(out, name), getattr(ref, name)
        assert (a is None) == (b is None), name
        if a is None:
            continue
        assert a.shape == b.shape and a.dtype == b.dtype, name
        differ = ~((a == b) | (a.isnan() & b.isnan())) if a.is_floating_point() else a != b
        assert not differ.any(), f"{name}: {int(differ.sum())} of {a.numel()} differ"


def check_format(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Every rule and granularity of one format on every kind of input."""
    fmt = get_format(name)
    for kind in INPUTS:
        x = make_input(kind, shape, dtype, device)
        for rule in fmt.rules:
            for span in fmt.granularities:
                arguments = {"scale_rule": rule, "granularity": span}
                out = quantize(x, name, impl="triton", **arguments)
                ref = quantize(x, name, impl="reference", **arguments)
                try:
                    assert_bit_equal(out, ref)
                except AssertionError as error:
                    raise AssertionError(f"{name} {rule} {span} {kind}: {error}") from None


def check_stages(device: str) -> None:
    """The stages of the fusion's ablation give the bits of `quantize_pair`."""
    from dma_attn.quant.stages import STAGES, quantize_pair_stage

    for kind, head_dim, dtype in (("heavy", 128, torch.bfloat16), ("special", 64, torch.float16),
                                  ("tiny", 32, torch.float32)):
        x = make_input(kind, (2, 3, 67, head_dim), dtype, device)
        for formats in (("mxfp8", "nvfp4"), ("mxfp8_e5m2", "mxfp4")):
            for rotate, rule in ((False, "paper"), (True, "auto")):
                want = quantize_pair(x, *formats, rotate=rotate, scale_rule=rule, impl="reference")
                for stage in STAGES:
                    got = quantize_pair_stage(x, *formats, stage, rotate=rotate, scale_rule=rule)
                    for out, ref in zip(got, want, strict=True):
                        assert_bit_equal(out, ref)
    empty = x[:, :, :0].contiguous()
    for stage in STAGES:
        for out in quantize_pair_stage(empty, "mxfp8", "nvfp4", stage, rotate=True):
            assert out is not None and out.shape == empty.shape
