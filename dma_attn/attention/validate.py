"""Checks of the public attention calls: one clear error with argument, expectation and value."""

from __future__ import annotations

import math

import torch

from ..config import DMAConfig
from ..quant.api import FLOAT_DTYPES

MAX_HEAD_DIM = 256
DIMS = {"HND": "(B, H, S, D)", "NHD": "(B, S, H, D)"}


def check_tensors(tensors: dict[str, torch.Tensor], rank: int, shape: str) -> None:
    """Rank, dtype, device and gradient rules that q, k and v share."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.dim() != rank:
            raise ValueError(f"{name}: expected {rank} dims {shape}, got shape {tuple(x.shape)}")
    names = ", ".join(tensors)
    dtypes = [x.dtype for x in tensors.values()]
    if len(set(dtypes)) > 1 or dtypes[0] not in FLOAT_DTYPES:
        got = ", ".join(str(d) for d in dtypes)
        raise TypeError(f"{names}: expected one dtype of float16, bfloat16, float32, got {got}")
    devices = [x.device for x in tensors.values()]
    if len(set(devices)) > 1:
        raise ValueError(f"{names}: expected one device, got {', '.join(map(str, devices))}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values()):
        raise NotImplementedError(
            f"{names}: expected inference inputs, got requires_grad=True; "
            "there is no backward pass: use torch.no_grad() or detach()"
        )


def check_heads(q_heads: int, kv_heads: int) -> None:
    """Grouped queries: H_q a multiple of H_kv."""
    if q_heads % kv_heads if kv_heads else q_heads:
        raise ValueError(
            f"k: expected a number of heads that divides q's {q_heads}, got {kv_heads}"
        )


def check_head_dims(head_dim: int, value_dim: int) -> None:
    """D and Dv: multiples of 8 up to 256."""
    if not all(0 < d <= MAX_HEAD_DIM and d % 8 == 0 for d in (head_dim, value_dim)):
        raise ValueError(
            f"q, k, v: expected head dims that are multiples of 8 from 8 to {MAX_HEAD_DIM}, "
            f"got D = {head_dim} and Dv = {value_dim}"
        )


def check_kv(k: torch.Tensor, v: torch.Tensor) -> None:
    """k and v (B, H_kv, S_kv, D or Dv) belong together."""
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"v: expected k's batch, heads and length {tuple(k.shape[:3])}, "
            f"got {tuple(v.shape[:3])}"
        )
    check_head_dims(k.shape[3], v.shape[3])


def check_config(config: DMAConfig) -> None:
    """A DMAConfig, not its name."""
    if not isinstance(config, DMAConfig):
        raise TypeError(f"config: expected a DMAConfig, got {type(config).__name__}")


def check_layout(layout: str) -> None:
    """HND (B, H, S, D) or NHD (B, S, H, D)."""
    if layout not in DIMS:
        raise ValueError(f"tensor_layout: expected one of {list(DIMS)}, got {layout!r}")


def check_window(window: int | None, causal: bool) -> int:
    """The window as an int, 0 for none."""
    if window is None:
        return 0
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"window_size: expected an int >= 1 or None, got {window!r}")
    if not causal:
        raise ValueError(f"window_size: expected is_causal=True with a window, got {window}")
    return window


def check_scale(scale: float | None, head_dim: int) -> float:
    """The softmax scale; None is head_dim ** -0.5."""
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale: expected a float or None, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    return float(scale)


def check_padding_mask(
    mask: torch.Tensor | None, batch: int, length: int, device: torch.device
) -> None:
    """key_padding_mask: (B, S_kv) bool on the inputs' device."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(f"key_padding_mask: expected a bool tensor (True = visible), got {got}")
    if tuple(mask.shape) != (batch, length):
        raise ValueError(
            f"key_padding_mask: expected shape {(batch, length)}, got {tuple(mask.shape)}"
        )
    if mask.device != device:
        raise ValueError(f"key_padding_mask: expected device {device}, got {mask.device}")


