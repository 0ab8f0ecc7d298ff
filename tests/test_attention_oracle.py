"""The attention call against the quantised oracle, within the bounds of docs/numerics.md."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dma_attn import DMAConfig, dma_attention, scaled_dot_product_attention
from dma_attn.testing import (
    class_map,
    error_budget,
    index_values,
    probe_key,
    probe_query,
    random_qkv,
)
from tests.impls import DEVICE, INTERPRETED, check_against_oracle, check_result, each_impl, pick

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
DEFAULT = DMAConfig()

LENGTHS = pick(
    [
        *[(1, 1), (1, 2), (2, 1), (1, 129), (1, 1100), (5, 17), (17, 5), (64, 64), (127, 128)],
        *[(128, 127), (129, 129), (130, 300), (300, 130), (385, 640), (513, 513), (1100, 1100)],
    ],
    [(1, 1), (5, 17), (40, 20), (130, 140)],
)


@each_impl
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths: tuple[int, int], is_causal: bool, impl: str) -> None:
    q, k, v = random_qkv(1, pick((4, 2), (2, 1)), lengths, 64, device=DEVICE)
    check_against_oracle(q, k, v, DEFAULT, impl, is_causal=is_causal)


@pytest.mark.skipif(INTERPRETED, reason="random shapes take too long under the interpreter")
@each_impl
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    batch=st.integers(1, 3),
    heads=st.sampled_from([(3, 1), (4, 2), (6, 2)]),
    lengths=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    window=st.sampled_from([None, 1, 2, 127, 128, 129, 300]),
)
def test_random_shapes(
    impl: str,
    batch: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    window: int | None,
) -> None:
    q, k, v = random_qkv(batch, heads, lengths, 64, device=DEVICE)
    check_against_oracle(q, k, v, DEFAULT, impl, is_causal=True, window_size=window)


DIMS: list[tuple[tuple[int, int], torch.dtype]] = pick(
    [
        *[((32, 32), BF16), ((32, 32), FP32), ((64, 64), FP16), ((64, 64), FP32), ((80, 80), BF16)],
        *[((96, 96), FP16), ((128, 128), BF16), ((128, 128), FP16), ((128, 128), FP32)],
        *[((256, 256), BF16), ((256, 256), FP32), ((8, 8), BF16), ((64, 128), BF16)],
        *[((128, 40), FP16), ((24, 256), BF16), ((192, 128), BF16), ((104, 72), FP32)],
    ],
    [((32, 32), BF16), ((64, 64), FP32), ((80, 24), FP16)],
    [
        *[((8, 8), BF16), ((32, 32), BF16), ((64, 64), FP16), ((64, 64), FP32)],
        *[((128, 128), BF16), ((128, 40), BF16), ((256, 256), BF16)],
    ],
)


@each_impl
@pytest.mark.parametrize(("dims", "dtype"), DIMS, ids=str)
def test_head_dims_and_dtypes(dims: tuple[int, int], dtype: torch.dtype, impl: str) -> None:
    lengths = pick((200, 333), (70, 140))
    q, k, v = random_qkv(1, (2, 1), lengths, dims, dtype=dtype, device=DEVICE)
    check_against_oracle(q, k, v, DEFAULT, impl, is_causal=True)


@each_impl
@pytest.mark.parametrize("heads", pick([(2, 2), (3, 1), (8, 2), (7, 1), (14, 2), (8, 1)], [(6, 2)]))
@pytest.mark.parametrize("s_q", pick([1, 9, 140], [9]))
def test_grouped_query_heads(heads: tuple[int, int], s_q: int, impl: str) -> None:
    q, k, v = random_qkv(2, heads, (s_q, pick(260, 40)), pick(64, 32), device=DEVICE)
    check_against_oracle(q, k, v, DEFAULT, impl, is_causal=True)


PAIRS = pick(
    [
        *[("mxfp8", "mxfp4"), ("mxfp8_e5m2", "nvfp4"), ("mxfp8_e4m3", "fp4"), ("none", "nvfp4")],
        *[("none", "int4"), ("none", "mxfp4"), ("int8", "nvfp4"), ("int8", "int4")],
        *[("int8", "int8"), ("nvfp4", "nvfp4"), ("none", "none"), ("mxfp8", "none")],
    ],
    [("mxfp8", "mxfp4"), ("none", "nvfp4"), ("int8", "int4")],
    [("mxfp8_e5m2", "mxfp4"), ("none", "int4"), ("int8", "fp4")],
)


@each_impl
@pytest.mark.parametrize(("high", "low"), PAIRS, ids=str)
def test_format_pairs(high: str, low: str, impl: str) -> None:
    q, k, v = random_qkv(1, (2, 1), pick((300, 450), (10, 150)), pick(64, 32), device=DEVICE)
    config = DMAConfig(high=high, low=low, sink=0)
    check_against_oracle(q, k, v, config, impl, is_causal=True)


@each_impl
@pytest.mark.parametrize(
    "preset", pick(DMAConfig.PRESETS, ("paper", "hopper"), ("paper", "nvfp4", "hopper", "off"))
)
def test_presets(preset: str, impl: str) -> None:
    q, k, v = random_qkv(1, (2, 1), pick((300, 450), (40, 140)), pick(128, 32, 64), device=DEVICE)
    check_against_oracle(q, k, v, DMAConfig.preset(preset), impl, is_causal=True)


@each_impl
@pytest.mark.parametrize("high", pick(["mxfp8", "none"], ["none"], ["none"]))
@pytest.mark.parametrize(
    ("smooth_k", "rotate"),
    pick([(False, False), (True, False), (False, True)], [(False, True)]),
)
def test_transforms_can_be_turned_off(high: str, smooth_k: bool, rotate: bool, impl: str) -> None:
    q, k, v = random_qkv(1, (2, 1), pick((300, 300), (140, 140)), pick(96, 32, 64), device=DEVICE)
    k[:, :, :, 5] += 20.0
    config = DMAConfig(high=high, low="nvfp4", sink=0, smooth_k=smooth_k, rotate=rotate)
    check_against_oracle(q, k, v, config, impl, is_causal=True)


RULES = pick(
    [
        *[("floor", "token"), ("rceil", "token"), ("even", "token"), ("mse", "token")],
        *[("amax", "tile"), ("auto", "tile"), ("auto", "tensor")],
    ],
    [("floor", "token"), ("auto", "tile")],
    [("amax", "tile"), ("auto", "tensor")],
)


@each_impl
@pytest.mark.parametrize("low", pick(["nvfp4", "mxfp4"], ["nvfp4"], ["nvfp4"]))
@pytest.mark.parametrize(("rule", "granularity"), RULES, ids=str)
def test_scale_rules_and_granularities(rule: str, granularity: str, low: str, impl: str) -> None:
    lengths = pick((200, 270), (20, 140))
    q, k, v = random_qkv(2, (2, 1), lengths, pick(64, 32), device=DEVICE)
    config = DMAConfig(low=low, sink=0, scale_rule=rule, granularity=granularity)
    check_against_oracle(q, k, v, config, impl, is_causal=True)


@each_impl
@pytest.mark.parametrize("dtype", pick([BF16, FP16, FP32], [FP32], [BF16]), ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_fp8_p_and_v(is_causal: bool, dtype: torch.dtype, impl: str) -> None:
    q, k, v = random_qkv(
        1, (2, 1), pick((260, 390), (20, 140)), pick(64, 32), dtype=dtype, device=DEVICE
    )
    check_against_oracle(q, k, v, DMAConfig(pv="fp8"), impl, is_causal=is_causal)


def padding_mask(kind: str, batch: int, s_kv: int) -> torch.Tensor:
    """Bool (B, S_kv), True = visible; another number of padded keys in each row."""
    keys = torch.arange(s_kv, device=DEVICE).expand(batch, -1)
    if kind == "random":
        generator = torch.Generator().manual_seed(1)
        return (torch.rand(batch, s_kv, generator=generator) < 0.7).to(DEVICE)
    pads = torch.tensor([0, s_kv // 2, s_kv - 3, s_kv], device=DEVICE)[:batch, None]
    return keys >= pads if kind == "left" else keys < s_kv - pads


@each_impl
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", ["left", "right", "random"])
@pytest.mark.parametrize(
    "config",
    pick(
        [DEFAULT, DMAConfig(pv="fp8"), DMAConfig.preset("hopper")],
        [DEFAULT],
        [DEFAULT, DMAConfig(pv="fp8")],
    ),
    ids=str,
)
def test_key_padding_with_poisoned_pads(
    config: DMAConfig, kind: str, is_causal: bool, impl: str
) -> None:
    """Also the sink of left-padded rows, which starts at the first valid key."""
    q, k, v = random_qkv(4, (2, 1), pick((150, 420), (10, 140)), pick(64, 32), device=DEVICE)
    mask = padding_mask(kind, 4, k.shape[2])
    hidden = ~mask[:, None, :, None]
    k, v = k.masked_fill(hidden, math.nan), v.masked_fill(hidden, math.nan)
    check_against_oracle(q, k, v, config, impl, is_causal=is_causal, key_padding_mask=mask)


@each_impl
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
def test_kv_len_with_poisoned_tail(
    as_tensor: bool, window: int | None, is_causal: bool, impl: str
) -> None:
    if window is not None and not is_causal:
        pytest.skip("a window needs is_causal")
    q, k, v = random_qkv(3, (2, 1), pick((150, 420), (10, 140)), pick(64, 32), device=DEVICE)
    ends = pick([300, 1, 140], [130, 1, 5]) if as_tensor else pick([300] * 3, [130] * 3)
    for row, end in enumerate(ends):
        k[row, :, end:] = v[row, :, end:] = math.nan
    kv_len = torch.tensor(ends, dtype=torch.int32, device=DEVICE) if as_tensor else ends[0]
    check_against_oracle(
        q, k, v, DEFAULT, impl, is_causal=is_causal, window_size=window, kv_len=kv_len
    )


@each_impl
@pytest.mark.parametrize("window", pick([1, 5, 128, 129, 300, 1000], [1, 40]))
def test_windows(window: int, impl: str) -> None:
    q, k, v = random_qkv(1, (2, 1), pick((330, 450), (20, 140)), pick(64, 32), device=DEVICE)
    check_against_oracle(q, k, v, DEFAULT, impl, is_causal=True, window_size=window)


@each_impl
def test_padding_kv_len_and_window_together(impl: str) -> None:
    q, k, v = random_qkv(2, (2, 1), pick((200, 420), (10, 150)), pick(64, 32), device=DEVICE)
    mask = padding_mask("left", 2, k.shape[2])
    kv_len = torch.tensor([k.shape[2] - 2, k.shape[2] - 9], dtype=torch.int32, device=DEVICE)
    check_against_oracle(
        q,
        k,
        v,
        DEFAULT,
        impl,
        is_causal=True,
        window_size=pick(150, 20),
        kv_len=kv_len,
        key_padding_mask=mask,
    )


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", ["bhqk", "1hqk", "b11k", "11qk", "qk"])
@pytest.mark.parametrize(
    "lengths", pick([(150, 280), (280, 150)], [(10, 20)], [(160, 288), (288, 160)]), ids=str
)
def test_sdpa_masks(lengths: tuple[int, int], shape: str, kind: str) -> None:
    """Masks through their broadcast strides; never-visible keys are poisoned."""
    q, k, v = random_qkv(2, (4, 4), lengths, pick(64, 32), device=DEVICE)
    sizes = {"b": 2, "h": 4, "q": lengths[0], "k": lengths[1], "1": 1}
    generator = torch.Generator().manual_seed(2)
    keep = torch.rand([sizes[c] for c in shape], generator=generator) < 0.6
    keep[..., :3] = False
    keep[..., 3] = True
    if shape.endswith("qk"):
        keep[..., 1, :] = False
    k[:, :, :3] = v[:, :, :3] = math.nan
    mask = keep.to(DEVICE)
    if kind == "float":
        bias = torch.randn(keep.shape, generator=generator).to(DEVICE, q.dtype)
        mask = bias.masked_fill(~mask, torch.finfo(q.dtype).min)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    check_result(out, None, q, k, v, DEFAULT, attn_mask=mask)


@pytest.mark.parametrize("lengths", pick([(150, 280), (280, 150), (300, 300)], [(10, 20)]), ids=str)
def test_sdpa_causal_is_top_left(lengths: tuple[int, int]) -> None:
    q, k, v = random_qkv(2, (4, 2), lengths, pick(64, 32), device=DEVICE)
    k[:, :, lengths[0] :] = v[:, :, lengths[0] :] = math.nan
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    check_result(out, None, q, k, v, DEFAULT, is_causal=True, top_left=True, scale=0.2)


BANDS = [(0, 128), (128, 0), (256, 128), (128, 256), (512, 128), (0, 384)]
BANDS += pick([(0, 0), ("full", 0)], [(0, 0), ("full", 0)])


@each_impl
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("diag", "sink"), BANDS, ids=str)
def test_bands_and_sinks(diag: int | str, sink: int, is_causal: bool, impl: str) -> None:
    lengths = pick((520, 700), (20, 270))
    q, k, v = random_qkv(1, (2, 1), lengths, pick(64, 32), device=DEVICE)
    config = DMAConfig(diag=diag, sink=sink)
    check_against_oracle(q, k, v, config, impl, is_causal=is_causal)


@each_impl
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("s_q", pick([1, 300, 700], [40], [300, 700]), ids=str)
@pytest.mark.parametrize(
    ("diag", "sink"),
    pick([(0, 0), (128, 128), (256, 0), ("full", 0)], [(128, 0)], [(128, 128), (256, 0)]),
    ids=str,
)
def test_precision_probe(diag: int | str, sink: int, s_q: int, is_causal: bool, impl: str) -> None:
    """The LSE of one probing key tells the class that its tile really got, tile by tile."""
    s_kv, d, scale = pick(560, 260), 32, 0.2
    config = DMAConfig(low="mxfp4", diag=diag, sink=sink, smooth_k=False, rotate=False)
    q = probe_query(d, dtype=BF16, device=DEVICE).expand(1, 1, s_q, d)
    v = torch.zeros(1, 1, s_kv, d, dtype=BF16, device=DEVICE)
    position = torch.arange(s_kv - s_q, s_kv, device=DEVICE)
    start = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    high = class_map(config, position[None], start, s_kv)[0]
    seen = (position + 1).clamp(min=0) if is_causal else torch.full_like(position, s_kv)
    for key in range(5, s_kv, 128):
        k = torch.zeros_like(v)
        k[0, 0, key] = probe_key(d, dtype=BF16, device=DEVICE)
        _, lse = dma_attention(
            q, k, v, is_causal=is_causal, scale=scale, config=config, return_lse=True, impl=impl
        )
        logit = torch.where(high[:, key], 38.75, 31.0).double() * scale
        expected = torch.log(torch.where(key < seen, seen - 1 + logit.exp(), seen.double()))
        torch.testing.assert_close(lse[0, 0].double(), expected, atol=5e-3, rtol=0)


@each_impl
@pytest.mark.parametrize("pv", ["fp16", "fp8"])
def test_ones_probe(pv: str, impl: str) -> None:
    """v = 1 returns 1 in every row that sees a key, and exactly 0 in the others."""
    config = DMAConfig(pv=pv)
    q, k, v = random_qkv(2, (2, 1), pick((400, 333), (50, 40)), pick(64, 32), device=DEVICE)
    v = torch.ones_like(v)
    arguments = {"config": config, "return_lse": True, "impl": impl}
    out = dma_attention(q, k, v, is_causal=True, **arguments)[0].float()
    blind = q.shape[2] - k.shape[2]
    assert not out[:, :, :blind].any()
    bound = error_budget(config, out.numel()).ones
    assert float((out[:, :, blind:] - 1).abs().max()) <= bound
    flat = dma_attention(torch.zeros_like(q), k, v, **arguments)[0].float()
    assert float((flat - 1).abs().max()) <= 1e-3


@each_impl
@pytest.mark.parametrize("preset", pick(DMAConfig.PRESETS, ("default",), ("default",)))
def test_mean_probe(preset: str, impl: str) -> None:
    """q = 0 gives the mean of the visible indices and ln(count), whatever the formats."""
    s_q, s_kv = pick((300, 450), (40, 140))
    q, k, _ = random_qkv(1, (2, 1), (s_q, s_kv), 64, dtype=FP16, device=DEVICE)
    config = DMAConfig.preset(preset).replace(pv="fp16")
    v = index_values(1, 1, s_kv, 64, dtype=FP16, device=DEVICE)
    for window in pick((None, 100), (None, 100), (None,)):
        out, lse = dma_attention(
            torch.zeros_like(q),
            k,
            v,
            is_causal=True,
            window_size=window,
            config=config,
            return_lse=True,
            impl=impl,
        )
        last = torch.arange(s_kv - s_q, s_kv, device=DEVICE, dtype=torch.float64)
        count = last + 1 if window is None else (last + 1).clamp(max=window)
        mean = (last - (count - 1) / 2)[None, None, :, None].expand(out.shape)
        torch.testing.assert_close(out.double(), mean, atol=1e-3, rtol=1e-3)
        expected = count.log()[None, None].expand(lse.shape)
        torch.testing.assert_close(lse.double(), expected, atol=1e-4, rtol=0)
