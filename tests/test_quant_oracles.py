"""The reference quantiser against numpy/ml_dtypes oracles and against torchao, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dma_attn import BlockScaledTensor, quantize, quantize_pair
from tests import oracles

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
COMBINATIONS = [
    (name, rule, granularity)
    for name, rules in oracles.RULES.items()
    for rule in rules
    for granularity in oracles.GRANULARITIES[name]
]
KINDS = ("normal", "heavy", "tiny", "huge", "grid", "sparse")
SHAPES = ((80,), (5, 40), (2, 3, 72), (2, 1, 7, 8), (1, 2, 1, 3, 16), (257, 8), (2, 128, 32))


def make_input(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    """Seeded input of a kind; "tiny" and "huge" sit at the ends of the dtype's range."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float32)
    limits = torch.finfo(dtype)
    if kind == "heavy":
        x = x * torch.exp(2 * torch.randn(shape, generator=generator))
    elif kind == "tiny":  # mostly subnormal; fp32 scales of fp32 and bf16 stay above zero
        x = x * (2.0**-22 if dtype == torch.float16 else 2.0**-128)
    elif kind == "huge":
        x = (x * 0.5).clamp(-1, 1) * limits.max
    elif kind == "grid":  # quarters: rounding ties and equal errors are common
        x = (x * 8).round() / 4
    elif kind == "sparse":
        x = x * (torch.rand(shape, generator=generator) < 0.05)
    return x.clamp(limits.min, limits.max).to(dtype)


def bits(x: np.ndarray) -> np.ndarray:
    """The stored bits of fp32 values, all NaN alike."""
    return np.where(np.isnan(x), np.float32(np.nan), x).astype(np.float32).view(np.uint32)


def codes_of(quantised: BlockScaledTensor, name: str) -> np.ndarray:
    """One uint8 code an element."""
    data = quantised.data.numpy()
    return oracles.unpack(data) if name in oracles.PACKED else data


def assert_matches_oracle(x: torch.Tensor, name: str, rule: str, granularity: str) -> None:
    """Data, scales, global scale and dequantised values equal the oracle's bits."""
    got = quantize(x, name, scale_rule=rule, granularity=granularity, impl="reference")
    want = oracles.quantize(oracles.to_numpy(x), name, rule, granularity)
    scales = got.scales.numpy()
    assert scales.dtype == want.scales.dtype
    assert scales.shape == want.scales.shape
    if name in oracles.TOKEN_FORMATS:
        zero = oracles.group_amax(oracles.to_numpy(x), granularity) == 0
        assert np.isfinite(scales[zero]).all()
        np.testing.assert_array_equal(bits(scales)[~zero], bits(want.scales)[~zero])
    else:
        np.testing.assert_array_equal(scales, want.scales)
    if want.global_scale is None:
        assert got.global_scale is None
    else:
        assert got.global_scale is not None
        assert got.global_scale.dtype == torch.float32
        assert tuple(got.global_scale.shape) == want.global_scale.shape
        np.testing.assert_array_equal(bits(got.global_scale.numpy()), bits(want.global_scale))
    codes = codes_of(got, name)
    want_codes = want.codes & 15 if name in oracles.PACKED else want.codes
    assert codes.shape == want_codes.shape == tuple(x.shape)
    free = want.poisoned
    np.testing.assert_array_equal(codes[~free], want_codes[~free])
    np.testing.assert_array_equal(bits(got.dequantize().numpy()), bits(want.values))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(("name", "rule", "granularity"), COMBINATIONS)
def test_bits_by_value_distribution(
    name: str, rule: str, granularity: str, dtype: torch.dtype
) -> None:
    for seed, kind in enumerate(KINDS if dtype == torch.float32 else ("heavy", "tiny", "huge")):
        assert_matches_oracle(make_input(kind, (1, 130, 80), dtype, seed), name, rule, granularity)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "rule", "granularity"), COMBINATIONS)
