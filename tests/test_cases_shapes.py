"""Lengths, tile tails, alignment, head dims and grouped heads: CASES sections B and C."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from dma_attn import DMAConfig, dma_attention, dma_attention_varlen
from dma_attn.attention.dispatch import use_native
from dma_attn.attention.kernels.tuning import TileConfig
from dma_attn.testing import (
    assert_rel_l2,
    dense_oracle,
    index_values,
    probe_key,
    probe_query,
    random_qkv,
)
from tests.impls import DEVICE, IMPLS, assert_same, check_against_oracle, each_impl, pick

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SIXTEEN_BITS = pytest.mark.parametrize("dtype", pick([FP16, BF16], [FP16], [BF16]), ids=str)


def cosine(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float(torch.cosine_similarity(out.double().flatten(), ref.flatten(), dim=0))


@each_impl
@pytest.mark.parametrize(
    "lengths",
    pick([(32, 128), (33, 127), (128, 32)], [(33, 127)], [(33, 127), (128, 32)]),
    ids=str,
)
def test_case_014_other_lengths_of_queries_and_keys(lengths: tuple[int, int], impl: str) -> None:
    q, k, v = random_qkv(1, (2, 2), lengths, 96, device=DEVICE)
    out, _ = check_against_oracle(q, k, v, DMAConfig(), impl)
    assert cosine(out, dense_oracle(q, k, v)[0]) >= 0.99


@each_impl
@SIXTEEN_BITS
def test_case_015_causal_is_bottom_right(dtype: torch.dtype, impl: str) -> None:
    q = torch.zeros(1, 1, 4, 64, dtype=dtype, device=DEVICE)
    k = torch.zeros(1, 1, 10, 64, dtype=dtype, device=DEVICE)
    v = index_values(1, 1, 10, 64, dtype=dtype, device=DEVICE)
    out, lse = dma_attention(q, k, v, is_causal=True, return_lse=True, impl=impl)
    wanted = torch.tensor([3.0, 3.5, 4.0, 4.5], dtype=dtype, device=DEVICE)
    assert torch.equal(out[0, 0], wanted[:, None].expand(4, 64))
    counts = torch.arange(7, 11, device=DEVICE).double()
    torch.testing.assert_close(lse[0, 0].double(), counts.log(), atol=1e-5, rtol=0)
    assert "bottom-right" in (dma_attention.__doc__ or "").lower()


@each_impl
@pytest.mark.parametrize("s_kv", [1, 2, 31, 64, 127, 128, 129])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_case_017_one_query(is_causal: bool, s_kv: int, impl: str) -> None:
    q, k, v = random_qkv(1, (pick(16, 2), 1), (1, s_kv), 64, device=DEVICE)
    out, _ = check_against_oracle(q, k, v, DMAConfig(), impl, is_causal=is_causal)
    if s_kv == 1:
        assert torch.equal(out, v.expand_as(out))


@each_impl
@pytest.mark.parametrize("d", pick([64, 128, 256], [32], [64]))
def test_case_018_length_that_no_tile_divides(d: int, impl: str) -> None:
    s = pick(1000, 200)
    q, k, v = random_qkv(1, (2, 1), (s, s), d, device=DEVICE)
    for is_causal in (False, True):
        check_against_oracle(q, k, v, DMAConfig(), impl, is_causal=is_causal)


@pytest.mark.skipif("triton" not in IMPLS, reason="the reference has no tile sizes")
@pytest.mark.parametrize(
    "tiles", pick([(16, 32), (64, 32)], [(64, 32)], [(64, 32), (32, 16)]), ids=str
)
def test_case_018_every_tile_size(tiles: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes do not depend on the blocks that a kernel cuts queries and keys into."""
    from dma_attn.attention.kernels import portable

    forced = TileConfig(*tiles, num_warps=4, num_stages=2)
    monkeypatch.setattr(portable, "portable_tiles", lambda *args, **kwargs: forced)
    s = pick(1000, 150)
    q, k, v = random_qkv(1, (2, 1), (pick(1000, 70), s), pick(64, 32), device=DEVICE)
    check_against_oracle(q, k, v, DMAConfig(), "triton", is_causal=True)


