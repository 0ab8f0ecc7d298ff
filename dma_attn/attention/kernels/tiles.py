"""The tile vocabulary of the attention kernels: load and decode a tile, round P, map the key loop.

A quantised copy holds codes, block scales and fp32 row scales of B * H * S rows. `load_tile`
returns the elements times their block scales, exact in bf16 (at most 7 significant bits); a row's
fp32 scale is applied to the scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...quant.jit import (
    bits,
    block,
    decode_e4m3,
    decode_e8m0,
    decode_element,
    encode_fp8,
    scale_kind,
)


@triton.constexpr_function
def has_row_scale(fmt):
    """True when an fp32 scale multiplies whole rows of scores."""
    return scale_kind(fmt) in ("e4m3", "fp32")


@triton.jit
def load_raw(x, base, row, mask_r, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(R, BLOCK_D) of a strided 16- or 32-bit operand; hidden rows and padding channels are 0."""
    offs_d = tl.arange(0, BLOCK_D)
    at = row[:, None] * x.strides[2] + offs_d.to(tl.int64)[None, :] * x.strides[3]
    return tl.load(base + at, mask=mask_r[:, None] & (offs_d < D)[None, :], other=0.0)


@triton.jit
def load_tile(copy, row, mask_r, D: tl.constexpr, BLOCK_D: tl.constexpr, R: tl.constexpr,
              FORMAT: tl.constexpr):
    """Rows `row` (R,) of a quantised copy: (R, BLOCK_D) bf16, padding channels 0."""
    N_BYTES: tl.constexpr = D * bits(FORMAT) // 8
    offs = tl.arange(0, BLOCK_D * bits(FORMAT) // 8)
    code = tl.load(copy.codes + row[:, None] * N_BYTES + offs[None, :],
                   mask=mask_r[:, None] & (offs < N_BYTES)[None, :], other=0).to(tl.int32)
    if bits(FORMAT) == 4:
        x = tl.join(decode_element(code & 15, FORMAT), decode_element(code >> 4, FORMAT))
        x = x.reshape(R, BLOCK_D)
    else:
        x = decode_element(code, FORMAT)
    if scale_kind(FORMAT) != "fp32":
        BLOCK: tl.constexpr = block(FORMAT, BLOCK_D)
        N: tl.constexpr = (D + BLOCK - 1) // BLOCK
        offs_n = tl.arange(0, BLOCK_D // BLOCK)
        byte = tl.load(copy.scales + row[:, None] * N + offs_n[None, :],
                       mask=mask_r[:, None] & (offs_n < N)[None, :], other=0).to(tl.int32)
        scale = decode_e8m0(byte) if scale_kind(FORMAT) == "e8m0" else decode_e4m3(byte)
        x = (x.reshape(R, BLOCK_D // BLOCK, BLOCK) * scale[:, :, None]).reshape(R, BLOCK_D)
    return x.to(tl.bfloat16)


@triton.jit
def load_row_scale(copy, row, tile, span, mask_r, SPAN: tl.constexpr):
    """fp32 scales of R rows: one each, one a tile of 128, or one for the head."""
    if SPAN == "token":
        return tl.load(copy.row_scales + row, mask=mask_r, other=0.0)
    elif SPAN == "tile":
        return tl.load(copy.row_scales + tile, mask=mask_r, other=0.0)
    else:
        return tl.load(copy.row_scales + span + row * 0, mask=mask_r, other=0.0)


@triton.jit
def key_block(i, lo, gap_lo, gap_hi, BLOCK_N: tl.constexpr):
    """First key of block i of the sequence [lo, gap_lo) then [gap_hi, ...)."""
    first = tl.cdiv(gap_lo - lo, BLOCK_N)
    return tl.where(i < first, lo + i * BLOCK_N, gap_hi + (i - first) * BLOCK_N)


@triton.jit
def n_key_blocks(lo, gap_lo, gap_hi, hi, BLOCK_N: tl.constexpr):
    """Number of blocks of [lo, gap_lo) then [gap_hi, hi)."""
    return tl.cdiv(gap_lo - lo, BLOCK_N) + tl.cdiv(hi - gap_hi, BLOCK_N)


@triton.jit
def round_e4m3(x):
    """fp32 -> the nearest E4M3 value, in bf16 (exact), by integer arithmetic on every GPU."""
    return decode_e4m3(encode_fp8(x, "mxfp8")).to(tl.bfloat16)