def test_bits_by_shape(
    name: str, rule: str, granularity: str, shape: tuple[int, ...]
) -> None:
    for kind in ("heavy",) if len(shape) > 2 else ("heavy", "grid"):
        assert_matches_oracle(make_input(kind, shape, torch.bfloat16), name, rule, granularity)


@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 80, 256])
@pytest.mark.parametrize("name", list(oracles.RULES))
def test_auto_is_the_documented_rule(name: str, head_dim: int) -> None:
    x = make_input("heavy", (9, head_dim), torch.float32)
    auto = quantize(x, name, impl="reference")
    named = quantize(x, name, scale_rule=oracles.AUTO[name], impl="reference")
    assert torch.equal(auto.data, named.data)
    assert torch.equal(auto.scales, named.scales)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 80)], ids=str)
@pytest.mark.parametrize(("name", "rule", "granularity"), COMBINATIONS)
def test_no_tokens(name: str, rule: str, granularity: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    got = quantize(x, name, scale_rule=rule, granularity=granularity, impl="reference")
    want = oracles.quantize(x.numpy(), name, rule, granularity)
    width = shape[-1] // 2 if name in oracles.PACKED else shape[-1]
    assert tuple(got.data.shape) == (*shape[:-1], width)
    assert tuple(got.scales.shape) == want.scales.shape
    assert tuple(got.dequantize().shape) == shape
    if want.global_scale is not None:
        assert got.global_scale is not None
        assert tuple(got.global_scale.shape) == want.global_scale.shape


def strided_views(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Views of one buffer whose last dim, rows or offset are irregular."""
    buffer = make_input("heavy", (2, 3, 34, 35), dtype)
    return {
        "odd row stride and offset": buffer[..., 1:33],
        "heads and tokens swapped": buffer[..., :32].transpose(1, 2),
        "last dim strided": buffer.transpose(-1, -2)[..., :32],
        "every other channel": make_input("heavy", (3, 5, 128), dtype)[..., ::2],
        "broadcast": buffer[:, :1, :, :32].expand(2, 3, 34, 32),
    }


@pytest.mark.parametrize("name", list(oracles.RULES))
def test_strides_do_not_matter(name: str) -> None:
    for label, view in strided_views(torch.float16).items():
        strided = quantize(view, name, impl="reference")
        contiguous = quantize(view.contiguous(), name, impl="reference")
        assert torch.equal(strided.data, contiguous.data), label
        assert torch.equal(strided.scales, contiguous.scales), label
        assert strided.shape == tuple(view.shape), label


@pytest.mark.parametrize(("name", "rule", "granularity"), COMBINATIONS)
def test_bits_with_nan_and_inf(name: str, rule: str, granularity: str) -> None:
    bad_values = (float("nan"), float("inf"), float("-inf"))
    for dtype, bad in zip(DTYPES, bad_values, strict=True):
        x = make_input("normal", (1, 257, 80), dtype)
        x[0, 3, 5] = bad
        x[0, 129, 79] = bad
        assert_matches_oracle(x, name, rule, granularity)


@pytest.mark.parametrize(("name", "rule", "granularity"), COMBINATIONS)
def test_bits_of_zeros(name: str, rule: str, granularity: str) -> None:
    x = torch.zeros(3, 130, 48)
    x[0, 0, 0] = 1.0
    x[2, :, 16:32] = -0.0
    assert_matches_oracle(x, name, rule, granularity)


@pytest.mark.parametrize("name", list(oracles.RULES))
def test_finite_input_near_zero_stays_finite(name: str) -> None:
    """Where amax / constant underflows to 0 in fp32 nothing turns into NaN."""
    smallest = torch.finfo(torch.float32).smallest_normal * 2.0**-23
    for factor in (1, 3, 1000, 2000, 40000):
        for sign in (1, -1):
            x = torch.zeros(2, 32)
            x[0, 3] = sign * smallest * factor
            values = quantize(x, name, impl="reference").dequantize()
            assert torch.isfinite(values).all(), (factor, values)
            assert float(values.abs().max()) <= 2 * smallest * factor
            assert (values[1] == 0).all()


@pytest.mark.parametrize(("name", "rule", "granularity"), COMBINATIONS)
def test_values_near_the_largest_float_never_become_nan(
    name: str, rule: str, granularity: str
) -> None:
    x = torch.full((2, 32), torch.finfo(torch.float32).max)
    x[1] = -x[1] / 3
    got = quantize(x, name, scale_rule=rule, granularity=granularity, impl="reference")
    assert not torch.isnan(got.dequantize()).any()
    assert_matches_oracle(x, name, rule, granularity)


finite_floats = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100),
              max_value=2.0**100, allow_subnormal=False),
    st.sampled_from([0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 448.0, 464.0, -7.0]),
).map(lambda v: v if abs(v) > 2.0**-100 or v == 0 else 0.0)


@settings(max_examples=30, deadline=None)
@given(
    x=arrays(np.float32, st.tuples(st.integers(1, 3), st.sampled_from([2, 16, 32, 40])),
             elements=finite_floats),
    combination=st.sampled_from(COMBINATIONS),
)
def test_bits_of_any_values(x: np.ndarray, combination: tuple[str, str, str]) -> None:
    assert_matches_oracle(torch.from_numpy(x.copy()), *combination)


@settings(max_examples=30, deadline=None)
@given(
    x=arrays(np.float32, (2, 32), elements=st.floats(-(2.0**20), 2.0**20, width=32)),
    name=st.sampled_from([*oracles.MX_FORMATS]),
    shift=st.integers(-20, 20),
    rule=st.sampled_from(["floor", "rceil", "even"]),
)
def test_mx_commutes_with_powers_of_two(
    x: np.ndarray, name: str, shift: int, rule: str
) -> None:
    x = np.where(np.abs(x) < 2.0**-40, np.float32(0), x)
    plain = quantize(torch.from_numpy(x), name, scale_rule=rule, impl="reference")
    scaled = quantize(
        torch.from_numpy(x * np.float32(2.0**shift)), name, scale_rule=rule, impl="reference"
    )
    assert torch.equal(plain.data, scaled.data)
    nonzero = plain.scales != 0
    assert torch.equal(plain.scales[nonzero].int() + shift, scaled.scales[nonzero].int())


@settings(max_examples=30, deadline=None)
@given(
    x=arrays(np.float32, (3, 48), elements=st.floats(-1000, 1000, width=32)),
    name=st.sampled_from([*oracles.RULES]),
)
def test_negation_only_flips_signs(x: np.ndarray, name: str) -> None:
    if name == "int4":  # -8..7 is not symmetric
        x = np.clip(x, -1, 1)
        rule = "amax"
    else:
        rule = "auto"
    positive = quantize(torch.from_numpy(x), name, scale_rule=rule, impl="reference")
    negative = quantize(torch.from_numpy(-x), name, scale_rule=rule, impl="reference")
    assert torch.equal(positive.scales, negative.scales)
    assert torch.equal(positive.dequantize(), -negative.dequantize())


def test_oracle_e2m1_agrees_with_ml_dtypes() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal(4096) * 4, np.arange(-32, 33) / 4]).astype(np.float32)
    theirs = np.clip(x, -6, 6).astype(oracles.ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(oracles.e2m1_codes(x), theirs)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 96, 128, 256])
def test_oracle_hadamard_is_the_sylvester_matrix(head_dim: int) -> None:
    x = np.random.default_rng(1).standard_normal((3, head_dim)).astype(np.float32)
    np.testing.assert_allclose(
        oracles.hadamard(x), x @ oracles.sylvester_matrix(head_dim), atol=1e-5
    )


TORCHAO_ELEMENTS = {
    "mxfp8": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp4": getattr(torch, "float4_e2m1fn_x2", None),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", ["floor", "rceil", "even"])
@pytest.mark.parametrize("name", oracles.MX_FORMATS)
def test_mx_equals_torchao(name: str, rule: str, dtype: torch.dtype) -> None:
    """Equal bytes and codes wherever the two documents agree.

    They differ on purpose in blocks with Inf (torchao keeps a finite scale) and for scale byte 0,
    where torchao divides by 2^-126 (floor, even) or by 1 (rceil) instead of 2^-127.
    """
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    mode = config.ScaleCalculationMode(rule)
    for seed, kind in enumerate(KINDS):
        x = make_input(kind, (2, 17, 96), dtype, seed)
        x[0, 0, 3] = float("nan")
        x[0, 1, 32:64] = 0
        their_scales, their_data = mx_tensor.to_mx(x, TORCHAO_ELEMENTS[name], 32, mode)
        ours = quantize(x, name, scale_rule=rule, impl="reference")
        scales = ours.scales.numpy()
        np.testing.assert_array_equal(scales, their_scales.view(torch.uint8).numpy())
        their_codes = their_data.view(torch.uint8).numpy()
        codes = ours.data.numpy()
        per_scale = 16 if name == "mxfp4" else 32
        same = np.repeat((scales != 255) & (scales != 0), per_scale, axis=-1)
        np.testing.assert_array_equal(codes[same], their_codes.reshape(codes.shape)[same])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["normal", "heavy", "sparse"])
def test_nvfp4_equals_torchao_up_to_midpoints(kind: str, dtype: torch.dtype) -> None:
    """Scales equal where >= 2^-6; codes differ only within one fp32 ulp of a rounding midpoint.

    torchao multiplies by the reciprocal of the combined scale and floors scales at 2^-6.
    """
    module = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = make_input(kind, (256, 128), dtype, seed=7)
    ours = quantize(x, "nvfp4", scale_rule="amax", granularity="tensor", impl="reference")
    per_tensor = module.per_tensor_amax_to_scale(x.abs().amax())
    theirs = module.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor)
    assert ours.global_scale is not None
    assert torch.equal(ours.global_scale, per_tensor)
    scales = ours.scales.view(torch.float8_e4m3fn).float().numpy()
    their_scales = theirs.scale.view(torch.float8_e4m3fn).reshape(scales.shape).float().numpy()
    large = scales >= 2.0**-6
    assert large.mean() > 0.5
    np.testing.assert_array_equal(scales[large], their_scales[large])
    codes = oracles.unpack(ours.data.numpy())
    their_codes = oracles.unpack(theirs.qdata.view(torch.uint8).reshape(ours.data.shape).numpy())
    differ = (codes != their_codes) & np.repeat(large, 16, axis=-1)
    product = np.repeat(scales * ours.global_scale.numpy(), 16, axis=-1)
    quotient = np.abs(oracles.to_numpy(x) / product)[differ]
    midpoints = (oracles.E2M1_VALUES[1:] + oracles.E2M1_VALUES[:-1]) / 2
    nearest = midpoints[np.abs(quotient[:, None] - midpoints).argmin(-1)]
    assert (np.abs(quotient - nearest) <= np.spacing(nearest)).all()
    assert differ.mean() < 1e-3


PAIRS = [("mxfp8", "nvfp4"), ("mxfp8_e5m2", "mxfp4"), ("int8", "int4"), ("none", "fp4")]


def assert_same(got: BlockScaledTensor | None, want: BlockScaledTensor | None) -> None:
    """Two optional copies with the same bits."""
    assert (got is None) == (want is None)
    if got is None or want is None:
        return
    assert torch.equal(got.data, want.data)
    assert torch.equal(got.scales, want.scales)
    assert (got.global_scale is None) == (want.global_scale is None)
    if got.global_scale is not None and want.global_scale is not None:
        assert torch.equal(got.global_scale, want.global_scale)
    assert tuple(got.shape) == tuple(want.shape)


def transformed(x: torch.Tensor, mean: torch.Tensor | None, rotate: bool) -> torch.Tensor:
    """The oracle's fp32 tensor that the pair must be the quantisation of."""
    values = oracles.to_numpy(x)
    if mean is not None:
        values = values - oracles.to_numpy(mean)
    return torch.from_numpy(oracles.hadamard(values) if rotate else values)


@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 80, 256])
@pytest.mark.parametrize("transforms", ["none", "mean", "rotate", "mean+rotate"])
def test_pair_is_quantize_of_the_transformed_tensor(transforms: str, head_dim: int) -> None:
    dtype = {40: torch.float16, 64: torch.bfloat16}.get(head_dim, torch.float32)
    x = make_input("normal", (2, 1, 5, head_dim), dtype)
    x = x + torch.linspace(-3, 3, head_dim).to(dtype)
    mean = x.float().mean(-2, keepdim=True) if "mean" in transforms else None
    rotate = "rotate" in transforms
    want = transformed(x, mean, rotate)
    for high, low in PAIRS:
        got = quantize_pair(x, high, low, mean=mean, rotate=rotate, impl="reference")
        for name, copy in ((high, got[0]), (low, got[1])):
            expected = None if name == "none" else quantize(want, name, impl="reference")
            assert_same(copy, expected)


