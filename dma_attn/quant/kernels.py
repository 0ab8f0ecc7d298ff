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

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..device import device_guard
from ..formats import BlockFormat
from ..schedule import TILE
from .encode import encode
from .jit import abs_bits, bits, block, hadamard, item, scale_kind, sequence
from .rows import Rows
from .tensor import BlockScaledTensor


class Strided(NamedTuple):
    """An operand with any strides: (pointer, strides); pointer None where there is none."""

    ptr: torch.Tensor | None
    strides: tuple[int, ...]


class RowArgs(NamedTuple):
    """`Rows` as kernel arguments, contiguous; None where there is none."""

    cu: torch.Tensor | None
    length: torch.Tensor | None
    valid: torch.Tensor | None


class Quantised(NamedTuple):
    """A quantised copy as kernel arguments; None for what its format lacks."""

    codes: torch.Tensor | None
    scales: torch.Tensor | None
    row_scales: torch.Tensor | None


@dataclass(frozen=True)
class TileSpec:
    """Compile-time shape of a tile: T rows, D channels padded to BLOCK_D, rotated or not."""

    T: int
    D: int
    BLOCK_D: int
    ROTATE: bool = False


@triton.jit
def program_ids(n_blocks, H):
    """Block of rows, sequence and head of this program; one grid axis, so that none overflows."""
    i_block = tl.program_id(0) % n_blocks
    bh = tl.program_id(0) // n_blocks
    return i_block, (bh // H).to(tl.int64), (bh % H).to(tl.int64)


@triton.jit
def counted(valid_ptr, b, rows, mask_t, S):
    """Which of `rows` count: in range (mask_t) and valid, for valid (n, S)."""
    if valid_ptr is not None:
        mask_t = mask_t & (tl.load(valid_ptr + b * S + rows, mask=mask_t, other=0) != 0)
    return mask_t


@triton.jit
def load_rows(x, mean, row_args, b, h, first, rows, length, size, multiplier, S: tl.constexpr):
    """T transformed rows in fp32; rows out of range or not valid are zeros."""
    T: tl.constexpr = S.T
    D: tl.constexpr = S.D
    BLOCK_D: tl.constexpr = S.BLOCK_D
    offs_d = tl.arange(0, BLOCK_D)
    mask_t = counted(row_args.valid, b, rows, (rows >= 0) & (rows < length), size)
    mask = mask_t[:, None] & (offs_d < D)[None, :]
    offs_d = offs_d.to(tl.int64)[None, :]
    batch = b if row_args.cu is None else b * 0
    base = x.ptr + batch * x.strides[0] + h * x.strides[1]
    at = (first + rows)[:, None] * x.strides[2] + offs_d * x.strides[3]
    y = tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
    if multiplier is not None:
        y = y * multiplier
    if mean.ptr is not None:
        base = mean.ptr + b * mean.strides[0] + h * mean.strides[1]
        at = rows[:, None] * mean.strides[2] + offs_d * mean.strides[3]
        y = y - tl.load(base + at, mask=mask, other=0.0)
    if S.ROTATE:
        y = hadamard(y, D, T, BLOCK_D)
    return y


@triton.jit
def common(row_scale):
    """The value that all rows share (an integer maximum over the bits keeps NaN)."""
    return tl.max(row_scale.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)


@triton.jit
def _store_copy(x, span_amax, copy, row, tile, span, mask_t, S: tl.constexpr, C: tl.constexpr):
    """Quantise x (T, BLOCK_D) as C = (format, rule, span) says; store codes and scales."""
    T: tl.constexpr = S.T
    D: tl.constexpr = S.D
    BLOCK_D: tl.constexpr = S.BLOCK_D
    FORMAT: tl.constexpr = item(C, 0)
    RULE: tl.constexpr = item(C, 1)
    SPAN: tl.constexpr = item(C, 2)
    codes, scales, row_scale = encode(x, span_amax, FORMAT, RULE, SPAN, T, BLOCK_D)
    if bits(FORMAT) == 4:
        low, high = tl.split(codes.reshape(T, BLOCK_D // 2, 2))
        codes = low | (high << 4)
    N_BYTES: tl.constexpr = D * bits(FORMAT) // 8
    offs = tl.arange(0, BLOCK_D * bits(FORMAT) // 8)
    tl.store(copy.codes + row[:, None] * N_BYTES + offs[None, :], codes.to(tl.uint8),
             mask=mask_t[:, None] & (offs < N_BYTES)[None, :])
    if scale_kind(FORMAT) != "fp32":
        BLOCK: tl.constexpr = block(FORMAT, BLOCK_D)
        N: tl.constexpr = (D + BLOCK - 1) // BLOCK
        offs_n = tl.arange(0, BLOCK_D // BLOCK)
        tl.store(copy.scales + row[:, None] * N + offs_n[None, :], scales.to(tl.uint8),
                 mask=mask_t[:, None] & (offs_n < N)[None, :])
    if scale_kind(FORMAT) != "e8m0":
        if SPAN == "token":
            tl.store(copy.row_scales + row, row_scale, mask=mask_t)
        elif SPAN == "tile":
            tl.store(copy.row_scales + tile, common(row_scale))
        else:
            tl.store(copy.row_scales + span, common(row_scale))


@triton.jit(do_not_specialize=["n_blocks", "H", "S", "longest", "n_tiles",
                               "amax_stride"])
def _quantise_kernel(x, mean, high, low, amax_ptr, amax_stride, row_args, offset_ptr, n_blocks, H,
                     S, longest, n_tiles, multiplier, SPEC: tl.constexpr, HIGH: tl.constexpr,
                     LOW: tl.constexpr):
    i_block, b, h = program_ids(n_blocks, H)
    first, length = sequence(b, row_args.cu, row_args.length, S, longest)
    begin = i_block.to(tl.int64) * SPEC.T
    if offset_ptr is not None:
        begin -= tl.load(offset_ptr + b) & (SPEC.T - 1)
    if begin >= length:
        return
    rows = begin + tl.arange(0, SPEC.T)
    y = load_rows(x, mean, row_args, b, h, first, rows, length, S, multiplier, SPEC)
    mask_t = (rows >= 0) & (rows < length)
    # Where the copies lie: (B, H, S, ...), packed sequences (1, H, total, ...)
    if row_args.cu is not None:
        plane = h
        tile = h * n_tiles + (first >> 7) + 2 * b + i_block
    else:
        plane = b * H + h
        tile = plane * n_tiles + i_block
    row = plane * S + first + rows
    span = (b * H + h) * amax_stride
    amax = 0
    if amax_ptr is not None:
        amax = tl.load(amax_ptr + span)
    if HIGH is not None:
        _store_copy(y, amax, high, row, tile, span, mask_t, SPEC, HIGH)
    if LOW is not None:
        _store_copy(y, amax, low, row, tile, span, mask_t, SPEC, LOW)


@triton.jit(do_not_specialize=["n_blocks", "H", "S", "longest", "amax_stride"])
def _span_amax_kernel(x, mean, amax_ptr, amax_stride, row_args, n_blocks, H, S, longest, multiplier,
                      SPEC: tl.constexpr):
    """Bits of the largest finite transformed |x| of a head: integer maxima commute, so exact."""
    i_block, b, h = program_ids(n_blocks, H)
    first, length = sequence(b, row_args.cu, row_args.length, S, longest)
    rows = i_block.to(tl.int64) * SPEC.T + tl.arange(0, SPEC.T)
    raw = abs_bits(load_rows(x, mean, row_args, b, h, first, rows, length, S, multiplier, SPEC))
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
    tile_rows = TILE if "tile" in spans else max(4096 // block_d, 16)
    n_tiles = rows.n_tiles(size)
    n_spans = rows.n * heads
    copies = [
        _allocate(x, f, span, n_tiles, rows, whole)
        for f, span in zip((high, low), spans, strict=True)
    ]
    if x.numel() == 0 or rows.longest == 0:
        for copy in copies:
            if copy is not None and copy.global_scale is not None:
                copy.global_scale.fill_(1.0)
        return copies[0], copies[1]
    shared = {
        "x": Strided(x, x.stride()),
        "mean": strided(mean, 4),
        "amax_stride": 0 if whole else 1,
        "row_args": row_arguments(rows),
        "H": heads,
        "S": size,
        "longest": rows.longest,
        "multiplier": multiplier,
        "SPEC": TileSpec(tile_rows, head_dim, block_d, rotate),
        "num_warps": 8 if tile_rows * block_d > 8192 else 4,
        "enable_fp_fusion": False,
    }
    blocks = -(-rows.longest // tile_rows)
    amax = None
    if "head" in spans:
        amax = torch.zeros(n_spans, dtype=torch.int32, device=x.device)
        _span_amax_kernel[(blocks * n_spans,)](amax_ptr=amax, n_blocks=blocks, **shared)
    blocks += rows.offset is not None
    _quantise_kernel[(blocks * n_spans,)](
        high=quantised(copies[0]),
        low=quantised(copies[1]),
        amax_ptr=amax,
        offset_ptr=rows.offset,
        n_blocks=blocks,
        n_tiles=n_tiles,
        HIGH=None if high is None else (high.name, high.resolve_rule(scale_rule), spans[0]),
        LOW=None if low is None else (low.name, low.resolve_rule(scale_rule), spans[1]),
        **shared,
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
    spans = tuple(
        "token" if f is None else f.resolve_granularity(granularity) for f in (high, low)
    )
    with device_guard(x.device):
        copies = launch_quantise(
            x4,
            high,
            low,
            Rows(x4.shape[0], x4.shape[2]),
            mean=None if mean is None else _four_dims(mean.broadcast_to(x.shape)),
            rotate=rotate,
            scale_rule=scale_rule,
            spans=("head" if spans[0] == "tensor" else spans[0],
                   "head" if spans[1] == "tensor" else spans[1]),
            whole=True,
        )
    high_copy, low_copy = (None if c is None else _reshape(c, x.shape) for c in copies)
    return high_copy, low_copy


def _four_dims(x: torch.Tensor) -> torch.Tensor:
    """View as (B, H, S, D); more than two leading dims are flattened (a copy if they must be)."""
    if x.dim() > 4:
        return x.flatten(0, x.dim() - 4)
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
        row_scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    if row_scale is not None and fmt.scale == "fp32":
        return BlockScaledTensor(data, row_scale, None, fmt.name, x.shape)
    scales = torch.empty(
        batch, heads, size, fmt.n_blocks(head_dim), dtype=torch.uint8, device=x.device
    )
    return BlockScaledTensor(data, scales, row_scale, fmt.name, x.shape)


def strided(x: torch.Tensor | None, rank: int) -> Strided:
    """A tensor and its strides as a kernel argument; None and zeros for an absent one."""
    return Strided(None, (0,) * rank) if x is None else Strided(x, x.stride())


def row_arguments(rows: Rows) -> RowArgs:
    """`Rows` as a kernel argument."""
    return RowArgs(rows.cu, rows.length, rows.valid)


def quantised(copy: BlockScaledTensor | None) -> Quantised:
    """A quantised copy as a kernel argument."""
    if copy is None:
        return Quantised(None, None, None)
    if copy.scales.dtype == torch.float32:
        return Quantised(copy.data, None, copy.scales)
    return Quantised(copy.data, copy.scales, copy.global_scale)
