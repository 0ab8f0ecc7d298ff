"""Small Triton reductions beside the quantiser: the K mean, and V in FP8.

    mean (n, H, 1, D) = sum of the finite values of the valid keys / their number
    V (B, H, S, Dv)  -> E4M3 codes of V / scale, scale (n, H, 1, Dv) = channel amax / 448

Both sum or take maxima in an order that does not depend on trailing unused keys, and read their
operand through its strides. The mean has a tolerance against PyTorch's; FP8 V has none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .jit import abs_bits, encode_fp8, sequence
from .kernels import load_rows, program_ids
from .rows import Rows

MEAN_ROWS = 256
V_ROWS = 64


@triton.jit(do_not_specialize=["n_blocks", "H", "S"])
def _mean_partial_kernel(x_ptr, x_strides, partial_ptr, cu_ptr, len_ptr, valid_ptr, valid_strides,
                         n_blocks, H, S, D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
                         ROWS: tl.constexpr, VARLEN: tl.constexpr, HAS_LEN: tl.constexpr,
                         HAS_VALID: tl.constexpr):
    """Sum and count of the finite values of ROWS keys, per channel."""
    i_block, b, h = program_ids(n_blocks, H)
    first, length = sequence(b, cu_ptr, len_ptr, S, VARLEN, HAS_LEN)
    begin = i_block.to(tl.int64) * ROWS
    if begin >= length:
        return
    offs_d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    count = tl.zeros([BLOCK_D], tl.float32)
    batch = b * 0 if VARLEN else b
    base = x_ptr + batch * x_strides[0] + h * x_strides[1]
    for i in range(0, ROWS, T):
        rows = begin + i + tl.arange(0, T)
        mask_t = rows < length
        if HAS_VALID:
            valid = tl.load(valid_ptr + b * valid_strides[0] + rows * valid_strides[1],
                            mask=mask_t, other=0)
            mask_t = mask_t & (valid != 0)
        mask = mask_t[:, None] & (offs_d < D)[None, :]
        at = (first + rows)[:, None] * x_strides[2] + offs_d.to(tl.int64)[None, :] * x_strides[3]
        x = tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
        finite = mask & (abs_bits(x) < 0x7F800000)
        total += tl.sum(tl.where(finite, x, 0.0), 0)
        count += tl.sum(finite.to(tl.float32), 0)
    out = partial_ptr + (((b * H + h) * n_blocks + i_block) * 2) * BLOCK_D + offs_d
    tl.store(out, total)
    tl.store(out + BLOCK_D, count)


@triton.jit(do_not_specialize=["n_chunks", "H", "S"])
def _mean_final_kernel(partial_ptr, mean_ptr, cu_ptr, len_ptr, H, S, n_chunks, D: tl.constexpr,
                       BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
                       VARLEN: tl.constexpr, HAS_LEN: tl.constexpr):
    """Combine the partial sums in a fixed order that trailing unused keys do not change."""
    bh = tl.program_id(0).to(tl.int64)
    _, length = sequence(bh // H, cu_ptr, len_ptr, S, VARLEN, HAS_LEN)
    offs_d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    count = tl.zeros([BLOCK_D], tl.float32)
    used = tl.cdiv(length, ROWS)
    for c in range(0, used, CHUNKS):
        chunk = c + tl.arange(0, CHUNKS)
        at = ((bh * n_chunks + chunk) * 2 * BLOCK_D)[:, None] + offs_d[None, :]
        mask = (chunk < used)[:, None]
        total += tl.sum(tl.load(partial_ptr + at, mask=mask, other=0.0), 0)
        count += tl.sum(tl.load(partial_ptr + at + BLOCK_D, mask=mask, other=0.0), 0)
    mean = tl.div_rn(total, tl.maximum(count, 1.0))
    tl.store(mean_ptr + bh * D + offs_d, mean, mask=offs_d < D)


@triton.jit(do_not_specialize=["n_blocks", "H", "S"])
def _v_fp8_kernel(v_ptr, v_strides, amax_ptr, data_ptr, scale_ptr, cu_ptr, len_ptr, valid_ptr,
                  valid_strides, n_blocks, H, S, D: tl.constexpr, BLOCK_D: tl.constexpr,
                  T: tl.constexpr, VARLEN: tl.constexpr, HAS_LEN: tl.constexpr,
                  HAS_VALID: tl.constexpr, ENCODE: tl.constexpr):
    """Channel maxima of V over the valid keys (ENCODE False), then E4M3 codes (True)."""
    i_block, b, h = program_ids(n_blocks, H)
    first, length = sequence(b, cu_ptr, len_ptr, S, VARLEN, HAS_LEN)
    rows = i_block.to(tl.int64) * T + tl.arange(0, T)
    if i_block * T >= length and (not ENCODE or i_block > 0):
        return
    v = load_rows(v_ptr, v_strides, v_ptr, v_strides, valid_ptr, valid_strides, b, h, first, rows,
                   length, 1.0, D, BLOCK_D, T, VARLEN, HAS_VALID, False, False, False)
    offs_d = tl.arange(0, BLOCK_D)
    span = (b * H + h) * D + offs_d
    if ENCODE:
        amax = tl.load(amax_ptr + span, mask=offs_d < D, other=0).to(tl.float32, bitcast=True)
        scale = tl.div_rn(amax, 448.0)
        scale = tl.where(scale == 0.0, 1.0, scale)
        bad = abs_bits(v) >= 0x7F800000
        x = tl.div_rn(v, scale[None, :] + tl.zeros_like(v))
        codes = tl.where(bad, 0x7F, encode_fp8(tl.where(bad, 0.0, x), "mxfp8"))
        batch = h if VARLEN else b * H + h
        at = (batch * S + first + rows)[:, None] * D + offs_d[None, :]
        tl.store(data_ptr + at, codes.to(tl.uint8),
                 mask=(rows < length)[:, None] & (offs_d < D)[None, :])
        if i_block == 0:
            tl.store(scale_ptr + span, scale, mask=offs_d < D)
    else:
        raw = abs_bits(v)
        tl.atomic_max(amax_ptr + span, tl.max(tl.where(raw < 0x7F800000, raw, 0), 0),
                      mask=offs_d < D)


def launch_key_mean(k: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Mean of K (B, H, S, D) over each sequence's valid keys: (n, H, 1, D) float32."""
    _, heads, size, head_dim = k.shape
    mean = torch.zeros(rows.n, heads, 1, head_dim, dtype=torch.float32, device=k.device)
    if k.numel() == 0 or rows.longest == 0:
        return mean
    block_d = triton.next_power_of_2(head_dim)
    n_chunks = triton.cdiv(rows.longest, MEAN_ROWS)
    partial = torch.empty(
        rows.n * heads, n_chunks, 2, block_d, dtype=torch.float32, device=k.device
    )
    flags = rows.flags
    _mean_partial_kernel[(n_chunks * rows.n * heads,)](
        k,
        k.stride(),
        partial,
        rows.cu,
        rows.length,
        rows.valid,
        rows.valid.stride() if rows.valid is not None else (0, 0),
        n_chunks,
        heads,
        size,
        D=head_dim,
        BLOCK_D=block_d,
        T=max(4096 // block_d, 16),
        ROWS=MEAN_ROWS,
        **flags,
    )
    del flags["HAS_VALID"]
    _mean_final_kernel[(rows.n * heads,)](
        partial,
        mean,
        rows.cu,
        rows.length,
        heads,
        size,
        n_chunks,
        D=head_dim,
        BLOCK_D=block_d,
        ROWS=MEAN_ROWS,
        CHUNKS=16,
        **flags,
    )
    return mean


def launch_v_fp8(v: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """V (B, H, S, D) -> E4M3 codes uint8 of the same shape, channel scales (n, H, 1, D) float32."""
    _, heads, size, head_dim = v.shape
    codes = torch.empty(v.shape, dtype=torch.uint8, device=v.device)
    scale = torch.ones(rows.n, heads, 1, head_dim, dtype=torch.float32, device=v.device)
    if v.numel() == 0 or rows.longest == 0:
        return codes, scale
    amax = torch.zeros(rows.n, heads, head_dim, dtype=torch.int32, device=v.device)
    blocks = triton.cdiv(rows.longest, V_ROWS)
    for encode_pass in (False, True):
        _v_fp8_kernel[(blocks * rows.n * heads,)](
            v,
            v.stride(),
            amax,
            codes,
            scale,
            rows.cu,
            rows.length,
            rows.valid,
            rows.valid.stride() if rows.valid is not None else (0, 0),
            blocks,
            heads,
            size,
            D=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            T=V_ROWS,
            ENCODE=encode_pass,
            enable_fp_fusion=False,
            **rows.flags,
        )
    return codes, scale
