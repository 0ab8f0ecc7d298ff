"""Worked values of the quantiser; the numbers in the names are those of CASES.md."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dma_attn import BlockScaledTensor, quantize
from dma_attn.formats import get_format
from dma_attn.quant.reference import quantize_reference
from tests import oracles

ALL = list(oracles.RULES)


def block(*values: float, size: int = 32, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One token (1, size): the values, then zeros."""
    x = torch.zeros(1, size, dtype=dtype)
    x[0, : len(values)] = torch.tensor(values, dtype=dtype)
    return x


def run(x: torch.Tensor, name: str, rule: str = "auto", **kwargs: str) -> BlockScaledTensor:
    """Quantise on the reference path."""
    return quantize(x, name, scale_rule=rule, impl="reference", **kwargs)


def codes(quantised: BlockScaledTensor) -> list[int]:
    """4-bit codes of the first token."""
    return oracles.unpack(quantised.data.numpy())[0].tolist()


def test_case_025_partial_block_equals_zero_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    for name in ALL:
        for width in (80, 16):
            padded_width = -(-width // 32) * 32
            memory = torch.full((7, padded_width), float("nan"))
            memory[:, :width] = torch.randn(7, width, generator=generator)
            got = run(memory[:, :width], name)
            padded = run(torch.nan_to_num(memory), name)
            assert torch.isfinite(got.dequantize()).all()
            assert torch.equal(got.dequantize(), padded.dequantize()[:, :width]), name
            n_bytes = width // 2 if name in oracles.PACKED else width
            assert torch.equal(got.data, padded.data[:, :n_bytes]), name
            assert torch.equal(got.scales, padded.scales[:, : got.scales.shape[1]]), name


@pytest.mark.parametrize(
    ("name", "amax", "rule", "byte", "value"),
    [
        ("mxfp8", 150.0, "floor", 126, 144.0),  # 150 / 2^-1 = 300 lies between 288 and 320
        ("mxfp8", 150.0, "rceil", 126, 144.0),
        ("mxfp4", 7.0, "floor", 127, 6.0),
        ("mxfp4", 7.0, "rceil", 128, 8.0),
        ("mxfp8", 480.0, "floor", 127, 448.0),
        ("mxfp8", 480.0, "rceil", 128, 480.0),
        ("mxfp8", 448.0, "rceil", 127, 448.0),
        ("mxfp8", 449.0, "rceil", 128, 448.0),
        ("mxfp8_e5m2", 57344.0, "rceil", 127, 57344.0),
        ("mxfp8_e5m2", 65535.0, "floor", 127, 57344.0),
        ("mxfp8_e5m2", 65535.0, "rceil", 128, 65536.0),
        ("mxfp4", 6.0, "rceil", 127, 6.0),
        ("mxfp4", 6.5, "even", 127, 6.0),  # 1.625 stays below 1.75: exponent 2
        ("mxfp4", 7.0, "even", 128, 8.0),  # 1.75 rounds up to 2: exponent 3
        ("mxfp8", 480.0, "even", 127, 448.0),  # 1.875 has three mantissa bits: exponent 8
        ("mxfp8", 496.0, "even", 128, 512.0),  # 1.9375 rounds up to 2: exponent 9
        ("mxfp8_e5m2", 61440.0, "even", 128, 65536.0),  # 1.875 rounds up to 2 with two bits
    ],
)
def test_case_047_scale_rules(
    name: str, amax: float, rule: str, byte: int, value: float
) -> None:
    got = run(block(amax), name, rule)
    assert got.scales.tolist() == [[byte]]
    assert float(got.dequantize()[0, 0]) == value


TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@pytest.mark.parametrize(
    ("name", "rule", "kwargs"),
    [
        ("mxfp4", "floor", {}),
        ("mxfp4", "rceil", {}),
        ("mxfp4", "even", {}),
        ("fp4", "amax", {}),
        ("nvfp4", "amax", {"granularity": "tensor"}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_case_048_e2m1_ties_to_even(
    name: str, rule: str, kwargs: dict[str, str], dtype: torch.dtype
) -> None:
    x = block(6.0, *TIES, *(-t for t in TIES), dtype=dtype)
    if name == "nvfp4":  # an outlier of 2688 elsewhere makes the global scale 1
        x = torch.cat([x, block(2688.0, dtype=dtype)])
    got = run(x, name, rule, **kwargs)
    assert got.dequantize()[0, :15].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4]
    assert codes(got)[:15] == [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14]


def test_e4m3_ties_to_even() -> None:
    x = block(256.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, -17.0)
    assert run(x, "mxfp8", "floor").dequantize()[0, :6].tolist() == [
        256.0, 16.0, 20.0, 0.0, 2.0**-8, -16.0,
    ]


def test_int8_and_int4_ties_to_even() -> None:
    x = block(127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5)
    got = run(x, "int8")
    assert got.scales.tolist() == [[1.0]]
    assert got.data.view(torch.int8)[0, :7].tolist() == [127, 0, 2, 2, 0, -2, -126]
    got = run(block(7.0, 0.5, 1.5, 2.5, -2.5, -7.0), "int4", "amax")
    assert codes(got)[:6] == [7, 0, 2, 2, 14, 9]


def test_case_049_floor_clips_and_rceil_does_not() -> None:
    x = torch.randn(400, 32, generator=torch.Generator().manual_seed(1))
    amax = x.abs().amax(-1)
    for rule, clips in (("floor", True), ("rceil", False)):
        scale = torch.exp2(run(x, "mxfp4", rule).scales[:, 0].double() - 127)
        clipped = amax > 6 * scale
        significand = torch.frexp(amax).mantissa * 2
        assert torch.equal(clipped, (significand > 1.5) & clips)
        assert not clips or 0.2 < float(clipped.float().mean()) < 0.38


@pytest.mark.parametrize(
    ("name", "rule", "noise"),
    [
        ("mxfp4", "floor", 0.115),
        ("mxfp4", "rceil", 0.115),
        ("nvfp4", "amax", 0.094),
        ("mxfp8", "rceil", 0.027),
        ("mxfp8", "floor", 0.030),
    ],
)
def test_case_049_reference_noise(name: str, rule: str, noise: float) -> None:
    x = torch.randn(2000, 32, generator=torch.Generator().manual_seed(2))
    error = oracles.rel_l2(run(x, name, rule).dequantize().numpy(), x.numpy())
    assert error == pytest.approx(noise, rel=0.05)


@pytest.mark.parametrize("granularity", ["token", "tile", "tensor"])
@pytest.mark.parametrize("rule", ["amax", "mse"])
def test_case_052_all_zero_nvfp4_is_finite(rule: str, granularity: str) -> None:
    got = run(torch.zeros(2, 64, 32), "nvfp4", rule, granularity=granularity)
    assert got.global_scale is not None
    assert (got.global_scale == 1).all()
    assert (got.scales == 0x01).all()
    assert (got.data == 0).all()
    assert (got.dequantize() == 0).all()


def test_case_052_zero_blocks_of_every_format() -> None:
    x = torch.zeros(2, 64)
    x[0, 0] = 3.0
    for name in ALL:
        got = run(x, name)
        values = got.dequantize()
        assert torch.isfinite(values).all()
        assert (values[1] == 0).all()
        assert (values[0, 32:] == 0).all()
        assert (got.data[1] == 0).all()
        if name in oracles.MX_FORMATS:
            assert got.scales[:, 1].tolist() == [0, 0]
        elif name == "nvfp4":
            assert got.scales[0, 1:].tolist() == [1, 1, 1]
            assert got.scales[1].tolist() == [1, 1, 1, 1]
        else:
            assert torch.isfinite(got.scales).all()


def test_case_053_block_scale_above_448_saturates() -> None:
    stale = torch.full((1, 1), 1.0) / (6 * 448)
    got = quantize_reference(
        block(300.0, -150.0, 0.5), get_format("nvfp4"), "amax", "token", global_scale=stale
    )
    assert got.scales[0, 0] == 0x7E
    values = got.dequantize()
    assert torch.isfinite(values).all()
    assert values[0, :2].tolist() == pytest.approx([1.0, -1.0], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "byte_of_one"), [("mxfp8", 0x38), ("mxfp8_e5m2", 0x3C), ("mxfp4", 0x22)]
)
def test_case_055_e8m0_bytes_0_and_255(name: str, byte_of_one: int) -> None:
    width = 16 if name == "mxfp4" else 32
    data = torch.full((3, width), byte_of_one, dtype=torch.uint8)
    scales = torch.tensor([[0], [255], [254]], dtype=torch.uint8)
    values = BlockScaledTensor(data, scales, None, name, torch.Size((3, 32))).dequantize()
    assert (values[0] == 2.0**-127).all()
    assert float(values[0, 0]) == pytest.approx(5.8775e-39, rel=1e-4)
    assert torch.isnan(values[1]).all()
    assert (values[2] == 2.0**127).all()


def test_case_055_every_scale_byte_decodes() -> None:
    data = torch.full((256, 32), 0x38, dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    values = BlockScaledTensor(data, scales, None, "mxfp8", torch.Size((256, 32))).dequantize()
    want = [float(np.ldexp(1.0, b - 127)) for b in range(255)]
    assert values[:255, 0].double().tolist() == want


def test_case_055_subnormal_input_is_not_lost() -> None:
    x = torch.full((2, 32), 1e-38)
    for name in oracles.MX_FORMATS:
        for rule in oracles.RULES[name]:
            got = run(x, name, rule)
            assert (got.scales == 0).all()
            relative = (got.dequantize().double() / x.double() - 1).abs().max()
            assert float(relative) < 0.25


@pytest.mark.parametrize("name", oracles.MX_FORMATS)
def test_case_058_exponents_come_from_the_bits(name: str) -> None:
    emax = {"mxfp8": 8, "mxfp8_e5m2": 15, "mxfp4": 2}[name]
    exponents = np.arange(-126, 128)
    powers = np.ldexp(np.ones(254, np.float32), exponents)
    below = np.nextafter(powers, np.float32(0))
    for values, k in ((powers, exponents), (below, exponents - 1)):
        x = torch.zeros(254, 32)
        x[:, 7] = torch.from_numpy(values)
        want = np.clip(k - emax, -127, 127) + 127
        np.testing.assert_array_equal(run(x, name, "floor").scales[:, 0].numpy(), want)
        significand = np.frexp(values)[0] * 2
        largest = {"mxfp8": 1.75, "mxfp8_e5m2": 1.75, "mxfp4": 1.5}[name]
        want = np.clip(k - emax + (significand > largest), -127, 127) + 127
        np.testing.assert_array_equal(run(x, name, "rceil").scales[:, 0].numpy(), want)
        assert torch.equal(run(-x, name, "floor").scales, run(x, name, "floor").scales)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_case_058_powers_of_two_in_16_bits(dtype: torch.dtype) -> None:
    low, high = (-24, 16) if dtype == torch.float16 else (-133, 128)
    exponents = torch.arange(low, high)
    x = torch.zeros(len(exponents), 32, dtype=dtype)
    x[:, 0] = torch.from_numpy(np.ldexp(1.0, exponents.numpy())).to(dtype)
    want = (exponents.clamp(min=-127) - 8).clamp(-127, 127) + 127
    assert run(x, "mxfp8", "floor").scales[:, 0].int().tolist() == want.tolist()


@pytest.mark.parametrize("name", ["mxfp4", "fp4"])
def test_case_060_even_index_in_the_low_nibble(name: str) -> None:
    x = block(0.5, -6.0, 1.0, 2.0)
    rule = "floor" if name == "mxfp4" else "amax"
    assert run(x, name, rule).data[0, :2].tolist() == [0xF1, 0x42]


def test_case_060_nvfp4_and_int4_use_the_same_order() -> None:
    x = torch.cat([block(0.5, -6.0, 1.0, 2.0), block(2688.0)])
    got = run(x, "nvfp4", "amax", granularity="tensor")
    assert got.data[0, :2].tolist() == [0xF1, 0x42]
    assert run(block(1.0, -7.0, 2.0, 4.0), "int4", "amax").data[0, :2].tolist() == [0x91, 0x42]


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp4", "int4"])
def test_case_060_all_256_bytes_survive(name: str) -> None:
    """Dequantise every pair of codes and quantise again under the scale it came from."""
    data = torch.arange(256, dtype=torch.uint8).reshape(32, 8)
    data = torch.cat([data, torch.full((32, 8), 0x77, dtype=torch.uint8)], -1)  # amax on the grid
    rule = "floor" if name == "mxfp4" else "amax"
    largest = 7.0 if name == "int4" else 6.0
    scales = torch.full((32, 1), 127, dtype=torch.uint8)
    second = None
    if name == "nvfp4":
        scales = torch.full((32, 2), 0x7E, dtype=torch.uint8)
        second = torch.full((32, 1), 2.0**-6)
    elif name in ("fp4", "int4"):
        scales = torch.ones(32, 1)
    values = BlockScaledTensor(data, scales, second, name, torch.Size((32, 32))).dequantize()
    if name == "int4":  # -8 is beyond amax / 7: keep it out
        values = values.clamp(min=-largest)
    again = run(values, name, rule)
    want = oracles.unpack(data.numpy())
    if name == "int4":
        want = np.where(want == 8, 9, want)
    np.testing.assert_array_equal(oracles.unpack(again.data.numpy()), want)


@pytest.mark.parametrize("name", ALL)
def test_case_061_dirty_memory_does_not_show(name: str) -> None:
    x = torch.randn(100, 80, generator=torch.Generator().manual_seed(3))
    clean = run(x, name)
    for size in (100, 300, 500, 4000, 8000, 32000):
        poison = torch.full((size,), 0xFF, dtype=torch.uint8)
        del poison
    dirty = run(x, name)
    assert torch.equal(clean.data, dirty.data)
    assert torch.equal(clean.scales, dirty.scales)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_case_062_round_trip_error_for_any_head_count(heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    for name in ("keys", "values"):
        x = torch.randn(1, heads, 130, 32, generator=generator).bfloat16()
        for granularity in ("token", "tile", "tensor"):
            got = run(x, "nvfp4", "amax", granularity=granularity).dequantize()
            error = oracles.rel_l2(got.numpy(), oracles.to_numpy(x))
            assert error == pytest.approx(0.095, rel=0.08), name


@pytest.mark.parametrize("name", ALL)
def test_case_070_a_later_token_changes_no_earlier_one(name: str) -> None:
    x = torch.randn(1, 2, 128, 64, generator=torch.Generator().manual_seed(4))
    changed = x.clone()
    changed[:, :, 127] *= 100
    for rule in oracles.RULES[name]:
        before = run(x, name, rule).dequantize()
        after = run(changed, name, rule).dequantize()
        assert torch.equal(before[:, :, :127], after[:, :, :127])


@pytest.mark.parametrize("name", ["nvfp4", "int8"])
def test_case_070_a_tile_scale_reaches_its_own_tile_only(name: str) -> None:
    x = torch.randn(1, 1, 384, 64, generator=torch.Generator().manual_seed(5))
    changed = x.clone()
    changed[:, :, 200] *= 100
    before = run(x, name, granularity="tile").dequantize()
    after = run(changed, name, granularity="tile").dequantize()
    assert torch.equal(before[:, :, :128], after[:, :, :128])
    assert torch.equal(before[:, :, 256:], after[:, :, 256:])


@pytest.mark.parametrize("rule", ["floor", "rceil"])
def test_case_071_one_vector_two_elements(rule: str) -> None:
    values = (*(2.0**-i for i in range(6, 0, -1)), 1.0, 8.0)
    fp4 = run(block(*values), "mxfp4", rule)
    assert fp4.scales.tolist() == [[128]]
    assert fp4.dequantize()[0, :8].tolist() == [0, 0, 0, 0, 0, 0, 1, 8]
    fp8 = run(block(*values), "mxfp8", rule)
    assert fp8.scales.tolist() == [[122]]
    assert torch.equal(fp8.dequantize(), block(*values))


def test_negative_values_that_round_to_zero_keep_their_sign() -> None:
    x = block(6.0, -0.01, -0.0, 0.01)
    for name, rule in (("mxfp4", "floor"), ("fp4", "amax"), ("nvfp4", "amax"), ("mxfp4", "mse")):
        assert codes(run(x, name, rule))[1:4] == [8, 8, 0], name
    tiny = block(448.0, -(2.0**-12), -0.0, 2.0**-12)
    assert run(tiny, "mxfp8").data[0, :4].tolist() == [0x7E, 0x80, 0x80, 0x00]
    tiny = block(57344.0, -(2.0**-20), -0.0)
    assert run(tiny, "mxfp8_e5m2").data[0, :3].tolist() == [0x7B, 0x80, 0x80]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ALL)
def test_nan_and_inf_poison_their_block_only(name: str, bad: float) -> None:
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(6))
    clean = run(x, name).dequantize()
    dirty_x = x.clone()
    dirty_x[0, 1, 17] = bad
    got = run(dirty_x, name)
    size = {"nvfp4": 16, "mxfp8": 32, "mxfp8_e5m2": 32, "mxfp4": 32}.get(name, 64)
    first = 17 // size * size
    poisoned = torch.zeros(2, 3, 64, dtype=torch.bool)
    poisoned[0, 1, first : first + size] = True
    values = got.dequantize()
    assert torch.equal(torch.isnan(values), poisoned)
    others = torch.ones(2, 3, dtype=torch.bool)
    others[0, 1] = False
    assert torch.equal(values[others], clean[others])
    scale = got.scales[0, 1, first // size]
    if name in oracles.MX_FORMATS:
        assert scale == 255
    elif name == "nvfp4":
        assert scale == 0x7F
        assert got.global_scale is not None
        assert torch.isfinite(got.global_scale).all()
        want = oracles.quantize(dirty_x.numpy(), name).global_scale
        assert torch.equal(got.global_scale, torch.from_numpy(want))
    else:
        assert torch.isnan(scale)


def test_nan_leaves_shared_nvfp4_scales_alone() -> None:
    x = torch.randn(1, 200, 64, generator=torch.Generator().manual_seed(7))
    x[0, 3, :16] = 0.1
    clean = {g: run(x, "nvfp4", granularity=g) for g in ("tile", "tensor")}
    x[0, 3, 2] = float("nan")
    for granularity, before in clean.items():
        after = run(x, "nvfp4", granularity=granularity)
        assert before.global_scale is not None
        assert after.global_scale is not None
        assert torch.equal(before.global_scale, after.global_scale)
        assert torch.isnan(after.dequantize()).sum() == 16


def test_only_nan_in_a_token_still_gives_a_finite_global_scale() -> None:
    x = torch.full((2, 16), float("nan"))
    x[1] = 1.0
    got = run(x, "nvfp4")
    assert got.global_scale is not None
    assert got.global_scale[0, 0] == 1
    assert torch.isnan(got.dequantize()[0]).all()
    assert (got.dequantize()[1] == 1).all()


def block_errors(x: torch.Tensor, quantised: BlockScaledTensor, size: int) -> torch.Tensor:
    """fp64 squared error of each block."""
    difference = quantised.dequantize().double() - x.double()
    return difference.square().unflatten(-1, (-1, size)).sum(-1)


@pytest.mark.parametrize(
    ("name", "other", "size"),
    [
        ("mxfp8", "floor", 32),
        ("mxfp8_e5m2", "floor", 32),
        ("mxfp4", "floor", 32),
        ("int4", "amax", 64),
        ("fp4", "amax", 64),
    ],
)
def test_mse_is_never_worse(name: str, other: str, size: int) -> None:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(500, 64, generator=generator)
    x = x * torch.exp(torch.randn(500, 64, generator=generator))
    best = block_errors(x, run(x, name, "mse"), size)
    plain = block_errors(x, run(x, name, other), size)
    assert (best <= plain * (1 + 1e-6)).all()
    assert float(best.sum()) < float(plain.sum()) or name == "mxfp8_e5m2"


def test_mse_of_nvfp4_is_the_better_of_six_and_four() -> None:
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(9))
    got = run(x, "nvfp4", "mse")
    assert got.global_scale is not None
    global_scale = got.global_scale.numpy()
    blocks = x.numpy().reshape(300, 4, 16)
    amax = np.abs(blocks).max(-1)
    errors, bytes_ = [], []
    for target in (6, 4):
        scale = oracles.nvfp4_block_scale_codes(amax, target, global_scale)
        product = (oracles.e4m3_decode(scale) * global_scale)[..., None]
        values = oracles.e2m1_decode(oracles.e2m1_codes(blocks / product)) * product
        errors.append(np.square(values.astype(np.float64) - blocks).sum(-1))
        bytes_.append(scale)
    clear = np.abs(errors[0] - errors[1]) > 1e-4 * errors[0]
    want = np.where(errors[1] < errors[0], bytes_[1], bytes_[0])
    assert clear.mean() > 0.9
    assert (want != bytes_[0])[clear].any()
    np.testing.assert_array_equal(got.scales.numpy()[clear], want[clear])


def test_mse_ties_take_the_smaller_mx_scale() -> None:
    for value, byte in ((2.0, 126), (1.0, 125), (3.0, 126)):  # exact under both scales
        got = run(block(value), "mxfp4", "mse")
        assert got.scales.tolist() == [[byte]]
        assert float(got.dequantize()[0, 0]) == value
    assert run(block(1e-30), "mxfp4", "mse").scales[0, 0] == 127 - 100 - 2  # squares underflow


def test_mse_ties_put_nvfp4_amax_on_six() -> None:
    x = torch.zeros(1, 32)
    x[0, 0] = 1536.0  # global scale 1; 6 * 256 = 4 * 384
    x[0, 16] = 12.0  # 6 * 2 = 4 * 3
    got = run(x, "nvfp4", "mse")
    assert got.global_scale is not None
    assert got.global_scale.tolist() == [[1.0]]
    assert got.scales.view(torch.float8_e4m3fn).float().tolist() == [[256.0, 2.0]]
    assert codes(got)[16] == 7


def test_mse_of_nvfp4_may_put_amax_on_four() -> None:
    x = torch.zeros(1, 32)
    x[0, 0] = 1536.0
    x[0, 16:20] = torch.tensor([12.0, 9.0, 9.0, 3.0])  # on 4: 4, 3, 3, 1 times 3, exact
    got = run(x, "nvfp4", "mse")
    assert got.scales.view(torch.float8_e4m3fn).float().tolist() == [[256.0, 3.0]]
    assert torch.equal(got.dequantize(), x)


@pytest.mark.parametrize(("name", "largest"), [("int4", 7.0), ("fp4", 6.0)])
def test_mse_of_token_formats_tries_nine_shares_of_amax(name: str, largest: float) -> None:
    generator = torch.Generator().manual_seed(10)
    x = torch.randn(200, 64, generator=generator)
    shares = np.array([1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6])
    values = x.double().numpy()
    errors = []
    for share in shares:
        scale = np.abs(values).max(-1, keepdims=True) * share / largest
        scaled = values / scale
        if name == "int4":
            rounded = np.clip(np.rint(scaled), -8, 7)
        else:
            rounded = oracles.e2m1_decode(oracles.e2m1_codes(scaled.astype(np.float32)))
        errors.append(np.square(rounded * scale - values).sum(-1))
    order = np.sort(errors, axis=0)
    clear = (order[1] - order[0]) > 1e-3 * order[0]
    want = np.abs(values).max(-1) * shares[np.argmin(errors, axis=0)] / largest
    assert clear.sum() > 100
    assert len(np.unique(np.argmin(errors, axis=0)[clear])) >= 4
    got = run(x, name, "mse").scales[:, 0].double().numpy()
    np.testing.assert_allclose(got[clear], want[clear], rtol=1e-6)


@pytest.mark.parametrize(("name", "largest"), [("int4", 7.0), ("fp4", 6.0)])
def test_mse_ties_of_token_formats_take_the_first_share(name: str, largest: float) -> None:
    x = block(1e-30, -3e-31)  # every squared error underflows to 0
    want = torch.tensor(1e-30) / largest
    assert torch.equal(run(x, name, "mse").scales, want.reshape(1, 1))


def test_int4_reaches_minus_eight_only_below_amax() -> None:
    x = block(*([-8.0] * 30), 4.0, 3.0)
    assert min(run(x, "int4", "amax").dequantize()[0].tolist()) == -8.0
    assert 8 not in codes(run(x, "int4", "amax"))
    x = block(-10.0, *([float(i) for i in range(1, 8)] * 9), size=64)
    got = run(x, "int4", "mse")
    best = oracles.quantize(x.numpy(), "int4", "mse")
    assert codes(got) == (best.codes[0] & 15).tolist()
    assert codes(got)[0] == 8


def test_saturation_instead_of_overflow() -> None:
    x = block(511.0, -511.0, 449.0)
    got = run(x, "mxfp8", "floor")
    assert got.scales.tolist() == [[127]]
    assert got.dequantize()[0, :3].tolist() == [448.0, -448.0, 448.0]
    assert got.data[0, :2].tolist() == [0x7E, 0xFE]
    got = run(block(7.99, -7.99), "mxfp4", "floor")
    assert got.dequantize()[0, :2].tolist() == [6.0, -6.0]
    got = run(block(65535.0, -65535.0), "mxfp8_e5m2", "floor")
    assert got.data[0, :2].tolist() == [0x7B, 0xFB]


def test_nvfp4_worked_scales() -> None:
    """Token amax 2688 under `amax`: global scale 1, block scales amax_block / 6 in E4M3."""
    x = torch.zeros(1, 64)
    x[0, 0] = 2688.0
    x[0, 16] = 12.0
    x[0, 32] = 0.006  # 0.001 is below 2^-9: clamped up
    got = run(x, "nvfp4", "amax")
    assert got.global_scale is not None
    assert got.global_scale.tolist() == [[1.0]]
    assert got.scales.tolist() == [[0x7E, 0x40, 0x01, 0x01]]
    assert got.dequantize()[0, [0, 16]].tolist() == [2688.0, 12.0]
    assert float(got.dequantize()[0, 32]) == 3 * 2.0**-9


def test_global_scale_spans() -> None:
    x = torch.ones(2, 130, 16)
    x[0, 1] = 2.0
    x[1, 129] = 8.0
    token = run(x, "nvfp4", "amax").global_scale
    tile = run(x, "nvfp4", "amax", granularity="tile").global_scale
    tensor = run(x, "nvfp4", "amax", granularity="tensor").global_scale
    assert token is not None
    assert tile is not None
    assert tensor is not None
    one = torch.tensor(1.0) / 2688
    assert token.shape == (2, 130, 1)
    assert token[0, 1, 0] == 2 * one
    assert token[1, 0, 0] == one
    assert torch.equal(tile, torch.tensor([[[2.0], [1.0]], [[1.0], [8.0]]]) * one)
    assert tensor.shape == ()
    assert tensor == 8 * one


def test_int8_scales_span_a_token_or_a_tile() -> None:
    x = torch.ones(1, 130, 8)
    x[0, 5, 0] = 254.0
    token = run(x, "int8")
    assert token.scales.shape == (1, 130, 1)
    assert token.scales[0, 5, 0] == 2.0
    tile = run(x, "int8", granularity="tile")
    assert tile.scales.shape == (1, 2, 1)
    assert tile.scales[0, 0, 0] == 2.0
    assert torch.equal(tile.scales[0, 1, 0], torch.tensor(1.0) / 127)
    assert tile.dequantize()[0, 5, 0] == 254.0