@pytest.mark.parametrize(
    ("rule", "granularity"),
    [
        ("auto", "tile"), ("floor", "token"), ("rceil", "tensor"), ("even", "tile"),
        ("mse", "tensor"), ("amax", "token"), ("amax", "tile"), ("amax", "tensor"),
    ],
)  # fmt: skip
def test_pair_ignores_what_a_format_lacks(rule: str, granularity: str) -> None:
    x = make_input("heavy", (1, 1, 130, 32), torch.bfloat16)
    for high, low in PAIRS:
        got = quantize_pair(
            x, high, low, scale_rule=rule, granularity=granularity, impl="reference"
        )
        for name, copy in ((high, got[0]), (low, got[1])):
            if name == "none":
                assert copy is None
                continue
            own_rule = rule if rule in oracles.RULES[name] else "auto"
            own = granularity if granularity in oracles.GRANULARITIES[name] else "token"
            expected = quantize(
                x, name, scale_rule=own_rule, granularity=own, impl="reference"
            )
            if own == "tensor":  # one batch row and head here, so both spans are the same
                assert copy is not None
                assert torch.equal(copy.data, expected.data)
                assert torch.equal(copy.scales, expected.scales)
            else:
                assert_same(copy, expected)


def test_pair_takes_a_mean_per_batch_row_and_head() -> None:
    x = make_input("normal", (2, 2, 5, 32), torch.float16)
    mean = torch.arange(2 * 2 * 32, dtype=torch.float32).reshape(2, 2, 1, 32) / 16
    high, low = quantize_pair(x, "mxfp8", "mxfp4", mean=mean, impl="reference")
    want = transformed(x, mean, rotate=False)
    assert_same(high, quantize(want, "mxfp8", impl="reference"))
    assert_same(low, quantize(want, "mxfp4", impl="reference"))


