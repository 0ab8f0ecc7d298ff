"""What an append to a `MixedKVCache` writes, in PyTorch: the twin of `quant.append`'s kernels,
and their launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..quant.api import quantize_pair
from ..quant.store import Copies, encode

if TYPE_CHECKING:
    from .mixed import MixedKVCache


def check_new(
    cache: MixedKVCache, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """k, v and key_padding_mask of an append.

    Raises:
        TypeError, ValueError: one of them is not what the cache takes.
    """
    n = k.shape[2] if isinstance(k, torch.Tensor) and k.dim() == 4 else -1
    for name, x, dim in (("k", k, cache.head_dims[0]), ("v", v, cache.head_dims[1])):
        shape = (cache.batch, cache.kv_heads, n, dim)
        if not isinstance(x, torch.Tensor) or tuple(x.shape) != shape:
            got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(f"{name}: expected (batch {cache.batch}, heads {cache.kv_heads}, S, "
                             f"{dim}), with k's S, got {got}")
        if x.dtype != cache.dtype or x.device != cache.device:
            raise TypeError(f"{name}: expected {cache.dtype} on {cache.device}, "
                            f"got {x.dtype} on {x.device}")
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            raise TypeError("key_padding_mask: expected a bool tensor")
        if tuple(mask.shape) != (cache.batch, n) or mask.device != cache.device:
            raise ValueError(f"key_padding_mask: expected {(cache.batch, n)} on {cache.device}, "
                             f"got {tuple(mask.shape)} on {mask.device}")


def advance(cache: MixedKVCache, n: int, mask: torch.Tensor | None) -> None:
    """n more tokens: which of them count, the first of each row, lengths, the ring's first."""
    if mask is None:
        begins, first = cache.starts < 0, cache.lengths
    else:
        begins = (cache.starts < 0) & mask.any(1)
        first = cache.lengths + mask.int().argmax(1).int()
    if cache.valid is not None:
        counts = cache.valid.new_ones(cache.batch, n) if mask is None else mask
        cache.valid.index_copy_(1, cache.lengths[0] + torch.arange(n, device=cache.device), counts)
    cache.starts.copy_(torch.where(begins, first, cache.starts))
    cache.lengths += n
    newest = ((cache.lengths[:1] - 1) >> 7 << 7) - cache.diag
    torch.maximum(cache.near, newest, out=cache.near)


def launch(
    cache: MixedKVCache, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """`advance`, and `write` of k and v, by kernels."""
    from ..quant.append import launch_advance, launch_append

    launch_advance(cache.lengths, cache.starts, cache.near, cache.valid, mask, k.shape[2],
                   cache.diag)
    for copies, x, rotated, mean in ((cache.k, k, cache.config.rotate, cache.mean),
                                     (cache.v, v, cache.rotate_v, None)):
        launch_append(x, copies, cache.lengths, cache.starts, cache.config.sink, mean=mean,
                      rotate=rotated, scale_rule=cache.config.scale_rule)


def write(
    cache: MixedKVCache, copies: Copies, x: torch.Tensor, rotated: bool, mean: torch.Tensor | None
) -> None:
    """Copies of the newest tokens, each where it belongs."""
    n = x.shape[2]
    positions = cache.lengths[0] - n + torch.arange(n, device=cache.device)
    near = copies.newest or copies.first
    high = "none" if near is None else near.format.name
    high_copy, low_copy = quantize_pair(
        x, high, copies.low.format.name, mean=mean, rotate=rotated,
        scale_rule=cache.config.scale_rule, impl="reference",
    )
    copies.low.write(positions, encode(low_copy, x))
    parts = encode(high_copy, x)
    if copies.newest is not None:
        kept = slice(max(0, n - cache.ring), n)
        copies.newest.write(positions[kept] % cache.ring, tuple(p[:, :, kept] for p in parts))
    if copies.first is not None:
        index, inside = cache.among_first(positions)
        copies.first.write(torch.where(inside, index, cache.sink), parts)
