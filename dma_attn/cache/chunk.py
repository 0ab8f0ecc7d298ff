"""A chunk of queries over a `MixedKVCache` as a prefill: every key in the copies that it has.

    tokens     old: the cache's copies           new: both copies from 16 bits
    K high     |first|   low again   |newest|    | all            |
    K low      | as they are                     | all            |
    V          | the best copy, in 16 bits       | as it is       |

The new tokens are appended on the way, and still all high here, however many there are.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..attention.prepare import first_valid, has_high, has_raw
from ..attention.types import PreparedKV
from ..quant.api import quantize_pair
from ..quant.rows import Rows
from ..quant.tensor import BlockScaledTensor
from .mixed import MixedKVCache


def append_and_prepare(
    cache: MixedKVCache,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    impl: str,
) -> PreparedKV:
    """All tokens of a cache, and k, v (B, H_kv, S, D or D_v), which are appended to it."""
    config = replace(cache.config, pv="fp16")
    canonical = config.canonical()
    keys, values = cache.best()
    high = None
    if has_high(canonical) and canonical.high_format.quantised:
        high = _high_copy(cache, keys, impl)
    if k is not None and v is not None:
        cache.append(k, v, key_padding_mask=key_padding_mask, impl=impl)
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        if high is not None:
            high = _joined(high, _quantised(cache, k, impl))
    everything = slice(0, cache.length)
    low = None
    if cache.k.low.format.quantised:
        low = cache.k.low.copy(everything)
    else:
        keys = cache.k.low.parts[0][:, :, everything]
    rows = Rows(cache.batch, cache.length,
                valid=None if cache.valid is None else cache.valid[:, everything])
    return PreparedKV(
        config=config,
        shape=(*keys.shape, values.shape[3]),
        dtype=cache.dtype,
        rows=rows,
        start=first_valid(rows),
        mean=cache.mean,
        high=high,
        low=low,
        k=keys if has_raw(config) else None,
        v=values,
        v_scale=None,
    )


def _high_copy(cache: MixedKVCache, keys: torch.Tensor, impl: str) -> BlockScaledTensor:
    """The high copies of all tokens of a cache; where there is none, that of what the low one says.

    A token without one is seen as high only after a crop.
    """
    copy = _quantised(cache, keys, impl)
    positions = torch.arange(cache.length, device=keys.device)
    if cache.k.newest is not None:
        near = positions[cache.high_from :]
        copy = _replaced(copy, cache.k.newest.copy(near % cache.ring), near)
    if cache.k.first is not None and cache.length:
        index, inside = cache.among_first(positions)
        first = cache.k.first.copy(slice(0, cache.sink))
        copy = _gathered(copy, first, index.clamp(0, cache.sink - 1), inside)
    return copy


def _quantised(cache: MixedKVCache, keys: torch.Tensor, impl: str) -> BlockScaledTensor:
    copy, _ = quantize_pair(
        keys, cache.config.high, "none", mean=cache.mean, rotate=cache.config.rotate,
        scale_rule=cache.config.scale_rule, impl=impl,
    )
    assert copy is not None  # the format is no "none"
    return copy


def _parts(copy: BlockScaledTensor) -> list[torch.Tensor]:
    parts = [copy.data, copy.scales]
    return parts if copy.global_scale is None else [*parts, copy.global_scale]


def _with(copy: BlockScaledTensor, parts: list[torch.Tensor]) -> BlockScaledTensor:
    data, scales, *second = parts
    shape = torch.Size((*data.shape[:3], copy.shape[3]))
    return BlockScaledTensor(data, scales, second[0] if second else None, copy.format, shape)


def _joined(a: BlockScaledTensor, b: BlockScaledTensor) -> BlockScaledTensor:
    return _with(a, [torch.cat(x, 2) for x in zip(_parts(a), _parts(b), strict=True)])


def _replaced(
    copy: BlockScaledTensor, other: BlockScaledTensor, positions: torch.Tensor
) -> BlockScaledTensor:
    """`copy` with tokens (n,) from another."""
    pairs = zip(_parts(copy), _parts(other), strict=True)
    return _with(copy, [x.index_copy(2, positions, y) for x, y in pairs])


def _gathered(
    copy: BlockScaledTensor, other: BlockScaledTensor, index: torch.Tensor, where: torch.Tensor
) -> BlockScaledTensor:
    """`copy` with token index[b, i] of another where `where`, (B, n)."""
    parts = []
    for x, y in zip(_parts(copy), _parts(other), strict=True):
        at = index[:, None, :, None].expand(-1, y.shape[1], -1, y.shape[3])
        parts.append(torch.where(where[:, None, :, None], y.gather(2, at), x))
    return _with(copy, parts)