@each_impl
@pytest.mark.parametrize("pv", pick(["fp16", "fp8"], ["fp16"], ["fp16"]))
@pytest.mark.parametrize("logit", [0.0, -8.0])
def test_case_019_tail_of_the_last_key_tile(logit: float, pv: str, impl: str) -> None:
    """Zero-filled tail keys would count in the denominator."""
    q = torch.full((1, 1, 3, 64), 1.0 if logit else 0.0, dtype=BF16, device=DEVICE)
    k = torch.full((1, 1, 129, 64), -1.0 if logit else 0.0, dtype=BF16, device=DEVICE)
    config = DMAConfig(pv=pv)
    out, lse = dma_attention(q, k, torch.ones_like(k), config=config, return_lse=True, impl=impl)
    assert torch.equal(out, torch.ones_like(out))
    wanted = torch.full_like(lse, math.log(129) + logit)
    torch.testing.assert_close(lse, wanted, atol=1e-4, rtol=0)


@each_impl
@pytest.mark.parametrize(
    "preset", pick(["default", "mxfp4", "paper", "off"], ["default"], ["default"])
)
def test_case_021_channels_beyond_64_take_part(preset: str, impl: str) -> None:
    _, k, v = random_qkv(1, (1, 1), (1, 50), 128, device=DEVICE)
    k.zero_()
    q = torch.zeros(1, 1, 1, 128, dtype=BF16, device=DEVICE)
    q[..., 64:], k[:, :, 17, 64:] = 1.0, 2.0
    config = DMAConfig.preset(preset)
    out, _ = dma_attention(q, k, v, scale=10 / 128, config=config, return_lse=True, impl=impl)
    weight = math.exp(10) / (math.exp(10) + 49)
    mean = (v.double().sum(2) - v[:, :, 17].double()) / 49
    wanted = weight * v[:, :, 17].double() + (1 - weight) * mean
    assert_rel_l2(out[:, :, 0], wanted, 1e-2)


@each_impl
@pytest.mark.parametrize("d", pick([40, 72, 80, 96, 112, 160], [40, 80], [80]))
def test_case_023_head_dims(d: int, impl: str) -> None:
    s = pick(130, 40)
    q, k, v = random_qkv(1, pick((4, 2), (2, 1)), (s, s), d, device=DEVICE)
    check_against_oracle(q, k, v, DMAConfig(), impl, is_causal=True)


@each_impl
@pytest.mark.parametrize("d", [4, 20, 36, 264, 512])
def test_case_023_unsupported_head_dims_name_the_rule(d: int, impl: str) -> None:
    q, k, v = random_qkv(1, (1, 1), (4, 4), (d, 32), device=DEVICE)
    with pytest.raises(ValueError, match=rf"\b{d}\b"):
        dma_attention(q, k, v, impl=impl)
    with pytest.raises(ValueError, match=rf"\b{d}\b"):
        dma_attention(v, v, k, impl=impl)


@each_impl
@pytest.mark.parametrize("dtype", pick([FP16, BF16, FP32], [BF16]), ids=str)
def test_case_024_default_scale_of_the_unpadded_head_dim(dtype: torch.dtype, impl: str) -> None:
    q = torch.zeros(1, 1, 1, 80, dtype=dtype, device=DEVICE)
    k = torch.zeros(1, 1, 2, 80, dtype=dtype, device=DEVICE)
    q[..., 0], k[:, :, 0, 0] = 4.0, 4.0
    v = torch.zeros(1, 1, 2, 80, dtype=dtype, device=DEVICE)
    v[:, :, 0] = 1.0
    out, _ = dma_attention(q, k, v, return_lse=True, impl=impl)
    wanted = 1 / (1 + math.exp(-16 / math.sqrt(80)))
    assert abs(wanted - 0.8568) < 1e-4
    assert float((out.double() - wanted).abs().max()) < 4e-3


