"""The public attention calls: validation, preparation, dispatch."""

from __future__ import annotations

import torch

from ..config import DMAConfig
from ..device import device_guard, use_triton
from ..quant.rows import Rows
from . import reference
from . import validate as check
from .prepare import prepare
from .types import CallOptions, PreparedKV, mask_floor

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def dma_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    config: DMAConfig = DMAConfig(),  # noqa: B008 - frozen
    key_padding_mask: torch.Tensor | None = None,
    kv_len: int | torch.Tensor | None = None,
    window_size: int | None = None,
    tensor_layout: str = "HND",
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> Result:
    """softmax(scale * Q K^T + mask) V with Q K^T in diagonal-tiled mixed precision.

    Args:
        q: (B, H_q, S_q, D) in layout "HND", (B, S_q, H_q, D) in "NHD"; any strides.
        k: (B, H_kv, S_kv, D), H_q a multiple of H_kv.
        v: (B, H_kv, S_kv, Dv). D and Dv are multiples of 8 up to 256. All float16, bfloat16 or
            float32, all alike.
        is_causal: *Bottom-right* causal: query i sees keys j <= i + S_kv - S_q.
        scale: Softmax scale, D ** -0.5 by default.
        config: Formats, tile classes and transforms.
        key_padding_mask: (B, S_kv) bool, True = visible.
        kv_len: Number of keys that hold data, an int or int32 (B,) read on the device; keys beyond
            are never read, positions count from it (static caches).
        window_size: With is_causal, the most recent keys that a query sees, itself included.
        tensor_layout: "HND" or "NHD"; the output has q's.
        return_lse: Also return the natural-log LSE of the unsmoothed scaled logits, float32
            (B, H_q, S_q); -inf for a query without visible keys, whose output is 0.
        out: Tensor to write the result to.
        impl: "reference" (PyTorch), "triton" or "auto" (Triton on a GPU, PyTorch on a CPU).

    Returns:
        The output, q's dtype and layout, or (output, LSE).

    Raises:
        TypeError, ValueError: an argument is not what is described above.
        NotImplementedError: an input requires grad under grad mode.
        RuntimeError: the Triton path was chosen and this device cannot run it.
    """
    check.check_config(config)
    check.check_layout(tensor_layout)
    check.check_tensors({"q": q, "k": k, "v": v}, 4, _dims(tensor_layout))
    check.check_heads(_hnd(q, tensor_layout).shape[1], _hnd(k, tensor_layout).shape[1])
    kv = prepare_kv(
        k,
        v,
        config,
        key_padding_mask=key_padding_mask,
        kv_len=kv_len,
        tensor_layout=tensor_layout,
        impl=impl,
    )
    return dma_attention_prepared(
        q,
        kv,
        is_causal=is_causal,
        scale=scale,
        window_size=window_size,
        return_lse=return_lse,
        out=out,
        impl=impl,
    )


def prepare_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    config: DMAConfig = DMAConfig(),  # noqa: B008 - frozen
    *,
    key_padding_mask: torch.Tensor | None = None,
    kv_len: int | torch.Tensor | None = None,
    tensor_layout: str = "HND",
    impl: str = "auto",
) -> PreparedKV:
    """Quantise K and V once, to attend many times with `dma_attention_prepared`.

    Arguments, shapes and errors are those of `dma_attention`. The result refers to v (and to k
    where a class is "none"): do not overwrite them while it is in use.
    """
    check.check_config(config)
    check.check_layout(tensor_layout)
    check.check_tensors({"k": k, "v": v}, 4, _dims(tensor_layout))
    k, v = _hnd(k, tensor_layout), _hnd(v, tensor_layout)
    check.check_kv(k, v)
    batch, length = k.shape[0], k.shape[2]
    check.check_padding_mask(key_padding_mask, batch, length, k.device)
    check.check_kv_len(kv_len, batch, length, k.device)
    triton = use_triton(k.device, impl)
    if isinstance(kv_len, int):
        k, v, length = k[:, :, :kv_len], v[:, :, :kv_len], kv_len
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[:, :kv_len]
        kv_len = None
    rows = Rows(batch, length, length=kv_len, valid=key_padding_mask)
    with device_guard(k.device):
        return prepare(k, v, config, rows, triton, tensor_layout)


