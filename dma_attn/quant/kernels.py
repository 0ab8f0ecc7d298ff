"""The fused Triton quantiser.

    x (B, H, S, D) 16- or 32-bit, any strides, read once
      -> fp32 -> (x * multiplier) -> (x - mean) -> Hadamard -> high copy: codes, scales
                                                            -> low copy: packed codes, scales

Operands: codes uint8 (B, H, S, D) or (B, H, S, D / 2); block scales uint8 (B, H, S, n_blocks); fp32
row scales (B, H, S), (B, H, n_tiles) or (B, H). Packed sequences (varlen) are (1, H, total, D) with
cu_seqlens. Invalid keys count as zeros; rows beyond a sequence's length are not written. Runs on
every GPU that Triton compiles for and under its interpreter; bit-equal to `quant.reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import device_guard
from ..formats import BlockFormat
from ..schedule import TILE
from .jit import abs_bits, bits, encode, hadamard, scale_kind, sequence
from .rows import Rows
from .tensor import BlockScaledTensor


@triton.jit
def program_ids(n_blocks, H):
    """Block of rows, sequence and head of this program; one grid axis, so that none overflows."""
    i_block = tl.program_id(0) % n_blocks
    bh = tl.program_id(0) // n_blocks
    return i_block, (bh // H).to(tl.int64), (bh % H).to(tl.int64)


@triton.jit
def load_rows(x_ptr, x_strides, mean_ptr, mean_strides, valid_ptr, valid_strides, b, h, first,
               rows, length, multiplier, D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
               VARLEN: tl.constexpr, HAS_VALID: tl.constexpr, SMOOTH: tl.constexpr,
               ROTATE: tl.constexpr, MULTIPLY: tl.constexpr):
    """T transformed rows in fp32; rows out of range or not valid are zeros."""
    offs_d = tl.arange(0, BLOCK_D)
    mask_t = (rows >= 0) & (rows < length)
    batch = b * 0 if VARLEN else b
    if HAS_VALID:
        valid = tl.load(valid_ptr + b * valid_strides[0] + rows * valid_strides[1], mask=mask_t,
                        other=0)
        mask_t = mask_t & (valid != 0)
    mask = mask_t[:, None] & (offs_d < D)[None, :]
    at = (first + rows)[:, None] * x_strides[2] + offs_d.to(tl.int64)[None, :] * x_strides[3]
    base = x_ptr + batch * x_strides[0] + h * x_strides[1]
    x = tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
    if MULTIPLY:
        x = x * multiplier
    if SMOOTH:
        at = rows[:, None] * mean_strides[2] + offs_d.to(tl.int64)[None, :] * mean_strides[3]
        mean = tl.load(mean_ptr + b * mean_strides[0] + h * mean_strides[1] + at, mask=mask,
                       other=0.0)
        x = x - mean
    if ROTATE:
        x = hadamard(x, D, T, BLOCK_D)
    return x


@triton.jit
def _common(row_scale):
    """The value that all rows share (an integer maximum over the bits keeps NaN)."""
    return tl.max(row_scale.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)


@triton.jit
def _store_copy(x, span_amax, copy, row, tile, mask_t, bh, D: tl.constexpr, BLOCK_D: tl.constexpr,
                T: tl.constexpr, FORMAT: tl.constexpr, RULE: tl.constexpr, SPAN: tl.constexpr):
    """Quantise x (T, BLOCK_D) and store codes, block scales and row scales of one copy."""
    data_ptr, scales_ptr, row_scale_ptr = copy
    codes, scales, row_scale = encode(x, span_amax, FORMAT, RULE, SPAN, T, BLOCK_D)
    if bits(FORMAT) == 4:
        low, high = tl.split(codes.reshape(T, BLOCK_D // 2, 2))
        codes = low | (high << 4)
    N_BYTES: tl.constexpr = D * bits(FORMAT) // 8
    offs = tl.arange(0, BLOCK_D * bits(FORMAT) // 8)
    tl.store(data_ptr + row[:, None] * N_BYTES + offs[None, :], codes.to(tl.uint8),
             mask=mask_t[:, None] & (offs < N_BYTES)[None, :])
    if scale_kind(FORMAT) != "fp32":
        BLOCK: tl.constexpr = 32 if scale_kind(FORMAT) == "e8m0" else 16
        N: tl.constexpr = (D + BLOCK - 1) // BLOCK
        offs_n = tl.arange(0, BLOCK_D // BLOCK)
        tl.store(scales_ptr + row[:, None] * N + offs_n[None, :], scales.to(tl.uint8),
                 mask=mask_t[:, None] & (offs_n < N)[None, :])
    if scale_kind(FORMAT) != "e8m0":
        if SPAN == "token":
            tl.store(row_scale_ptr + row, row_scale, mask=mask_t)
        elif SPAN == "tile":
            tl.store(row_scale_ptr + tile, _common(row_scale))
        else:
            tl.store(row_scale_ptr + bh, _common(row_scale))


@triton.jit(do_not_specialize=["n_blocks", "H", "S", "n_tiles", "amax_stride"])
def _quantise_kernel(x_ptr, x_strides, mean_ptr, mean_strides, high, low, amax_ptr, amax_stride,
                     cu_ptr, len_ptr, valid_ptr, valid_strides, offset_ptr, n_blocks, H, S,
                     n_tiles, multiplier, D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
                     HIGH: tl.constexpr, HIGH_RULE: tl.constexpr, HIGH_SPAN: tl.constexpr,
                     LOW: tl.constexpr, LOW_RULE: tl.constexpr, LOW_SPAN: tl.constexpr,
                     VARLEN: tl.constexpr, HAS_LEN: tl.constexpr, HAS_VALID: tl.constexpr,
                     HAS_OFFSET: tl.constexpr, SMOOTH: tl.constexpr, ROTATE: tl.constexpr,
                     MULTIPLY: tl.constexpr):
    i_block, b, h = program_ids(n_blocks, H)
    first, length = sequence(b, cu_ptr, len_ptr, S, VARLEN, HAS_LEN)
    begin = i_block.to(tl.int64) * T
    if HAS_OFFSET:
        begin -= tl.load(offset_ptr + b) & (T - 1)
    rows = begin + tl.arange(0, T)
    if begin >= length:
        return
    x = load_rows(x_ptr, x_strides, mean_ptr, mean_strides, valid_ptr, valid_strides, b, h, first,
                   rows, length, multiplier, D, BLOCK_D, T, VARLEN, HAS_VALID, SMOOTH, ROTATE,
                   MULTIPLY)
    mask_t = (rows >= 0) & (rows < length)
    if VARLEN:
        bh = h
        tile = h * n_tiles + (first >> 7) + 2 * b + i_block
        span = b * H + h
    else:
        bh = b * H + h
        tile = bh * n_tiles + i_block
        span = bh
    row = bh * S + first + rows
    amax = 0
    if HIGH_SPAN == "head" or LOW_SPAN == "head":
        amax = tl.load(amax_ptr + span * amax_stride)
    if HIGH != "none":
        _store_copy(x, amax, high, row, tile, mask_t, span * amax_stride, D, BLOCK_D, T, HIGH,
                    HIGH_RULE, HIGH_SPAN)
    if LOW != "none":
        _store_copy(x, amax, low, row, tile, mask_t, span * amax_stride, D, BLOCK_D, T, LOW,
                    LOW_RULE, LOW_SPAN)


@triton.jit(do_not_specialize=["n_blocks", "H", "S", "amax_stride"])
def _span_amax_kernel(x_ptr, x_strides, mean_ptr, mean_strides, amax_ptr, amax_stride, cu_ptr,
                      len_ptr, valid_ptr, valid_strides, n_blocks, H, S, multiplier,
                      D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, VARLEN: tl.constexpr,
                      HAS_LEN: tl.constexpr, HAS_VALID: tl.constexpr, SMOOTH: tl.constexpr,
                      ROTATE: tl.constexpr, MULTIPLY: tl.constexpr):
    """Bits of the largest finite transformed |x| of a head: integer maxima commute, so exact."""
    i_block, b, h = program_ids(n_blocks, H)
    first, length = sequence(b, cu_ptr, len_ptr, S, VARLEN, HAS_LEN)
    rows = i_block.to(tl.int64) * T + tl.arange(0, T)
    x = load_rows(x_ptr, x_strides, mean_ptr, mean_strides, valid_ptr, valid_strides, b, h, first,
                   rows, length, multiplier, D, BLOCK_D, T, VARLEN, HAS_VALID, SMOOTH, ROTATE,
                   MULTIPLY)
    raw = abs_bits(x)
    raw = tl.where(raw < 0x7F800000, raw, 0)
    tl.atomic_max(amax_ptr + (b * H + h) * amax_stride, tl.max(tl.max(raw, 1), 0))


def launch_quantise(
    x: torch.Tensor,
    high: BlockFormat | None,
    low: BlockFormat | None,
    rows: Rows,
    *,
    mean: torch.Tensor | None = None,
    rotate: bool = False,
    scale_rule: str = "auto",
    spans: tuple[str, str] = ("token", "token"),
    multiplier: float | None = None,
    whole: bool = False,
) -> tuple[BlockScaledTensor | None, BlockScaledTensor | None]:
    """Quantise x (B, H, S, D) to one or two formats in one pass.

    Args:
        mean: float32 (n, H, 1 or S, D), subtracted from x.
        spans: What the fp32 scale of the two copies spans: "token", "tile" or "head".
        multiplier: Factor applied to x first (scale * log2(e), the authors' order).
        whole: "head" means all of x: one scale.
    """
    _, heads, size, head_dim = x.shape
    if mean is not None:
        mean = mean.expand(-1, -1, size, -1)  # stride 0 along the tokens
    block_d = max(triton.next_power_of_2(head_dim), 32)
    spans = (_span(high, spans[0]), _span(low, spans[1]))
    tile_rows = TILE if "tile" in spans else max(4096 // block_d, 16)
    n_tiles = rows.n_tiles(size)
    n_spans = rows.n * heads
    copies = [
        _allocate(x, f, span, n_tiles, rows, whole)
        for f, span in zip((high, low), spans, strict=True)
    ]
    if x.numel() == 0 or rows.longest == 0:
        return copies[0], copies[1]
    shared = {
        "x_ptr": x,
        "x_strides": x.stride(),
        "mean_ptr": mean if mean is not None else x,
        "mean_strides": mean.stride() if mean is not None else (0, 0, 0, 0),
        "amax_ptr": None,
        "amax_stride": 0 if whole else 1,
        "cu_ptr": rows.cu,
        "len_ptr": rows.length,
        "valid_ptr": rows.valid,
        "valid_strides": rows.valid.stride() if rows.valid is not None else (0, 0),
        "H": heads,
        "S": size,
        "multiplier": multiplier if multiplier is not None else 1.0,
        "D": head_dim,
        "BLOCK_D": block_d,
        "T": tile_rows,
        "SMOOTH": mean is not None,
        "ROTATE": rotate,
        "MULTIPLY": multiplier is not None,
        **rows.flags,
    }
    options = {"num_warps": 8 if tile_rows * block_d > 8192 else 4, "enable_fp_fusion": False}
    blocks = triton.cdiv(rows.longest, tile_rows)
    if "head" in spans:
        shared["amax_ptr"] = torch.zeros(n_spans, dtype=torch.int32, device=x.device)
        _span_amax_kernel[(blocks * n_spans,)](**shared, n_blocks=blocks, **options)
    rules = [f.resolve_rule(scale_rule) if f is not None else "" for f in (high, low)]
    blocks += rows.offset is not None
    _quantise_kernel[(blocks * n_spans,)](
        **shared,
        n_blocks=blocks,
        high=pointers(copies[0]),
        low=pointers(copies[1]),
        offset_ptr=rows.offset,
        n_tiles=n_tiles,
        HIGH=high.name if high is not None else "none",
        HIGH_RULE=rules[0],
        HIGH_SPAN=spans[0],
        LOW=low.name if low is not None else "none",
        LOW_RULE=rules[1],
        LOW_SPAN=spans[1],
        HAS_OFFSET=rows.offset is not None,
        **options,
    )
    return copies[0], copies[1]


def quantize_triton(
    x: torch.Tensor,
    formats: tuple[BlockFormat, BlockFormat | None],
    mean: torch.Tensor | None,
    rotate: bool,
    scale_rule: str,
    granularity: str,
) -> tuple[BlockScaledTensor | None, BlockScaledTensor | None]:
    """`quantize_pair` (or `quantize`, with one format) of an x of any rank."""
    x4 = _four_dims(x)
    high, low = (f if f is not None and f.quantised else None for f in formats)
    span = "head" if granularity == "tensor" else granularity
    with device_guard(x.device):
        copies = launch_quantise(
            x4,
            high,
            low,
            Rows(x4.shape[0], x4.shape[2]),
            mean=None if mean is None else _four_dims(mean.broadcast_to(x.shape)),
            rotate=rotate,
            scale_rule=scale_rule,
            spans=(span, span),
            whole=True,
        )
    high_copy, low_copy = (None if c is None else _reshape(c, x.shape) for c in copies)
    return high_copy, low_copy


def _span(fmt: BlockFormat | None, span: str) -> str:
    """The span of a copy's fp32 scale; one that its format lacks means a token."""
    lacks = fmt is None or ("tensor" if span == "head" else span) not in fmt.granularities
    return "token" if lacks else span


def _four_dims(x: torch.Tensor) -> torch.Tensor:
    """View as (B, H, S, D); more than two leading dims are flattened (a copy if they must be)."""
    if x.dim() > 4:
        return x.reshape(-1, *x.shape[-3:])
    return x[(None,) * (4 - x.dim())]


def _reshape(copy: BlockScaledTensor, shape: torch.Size) -> BlockScaledTensor:
    def back(t: torch.Tensor) -> torch.Tensor:
        if t.dim() == 0:
            return t
        return t.reshape(*shape[:-2], *t.shape[-2:] if len(shape) > 1 else t.shape[-1:])

    second = None if copy.global_scale is None else back(copy.global_scale)
    return BlockScaledTensor(back(copy.data), back(copy.scales), second, copy.format, shape)


def _allocate(
    x: torch.Tensor,
    fmt: BlockFormat | None,
    span: str,
    n_tiles: int,
    rows: Rows,
    whole: bool,
) -> BlockScaledTensor | None:
    if fmt is None:
        return None
    batch, heads, size, head_dim = x.shape
    data = torch.empty(
        batch, heads, size, fmt.row_bytes(head_dim), dtype=torch.uint8, device=x.device
    )
    row_scale = None
    if fmt.scale != "e8m0":
        shape = {
            "token": (batch, heads, size, 1),
            "tile": (batch, heads, n_tiles, 1),
            "head": () if whole else (rows.n, heads, 1, 1),
        }[span]
        row_scale = torch.ones(shape, dtype=torch.float32, device=x.device)
    if row_scale is not None and fmt.scale == "fp32":
        return BlockScaledTensor(data, row_scale, None, fmt.name, x.shape)
    scales = torch.empty(
        batch, heads, size, fmt.n_blocks(head_dim), dtype=torch.uint8, device=x.device
    )
    return BlockScaledTensor(data, scales, row_scale, fmt.name, x.shape)


def pointers(copy: BlockScaledTensor | None) -> tuple[torch.Tensor | None, ...]:
    """(codes, block scales, fp32 row scales): a copy as the kernels' operand tuple."""
    if copy is None:
        return (None, None, None)
    if copy.global_scale is None and copy.scales.dtype == torch.float32:
        return (copy.data, None, copy.scales)
    return (copy.data, copy.scales, copy.global_scale)

