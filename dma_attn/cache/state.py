"""A `MixedKVCache` as a flat mapping of tensors, and the way back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..config import DMAConfig

if TYPE_CHECKING:
    from .mixed import MixedKVCache


def save(cache: MixedKVCache) -> dict[str, torch.Tensor]:
    """`MixedKVCache.state_dict`."""
    options = {
        "config": cache.config.to_dict(), "v_formats": cache.v_formats,
        "rotate_v": cache.rotate_v, "dtype": str(cache.dtype).removeprefix("torch."),
        "sizes": [cache.batch, cache.kv_heads, *cache.head_dims],
        "length": cache.length, "high_from": cache.high_from,
    }
    state = {"options": torch.tensor(list(json.dumps(options).encode()), dtype=torch.uint8),
             "starts": cache.starts}
    if cache.mean is not None:
        state["mean"] = cache.mean
    if cache.valid is not None:
        state["valid"] = cache.valid[:, : cache.length].contiguous()
    for name, op in (("k", cache.k), ("v", cache.v)):
        for kind in ("low", "newest", "first"):
            store = getattr(op, kind)
            for i, part in enumerate(() if store is None else store.parts):
                state[f"{name}.{kind}.{i}"] = (part[:, :, : cache.length] if kind == "low"
                                               else part).contiguous()
    return state


def load(
    cls: type[MixedKVCache], state: Mapping[str, torch.Tensor], max_len: int | None
) -> MixedKVCache:
    """`MixedKVCache.from_state_dict`."""
    missing = {"options", "starts"} - set(state)
    if missing:
        raise ValueError(f"state: expected a cache's state_dict(), no {sorted(missing)}")
    options = json.loads(bytes(state["options"].tolist()))
    batch, heads, dim, dim_v = options["sizes"]
    v_high, v_low = options["v_formats"]
    length = options["length"]
    cache = cls(
        batch, heads, dim, max(length, max_len or 0), head_dim_v=dim_v,
        config=DMAConfig(**options["config"]), v_high=v_high, v_low=v_low,
        rotate_v=options["rotate_v"], dtype=getattr(torch, options["dtype"]),
        device=state["starts"].device,
    )
    cache.length, cache.high_from = length, options["high_from"]
    cache.lengths.fill_(length)
    cache.near.fill_(cache.high_from)
    cache.starts.copy_(state["starts"])
    cache.mean = state["mean"].clone() if "mean" in state else None
    if "valid" in state:
        cache.valid = cache.starts.new_zeros(batch, cache.capacity, dtype=torch.bool)
        cache.valid[:, :length] = state["valid"]
    for name, op in (("k", cache.k), ("v", cache.v)):
        for kind in ("low", "newest", "first"):
            store = getattr(op, kind)
            for i, part in enumerate(() if store is None else store.parts):
                part[:, :, : state[f"{name}.{kind}.{i}"].shape[2]] = state[f"{name}.{kind}.{i}"]
    return cache