@each_impl
@pytest.mark.parametrize("d_v", pick([64, 8, 96], [64]))
def test_case_026_value_head_dim_differs(d_v: int, impl: str) -> None:
    q, k, v = random_qkv(1, (pick(8, 1), pick(8, 1)), (4, 4), (32, d_v), device=DEVICE)
    out, _ = check_against_oracle(q, k, v, DMAConfig(), impl)
    assert out.shape[-1] == d_v


@each_impl
@pytest.mark.parametrize("group", [1, 7, 8])
@pytest.mark.parametrize("s_q", pick([1, 2, 3, 15, 17], [3], [1, 2, 3, 15]))
def test_case_027_few_queries(s_q: int, group: int, impl: str) -> None:
    q, k, v = random_qkv(1, (group, 1), (s_q, pick(333, 40)), pick(128, 32), device=DEVICE)
    check_against_oracle(q, k, v, DMAConfig(), impl, is_causal=True)


@each_impl
@pytest.mark.parametrize("is_causal", pick([False, True], [True]))
def test_case_028_varlen_with_empty_sequences(is_causal: bool, impl: str) -> None:
    lens_q, lens_k = [0, 1, 0, 1], [0, 3, 0, 5]
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=DEVICE)
        for lens in (lens_q, lens_k)
    )
    q, k, v = (x[0].transpose(0, 1) for x in random_qkv(1, (9, 3), (2, 8), 64, device=DEVICE))
    out, lse = dma_attention_varlen(
        q, k, v, cu_q, cu_k, 1, 5, is_causal=is_causal, return_lse=True, impl=impl
    )
    assert out.shape == (2, 9, 64) and lse.shape == (9, 2)
    for row, (a, b) in enumerate(((0, 3), (3, 8))):
        one = (q[row : row + 1], k[a:b], v[a:b])
        with use_native(False):  # the kernel that packed sequences take
            alone, alone_lse = dma_attention(
                *(x.transpose(0, 1)[None] for x in one),
                is_causal=is_causal,
                return_lse=True,
                impl=impl,
            )
        assert_rel_l2(out[row], alone[0, :, 0], 1e-3)
        torch.testing.assert_close(lse[:, row], alone_lse[0, :, 0], atol=1e-3, rtol=0)


@each_impl
@pytest.mark.parametrize("preset", pick(["default", "mxfp4", "off"], ["default"], ["default"]))
def test_case_030_chunks_equal_one_shot(preset: str, impl: str) -> None:
    """A chunk is a call with S_q < S_kv; edges on tiles, no mean over keys to come."""
    s = pick(300, 150)
    config = DMAConfig.preset(preset).replace(smooth_k=False)
    q, k, v = random_qkv(1, (2, 1), (s, s), 64, device=DEVICE)
    arguments = {"is_causal": True, "config": config, "return_lse": True, "impl": impl}
    whole, _ = dma_attention(q, k, v, **arguments)
    for a, b in itertools.pairwise([*range(0, s, 128), s]):
        part, _ = dma_attention(q[:, :, a:b], k[:, :, :b], v[:, :, :b], **arguments)
        assert_rel_l2(part, whole[:, :, a:b], 1e-3)


