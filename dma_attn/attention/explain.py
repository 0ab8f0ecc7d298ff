"""`explain`: which path a call takes, and why, in words."""

from __future__ import annotations

import torch

from ..config import DMAConfig
from ..device import IMPLS, NATIVE, DeviceStatus, device_status
from ..formats import BlockFormat, check_choice
from ..quant.rows import Rows
from ..schedule import TILE, key_ranges
from . import validate as check
from .api import check_call
from .dispatch import native_kernel
from .prepare import has_high


def explain(
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
) -> str:
    """Say which path `dma_attention` takes for these arguments, why, and what it stores.

    Arguments are those of `dma_attention`; nothing is computed, no tensor's values are read
    (the share of high tiles is that of unpadded keys). A refused device is part of the answer, not
    an error.

    Raises:
        TypeError, ValueError: an argument that `dma_attention` would refuse.
    """
    check.check_config(config)
    check.check_layout(tensor_layout)
    check.check_tensors({"q": q, "k": k, "v": v}, 4, check.DIMS[tensor_layout])
    result = (*q.shape[:3], v.shape[3])
    check.check_out(out, result, q, {"k": k, "v": v})
    if tensor_layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    check.check_kv(k, v)
    check.check_padding_mask(key_padding_mask, k.shape[0], k.shape[2], k.device)
    check.check_kv_len(kv_len, k.shape[0], k.shape[2], k.device)
    call = check_call(q, k.shape, is_causal, scale, window_size, return_lse)
    window = call.window
    if isinstance(kv_len, int):
        k, v = k[:, :, :kv_len], v[:, :, :kv_len]
    canonical = config.canonical()
    batch, heads, n_q, head_dim = q.shape
    kv_heads, n_kv = k.shape[1:3]
    status = _path(q.device, impl)
    kernel, reason = status.kernel, status.reason
    if status.path == "triton":
        length = kv_len if isinstance(kv_len, torch.Tensor) else None
        rows = Rows(batch, n_kv, length=length, valid=key_padding_mask)
        kernel, gap = native_kernel(k, v, config, rows, masked=False)
        where, _, cores = reason.partition(": ")
        if kernel in NATIVE:
            reason = f"{where}: {NATIVE[kernel]}"
        else:
            reason = f"{where}: {cores.rpartition('else ')[2]}; {gap}"
    lines = [
        f"path: {status.path} ({kernel} kernel): {reason}",
        f"config: {config}: high {config.high}, low {config.low}, diag {config.diag}, "
        f"sink {config.sink}, pv {config.pv}",
        f"shapes: B {batch}, heads {heads} over {kv_heads}, {n_q} queries x {n_kv} keys, "
        f"D {head_dim}, Dv {v.shape[3]}, {q.dtype}",
    ]
    if has_high(canonical):
        share = high_share(n_q, n_kv, window, canonical, is_causal)
        lines.append(f"tiles: {share:.1%} of the visible scores are high precision")
    else:
        lines.append(f"tiles: one class, {canonical.low}")
    classes = (canonical.high_format, canonical.low_format) if has_high(canonical) else (
        canonical.low_format,
    )
    if kernel == "hopper":
        copies = [f.name for f in classes if f.quantised]
        lines.append(
            f"copies of Q and K: {' and '.join(copies)}, each folded into {head_dim} bytes a token "
            "and head, and 4 a query or 128 keys"
        )
        lines += [f"beside them: {_describe(f, head_dim)}" for f in classes if not f.quantised]
    else:
        lines += [f"copies of Q and K: {_describe(f, head_dim)}" for f in dict.fromkeys(classes)]
    if kernel == "blackwell":
        lines.append("beside them: K's block scales once more, swizzled for the tensor cores")
    transforms = [n for n, on in (("K smoothing", config.smooth_k), ("rotation", config.rotate))
                  if on and any(f.quantised for f in classes)]
    lines.append(f"transforms: {', '.join(transforms) or 'none'}")
    stored = "E4M3 codes, one fp32 scale a channel" if config.pv == "fp8" else "read where it lies"
    lines.append(f"V: {stored}")
    return "\n".join(lines)


def _path(device: torch.device, impl: str) -> DeviceStatus:
    check_choice("impl", impl, IMPLS)
    status = device_status(device)
    if impl == "reference":
        return DeviceStatus("reference", "reference", 'impl="reference" was asked for')
    if impl == "auto" and status.path == "triton" and device.type == "cpu":
        return DeviceStatus("reference", "reference", "cpu tensors use PyTorch")
    if impl == "triton" and status.path == "reference":
        return DeviceStatus("refused", "none", f'impl="triton" needs CUDA tensors, got {device}')
    return status


def high_share(n_q: int, n_kv: int, window: int, config: DMAConfig, causal: bool) -> float:
    """Share of high-precision scores, whole blocks of visible keys counted."""
    first = n_kv - n_q
    high = total = 0
    for tile in range(first >> 7, ((first + n_q - 1) >> 7) + 1 if n_q else first >> 7):
        lo, hi = max(tile * TILE, first), min((tile + 1) * TILE, first + n_q)
        bounds = key_ranges(lo, hi, 0, n_kv, window, int(config.diag), config.sink, causal)
        rows = hi - lo
        high += rows * (bounds[1] - bounds[0] + bounds[3] - bounds[2])
        total += rows * (bounds[4] - bounds[0])
    return high / total if total else 0.0


def _describe(fmt: BlockFormat, head_dim: int) -> str:
    if not fmt.quantised:
        return "none (16- or 32-bit values are read where they lie)"
    scale = {"e8m0": 1, "e4m3": 1, "fp32": 4}[fmt.scale] * fmt.n_blocks(head_dim)
    extra = 4 if fmt.has_global_scale else 0
    per_token = fmt.row_bytes(head_dim) + scale + extra
    return f"{fmt.name}, {per_token} bytes a token and head ({per_token / head_dim:.3f} a value)"
