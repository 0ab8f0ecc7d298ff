"""K and V made ready for attention: mean, quantised copies, FP8 V, first valid keys."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..config import DMAConfig
from ..device import fits_tma
from ..formats import E4M3_MAX, E4M3_NAN, LOG2_E, BlockFormat
from ..quant.reference import abs_bits, divide, quantize_reference
from ..quant.rows import Rows
from ..quant.tensor import BlockScaledTensor
from ..quant.transforms import key_mean, rotate
from ..schedule import TILE, tile_count
from .dispatch import blackwell_gap, hopper_gap
from .types import CallOptions, PreparedKV, mask_floor

FORK_SIZE = 2**24  # elements of Q from which a second stream saves more than it costs the host


def prepare(
    k: torch.Tensor,
    v: torch.Tensor,
    config: DMAConfig,
    rows: Rows,
    triton: bool,
    tensor_layout: str = "HND",
    masked: bool = False,
    queries: torch.Tensor | None = None,
) -> PreparedKV:
    """Quantise K and V (B, H_kv, S_kv, D or Dv), by the Triton kernels or in PyTorch.

    Args:
        masked: The call has an attention mask or torch's top-left causal rule.
        queries: Q (B, H_q, S_q, D) of the one call that this is for, if its codes do not depend on
            the mean of K: they may then be made beside those of K and V.
    """
    if triton and not hopper_gap(k, v, config, rows, masked):
        return prepare_folded(k, v, config, rows, tensor_layout, queries)
    canonical = config.canonical()
    high = _class_format(canonical.high_format, canonical)
    low = canonical.low_format if canonical.low_format.quantised else None
    mean = None
    if config.smooth_k and (high or low):
        if triton:
            from ..quant.reductions import launch_key_mean

            mean = launch_key_mean(k, rows)
        else:
            mean = key_mean(k, rows.in_use())
    high_copy, low_copy = quantise_operand(k, high, low, rows, config, mean, None, False, triton)
    swizzled = None
    if triton and not blackwell_gap(k, v, config, rows):
        from .kernels.swizzle import swizzle

        swizzled = (None if high_copy is None else swizzle(high_copy.scales),
                    None if low_copy is None else swizzle(low_copy.scales))
    v_scale = None
    if config.pv == "fp8":
        if triton:
            from ..quant.reductions import launch_v_fp8

            v, v_scale = launch_v_fp8(v, rows)
        else:
            v, v_scale = v_fp8_reference(v, rows.in_use())
    return PreparedKV(
        config=config,
        shape=(*k.shape, v.shape[-1]),
        dtype=k.dtype,
        rows=rows,
        start=first_valid(rows),
        mean=mean,
        high=high_copy,
        low=low_copy,
        k=k if has_raw(config) else None,
        v=v,
        v_scale=v_scale,
        swizzled=swizzled,
        tensor_layout=tensor_layout,
    )


def prepare_folded(
    k: torch.Tensor,
    v: torch.Tensor,
    config: DMAConfig,
    rows: Rows,
    tensor_layout: str,
    queries: torch.Tensor | None,
) -> PreparedKV:
    """K and V as the Hopper kernel reads them."""
    from ..quant.folded import fold_kv, query_codes

    fork = None
    raw = has_raw(config)
    if queries is not None and queries.is_cuda and queries.numel() >= FORK_SIZE and not raw:
        high, _ = class_spans(config, query=True)
        room = query_codes(queries, high, rows.length, k.shape[2])
        fork = (room, torch.cuda.current_stream().record_event())
    folded = fold_kv(k, v, *class_spans(config, query=False), rows.length, config)
    return PreparedKV(
        config=config,
        shape=(*k.shape, v.shape[3]),
        dtype=k.dtype,
        rows=rows,
        start=None,
        mean=folded.mean,
        high=None,
        low=None,
        k=k if raw else None,
        v=v if folded.v is None else folded.v,
        v_scale=folded.v_scale,
        folded=(folded.codes, folded.scales),
        fork=fork,
        tensor_layout=tensor_layout,
    )


class FoldedQueries(NamedTuple):
    """Q as the Hopper kernel reads it.

    Attributes:
        codes: uint8 (classes, B, H_q, blocks * 128, D), E4M3 or int8, at absolute positions.
        scales: float32 (classes, B, H_q, blocks * 128).
        shift: float32 (B, H_q, S_q), scale * q . mean_k, where the LSE or 16-bit tiles need it.
        raw: Q itself (B, H_q, S_q, D) for 16-bit tiles, negated with a negative scale, or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    shift: torch.Tensor | None
    raw: torch.Tensor | None