def dma_attention_prepared(
    q: torch.Tensor,
    prepared: PreparedKV,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> Result:
    """`dma_attention` on keys and values that `prepare_kv` made; the same numbers, bit for bit."""
    if not isinstance(prepared, PreparedKV):
        raise TypeError(f"prepared: expected a PreparedKV, got {type(prepared).__name__}")
    return _attend(q, prepared, is_causal, scale, window_size, return_lse, out, impl)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`'s signature and meaning, default config.

    Args:
        query: (B, H_q, S_q, D); key (B, H_kv, S_kv, D); value (B, H_kv, S_kv, Dv).
        attn_mask: Broadcastable to (B, H_q, S_q, S_kv). bool: True = visible. float: added to the
            scaled scores; values <= finfo(dtype).min / 2 count as not visible. It is read per tile
            through its own strides, never expanded.
        dropout_p: Must be 0.
        is_causal: torch's *top-left* rule: query i sees keys j <= i. Not together with attn_mask.
        enable_gqa: Must be True when H_q != H_kv, as in torch.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `dma_attention`.
    """
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p: expected 0 (inference only), got {dropout_p}")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask: expected None with is_causal=True, got a mask")
    check.check_tensors({"query": query, "key": key, "value": value}, 4, _dims("HND"))
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"enable_gqa: expected True for {query.shape[1]} query and {key.shape[1]} key heads, "
            "got False"
        )
    return masked_attention(query, key, value, attn_mask, top_left_causal=is_causal, scale=scale)


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    *,
    top_left_causal: bool = False,
    scale: float | None = None,
    config: DMAConfig = DMAConfig(),  # noqa: B008 - frozen
    valid: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """`scaled_dot_product_attention` with any config: the entry for adapters of frameworks.

    Args:
        q, k, v: (B, H, S, D) as in `dma_attention`; H_q a multiple of H_kv.
        attn_mask: As in `scaled_dot_product_attention`.
        top_left_causal: torch's causal rule; not together with a mask.
        valid: (B, S_kv) bool, `visible_keys(attn_mask, ...)` when the caller has it already.
        kv_len: int32 (B,) number of keys that hold data, read on the device.
        out: (B, H_q, S_q, Dv) to write to.
    """
    check.check_config(config)
    check.check_tensors({"query": q, "key": k, "value": v}, 4, _dims("HND"))
    check.check_kv(k, v)
    check.check_kv_len(kv_len, k.shape[0], k.shape[2], k.device)
    shape = (*q.shape[:3], k.shape[2])
    mask = check.check_attn_mask(attn_mask, shape, q.device)
    if valid is None and attn_mask is not None:
        valid = visible_keys(attn_mask, shape)
    triton = use_triton(q.device, impl)
    with device_guard(q.device):
        kv = prepare(k, v, config, Rows(k.shape[0], k.shape[2], length=kv_len, valid=valid), triton)
    result = _attend(
        q, kv, top_left_causal, scale, None, False, out, impl, mask, top_left_causal
    )
    assert isinstance(result, torch.Tensor)
    return result


def visible_keys(mask: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """(B, S_kv) bool: keys that some query of some head may see, from an unexpanded attn_mask.

    Args:
        shape: (B, H_q, S_q, S_kv) that the mask broadcasts to.
    """
    visible = mask if mask.dtype == torch.bool else mask > mask_floor(mask.dtype)
    visible = visible.reshape((1,) * (4 - visible.dim()) + tuple(visible.shape))
    return visible.any(2).any(1).broadcast_to(shape[0], shape[3])


def dma_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    config: DMAConfig = DMAConfig(),  # noqa: B008 - frozen
    window_size: int | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> Result:
    """`dma_attention` over packed sequences: one launch, cu_seqlens read on the device only.

    Args:
        q: (total_q, H_q, D); k (total_k, H_kv, D); v (total_k, H_kv, Dv).
        cu_seqlens_q, cu_seqlens_k: int32 (n + 1,) cumulative lengths from 0; zero-length sequences
            are allowed. Positions, means and V scales count per sequence.
        max_seqlen_q, max_seqlen_k: The longest sequences; longer ones would be cut.
        return_lse: Also return the LSE, float32 (H_q, total_q).

    Returns:
        (total_q, H_q, Dv), rows beyond cu_seqlens_q[-1] are 0 (their LSE -inf).

    Raises:
        As `dma_attention`.
    """
    check.check_config(config)
    check.check_tensors({"q": q, "k": k, "v": v}, 3, "(total, H, D)")
    n = check_packed(q, k, cu_seqlens_q, cu_seqlens_k)
    check.check_length("max_seqlen_q", max_seqlen_q)
    check.check_length("max_seqlen_k", max_seqlen_k)
    q4, k4, v4 = (x.transpose(0, 1)[None] for x in (q, k, v))
    check.check_kv(k4, v4)
    call = _options(q4, k4, is_causal, scale, window_size, return_lse, None, False)
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32, device=q.device)
    if not use_triton(q.device, impl):
        ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for b in range(n):
            i, j = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
            if i.start < i.stop:
                out[i], part = dma_attention(
                    q[None, i],
                    k[None, j],
                    v[None, j],
                    is_causal=is_causal,
                    scale=scale,
                    config=config,
                    window_size=window_size,
                    tensor_layout="NHD",
                    return_lse=True,
                    impl="reference",
                )
                lse[:, i] = part[0]
    elif q.numel() and n:
        from .kernels import portable

        with device_guard(q.device):
            kv = prepare(k4, v4, config, Rows(n, max_seqlen_k, cu=cu_seqlens_k), True)
            packed = CallOptions(**{**vars(call), "cu_q": cu_seqlens_q, "longest_q": max_seqlen_q})
            portable.launch(q4, kv, packed, out.transpose(0, 1)[None], lse)
    return (out, lse) if return_lse else out


def check_packed(
    q: torch.Tensor, k: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor
) -> int:
    """Check the cumulative lengths of packed q and k; the number of sequences."""
    check.check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, None, q.device)
    check.check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, len(cu_seqlens_q), k.device)
    return len(cu_seqlens_q) - 1


def _attend(
    q: torch.Tensor,
    kv: PreparedKV,
    is_causal: bool,
    scale: float | None,
    window_size: int | None,
    return_lse: bool,
    out: torch.Tensor | None,
    impl: str,
    mask: torch.Tensor | None = None,
    top_left: bool = False,
) -> Result:
    check.check_tensors({"q": q}, 4, _dims(kv.tensor_layout))
    if q.dtype != kv.dtype:
        raise TypeError(f"q: expected the dtype of k and v, {kv.dtype}, got {q.dtype}")
    if q.device != kv.device:
        raise ValueError(f"q: expected the device of k and v, {kv.device}, got {q.device}")
    x = _hnd(q, kv.tensor_layout)
    batch, kv_heads, _, head_dim, value_dim = kv.shape
    if x.shape[0] != batch or x.shape[3] != head_dim:
        raise ValueError(
            f"q: expected batch {batch} and head dim {head_dim} like k, "
            f"got batch {x.shape[0]} and head dim {x.shape[3]}"
        )
    check.check_heads(x.shape[1], kv_heads)
    shape = (*x.shape[:3], value_dim)
    layout_shape = shape if kv.tensor_layout == "HND" else (shape[0], shape[2], shape[1], shape[3])
    check.check_out(out, layout_shape, q)
    call = _options(x, x, is_causal, scale, window_size, return_lse, mask, top_left)
    result = out if out is not None else q.new_empty(layout_shape)
    target = _hnd(result, kv.tensor_layout)
    if use_triton(q.device, impl):
        from .kernels import portable

        lse = torch.empty(x.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
        with device_guard(q.device):
            portable.launch(x, kv, call, target, lse)
    else:
        lse = reference.attend(x, kv, call, target)
    if return_lse:
        assert lse is not None
        return result, lse
    return result


def _options(
    q: torch.Tensor,
    k: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    window_size: int | None,
    return_lse: bool,
    mask: torch.Tensor | None,
    top_left: bool,
) -> CallOptions:
    """Options for q and k (B, H, S, D)."""
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q: expected k's head dim {k.shape[3]}, got {q.shape[3]}")
    if q is not k:
        check.check_heads(q.shape[1], k.shape[1])
    for name, value in (("is_causal", is_causal), ("return_lse", return_lse)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {value!r}")
    return CallOptions(
        causal=is_causal,
        top_left=top_left,
        scale=check.check_scale(scale, q.shape[3]),
        window=check.check_window(window_size, is_causal),
        mask=mask,
        return_lse=return_lse,
        longest_q=q.shape[2],
    )


def _hnd(x: torch.Tensor, layout: str) -> torch.Tensor:
    return x if layout == "HND" else x.transpose(1, 2)


def _dims(layout: str) -> str:
    return "(B, H, S, D)" if layout == "HND" else "(B, S, H, D)"
