"""The KV cache against a model of it: lists of tokens, each with its copies and its class."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dma_attn import DMAConfig, quantize_pair
from dma_attn.cache import MixedKVCache, dma_attention_with_kvcache
from dma_attn.quant.transforms import key_mean, rotate
from dma_attn.schedule import is_high

HEADS, DIM = 2, 16


@dataclass
class Model:
    """What a cache should hold, written from the definition."""

    config: DMAConfig
    v_formats: tuple[str, str]
    rotate_v: bool
    k: Tensor  # (B, H, tokens, D), as appended
    v: Tensor
    counts: Tensor  # (B, tokens)
    mean: Tensor | None = None
    high_from: int = 0

    def append(self, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        counts = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool) if mask is None else mask
        if self.config.smooth_k and self.mean is None and k.shape[2]:
            self.mean = key_mean(k, mask)
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        self.counts = torch.cat([self.counts, counts], 1)
        n = self.k.shape[2]
        if k.shape[2] and self.config.diag != "full":
            newest = (n - 1) // 128
            self.high_from = max(self.high_from, (newest - int(self.config.diag) // 128) * 128)

    def crop(self, n: int) -> None:
        self.k, self.v, self.counts = self.k[:, :, :n], self.v[:, :, :n], self.counts[:, :n]
        self.high_from = min(self.high_from, n)

    def reorder(self, index: list[int]) -> None:
        self.k, self.v, self.counts = self.k[index], self.v[index], self.counts[index]
        self.mean = None if self.mean is None else self.mean[index]

    def values(self, position: int) -> tuple[Tensor, Tensor]:
        config = self.config
        outs = []
        for x, formats, mean, rotated in (
            (self.k, (config.high, config.low), self.mean, config.rotate),
            (self.v, self.v_formats, None, self.rotate_v),
        ):
            copies = []
            pair = quantize_pair(x, *formats, mean=mean, rotate=rotated,
                                 scale_rule=config.scale_rule) if x.shape[2] else (None, None)
            for copy in pair:
                if copy is None:
                    copies.append(x.float())
                else:
                    y = copy.dequantize()
                    y = rotate(y) if rotated else y
                    copies.append(y if mean is None else y + mean)
            out = copies[1].clone()
            for b in range(x.shape[0]):
                where = self.counts[b].nonzero()
                start = int(where[0]) if len(where) else None
                for j in range(x.shape[2]):
                    if config.diag == "full":
                        high = True
                    elif start is None:
                        high = is_high(position >> 7, j >> 7, 0, int(config.diag), 0)
                        high = high and j >= self.high_from
                    else:
                        first = is_high(10**6, j >> 7, start, 0, config.sink)
                        near = is_high(position >> 7, j >> 7, 0, int(config.diag), 0)
                        high = first or (near and j >= self.high_from)
                    if high:
                        out[b, :, j] = copies[0][b, :, j]
            outs.append(torch.where(self.counts[:, None, :, None], out, 0.0).to(x.dtype))
        return outs[0], outs[1]


CONFIGS = {
    "default": (DMAConfig(high="none", low="int4"), ("none", "int4"), True),
    "wide": (DMAConfig(high="mxfp8", low="nvfp4", diag=256, sink=0), ("mxfp8", "fp4"), True),
    "sink": (DMAConfig(high="int8", low="mxfp4", diag=0, sink=256), ("none", "nvfp4"), False),
    "full": (DMAConfig(high="mxfp8", low="nvfp4", diag="full"), ("mxfp8", "none"), True),
    "low": (DMAConfig(high="none", low="mxfp8_e5m2", diag=0, sink=0, smooth_k=False),
            ("int4", "int4"), True),
    "none": (DMAConfig(high="none", low="none"), ("none", "none"), True),
}


def make(name: str, batch: int, max_len: int | None = None) -> tuple[MixedKVCache, Model]:
    config, (v_high, v_low), rotate_v = CONFIGS[name]
    cache = MixedKVCache(batch, HEADS, DIM, max_len, head_dim_v=2 * DIM, config=config,
                         v_high=v_high, v_low=v_low, rotate_v=rotate_v)
    k = torch.zeros(batch, HEADS, 0, DIM, dtype=torch.bfloat16)
    v = torch.zeros(batch, HEADS, 0, 2 * DIM, dtype=torch.bfloat16)
    counts = torch.zeros(batch, 0, dtype=torch.bool)
    return cache, Model(config, (v_high, v_low), rotate_v, k, v, counts)


def tokens(batch: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    k, v = (torch.randn(batch, HEADS, n, d, generator=generator).bfloat16() for d in (DIM, 2 * DIM))
    return k + 1, v


def check(cache: MixedKVCache, model: Model, position: int | None = None) -> None:
    n = model.k.shape[2]
    assert cache.length == n and cache.lengths.tolist() == [n] * model.k.shape[0]
    assert cache.near.tolist() == [cache.high_from]
    if model.config.diag != "full":
        assert cache.high_from == model.high_from
    assert cache.sync_length() == n
    out = cache.dequantize(query_position=position)
    ref = model.values(n - 1 if position is None else position)
    for x, y in zip(out, ref, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_operations(name: str, seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cache, model = make(name, 3, rng.choice([None, 700]))
    padded = seed % 2 == 1
    for _ in range(14):
        step = rng.choice(["append", "append", "append", "crop", "reorder", "clone", "state"])
        batch = model.k.shape[0]
        if step == "append":
            n = rng.choice([0, 1, 1, 3, 16, 100, 128, 129, 300])
            k, v = tokens(batch, n, generator)
            mask = None
            if padded and rng.random() < 0.7:
                mask = torch.rand(batch, n, generator=generator) < rng.choice([0.0, 0.5, 0.9])
            cache.append(k, v, key_padding_mask=mask)
            model.append(k, v, mask)
        elif step == "crop":
            n = rng.randint(0, cache.length)
            n = max(n, cache.length - rng.choice([0, 1, 5, 130, 1000]))
            cache.crop(n)
            model.crop(n)
        elif step == "reorder":
            index = [rng.randrange(batch) for _ in range(rng.randint(1, 4))]
            cache.reorder(index)
            model.reorder(index)
        elif step == "clone":
            other = cache.clone()
            cache.append(*tokens(batch, 5, generator))
            cache = other
        else:
            cache = MixedKVCache.from_state_dict(cache.state_dict())
        check(cache, model)
        check(cache, model, max(0, cache.length - rng.choice([2, 16, 128])))


@pytest.mark.parametrize("name", CONFIGS)
def test_crop_far_back(name: str) -> None:
    """Tokens that lost their high copies stay low; what is appended then has both again."""
    generator = torch.Generator().manual_seed(5)
    cache, model = make(name, 2)
    for n, kept in ((700, 300), (5, 305), (200, 290), (3, 293), (400, 0), (140, 140)):
        k, v = tokens(2, n, generator)
        cache.append(k, v)
        model.append(k, v, None)
        check(cache, model)
        cache.crop(kept)
        model.crop(kept)
        check(cache, model)


@pytest.mark.parametrize("name", CONFIGS)
def test_crop_before_the_first_token_that_counts(name: str) -> None:
    generator = torch.Generator().manual_seed(6)
    cache, model = make(name, 2)
    for n, first, kept in ((200, 150, 100), (300, 90, 180), (40, 0, 100), (500, 300, 600)):
        k, v = tokens(2, n, generator)
        mask = torch.ones(2, n, dtype=torch.bool)
        mask[0, :first] = False
        cache.append(k, v, key_padding_mask=mask)
        model.append(k, v, mask)
        check(cache, model)
        cache.crop(kept)
        model.crop(kept)
        check(cache, model)


@pytest.mark.parametrize("name", CONFIGS)
def test_pieces_equal_one_append(name: str) -> None:
    """Bit by bit, after the same first append."""
    k, v = tokens(2, 700, torch.Generator().manual_seed(0))
    caches = [make(name, 2)[0] for _ in range(2)]
    for cache, cuts in zip(caches, ([130, 700], [130, 131, 200, 256, 600, 601, 700]), strict=True):
        begin = 0
        for end in cuts:
            cache.append(k[:, :, begin:end], v[:, :, begin:end])
            begin = end
    states = [cache.state_dict() for cache in caches]
    assert states[0].keys() == states[1].keys()
    for key, x in states[0].items():
        if "first" in key:  # its last token is where others went
            assert torch.equal(x[:, :, :-1], states[1][key][:, :, :-1])
        else:
            assert torch.equal(x, states[1][key]), key


def test_growth_is_rare_and_appends_stay_in_place() -> None:
    cache, _ = make("default", 1)
    grown = 0
    pointer = cache.k.low.parts[0].data_ptr()
    for _ in range(600):
        cache.append(*tokens(1, 1, torch.Generator()))
        if cache.k.low.parts[0].data_ptr() != pointer:
            grown += 1
            pointer = cache.k.low.parts[0].data_ptr()
    assert grown <= 4 and cache.capacity == 1024


@pytest.mark.parametrize("config, v, bound", [
    (DMAConfig(high="none", low="int4"), ("none", "int4"), 0.29),
    (DMAConfig(), ("mxfp8", "nvfp4"), 0.32),
])
def test_memory(config: DMAConfig, v: tuple[str, str], bound: float) -> None:
    cache = MixedKVCache(1, 2, 128, 32768, config=config, v_high=v[0], v_low=v[1])
    assert cache.nbytes() <= bound * 2 * 2 * 2 * 128 * 32768


def test_case_094_first_and_newest_tiles_are_high() -> None:
    cache = MixedKVCache(1, 1, 64, config=DMAConfig(), v_high="mxfp8", v_low="nvfp4")
    k = torch.randn(1, 1, 400, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache.append(k[:, :, :300], k[:, :, :300])
    for length, classes in ((300, "hlh"), (400, "hllh")):
        for n in range(cache.length, length):
            cache.append(k[:, :, n : n + 1], k[:, :, n : n + 1])
        out = cache.dequantize(dtype=torch.float32)[0]
        for i, kind in enumerate(classes):
            tile = slice(128 * i, min(128 * i + 128, length))
            gap = (out[:, :, tile] - k[:, :, tile].float()).norm() / k[:, :, tile].float().norm()
            assert (gap < 0.035) == (kind == "h") and gap < 0.13


def test_case_097_crop() -> None:
    k, v = tokens(2, 210, torch.Generator().manual_seed(1))
    cache, fresh = make("default", 2)[0], make("default", 2)[0]
    cache.append(k[:, :, :200], v[:, :, :200])
    cache.crop(150)
    cache.append(k[:, :, 207:], v[:, :, 207:])
    fresh.append(k[:, :, :200], v[:, :, :200])
    fresh.crop(0)
    fresh.append(k[:, :, :150], v[:, :, :150])
    fresh.append(k[:, :, 207:], v[:, :, 207:])
    assert cache.length == 153
    for x, y in zip(cache.dequantize(), fresh.dequantize(), strict=True):
        assert torch.equal(x, y)


def test_none_everywhere_returns_what_came() -> None:
    cache, _ = make("none", 2)
    k, v = tokens(2, 300, torch.Generator().manual_seed(2))
    cache.append(k, v)
    out = cache.dequantize()
    assert torch.equal(out[0], k) and torch.equal(out[1], v)


@pytest.mark.parametrize("arguments, message", [
    ({"batch": 0}, "batch"), ({"head_dim": 15}, "even"), ({"max_len": -1}, "max_len"),
    ({"config": DMAConfig(granularity="tile")}, "granularity"), ({"v_low": "int5"}, "v_low"),
    ({"dtype": torch.float64}, "dtype"), ({"rotate_v": 1}, "rotate_v"),
])
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    base: dict[str, object] = {"batch": 1, "kv_heads": 1, "head_dim": 16}
    with pytest.raises((TypeError, ValueError), match=message):
        MixedKVCache(**{**base, **arguments})  # type: ignore[arg-type]


def test_bad_calls() -> None:
    cache, _ = make("default", 2)
    k, v = tokens(2, 4, torch.Generator())
    for args, message in (((k[:1], v), "k:"), ((k, v[..., :3]), "v:"), ((k.float(), v), "k:"),
                          ((k, v[:, :, :2]), "v:")):
        with pytest.raises((TypeError, ValueError), match=message):
            cache.append(*args)
    with pytest.raises(ValueError, match="key_padding_mask"):
        cache.append(k, v, key_padding_mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match="bool"):
        cache.append(k, v, key_padding_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="length"):
        cache.crop(1)
    with pytest.raises(ValueError, match="index"):
        cache.reorder([2])
    with pytest.raises(ValueError, match="state_dict"):
        MixedKVCache.from_state_dict({})
    assert cache.length == 0


def test_states_share_no_memory() -> None:
    """Nor do dequantised copies, also in the cache's own precision; a state can be saved."""
    config = DMAConfig(high="none", low="none", smooth_k=True)
    cache = MixedKVCache(2, 1, 32, 128, config=config, v_high="none", v_low="none",
                         dtype=torch.float32)
    x = torch.randn(2, 1, 128, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 128, dtype=torch.bool)
    mask[0, :100] = False
    cache.append(x, x + 1, key_padding_mask=mask)
    state = cache.state_dict()
    assert all(part.is_contiguous() for part in state.values())
    before = {name: part.clone() for name, part in state.items()}
    other = MixedKVCache.from_state_dict(state)
    other.reorder(torch.tensor([1, 0]))
    for copy in (*cache.dequantize(), *cache.best()):
        copy.fill_(torch.nan)
    for name, part in cache.state_dict().items():
        assert torch.equal(part, before[name]), name


