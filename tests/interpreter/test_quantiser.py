"""The Triton quantiser under the interpreter: bit-equal to the PyTorch specification."""

from __future__ import annotations

import pytest
import torch

from dma_attn import quantize_pair
from dma_attn.attention.prepare import v_fp8_reference
from dma_attn.quant.rows import Rows
from dma_attn.quant.transforms import key_mean
from tests.impls import INTERPRETED
from tests.quant_checks import (
    QUANTISED,
    assert_bit_equal,
    check_format,
    check_stages,
    make_input,
)

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize("name", QUANTISED)
def test_kernel_equals_reference(name: str) -> None:
    check_format(name, (2, 20, 80), torch.float32, "cpu")


def test_stages_of_fusion_give_the_same_bits() -> None:
    check_stages("cpu")


@pytest.mark.parametrize("formats", [("mxfp8", "nvfp4"), ("none", "int4")])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_pair_with_mean_and_rotation(formats: tuple[str, str], head_dim: int) -> None:
    x = make_input("heavy", (1, 2, 70, head_dim), torch.float16, "cpu")[:, :, ::2]
    arguments = {"mean": torch.randn(1, 2, 1, head_dim), "rotate": True}
    copies = [quantize_pair(x, *formats, impl=i, **arguments) for i in ("triton", "reference")]
    for out, ref in zip(*copies, strict=True):
        assert_bit_equal(out, ref)


def test_reductions_over_valid_keys() -> None:
    from dma_attn.quant.reductions import launch_key_mean, launch_v_fp8

    x = make_input("special", (2, 2, 300, 40), torch.float32, "cpu")
    valid = torch.rand(2, 300) < 0.7
    rows = Rows(2, 300, length=torch.tensor([300, 130], dtype=torch.int32), valid=valid)
    used = rows.in_use()
    torch.testing.assert_close(launch_key_mean(x, rows), key_mean(x, used), rtol=1e-5, atol=1e-6)
    (codes, scale), (ref_codes, ref_scale) = launch_v_fp8(x, rows), v_fp8_reference(x, used)
    assert torch.equal(scale, ref_scale)
    assert torch.equal(codes[used[:, None].expand(2, 2, 300)],
                       ref_codes[used[:, None].expand(2, 2, 300)])
