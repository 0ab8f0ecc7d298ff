"""Attention over a `MixedKVCache`: up to 16 queries stay in 16 bits, more are a prefill.

    out_i = softmax(scale * q_i K_i^T) V_i      K_i, V_i: the cache as query i's tile sees it

Queries in one tile of 128 positions see every key in the same precision, so a call of few is one or
two dense problems.
"""

from __future__ import annotations

import torch

from ..attention import validate as check
from ..attention.api import dma_attention, dma_attention_prepared
from ..config import DMAConfig
from ..device import device_guard, use_triton
from .chunk import append_and_prepare
from .mixed import MixedKVCache

MOST_QUERIES = 16
_OFF = DMAConfig.preset("off")


def dma_attention_with_kvcache(
    q: torch.Tensor,
    cache: MixedKVCache,
    *,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    scale: float | None = None,
    window_size: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the newest tokens' queries over a cache.

    Args:
        q: (B, H_q, S, D), the queries of the newest S tokens, in the cache's dtype; H_q a multiple
            of the cache's heads. Up to 16 are used as they are, against what the cache keeps. More
            are quantised like the cache's K, and see the tokens of k and v before any of them has
            lost its high copy, and v itself.
        cache: Keys and values; k and v are appended to it first.
        k, v: (B, H_kv, S_new, D) and (B, H_kv, S_new, D_v), or neither.
        key_padding_mask: bool (B, S_new), True = a new token that counts; None: all do.
        scale: Softmax scale, D ** -0.5 by default.
        window_size: The most recent keys that a query sees, itself included.
        return_lse: Also return the natural-log LSE, float32 (B, H_q, S); -inf for a query without
            keys that count, whose output is 0.
        out: (B, H_q, S, D_v) to write the result to.
        impl: "reference" (PyTorch), "triton" or "auto" (Triton on a GPU, PyTorch on a CPU).

    Returns:
        The output, q's dtype, or (output, LSE).

    Raises:
        TypeError, ValueError: an argument is not what is described above.
    """
    if not isinstance(cache, MixedKVCache):
        raise TypeError(f"cache: expected a MixedKVCache, got {type(cache).__name__}")
    check.check_tensors({"q": q}, 4, "(B, H, S, D)")
    if q.dtype != cache.dtype or q.device != cache.device:
        raise TypeError(f"q: expected {cache.dtype} on {cache.device}, got {q.dtype} on {q.device}")
    if q.shape[0] != cache.batch or q.shape[3] != cache.head_dims[0]:
        raise ValueError(f"q: expected batch {cache.batch} and head dim {cache.head_dims[0]}, "
                         f"got {tuple(q.shape)}")
    check.check_heads(q.shape[1], cache.kv_heads)
    if (k is None) != (v is None):
        raise ValueError("k, v: expected both or neither")
    if k is None and key_padding_mask is not None:
        raise ValueError("key_padding_mask: expected None without k and v")
    n = q.shape[2]
    new = 0 if k is None else k.shape[2]
    if n > cache.length + new:
        raise ValueError(f"q: expected at most as many queries as tokens, {cache.length + new}, "
                         f"got {n}")
    triton = use_triton(q.device, impl)
    shape = (*q.shape[:3], cache.head_dims[1])
    check.check_out(out, shape, q, {"q": None})
    check.check_head_dims(*cache.head_dims)
    scale = check.check_scale(scale, q.shape[3])
    window = check.check_window(window_size, True)
    if n > MOST_QUERIES:
        prepared = append_and_prepare(cache, k, v, key_padding_mask, impl)
        return dma_attention_prepared(
            q, prepared, is_causal=True, scale=scale, window_size=window_size,
            return_lse=return_lse, out=out, impl=impl,
        )
    if k is not None and v is not None:
        cache.append(k, v, key_padding_mask=key_padding_mask, impl=impl)
    result = q.new_empty(shape) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if triton:
        with device_guard(q.device):
            _run(q, cache, scale, window, result, lse)
        return (result, lse) if return_lse else result
    begin = cache.length - n
    while begin < cache.length:
        end = min((begin | 127) + 1, cache.length)
        keys, values = cache.dequantize(query_position=begin, dtype=torch.float32)
        rows = slice(begin - cache.length + n, end - cache.length + n)
        part, part_lse = dma_attention(
            q[:, :, rows].float(), keys[:, :, :end], values[:, :, :end], is_causal=True,
            scale=scale, config=_OFF, window_size=window_size, return_lse=True, impl="reference",
            key_padding_mask=None if cache.valid is None else cache.valid[:, :end],
        )
        result[:, :, rows] = part.to(q.dtype)
        lse[:, :, rows] = part_lse
        begin = end
    return (result, lse) if return_lse else result


def _run(
    q: torch.Tensor, cache: MixedKVCache, scale: float, window: int, out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """The kernels."""
    from ..attention.kernels import decode_launch as decode

    if not out.numel():
        return
    if window >= cache.capacity:
        window = 0  # it hides nothing
    layout = decode.Layout(
        cache.lengths, cache.starts, cache.near, cache.valid,
        cache.diag if any(x.newest for x in (cache.k, cache.v)) else 0,
        cache.config.sink if any(x.first for x in (cache.k, cache.v)) else 0,
        cache.capacity, cache.ring, cache.sink + 1 if cache.sink else 0,
    )
    cache.recordings.call(
        lambda: decode.launch(q, cache.mean, cache.config.rotate, cache.k, cache.v, cache.rotate_v,
                              layout, scale, window, out, lse),
        ("attend", scale, window, cache.config, cache.rotate_v), cache.owned(), (q, out, lse),
        q.device,
    )