def test_reading_does_not_write() -> None:
    """float32, one row and head: slices of the stores are contiguous."""
    cache = MixedKVCache(1, 1, 32, config=DMAConfig(high="mxfp8", low="none"), v_high="mxfp8",
                         v_low="none", dtype=torch.float32)
    x = torch.randn(1, 1, 128, 32, generator=torch.Generator().manual_seed(0))
    cache.append(x, x)
    before = [part.clone() for part in cache.v.low.parts + cache.k.low.parts]
    cache.dequantize()
    dma_attention_with_kvcache(x[:, :, :1], cache, impl="reference")
    for part, old in zip(cache.v.low.parts + cache.k.low.parts, before, strict=True):
        assert torch.equal(part, old)


def test_head_dims_that_kernels_cannot_take() -> None:
    for dims in ((15, 16), (16, 15), (264, 16)):
        cache = MixedKVCache(1, 1, dims[0], head_dim_v=dims[1], config=DMAConfig.preset("off"),
                             v_high="none", v_low="none")
        cache.append(*(torch.zeros(1, 1, 3, dim).bfloat16() for dim in dims))
        with pytest.raises(ValueError, match="multiples of 8"):
            dma_attention_with_kvcache(torch.zeros(1, 1, 1, dims[0]).bfloat16(), cache)