def folded_queries(
    q: torch.Tensor, kv: PreparedKV, scale: float, want_shift: bool
) -> FoldedQueries:
    """Q for the Hopper kernel; TMA must be able to read 16-bit Q, or it is copied."""
    from ..quant.folded import fold_q, query_codes

    raw = None
    if kv.k is not None:
        q, scale = (q, scale) if scale >= 0 else (-q, -scale)
        raw = q = q if fits_tma(q) else q.clone(memory_format=torch.contiguous_format)
    spans = class_spans(kv.config, query=True)
    mean = kv.mean if want_shift or raw is not None else None
    length, n_kv = kv.rows.length, kv.shape[2]
    if kv.fork is None:
        room = query_codes(q, spans[0], length, n_kv)
        shift = fold_q(q, *spans, length, n_kv, kv.config, scale, mean, room)
    else:
        # The room comes from the current stream, which waits for the other one: nothing else
        # takes that memory, or Q's, too early or too late
        room, event = kv.fork
        beside = _second_stream(q.device, torch.cuda.current_stream().cuda_stream)
        beside.wait_event(event)
        with torch.cuda.stream(beside):
            shift = fold_q(q, *spans, length, n_kv, kv.config, scale, mean, room)
        torch.cuda.current_stream().wait_stream(beside)
    return FoldedQueries(*room, shift, raw)


@functools.cache
def _second_stream(device: torch.device, first: int) -> torch.cuda.Stream:
    """Each stream has its own, so that calls on two streams, or a capture, never meet on one."""
    return torch.cuda.Stream(device)


def widths(config: DMAConfig, call: CallOptions, n_q: int, n_kv: int) -> tuple[int, int, int]:
    """Window, diag and sink in tokens, cut to what covers the whole matrix: they fit int32."""
    widest = TILE * tile_count(n_q + n_kv + TILE)
    canonical = config.canonical()
    return (
        min(call.window, widest),
        min(int(canonical.diag), widest),
        min(canonical.sink, widest),
    )


@functools.cache
def class_spans(
    config: DMAConfig, query: bool
) -> tuple[tuple[BlockFormat, str] | None, tuple[BlockFormat, str]]:
    """Format and span of its fp32 scale, of the high class (None if it has no copy) and the low."""
    canonical = config.canonical()
    high, low = canonical.high_format, canonical.low_format
    low_class = (low, operand_span(low, config, query))
    if not has_high(canonical) or not high.quantised:
        return None, low_class
    return (high, operand_span(high, config, query)), low_class


def has_high(canonical: DMAConfig) -> bool:
    """True when a canonical config has tiles of the high class at all."""
    return bool(canonical.diag or canonical.sink)


def has_raw(config: DMAConfig) -> bool:
    """True when there are tiles of 16-bit Q and K."""
    canonical = config.canonical()
    return canonical.low == "none" or (canonical.high == "none" and has_high(canonical))