def check_kv_len(
    kv_len: int | torch.Tensor | None, batch: int, length: int, device: torch.device
) -> None:
    """kv_len: an int in [0, S_kv], or int32 (B,) on the inputs' device (clamped when read)."""
    if kv_len is None:
        return
    if isinstance(kv_len, torch.Tensor):
        if kv_len.dtype != torch.int32 or tuple(kv_len.shape) != (batch,):
            raise ValueError(
                f"kv_len: expected an int32 tensor of shape {(batch,)}, "
                f"got {kv_len.dtype} {tuple(kv_len.shape)}"
            )
        if kv_len.device != device:
            raise ValueError(f"kv_len: expected device {device}, got {kv_len.device}")
    elif isinstance(kv_len, bool) or not isinstance(kv_len, int):
        raise TypeError(f"kv_len: expected an int or an int32 tensor, got {type(kv_len).__name__}")
    elif not 0 <= kv_len <= length:
        raise ValueError(f"kv_len: expected 0 <= kv_len <= {length}, got {kv_len}")


def check_out(
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    like: torch.Tensor,
    read: dict[str, torch.Tensor | None],
) -> None:
    """out: the result's shape, dtype and device, no element twice, none that a kernel still reads.

    Args:
        read: Operands, by name, that are read while out is written; out may be q itself.
    """
    if out is None:
        return
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out: expected a torch.Tensor, got {type(out).__name__}")
    if tuple(out.shape) != shape or out.dtype != like.dtype or out.device != like.device:
        raise ValueError(
            f"out: expected {shape} {like.dtype} on {like.device}, "
            f"got {tuple(out.shape)} {out.dtype} on {out.device}"
        )
    if any(n > 1 and s == 0 for n, s in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"out: expected distinct elements, got strides {out.stride()}")
    for name, x in read.items():
        same = name == "q" and x is not None and _place(x) == _place(out)
        if x is not None and not same and x.numel() and out.numel():
            (a, b), (c, d) = _extent(out), _extent(x)
            if a < d and c < b:
                raise ValueError(f"out: expected memory apart from {name}, got an overlap")


def _place(x: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return x.data_ptr(), x.shape, x.stride()


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte of a non-empty tensor and the one past its last."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def check_cu_seqlens(name: str, cu: torch.Tensor, n: int | None, device: torch.device) -> None:
    """cu_seqlens: int32 (n + 1,) on the inputs' device; its values are not read."""
    if not isinstance(cu, torch.Tensor) or cu.dtype != torch.int32 or cu.dim() != 1 or not len(cu):
        got = f"{cu.dtype} {tuple(cu.shape)}" if isinstance(cu, torch.Tensor) else type(cu).__name__
        raise ValueError(f"{name}: expected a 1-dim int32 tensor of at least 1 entry, got {got}")
    if n is not None and len(cu) != n:
        raise ValueError(f"{name}: expected {n} entries like cu_seqlens_q, got {len(cu)}")
    if cu.device != device:
        raise ValueError(f"{name}: expected device {device}, got {cu.device}")


def check_packed(
    q: torch.Tensor, k: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor
) -> int:
    """Check the cumulative lengths of packed q and k; the number of sequences."""
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, None, q.device)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, len(cu_seqlens_q), k.device)
    return len(cu_seqlens_q) - 1


def check_length(name: str, value: int) -> None:
    """max_seqlen: a host int >= 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}: expected an int >= 0, got {value!r}")


def check_attn_mask(
    mask: torch.Tensor | None, shape: tuple[int, int, int, int], device: torch.device
) -> torch.Tensor | None:
    """attn_mask expanded (stride 0) to (B, H_q, S_q, S_kv): bool, or float to be added."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.bool, *FLOAT_DTYPES):
        got = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(f"attn_mask: expected a bool or float tensor, got {got}")
    if mask.device != device:
        raise ValueError(f"attn_mask: expected device {device}, got {mask.device}")
    if torch.is_grad_enabled() and mask.requires_grad:
        raise NotImplementedError("attn_mask: expected no requires_grad, there is no backward pass")
    try:
        return mask.broadcast_to(shape)
    except RuntimeError:
        raise ValueError(
            f"attn_mask: expected a shape that broadcasts to {shape}, got {tuple(mask.shape)}"
        ) from None
