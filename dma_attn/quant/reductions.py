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

from .jit import abs_bits, constant, encode_fp8, sequence
from .kernels import Strided, TileSpec, counted, load_rows, program_ids, row_arguments
from .rows import Rows

MEAN_ROWS = 256
V_ROWS = 64


@triton.jit(do_not_specialize=["n_blocks", "H", "S", "longest"])
def _mean_partial_kernel(x, partial_ptr, row_args, n_blocks, H, S, longest, SPEC: tl.constexpr,
                         ROWS: tl.constexpr):
    """Sum and count of the finite values of ROWS keys, per channel."""
    D: tl.constexpr = SPEC.D
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    T: tl.constexpr = SPEC.T
    i_block, b, h = program_ids(n_blocks, H)
    first, length = sequence(b, row_args.cu, row_args.length, S, longest)
    begin = i_block.to(tl.int64) * ROWS
    if begin >= length:
        return
    offs_d = tl.arange(0, BLOCK_D)
    at_d = offs_d.to(tl.int64)[None, :] * x.strides[3]
    tl.static_assert(ROWS % T == 0)
    total = tl.zeros([BLOCK_D], tl.float32)
    count = tl.zeros([BLOCK_D], tl.float32)
    batch = b if row_args.cu is None else b * 0
    base = x.ptr + batch * x.strides[0] + h * x.strides[1]
    for i in range(0, ROWS, T):
        rows = begin + i + tl.arange(0, T)
        mask_t = counted(row_args.valid, b, rows, rows < length, S)
        mask = mask_t[:, None] & (offs_d < D)[None, :]
        y = tl.load(base + (first + rows)[:, None] * x.strides[2] + at_d, mask=mask, other=0.0)
        y = y.to(tl.float32)
        finite = mask & (abs_bits(y) < 0x7F800000)
        total += tl.sum(tl.where(finite, y, 0.0), 0)
        count += tl.sum(finite.to(tl.float32), 0)
    out = partial_ptr + (((b * H + h) * n_blocks + i_block) * 2) * BLOCK_D + offs_d
    tl.store(out, total)
    tl.store(out + BLOCK_D, count)