def quantise_operand(
    x: torch.Tensor,
    high: BlockFormat | None,
    low: BlockFormat | None,
    rows: Rows,
    config: DMAConfig,
    mean: torch.Tensor | None,
    multiplier: float | None,
    query: bool,
    triton: bool,
) -> tuple[BlockScaledTensor | None, BlockScaledTensor | None]:
    """The copies of Q or K (B, H, S, D) that a call needs; None for an absent class."""
    if high is None and low is None:
        return None, None
    spans = (operand_span(high, config, query), operand_span(low, config, query))
    if triton:
        from ..quant.kernels import launch_quantise

        return launch_quantise(
            x,
            high,
            low,
            rows,
            mean=mean,
            rotate=config.rotate,
            scale_rule=config.scale_rule,
            spans=spans,
            multiplier=multiplier,
        )
    y = x.float()
    if multiplier is not None:
        y = y * multiplier
    if mean is not None:
        y = y - mean
    used = rows.in_use()
    if used is not None:
        y = torch.where(used[:, None, :, None], y, 0.0)
    if config.rotate:
        y = rotate(y)
    high_copy, low_copy = (
        None if f is None else quantize_reference(y, f, f.resolve_rule(config.scale_rule), span)
        for f, span in zip((high, low), spans, strict=True)
    )
    return high_copy, low_copy


def operand_span(fmt: BlockFormat | None, config: DMAConfig, query: bool) -> str:
    """What the fp32 scale of an operand spans: "token", "tile", or "head" for "tensor".

    int8 queries keep one scale a token whatever the granularity: a row's scale costs nothing.
    """
    if fmt is None or (query and fmt.name == "int8"):
        return "token"
    span = fmt.resolve_granularity(config.granularity)
    return "head" if span == "tensor" else span


def v_fp8_reference(
    v: torch.Tensor, used: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """V (B, H, S, Dv) -> E4M3 uint8, fp32 scale per channel (B, H, 1, Dv); NaN and Inf -> NaN."""
    x = v.float()
    if used is not None:
        x = torch.where(used[:, None, :, None], x, 0.0)
    finite = torch.where(torch.isfinite(x), x, 0.0)
    if x.shape[-2]:
        amax = abs_bits(finite).amax(-2, keepdim=True).view(torch.float32)
    else:
        amax = finite.new_zeros(*x.shape[:-2], 1, x.shape[-1])
    scale = divide(amax, E4M3_MAX)
    scale = torch.where(scale == 0, 1.0, scale)
    codes = (finite / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(torch.isfinite(x), codes, E4M3_NAN), scale


def first_valid(rows: Rows) -> torch.Tensor | None:
    """int32 (n,) first valid key of each row, 0 for a row without; None without a mask."""
    used = rows.in_use()
    if rows.valid is None or used is None or rows.longest == 0:
        return None
    return used.to(torch.uint8).argmax(-1).to(torch.int32)


def _class_format(fmt: BlockFormat, canonical: DMAConfig) -> BlockFormat | None:
    return fmt if fmt.quantised and has_high(canonical) else None


def query_copies(
    q: torch.Tensor, kv: PreparedKV, rows: Rows, scale: float, triton: bool
) -> tuple[BlockScaledTensor | None, BlockScaledTensor | None]:
    """Q's copies in the formats that K was prepared in; the authors' order folds the scale in."""
    canonical = kv.config.canonical()
    high = canonical.high_format if kv.high is not None else None
    low = canonical.low_format if kv.low is not None else None
    multiplier = scale * LOG2_E if kv.config.folds_scale else None
    return quantise_operand(q, high, low, rows, kv.config, None, multiplier, True, triton)


def visible_keys(mask: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """(B, S_kv) bool: keys that some query of some head may see, from an unexpanded attn_mask.

    Args:
        shape: (B, H_q, S_q, S_kv) that the mask broadcasts to.
    """
    mask = mask[(None,) * (4 - mask.dim())]
    # One row stands for those that a stride of 0 repeats
    mask = mask[tuple(slice(0, 1) if s == 0 else slice(None) for s in mask.stride())]
    if 0 in mask.shape[1:3]:
        visible = torch.zeros(mask.shape[0], mask.shape[3], dtype=torch.bool, device=mask.device)
    elif mask.dtype == torch.bool:
        visible = mask.any(2).any(1)
    else:
        visible = mask.amax((1, 2)) > mask_floor(mask.dtype)
    return visible.broadcast_to(shape[0], shape[3])