@pytest.mark.parametrize("rotate", [False, True])
def test_case_106a_pair_leaves_its_inputs_alone(rotate: bool) -> None:
    buffer = make_input("normal", (1, 2, 9, 67), torch.float32)
    view = buffer[..., 1:65]
    mean = view.mean(-2, keepdim=True)
    before, mean_before = buffer.clone(), mean.clone()
    quantize_pair(view, "mxfp8", "nvfp4", mean=mean, rotate=rotate, impl="reference")
    quantize(view, "int4", impl="reference")
    assert torch.equal(buffer, before)
    assert torch.equal(mean, mean_before)


def test_pair_with_nan_keeps_other_tokens_clean() -> None:
    x = make_input("normal", (1, 1, 6, 64), torch.float32)
    clean = quantize_pair(x, "mxfp8", "nvfp4", rotate=True, impl="reference")
    x[..., 2, 5] = float("nan")
    dirty = quantize_pair(x, "mxfp8", "nvfp4", rotate=True, impl="reference")
    keep = [0, 1, 3, 4, 5]
    for before, after in zip(clean, dirty, strict=True):
        assert before is not None
        assert after is not None
        assert torch.isnan(after.dequantize()[..., 2, :]).any()
        assert torch.equal(before.dequantize()[..., keep, :], after.dequantize()[..., keep, :])