@each_impl
@pytest.mark.parametrize("step", pick([128, 100, 37], [100], [128, 100]))
def test_case_030_class_follows_the_absolute_position(step: int, impl: str) -> None:
    s, d, probe = 300, 32, 130
    config = DMAConfig(low="mxfp4", smooth_k=False, rotate=False)
    k = torch.zeros(1, 1, s, d, dtype=BF16, device=DEVICE)
    k[:, :, probe] = probe_key(d, dtype=BF16, device=DEVICE)
    q = probe_query(d, dtype=BF16, device=DEVICE).expand(1, 1, s, d)
    for a, b in itertools.pairwise([*range(0, s, step), s]):
        kv = k[:, :, :b]
        _, lse = dma_attention(
            q[:, :, a:b],
            kv,
            kv,
            is_causal=True,
            scale=0.2,
            config=config,
            return_lse=True,
            impl=impl,
        )
        position = torch.arange(a, b, device=DEVICE)
        logit = 0.2 * torch.where(position < 256, 38.75, 31.0).double()
        seen = (position + 1).double()
        wanted = torch.where(position >= probe, seen - 1 + logit.exp(), seen).log()
        torch.testing.assert_close(lse[0, 0].double(), wanted, atol=5e-3, rtol=0)


HEADS = pick([(10, 2), (24, 4), (28, 4), (56, 8), (14, 2)], [(10, 2)])


@each_impl
@pytest.mark.parametrize("s_q", pick([1, 40], [5]))
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_case_032_group_sizes(heads: tuple[int, int], s_q: int, impl: str) -> None:
    h_q, h_kv = heads
    q, k, _ = random_qkv(1, heads, (s_q, 50), 64, device=DEVICE)
    index = torch.arange(h_kv, dtype=BF16, device=DEVICE)
    v = index[None, :, None, None].expand(1, h_kv, 50, 64).contiguous()
    config = DMAConfig(pv="fp16")
    arguments = {"config": config, "return_lse": True, "impl": impl}
    out, _ = dma_attention(q, k, v, is_causal=True, **arguments)
    wanted = (torch.arange(h_q, device=DEVICE) // (h_q // h_kv)).to(BF16)
    # P is rounded to bf16 while its sum is not: the ones bound of docs/numerics.md
    torch.testing.assert_close(out, wanted[None, :, None, None].expand_as(out), atol=0, rtol=8e-3)
    flat, _ = dma_attention(torch.zeros_like(q), k, v, **arguments)
    assert torch.equal(flat, wanted[None, :, None, None].expand_as(flat))


@each_impl
@pytest.mark.parametrize("heads", [(3, 2), (33, 2), (1, 2), (4, 0)], ids=str)
def test_case_034_head_counts_that_do_not_divide(heads: tuple[int, int], impl: str) -> None:
    q, k, v = random_qkv(1, heads, (4, 4), 32, device=DEVICE)
    with pytest.raises(ValueError, match=rf"\b{heads[0]}\b.*\b{heads[1]}\b"):
        dma_attention(q, k, v, impl=impl)


@each_impl
@pytest.mark.parametrize(
    "preset", pick(["mxfp8", "mxfp4", "nvfp4", "default", "hopper"], [], ["nvfp4", "hopper"])
)
def test_case_036_every_mode_with_grouped_heads(preset: str, impl: str) -> None:
    q, k, v = random_qkv(1, (28, 4), (40, 300), 64, device=DEVICE)
    k += 3.0 * torch.arange(4, device=DEVICE)[None, :, None, None]
    check_against_oracle(q, k, v, DMAConfig.preset(preset), impl, is_causal=True)


@each_impl
@pytest.mark.parametrize("s_q", pick([1, 8, 128], [8], [8]))
@pytest.mark.parametrize("pv", pick(["fp16", "fp8"], ["fp16"], ["fp16"]))
def test_case_037_expanded_heads(pv: str, s_q: int, impl: str) -> None:
    q, k, v = random_qkv(1, (8, 1), (s_q, pick(200, 40)), 64, device=DEVICE)
    views = [x.expand(1, 8, -1, -1) for x in (k, v)]
    config = DMAConfig(pv=pv)
    arguments = {"is_causal": True, "config": config, "return_lse": True, "impl": impl}
    one = dma_attention(q, *views, **arguments)
    packed = [x.contiguous() for x in views]
    two = dma_attention(q, *packed, **arguments)
    assert_same(one, two, (q, *views), (q, *packed), config, impl)
