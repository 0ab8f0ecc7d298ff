"""Golden vectors of the preset `paper`, worked by hand from the authors' published rules.

E2M1 encoder: the exponent is that of the value (1, 2 and 4 start a new one) and the mantissa bit is
set above a threshold (0.125, 1.25, 2.5, 5), so that rounding never carries: 1.9 -> 1.5. MX scales
are 2^(floor(log2 amax) - emax) with emax 7 (E4M3) and 3 (E2M1). NVFP4's token scale is amax / 2^7;
the block scale amax_block / 6 divides unrounded and multiplies rounded to E4M3.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dma_attn import DMAConfig, quantize, quantize_pair
from tests import oracles

LOG2E = math.log2(math.e)


def token(*values: float, size: int = 32) -> torch.Tensor:
    """One fp32 token (1, size): the values, then zeros."""
    x = torch.zeros(1, size)
    x[0, : len(values)] = torch.tensor(values)
    return x


ENCODER = [
    (0.0, 0.0), (0.125, 0.0), (0.13, 0.5), (0.2, 0.5), (0.5, 0.5), (0.75, 0.5), (0.99, 0.5),
    (1.0, 1.0), (1.25, 1.0), (1.26, 1.5), (1.5, 1.5), (1.75, 1.5), (1.9, 1.5), (1.99, 1.5),
    (2.0, 2.0), (2.5, 2.0), (2.6, 3.0), (3.5, 3.0), (3.99, 3.0),
    (4.0, 4.0), (5.0, 4.0), (5.1, 6.0), (6.0, 6.0),
]  # fmt: skip


@pytest.mark.parametrize("sign", [1, -1])
def test_nvfp4_encoder_never_carries(sign: int) -> None:
    """Token scale 1 (amax 128) and, in the blocks of the vector, block scale 1 (amax 6)."""
    for start in range(0, len(ENCODER), 15):
        part = ENCODER[start : start + 15]
        x = torch.zeros(1, 32)
        x[0, 0] = 128.0
        x[0, 16 : 16 + len(part)] = sign * torch.tensor([value for value, _ in part])
        x[0, 31] = 6.0
        got = quantize(x, "nvfp4", scale_rule="paper", impl="reference")
        assert got.global_scale is not None
        assert got.global_scale.tolist() == [[1.0]]
        assert got.scales[0, 1] == 0x38
        values = got.dequantize()[0, 16 : 16 + len(part)].tolist()
        assert values == [sign * want for _, want in part]


@pytest.mark.parametrize("sign", [1, -1])
def test_mxfp4_encoder_never_carries_and_clips(sign: int) -> None:
    """amax 15 gives the scale 2^(3 - 3) = 1; everything above 6 clips."""
    vector = [*ENCODER, (7.0, 6.0), (15.0, 6.0)]
    x = sign * token(*(value for value, _ in vector))
    got = quantize(x, "mxfp4", scale_rule="paper", impl="reference")
    assert got.scales.tolist() == [[127]]
    values = got.dequantize()[0, : len(vector)].tolist()
    assert values == [sign * want for _, want in vector]


def test_encoder_is_wrong_on_a_fifth_of_a_uniform_grid() -> None:
    """The published share of wrongly rounded values on [0, 6] is 18.7 %."""
    grid = torch.linspace(0, 6, 6 * 1024 + 1)[:-1]  # multiples of 2^-10, ties included
    rows = torch.zeros(len(grid) // 16, 32)
    rows[:, :16] = grid.reshape(-1, 16)
    rows[:, 31] = 15.0  # scale 1
    got = quantize(rows, "mxfp4", scale_rule="paper", impl="reference").dequantize()[:, :16]
    nearest = oracles.e2m1_decode(oracles.e2m1_codes(grid.numpy()))
    wrong = got.flatten().numpy() != nearest
    assert float(wrong.mean()) == pytest.approx(0.1875, abs=2e-3)


@pytest.mark.parametrize(
    ("amax", "byte", "code"),
    [
        (1.0, 120, 0x70),  # 1 / 2^-7 = 128
        (448.0, 128, 0x76),  # 448 / 2 = 224
        (480.0, 128, 0x77),  # 480 / 2 = 240
        (150.0, 127, 0x71),  # 150 between 144 and 160
        (1.999, 120, 0x78),  # 255.9 rounds to 256
    ],
)
def test_mxfp8_uses_emax_7(amax: float, byte: int, code: int) -> None:
    got = quantize(token(amax, -amax), "mxfp8", scale_rule="paper", impl="reference")
    assert got.scales.tolist() == [[byte]]
    assert got.data[0, :2].tolist() == [code, code | 0x80]


@pytest.mark.parametrize(
    ("amax", "byte", "value"), [(4.0, 126, 3.0), (7.9, 126, 3.0), (1.0, 124, 0.75)]
)
def test_mxfp4_uses_emax_3(amax: float, byte: int, value: float) -> None:
    """Every block maximum lands in [8, 16) and clips at 6."""
    got = quantize(token(amax, -amax), "mxfp4", scale_rule="paper", impl="reference")
    assert got.scales.tolist() == [[byte]]
    assert got.dequantize()[0, :2].tolist() == [value, -value]


@pytest.mark.parametrize(("amax", "scale"), [(128.0, 1.0), (256.0, 2.0), (3.0, 0.0234375)])
def test_nvfp4_token_scale_is_amax_over_128(amax: float, scale: float) -> None:
    x = torch.cat([token(amax, 1.0), token(0.0, -2 * amax)])
    got = quantize(x, "nvfp4", scale_rule="paper", impl="reference")
    assert got.global_scale is not None
    assert got.global_scale.tolist() == [[scale], [2 * scale]]


def test_nvfp4_divides_by_the_unrounded_scale_and_multiplies_by_the_rounded() -> None:
    """Block of amax 6.3125: scale 1.052, E4M3 1.0. 2.59375 is 2.465 scales: 2, not 3.

    Block of amax 128: scale 21.333, E4M3 22: 128 -> 6 * 22 = 132.
    """
    x = torch.zeros(1, 48)
    x[0, 0] = 128.0
    x[0, 16:19] = torch.tensor([6.3125, 2.59375, -1.3125])
    x[0, 32] = 6 * 2.0**-11  # E4M3 rounds 2^-11 to 0
    got = quantize(x, "nvfp4", scale_rule="paper", impl="reference")
    assert got.scales.view(torch.float8_e4m3fn).float().tolist() == [[22.0, 1.0, 0.0]]
    values = got.dequantize()[0]
    assert values[[0, 16, 17, 18, 32]].tolist() == [132.0, 6.0, 2.0, -1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_random_input_against_the_oracle(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 33, 80, generator=generator)
    x = (x * torch.exp(torch.randn(2, 33, 80, generator=generator))).to(dtype)
    x[0, 4] = 0
    x[1, 5, 16:64] = 0
    got = quantize(x, name, scale_rule="paper", impl="reference")
    want = oracles.quantize(oracles.to_numpy(x), name, "paper")
    np.testing.assert_array_equal(got.dequantize().numpy(), want.values)
    if name != "nvfp4":
        np.testing.assert_array_equal(got.scales.numpy(), want.scales)
    else:
        assert got.global_scale is not None
        np.testing.assert_array_equal(got.global_scale.numpy(), want.global_scale)


def test_zero_tokens_stay_zero() -> None:
    for name in ("mxfp8", "mxfp4", "nvfp4"):
        got = quantize(torch.zeros(2, 64), name, scale_rule="paper", impl="reference")
        assert (got.dequantize() == 0).all()


def test_formats_without_the_paper_rule_refuse_it() -> None:
    for name in ("mxfp8_e5m2", "int8", "int4", "fp4"):
        with pytest.raises(ValueError, match="paper"):
            quantize(torch.ones(1, 32), name, scale_rule="paper", impl="reference")


def test_preset() -> None:
    config = DMAConfig.preset("paper")
    assert (config.high, config.low, config.scale_rule) == ("mxfp8", "nvfp4", "paper")
    assert (config.smooth_k, config.rotate) == (False, False)
    assert (config.diag, config.sink, config.granularity) == (128, 128, "token")


def test_pair_applies_the_rule_to_both_copies() -> None:
    x = torch.randn(1, 2, 9, 64, generator=torch.Generator().manual_seed(1))
    high, low = quantize_pair(x, "mxfp8", "nvfp4", scale_rule="paper", impl="reference")
    for copy, name in ((high, "mxfp8"), (low, "nvfp4")):
        assert copy is not None
        want = quantize(x, name, scale_rule="paper", impl="reference")
        assert torch.equal(copy.data, want.data)
        assert torch.equal(copy.scales, want.scales)


def paper_logits(q: np.ndarray, k: np.ndarray, factor: float, fold: bool) -> np.ndarray:
    """Base-2 logits (S, S) in float64 by the oracle quantiser, classes of diag 128 and sink 128."""
    if fold:
        q = q * np.float32(factor)
    high, low = (
        oracles.quantize(q, name, "paper").values.astype(np.float64)
        @ oracles.quantize(k, name, "paper").values.astype(np.float64).T
        for name in ("mxfp8", "nvfp4")
    )
    tile = np.arange(len(q)) // 128
    near = (tile[:, None] == tile[None, :]) | (tile[None, :] == 0)
    return np.where(near, high, low) * (1.0 if fold else factor)


def test_attention_folds_scale_and_log2e_into_q_first() -> None:
    from dma_attn import dma_attention

    generator = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(3, 1, 1, 384, 64, generator=generator)
    scale = 0.3
    out, lse = dma_attention(
        q, k, v, is_causal=True, scale=scale, config=DMAConfig.preset("paper"),
        return_lse=True, impl="reference",
    )  # fmt: skip
    causal = np.tril(np.ones((384, 384), bool))
    values = {}
    for fold in (True, False):
        logits = paper_logits(q[0, 0].numpy(), k[0, 0].numpy(), scale * LOG2E, fold)
        logits = np.where(causal, logits, -np.inf)
        top = logits.max(-1, keepdims=True)
        weights = np.exp2(logits - top)
        total = weights.sum(-1, keepdims=True)
        values[fold] = (
            weights / total @ v[0, 0].double().numpy(),
            ((np.log2(total) + top) * math.log(2))[:, 0],
        )
    want_out, want_lse = values[True]
    assert np.abs(values[False][1] - want_lse).max() > 1e-2
    np.testing.assert_allclose(lse[0, 0].numpy(), want_lse, atol=1e-4)
    assert oracles.rel_l2(out[0, 0].numpy(), want_out) < 1e-4
