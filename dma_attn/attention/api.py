"""The public attention calls: validation, preparation, dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..config import DMAConfig
from ..device import device_guard, use_triton
from ..quant.rows import Rows
from . import reference
from . import validate as check
from .prepare import folded_queries, has_raw, prepare, visible_keys
from .types import CallOptions, PreparedKV

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
        out: Tensor to write the result to; it must not share memory with k or v, nor with q where
            a class is "none", unless it is q itself.
        impl: "reference" (PyTorch), "triton" or "auto" (Triton on a GPU, PyTorch on a CPU).

    Keys that no query can see are never read. NaN or Inf in V at a key that some query of a block
    of up to 128 sees reaches every row of that block, rows that it is hidden from too (0 * NaN).

    Returns:
        The output, q's dtype and layout, or (output, LSE).

    Raises:
        TypeError, ValueError: an argument is not what is described above.
        NotImplementedError: an input requires grad under grad mode.
        RuntimeError: the Triton path was chosen and this device cannot run it.
    """
    check.check_layout(tensor_layout)
    check.check_config(config)
    check.check_tensors({"q": q, "k": k, "v": v}, 4, check.DIMS[tensor_layout])
    x, k4, v4 = (_hnd(t, tensor_layout) for t in (q, k, v))
    check.check_kv(k4, v4)
    call = check_call(x, k4.shape, is_causal, scale, window_size, return_lse)
    read = {"k": k, "v": v, "q": q if has_raw(config) else None}
    result = _result(q, (*x.shape[:3], v.shape[3]), tensor_layout, out, read)
    ahead = None if return_lse else x
    kv = _prepare_kv(k, v, config, key_padding_mask, kv_len, tensor_layout, impl, ahead)
    return _run(x, kv, call, result, impl)


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
    where a class is "none"), to the mask and to a kv_len tensor: do not overwrite them while it is
    in use.
    """
    return _prepare_kv(k, v, config, key_padding_mask, kv_len, tensor_layout, impl, None)


def _prepare_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    config: DMAConfig,
    key_padding_mask: torch.Tensor | None,
    kv_len: int | torch.Tensor | None,
    tensor_layout: str,
    impl: str,
    queries: torch.Tensor | None,
) -> PreparedKV:
    """`prepare_kv`; queries: those of the one call that it is for, see `prepare`."""
    check.check_config(config)
    check.check_layout(tensor_layout)
    check.check_tensors({"k": k, "v": v}, 4, check.DIMS[tensor_layout])
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
        return prepare(k, v, config, rows, triton, tensor_layout, queries=queries)


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
    layout = prepared.tensor_layout
    check.check_tensors({"q": q}, 4, check.DIMS[layout])
    if q.dtype != prepared.dtype:
        raise TypeError(f"q: expected the dtype of k and v, {prepared.dtype}, got {q.dtype}")
    if q.device != prepared.device:
        raise ValueError(f"q: expected the device of k and v, {prepared.device}, got {q.device}")
    x = _hnd(q, layout)
    call = check_call(x, prepared.shape, is_causal, scale, window_size, return_lse)
    read = {"k": prepared.k, "v": prepared.v, "q": q if has_raw(prepared.config) else None}
    result = _result(q, (*x.shape[:3], prepared.shape[4]), layout, out, read)
    return _run(x, prepared, call, result, impl)


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
    check.check_tensors({"query": query, "key": key, "value": value}, 4, check.DIMS["HND"])
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
    check.check_tensors({"query": q, "key": k, "value": v}, 4, check.DIMS["HND"])
    check.check_kv(k, v)
    check.check_kv_len(kv_len, k.shape[0], k.shape[2], k.device)
    call = check_call(q, k.shape, top_left_causal, scale, None, False)
    shape = (*q.shape[:3], k.shape[2])
    mask = check.check_attn_mask(attn_mask, shape, q.device)
    call = replace(call, mask=mask, top_left=top_left_causal)
    read = {"k": k, "v": v, "q": q if has_raw(config) else None}
    result = _result(q, (*q.shape[:3], v.shape[3]), "HND", out, read)
    if valid is None and attn_mask is not None:
        valid = visible_keys(attn_mask, shape)
    with device_guard(q.device):
        rows = Rows(k.shape[0], k.shape[2], length=kv_len, valid=valid)
        masked = mask is not None or top_left_causal
        kv = prepare(k, v, config, rows, use_triton(q.device, impl), masked=masked)
    attended = _run(q, kv, call, result, impl)
    assert isinstance(attended, torch.Tensor)  # no LSE was asked for
    return attended


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
    n = check.check_packed(q, k, cu_seqlens_q, cu_seqlens_k)
    check.check_length("max_seqlen_q", max_seqlen_q)
    check.check_length("max_seqlen_k", max_seqlen_k)
    q4, k4, v4 = (x.transpose(0, 1)[None] for x in (q, k, v))
    check.check_kv(k4, v4)
    call = check_call(q4, k4.shape, is_causal, scale, window_size, return_lse)
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = None
    if return_lse:
        shape = (q.shape[1], q.shape[0])
        lse = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    if not use_triton(q.device, impl):
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for b in range(n):
            i = slice(starts_q[b], min(starts_q[b + 1], starts_q[b] + max_seqlen_q))
            j = slice(starts_k[b], min(starts_k[b + 1], starts_k[b] + max_seqlen_k))
            if i.start < i.stop:
                part = dma_attention(
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
                out[i] = part[0][0]
                if lse is not None:
                    lse[:, i] = part[1][0]
    elif q.numel() and n:
        from .kernels import portable

        with device_guard(q.device):
            kv = prepare(k4, v4, config, Rows(n, max_seqlen_k, cu=cu_seqlens_k), True)
            call = replace(call, cu_q=cu_seqlens_q.contiguous(), longest_q=max_seqlen_q)
            portable.launch(q4, kv, call, out.transpose(0, 1)[None], lse)
    return out if lse is None else (out, lse)


def check_call(
    q: torch.Tensor,
    k_shape: Sequence[int],
    is_causal: bool,
    scale: float | None,
    window_size: int | None,
    return_lse: bool,
) -> CallOptions:
    """Check what concerns q and the call: q (B, H_q, S_q, D) against k (B, H_kv, S_kv, D)."""
    if q.shape[0] != k_shape[0] or q.shape[3] != k_shape[3]:
        raise ValueError(
            f"q: expected batch {k_shape[0]} and head dim {k_shape[3]} like k, "
            f"got batch {q.shape[0]} and head dim {q.shape[3]}"
        )
    check.check_heads(q.shape[1], k_shape[1])
    for name, value in (("is_causal", is_causal), ("return_lse", return_lse)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {value!r}")
    return CallOptions(
        causal=is_causal,
        top_left=False,
        scale=check.check_scale(scale, q.shape[3]),
        window=check.check_window(window_size, is_causal),
        mask=None,
        return_lse=return_lse,
        longest_q=q.shape[2],
    )


def _result(
    q: torch.Tensor,
    shape: tuple[int, ...],
    layout: str,
    out: torch.Tensor | None,
    read: dict[str, torch.Tensor | None],
) -> torch.Tensor:
    """Where the result (B, H_q, S_q, Dv) goes, in q's layout: `out`, checked, or a new tensor."""
    if layout == "NHD":
        shape = (shape[0], shape[2], shape[1], shape[3])
    check.check_out(out, shape, q, read)
    return q.new_empty(shape) if out is None else out


def _run(
    q: torch.Tensor, kv: PreparedKV, call: CallOptions, result: torch.Tensor, impl: str
) -> Result:
    """Attend with q (B, H_q, S_q, D) and fill `result`, which has the caller's layout."""
    target = _hnd(result, kv.tensor_layout)
    if use_triton(q.device, impl):
        lse = None
        if call.return_lse:
            lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        with device_guard(q.device):
            if kv.folded is None:
                from .kernels import portable

                portable.launch(q, kv, call, target, lse)
            elif result.numel() > 0:
                from .kernels import hopper_call

                queries = folded_queries(q, kv, call.scale, lse is not None)
                hopper_call.run(queries, kv, call, target, lse)
    elif kv.folded is not None:
        raise ValueError(
            'impl: expected "triton" or "auto" for keys prepared for the Hopper kernel, got '
            f"{impl!r}; prepare them with the same impl"
        )
    else:
        lse = reference.attend(q, kv, call, target)
    return result if lse is None else (result, lse)


def _hnd(x: torch.Tensor, layout: str) -> torch.Tensor:
    return x if layout == "HND" else x.transpose(1, 2)
