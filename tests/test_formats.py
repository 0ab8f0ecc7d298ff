"""The format table, `BlockScaledTensor` and the errors of `quantize` and `quantize_pair`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from dma_attn import BlockScaledTensor, quantize, quantize_pair
from dma_attn.formats import FORMATS, get_format
from tests import oracles

NAMES = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "int8", "int4", "fp4", "none")
QUANTISED = NAMES[:-1]


def test_names() -> None:
    assert set(FORMATS) == set(NAMES)
    for name in NAMES:
        assert get_format(name) is FORMATS[name]
        assert FORMATS[name].name == name


def test_alias() -> None:
    assert get_format("mxfp8_e4m3") is FORMATS["mxfp8"]
    got = quantize(torch.ones(1, 32), "mxfp8_e4m3", impl="reference")
    assert got.format == "mxfp8"


@pytest.mark.parametrize(
    ("name", "bits", "largest", "block"),
    [
        ("mxfp8", 8, 448.0, 32),
        ("mxfp8_e5m2", 8, 57344.0, 32),
        ("mxfp4", 4, 6.0, 32),
        ("nvfp4", 4, 6.0, 16),
        ("int8", 8, 127.0, None),
        ("int4", 4, 7.0, None),
        ("fp4", 4, 6.0, None),
    ],
)
def test_constants(name: str, bits: int, largest: float, block: int | None) -> None:
    fmt = get_format(name)
    assert (fmt.bits, fmt.max, fmt.block) == (bits, largest, block)


@pytest.mark.parametrize(("name", "emax"), [("mxfp8", 8), ("mxfp8_e5m2", 15), ("mxfp4", 2)])
def test_emax(name: str, emax: int) -> None:
    assert get_format(name).emax == emax


def test_formats_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["mxfp8"].max = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("shape", [(80,), (3, 80), (2, 1, 5, 72), (1, 2, 1, 131, 16)], ids=str)
def test_layout(name: str, shape: tuple[int, ...]) -> None:
    got = quantize(torch.ones(shape), name, impl="reference")
    width = shape[-1] // 2 if name in oracles.PACKED else shape[-1]
    assert got.data.dtype == torch.uint8
    assert tuple(got.data.shape) == (*shape[:-1], width)
    if name in oracles.TOKEN_FORMATS:
        assert got.scales.dtype == torch.float32
        assert tuple(got.scales.shape) == (*shape[:-1], 1)
    else:
        size = 16 if name == "nvfp4" else 32
        assert got.scales.dtype == torch.uint8
        assert tuple(got.scales.shape) == (*shape[:-1], -(-shape[-1] // size))
    if name == "nvfp4":
        assert got.global_scale is not None
        assert got.global_scale.dtype == torch.float32
        assert tuple(got.global_scale.shape) == (*shape[:-1], 1)
    else:
        assert got.global_scale is None
    assert tuple(got.shape) == shape
    assert got.format == name


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("mxfp8", 10 * (80 + 3)),
        ("mxfp8_e5m2", 10 * (80 + 3)),
        ("mxfp4", 10 * (40 + 3)),
        ("nvfp4", 10 * (40 + 5 + 4)),
        ("int8", 10 * (80 + 4)),
        ("int4", 10 * (40 + 4)),
        ("fp4", 10 * (40 + 4)),
    ],
)
def test_nbytes(name: str, nbytes: int) -> None:
    assert quantize(torch.ones(2, 5, 80), name, impl="reference").nbytes == nbytes


@pytest.mark.parametrize("granularity", ["token", "tile", "tensor"])
def test_dequantize_rounds_the_product_once(granularity: str) -> None:
    x = torch.randn(2, 130, 48, generator=torch.Generator().manual_seed(0))
    got = quantize(x, "nvfp4", granularity=granularity, impl="reference")
    full = got.dequantize()
    assert full.dtype == torch.float32
    assert full.shape == x.shape
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert torch.equal(got.dequantize(dtype), full.to(dtype))
        assert got.dequantize(dtype=dtype).dtype == dtype


def assert_identical(a: BlockScaledTensor, b: BlockScaledTensor) -> None:
    """The same bits, metadata included."""
    assert (a.format, tuple(a.shape), a.nbytes) == (b.format, tuple(b.shape), b.nbytes)
    assert torch.equal(a.data, b.data)
    assert torch.equal(a.scales, b.scales)
    assert (a.global_scale is None) == (b.global_scale is None)
    if a.global_scale is not None and b.global_scale is not None:
        assert torch.equal(a.global_scale, b.global_scale)


@pytest.mark.parametrize(
    ("name", "granularity"), [(n, g) for n in QUANTISED for g in oracles.GRANULARITIES[n]]
)
def test_state_dict_through_safetensors(name: str, granularity: str, tmp_path: Path) -> None:
    torch_io = pytest.importorskip("safetensors.torch")
    x = torch.randn(3, 2, 40, 130, generator=torch.Generator().manual_seed(1))
    view = x.transpose(-1, -2)  # strided: what is stored must still be contiguous
    got = quantize(view, name, granularity=granularity, impl="reference")
    torch_io.save_file(got.state_dict(), tmp_path / "t.safetensors")
    back = BlockScaledTensor.from_state_dict(torch_io.load_file(tmp_path / "t.safetensors"))
    assert_identical(got, back)
    assert torch.equal(got.dequantize(), back.dequantize())


@pytest.mark.parametrize("name", QUANTISED)
def test_state_dict_holds_tensors_only(name: str) -> None:
    got = quantize(torch.ones(2, 32), name, impl="reference")
    state = got.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert_identical(got, BlockScaledTensor.from_state_dict(state))


def test_from_state_dict_names_what_is_missing() -> None:
    state = quantize(torch.ones(2, 32), "mxfp8", impl="reference").state_dict()
    del state["scales"]
    with pytest.raises(ValueError, match="scales"):
        BlockScaledTensor.from_state_dict(state)


def test_to_moves_every_part() -> None:
    got = quantize(torch.ones(2, 32), "nvfp4", impl="reference")
    assert_identical(got, got.to("cpu"))
    moved = got.to(torch.device("meta"))
    assert moved.global_scale is not None
    for part in (moved.data, moved.scales, moved.global_scale):
        assert part.device.type == "meta"
    assert moved.format == "nvfp4"
    assert tuple(moved.shape) == (2, 32)


def test_a_tensor_is_frozen() -> None:
    got = quantize(torch.ones(2, 32), "mxfp8", impl="reference")
    with pytest.raises(dataclasses.FrozenInstanceError):
        got.format = "mxfp4"  # type: ignore[misc]


@pytest.mark.parametrize("call", ["get_format", "quantize", "high", "low"])
def test_unknown_format_lists_the_valid_names(call: str) -> None:
    x = torch.ones(1, 32)
    calls = {
        "get_format": lambda: get_format("fp5"),
        "quantize": lambda: quantize(x, "fp5"),
        "high": lambda: quantize_pair(x, "fp5", "nvfp4"),
        "low": lambda: quantize_pair(x, "mxfp8", "fp5"),
    }
    with pytest.raises(ValueError, match="fp5") as error:
        calls[call]()
    for name in (*NAMES, "mxfp8_e4m3"):
        assert f"'{name}'" in str(error.value)


def test_quantize_refuses_none() -> None:
    with pytest.raises(ValueError, match="none"):
        quantize(torch.ones(1, 32), "none")


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn]
)
def test_wrong_dtype(dtype: torch.dtype) -> None:
    x = torch.ones(1, 32).to(dtype)
    expected = r"x: .*float16.*bfloat16.*float32.*" + str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=expected):
        quantize(x, "mxfp8")
    with pytest.raises(TypeError, match=expected):
        quantize_pair(x, "mxfp8", "nvfp4")


def test_not_a_tensor() -> None:
    with pytest.raises(TypeError, match="list"):
        quantize([1.0, 2.0], "mxfp8")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", QUANTISED)
def test_unknown_rule_lists_the_valid_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"scale_rule.*'ceil'") as error:
        quantize(torch.ones(1, 32), name, scale_rule="ceil")
    for rule in ("auto", *oracles.RULES[name]):
        assert f"'{rule}'" in str(error.value)
    with pytest.raises(ValueError, match=r"scale_rule.*'ceil'"):
        quantize_pair(torch.ones(1, 32), name, "none", scale_rule="ceil")


@pytest.mark.parametrize("rule", ["floor", "rceil", "even", "mse", "amax"])
@pytest.mark.parametrize("name", QUANTISED)
def test_a_rule_that_a_format_lacks_raises(name: str, rule: str) -> None:
    if rule in oracles.RULES[name]:
        assert quantize(torch.ones(1, 32), name, scale_rule=rule, impl="reference").format == name
        return
    with pytest.raises(ValueError, match=rf"scale_rule.*'{rule}'"):
        quantize(torch.ones(1, 32), name, scale_rule=rule)


@pytest.mark.parametrize("granularity", ["token", "tile", "tensor", "block"])
@pytest.mark.parametrize("name", QUANTISED)
def test_a_granularity_that_a_format_lacks_raises(name: str, granularity: str) -> None:
    x = torch.ones(1, 32)
    if granularity in oracles.GRANULARITIES[name]:
        assert quantize(x, name, granularity=granularity, impl="reference").format == name
        return
    with pytest.raises(ValueError, match=rf"granularity.*'{granularity}'"):
        quantize(x, name, granularity=granularity)
    if granularity == "block":
        with pytest.raises(ValueError, match=r"granularity.*'block'"):
            quantize_pair(x, name, "none", granularity=granularity)


@pytest.mark.parametrize("name", oracles.PACKED)
def test_odd_head_dim_in_four_bits(name: str) -> None:
    x = torch.ones(2, 33)
    with pytest.raises(ValueError, match=rf"{name}.*even.*33"):
        quantize(x, name)
    with pytest.raises(ValueError, match=rf"{name}.*even.*33"):
        quantize_pair(x, "mxfp8", name)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "int8"])
def test_odd_head_dim_in_eight_bits(name: str) -> None:
    x = torch.randn(2, 33, generator=torch.Generator().manual_seed(2))
    got = quantize(x, name, impl="reference")
    assert got.data.shape == (2, 33)
    want = oracles.quantize(x.numpy(), name)
    assert torch.equal(got.dequantize(), torch.from_numpy(want.values))


def test_scalar_input() -> None:
    with pytest.raises(ValueError, match="x"):
        quantize(torch.tensor(1.0), "mxfp8")


def test_unknown_impl() -> None:
    with pytest.raises(ValueError, match=r"impl.*'cuda'"):
        quantize(torch.ones(1, 32), "mxfp8", impl="cuda")


def test_mean_of_a_wrong_shape() -> None:
    with pytest.raises(ValueError, match="mean"):
        quantize_pair(torch.ones(1, 2, 3, 32), "mxfp8", "nvfp4", mean=torch.ones(1, 2, 1, 16))