@triton.jit(do_not_specialize=["n_chunks", "H", "S", "longest"])
def _mean_final_kernel(partial_ptr, mean_ptr, row_args, H, S, longest, n_chunks, SPEC: tl.constexpr,
                       ROWS: tl.constexpr):
    """Combine the partial sums in a fixed order that trailing unused keys do not change."""
    D: tl.constexpr = SPEC.D
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    T: tl.constexpr = SPEC.T
    bh = tl.program_id(0).to(tl.int64)
    _, length = sequence(bh // H, row_args.cu, row_args.length, S, longest)
    offs_d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    count = tl.zeros([BLOCK_D], tl.float32)
    used = tl.cdiv(length, ROWS)
    for c in range(0, used, T):
        chunk = c + tl.arange(0, T)
        at = ((bh * n_chunks + chunk) * 2 * BLOCK_D)[:, None] + offs_d[None, :]
        mask = (chunk < used)[:, None]
        total += tl.sum(tl.load(partial_ptr + at, mask=mask, other=0.0), 0)
        count += tl.sum(tl.load(partial_ptr + at + BLOCK_D, mask=mask, other=0.0), 0)
    mean = tl.div_rn(total, tl.maximum(count, 1.0))
    tl.store(mean_ptr + bh * D + offs_d, mean, mask=offs_d < D)


@triton.jit(do_not_specialize=["n_blocks", "H", "S", "longest"])
def _v_fp8_kernel(v, amax_ptr, data_ptr, scale_ptr, row_args, n_blocks, H, S, longest,
                  SPEC: tl.constexpr,
                  ENCODE: tl.constexpr):
    """Channel maxima of V over the valid keys (ENCODE False), then E4M3 codes (True)."""
    D: tl.constexpr = SPEC.D
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    T: tl.constexpr = SPEC.T
    i_block, b, h = program_ids(n_blocks, H)
    first, length = sequence(b, row_args.cu, row_args.length, S, longest)
    if i_block * T >= length and (not ENCODE or i_block > 0):
        return
    rows = i_block.to(tl.int64) * T + tl.arange(0, T)
    no_mean = Strided(None, (0, 0, 0, 0))
    x = load_rows(v, no_mean, row_args, b, h, first, rows, length, S, None, SPEC)
    raw = abs_bits(x)
    offs_d = tl.arange(0, BLOCK_D)
    span = (b * H + h) * D + offs_d
    if ENCODE:
        amax = tl.load(amax_ptr + span, mask=offs_d < D, other=0)
        scale = tl.div_rn(amax.to(tl.float32, bitcast=True), constant("E4M3_MAX"))
        scale = tl.where(scale == 0.0, 1.0, scale)
        bad = raw >= 0x7F800000
        codes = encode_fp8(tl.div_rn(tl.where(bad, 0.0, x), scale[None, :] + tl.zeros_like(x)),
                           "mxfp8")
        codes = tl.where(bad, constant("E4M3_NAN"), codes)
        plane = h if row_args.cu is not None else b * H + h
        at = (plane * S + first + rows)[:, None] * D + offs_d[None, :]
        tl.store(data_ptr + at, codes.to(tl.uint8),
                 mask=(rows < length)[:, None] & (offs_d < D)[None, :])
        if i_block == 0:
            tl.store(scale_ptr + span, scale, mask=offs_d < D)
    else:
        finite = tl.max(tl.where(raw < 0x7F800000, raw, 0), 0)
        tl.atomic_max(amax_ptr + span, finite, mask=offs_d < D)


def launch_key_mean(k: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Mean of K (B, H, S, D) over each sequence's valid keys: (n, H, 1, D) float32."""
    _, heads, size, head_dim = k.shape
    mean = torch.empty(rows.n, heads, 1, head_dim, dtype=torch.float32, device=k.device)
    if k.numel() == 0 or rows.longest == 0:
        return mean.zero_()
    block_d = triton.next_power_of_2(head_dim)
    n_chunks = -(-rows.longest // MEAN_ROWS)
    shape = (rows.n * heads, n_chunks, 2, block_d)
    partial = torch.empty(shape, dtype=torch.float32, device=k.device)
    spec = TileSpec(min(max(4096 // block_d, 16), MEAN_ROWS), head_dim, block_d)
    row_args = row_arguments(rows)
    _mean_partial_kernel[(n_chunks * rows.n * heads,)](
        Strided(k, k.stride()),
        partial,
        row_args,
        n_chunks,
        heads,
        size,
        rows.longest,
        SPEC=spec,
        ROWS=MEAN_ROWS,
    )
    spec = TileSpec(16, head_dim, block_d)
    _mean_final_kernel[(rows.n * heads,)](
        partial, mean, row_args, heads, size, rows.longest, n_chunks, SPEC=spec, ROWS=MEAN_ROWS
    )
    return mean


def launch_v_fp8(v: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """V (B, H, S, D) -> E4M3 codes uint8 of the same shape, channel scales (n, H, 1, D) float32."""
    _, heads, size, head_dim = v.shape
    codes = torch.empty(v.shape, dtype=torch.uint8, device=v.device)
    scale = torch.empty(rows.n, heads, 1, head_dim, dtype=torch.float32, device=v.device)
    if v.numel() == 0 or rows.longest == 0:
        return codes, scale.fill_(1.0)
    amax = torch.zeros(rows.n, heads, head_dim, dtype=torch.int32, device=v.device)
    blocks = -(-rows.longest // V_ROWS)
    for encode_pass in (False, True):
        _v_fp8_kernel[(blocks * rows.n * heads,)](
            Strided(v, v.stride()),
            amax,
            codes,
            scale,
            row_arguments(rows),
            blocks,
            heads,
            size,
            rows.longest,
            SPEC=TileSpec(V_ROWS, head_dim, triton.next_power_of_2(head_dim)),
            ENCODE=encode_pass,
            enable_fp_fusion=False,
        )
    return codes, scale
