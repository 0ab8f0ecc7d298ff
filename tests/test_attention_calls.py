"""The forms of the call: layouts, `out=`, varlen, prepared keys, merged splits, determinism."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from dma_attn import (
    DMAConfig,
    dma_attention,
    dma_attention_prepared,
    dma_attention_varlen,
    merge_states,
    prepare_kv,
)
from dma_attn.testing import (
    assert_lse,
    assert_rel_l2,
    error_budget,
    quantised_oracle,
    random_qkv,
)
from tests.impls import DEVICE, FOLDED_GAP, IMPLS, each_impl, pick, takes_hopper

BF16, FP32 = torch.bfloat16, torch.float32
DEFAULT = DMAConfig()


@each_impl
@pytest.mark.parametrize("return_lse", pick([False, True], [True], [True]))
def test_nhd_layout_and_out_are_bit_equal(return_lse: bool, impl: str) -> None:
    q, k, v = random_qkv(
        2, (4, 2), pick((130, 200), (20, 40)), (64, pick(32, 32, 64)), device=DEVICE
    )
    ref = dma_attention(q, k, v, is_causal=True, return_lse=return_lse, impl=impl)
    swapped = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    target = torch.full((2, q.shape[2], 4, v.shape[3]), math.nan, dtype=q.dtype, device=DEVICE)
    got = dma_attention(
        *swapped, is_causal=True, tensor_layout="NHD", out=target, return_lse=return_lse, impl=impl
    )
    if return_lse:
        (out, lse), (ref, ref_lse) = got, ref
        assert torch.equal(lse, ref_lse)
        assert lse.shape == (2, 4, q.shape[2]) and lse.dtype == FP32
    else:
        out = got
    assert out.data_ptr() == target.data_ptr()
    assert torch.equal(out.transpose(1, 2), ref)
    view = torch.full((2, 4, q.shape[2], 2 * v.shape[3]), math.nan, dtype=q.dtype, device=DEVICE)[
        ..., ::2
    ]
    dma_attention(q, k, v, is_causal=True, out=view, impl=impl)
    assert torch.equal(view, ref)


VARLEN = pick([[3, 0, 130, 1, 257], [3, 5, 200, 0, 300]], [[3, 0, 20], [3, 5, 140]])


SMOOTHLESS = DEFAULT.replace(smooth_k=False)
FP8 = DEFAULT.replace(pv="fp8")


@each_impl
@pytest.mark.parametrize(
    ("config", "is_causal"),
    pick(
        [(config, causal) for config in (DEFAULT, SMOOTHLESS, FP8) for causal in (False, True)],
        [(DEFAULT, True)],
        [(FP8, True)],
    ),
    ids=str,
)
def test_varlen_equals_a_loop(config: DMAConfig, is_causal: bool, impl: str) -> None:
    lens_q, lens_k = VARLEN
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=DEVICE)
        for x in (lens_q, lens_k)
    )
    spare = 4
    q, k, v = (
        x[0].transpose(0, 1)
        for x in random_qkv(
            1, (3, 1), (sum(lens_q) + spare, sum(lens_k) + spare), 64, device=DEVICE
        )
    )
    k[-spare:] = v[-spare:] = math.nan
    out, lse = dma_attention_varlen(
        q,
        k,
        v,
        cu_q,
        cu_k,
        max(lens_q),
        max(lens_k),
        is_causal=is_causal,
        config=config,
        return_lse=True,
        impl=impl,
    )
    assert out.shape == (q.shape[0], 3, 64) and lse.shape == (3, q.shape[0])
    assert not out[sum(lens_q) :].any()
    for first, n_q, first_k, n_k in zip(cu_q.tolist(), lens_q, cu_k.tolist(), lens_k, strict=False):
        if n_q == 0:
            continue
        one = [
            x[at : at + n].transpose(0, 1)[None]
            for x, at, n in ((q, first, n_q), (k, first_k, n_k), (v, first_k, n_k))
        ]
        ref, ref_lse = quantised_oracle(*one, config, is_causal=is_causal)
        budget = error_budget(config, ref.numel())
        piece = out[first : first + n_q].transpose(0, 1)[None]
        assert_rel_l2(piece, ref, budget.rel_l2)
        assert_lse(lse[None, :, first : first + n_q], ref_lse, budget, 10.0)
        alone, _ = dma_attention(
            *one, is_causal=is_causal, config=config, return_lse=True, impl=impl
        )
        bound = 1e-2 if config.smooth_k else 1e-3
        assert_rel_l2(piece, alone, FOLDED_GAP if takes_hopper(*one[1:], config, impl) else bound)


@each_impl
@pytest.mark.parametrize("preset", pick(DMAConfig.PRESETS, ("default",), ("default",)))
def test_prepared_equals_one_call_bitwise(preset: str, impl: str) -> None:
    config = DMAConfig.preset(preset)
    q, k, v = random_qkv(
        2, (4, 2), pick((70, 300), (10, 140)), (64, pick(96, 96, 64)), device=DEVICE
    )
    kv_len = torch.tensor([k.shape[2] - 5, 100], dtype=torch.int32, device=DEVICE)
    padding = torch.ones(2, k.shape[2], dtype=torch.bool, device=DEVICE)
    padding[1, :9] = False
    both = {"kv_len": kv_len, "key_padding_mask": padding}
    every = [{}, {"kv_len": kv_len}, {"key_padding_mask": padding}, both]
    for limits in pick(every, every, [{}, both]):
        prepared = prepare_kv(k, v, config, impl=impl, **limits)
        for shape in ({"is_causal": False}, {"is_causal": True, "window_size": 64}):
            one = dma_attention(
                q, k, v, config=config, return_lse=True, impl=impl, **limits, **shape
            )
            two = dma_attention_prepared(q, prepared, return_lse=True, impl=impl, **shape)
            assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@each_impl
@pytest.mark.parametrize("dtype", pick([FP32, BF16], [FP32], [FP32]), ids=str)
def test_merged_key_splits_equal_the_whole(dtype: torch.dtype, impl: str) -> None:
    config = DMAConfig.preset("mxfp8").replace(smooth_k=False)
    q, k, v = random_qkv(1, (4, 2), pick((60, 300), (10, 40)), 64, dtype=dtype, device=DEVICE)
    whole, whole_lse = dma_attention(q, k, v, config=config, return_lse=True, impl=impl)
    edges = [0, k.shape[2] // 3, k.shape[2] // 2, k.shape[2], k.shape[2]]
    parts = [
        dma_attention(q, k[:, :, a:b], v[:, :, a:b], config=config, return_lse=True, impl=impl)
        for a, b in itertools.pairwise(edges)
    ]
    out, lse = merge_states([part[0] for part in parts], [part[1] for part in parts])
    assert out.dtype == dtype and lse.dtype == FP32
    assert_rel_l2(out, whole, 1e-3 if dtype == FP32 else 6e-3)
    torch.testing.assert_close(lse, whole_lse, atol=1e-3, rtol=0)


def test_merge_states_of_nothing_visible_stays_empty() -> None:
    out = torch.zeros(1, 1, 2, 8, device=DEVICE)
    lse = torch.full((1, 1, 2), -math.inf, device=DEVICE)
    full, full_lse = out + 3.0, torch.zeros_like(lse)
    merged, merged_lse = merge_states([out, out], [lse, lse])
    assert not merged.any() and torch.equal(merged_lse, lse)
    merged, merged_lse = merge_states([out, full], [lse, full_lse])
    assert torch.equal(merged, full) and torch.equal(merged_lse, full_lse)


@each_impl
@pytest.mark.parametrize("pv", ["fp16", "fp8"])
def test_same_call_gives_same_bits(pv: str, impl: str) -> None:
    q, k, v = random_qkv(2, (4, 2), pick((200, 300), (20, 40)), 64, device=DEVICE)
    config = DMAConfig(pv=pv)
    first = dma_attention(q, k, v, is_causal=True, config=config, return_lse=True, impl=impl)
    again = dma_attention(q, k, v, is_causal=True, config=config, return_lse=True, impl=impl)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@each_impl
@pytest.mark.parametrize("pv", ["fp16", "fp8"])
def test_batch_neighbours_do_not_change_a_row(pv: str, impl: str) -> None:
    q, k, v = random_qkv(3, (4, 2), pick((200, 300), (20, 40)), 64, device=DEVICE)
    config = DMAConfig(pv=pv)
    arguments = {"is_causal": True, "config": config, "return_lse": True, "impl": impl}
    before = dma_attention(q, k, v, **arguments)
    q[0] *= 50.0
    k[2] = math.nan
    v[0] *= 100.0
    after = dma_attention(q, k, v, **arguments)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[1], other[1])


@pytest.mark.skipif(len(IMPLS) < 2, reason="one implementation only")
def test_implementations_agree() -> None:
    q, k, v = random_qkv(1, (4, 2), (300, 450), 64, device=DEVICE)
    outs = [dma_attention(q, k, v, is_causal=True, return_lse=True, impl=impl)[0] for impl in IMPLS]
    folded = takes_hopper(k, v, DMAConfig(), "triton")
    assert_rel_l2(outs[0], outs[1], FOLDED_GAP if folded else 1e-2)
