"""The Triton quantiser on a GPU: bit-equal to the PyTorch specification, there and on the CPU."""

from __future__ import annotations

import pytest
import torch

from dma_attn import quantize, quantize_pair
from dma_attn.quant.stages import quantize_pair_stage
from tests.impls import needs_gpu
from tests.quant_checks import (
    QUANTISED,
    assert_bit_equal,
    check_format,
    check_stages,
    make_input,
)


@needs_gpu
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("name", QUANTISED)
def test_kernel_equals_reference(name: str, head_dim: int) -> None:
    check_format(name, (2, 2, 300, head_dim), torch.float32, "cuda")


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "int8"])
def test_kernel_equals_reference_16_bit(name: str, dtype: torch.dtype) -> None:
    check_format(name, (300, 96), dtype, "cuda")


@needs_gpu
@pytest.mark.parametrize("formats", [("mxfp8", "nvfp4"), ("int8", "int4"), ("none", "mxfp4")])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_pair_with_mean_and_rotation(formats: tuple[str, str], head_dim: int) -> None:
    for kind in ("normal", "heavy", "special"):
        x = make_input(kind, (2, 3, 500, head_dim), torch.bfloat16, "cuda")[:, :, ::2]
        mean = torch.randn(2, 3, 1, head_dim, device="cuda")
        arguments = {"mean": mean, "rotate": True}
        copies = [quantize_pair(x, *formats, impl=i, **arguments) for i in ("triton", "reference")]
        for out, ref in zip(*copies, strict=True):
            assert_bit_equal(out, ref)


@needs_gpu
def test_reference_on_the_gpu_equals_the_cpu() -> None:
    x = make_input("heavy", (300, 128), torch.float32, "cpu")
    for name in QUANTISED:
        on_gpu = quantize(x.cuda(), name, impl="reference")
        assert_bit_equal(on_gpu.to("cpu"), quantize(x, name, impl="reference"))


@needs_gpu
def test_stages_of_fusion_give_the_same_bits() -> None:
    check_stages("cuda")


@pytest.mark.parametrize(
    "change, name",
    [({"stage": "half"}, "stage"), ({"high": "int8"}, "high"), ({"low": "none"}, "low"),
     ({"x": torch.zeros(4, 48)}, "x:"), ({"x": torch.zeros(64, 4).T}, "x:")],
)
def test_stages_refuse_what_they_cannot_take(change: dict[str, object], name: str) -> None:
    arguments = {"x": torch.zeros(4, 64), "high": "mxfp8", "low": "nvfp4", "stage": "+ pack",
                 "rotate": True, **change}
    with pytest.raises(ValueError, match=f"^{name}"):
        quantize_pair_stage(**arguments)  # type: ignore[arg-type]
