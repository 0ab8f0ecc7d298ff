"""The portable attention kernel: any GPU from sm_80 on, and the interpreter.

    O = softmax(scale * (Q_class K_class^T) + mask) V    over the ranges of `schedule.key_ranges`

             sink     low            diagonal   low
    keys  |  high  |  low  low  low |  high  |  low  low |

One program = BLOCK_M queries of one head; two loops over keys: the high ranges, then the low ones.

Operands: quantised Q and K as (codes, block scales, fp32 row scales), upcast to bf16 in registers;
raw Q and K (16- or 32-bit, any strides) where a class is "none"; V raw or E4M3. Online softmax in
fp32 and base 2. A row whose keys are all hidden gives 0 and LSE -inf. Device needs: 16-bit tensor
cores; FP8 is decoded by integer arithmetic, so sm_80 runs every format.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ...device import interpreting, shared_memory_limit
from ...quant.jit import common_keys, decode_e4m3, key_ranges, sequence
from ...quant.kernels import pointers
from ...quant.rows import Rows
from ..prepare import has_high, operand_span, query_copies
from ..types import CallOptions, PreparedKV, mask_floor, needs_shift
from .tiles import (
    has_row_scale,
    item,
    key_block,
    load_row_scale,
    load_tile,
    n_key_blocks,
    round_e4m3,
)
from .tuning import portable_tiles

LOG2_E = math.log2(math.e)


@triton.jit
def _load_raw(base, strides, row, offs_d, mask_r, D: tl.constexpr):
    """(R, BLOCK_D) of a strided 16- or 32-bit operand; hidden rows and padding channels are 0."""
    at = row[:, None] * strides[2] + offs_d.to(tl.int64)[None, :] * strides[3]
    return tl.load(base + at, mask=mask_r[:, None] & (offs_d < D)[None, :], other=0.0)


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    """a @ b + acc in fp32; fp32 operands in three TF32 products; UPCAST for the interpreter."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def _attend_ranges(acc, row_max, row_sum, queries, q_operand, k_operand, q_scale, shift, pos_m,
                   mask_m, lo, gap_lo, gap_hi, hi, common, seen, keys, values, masks, window,
                   D: tl.constexpr, DV: tl.constexpr,
                   BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, FORMAT: tl.constexpr, SPANS: tl.constexpr,
                   CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_VALID: tl.constexpr,
                   MASK: tl.constexpr, MASK_FLOOR: tl.constexpr, SHIFT: tl.constexpr,
                   FP8_V: tl.constexpr, UPCAST: tl.constexpr):
    """Online softmax over the keys [lo, gap_lo) and [gap_hi, hi), all of one precision class."""
    q_base, q_strides, q_raw_row, q_row, q_tile, q_span = queries
    k_base, k_strides, k_row0, k_tile0, k_span = keys
    v_base, v_strides = values
    valid_ptr, valid_row, valid_stride, mask_ptr, mask_rows, mask_stride = masks
    seen_lo, seen_hi = seen
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    if FORMAT == "none":
        q = _load_raw(q_base, q_strides, q_raw_row, offs_d, mask_m, D)
    else:
        q = load_tile(q_operand, q_row, mask_m, D, BLOCK_D, BLOCK_M, FORMAT, tl.bfloat16)
    row_factor = tl.zeros([BLOCK_M], tl.float32) + q_scale
    if has_row_scale(FORMAT):
        row_factor *= load_row_scale(q_operand, q_row, q_tile, q_span, mask_m,
                                     item(SPANS, 0))
    for i in range(0, n_key_blocks(lo, gap_lo, gap_hi, hi, BLOCK_N)):
        start_n = key_block(i, lo, gap_lo, gap_hi, BLOCK_N)
        pos_n = start_n + tl.arange(0, BLOCK_N)
        mask_n = (pos_n >= seen_lo) & (pos_n < seen_hi)
        if HAS_VALID:
            at = valid_row + pos_n.to(tl.int64) * valid_stride
            seen = tl.load(valid_ptr + at, mask=mask_n, other=0)
            mask_n = mask_n & (seen != 0)
        row_n = k_row0 + pos_n.to(tl.int64)
        # Scores of this block, in base 2
        if FORMAT == "none":
            k = _load_raw(k_base, k_strides, row_n, offs_d, mask_n, D)
        else:
            k = load_tile(k_operand, row_n, mask_n, D, BLOCK_D, BLOCK_N, FORMAT, tl.bfloat16)
        scores = _dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), UPCAST)
        scores = scores * row_factor[:, None]
        if has_row_scale(FORMAT):
            k_scale = load_row_scale(k_operand, row_n, k_tile0 + (pos_n >> 7), k_span, mask_n,
                                     item(SPANS, 1))
            scores = scores * k_scale[None, :]
        if SHIFT and FORMAT == "none":
            scores = scores - shift[:, None]
        # Hidden keys
        if MASK != "none":
            at = mask_rows[:, None] + pos_n.to(tl.int64)[None, :] * mask_stride
            bias = tl.load(mask_ptr + at, mask=mask_m[:, None] & mask_n[None, :], other=0)
            if MASK == "bool":
                scores = tl.where(bias != 0, scores, float("-inf"))
            else:
                bias = bias.to(tl.float32)
                scores = tl.where(bias > MASK_FLOOR, scores + bias * 1.4426950408889634,
                                  float("-inf"))
        if HAS_VALID or (start_n < common[0] or start_n + BLOCK_N > common[1]):
            visible = mask_n[None, :]
            if CAUSAL:
                visible = visible & (pos_n[None, :] <= pos_m[:, None])
            if WINDOW:
                visible = visible & (pos_n[None, :] > pos_m[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        # Online softmax
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.math.exp2(scores - base[:, None])
        decay = tl.math.exp2(row_max - base)
        row_sum = row_sum * decay + tl.sum(p, 1)
        acc = acc * decay[:, None]
        row_max = new_max
        v = _load_raw(v_base, v_strides, row_n, offs_dv, mask_n, DV)
        if FP8_V:
            v = decode_e4m3(v.to(tl.int32)).to(tl.bfloat16)
            p = round_e4m3(p * 256.0)
        acc = _dot(p.to(v.dtype), v, acc, UPCAST)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["n_blocks", "H_Q", "GROUP", "S_Q", "S_KV", "q_tiles", "k_tiles",
                               "window", "diag", "sink"])
def _portable_kernel(q_ptr, q_strides, k_ptr, k_strides, v_ptr, v_strides, out_ptr, out_strides,
                     lse_ptr, q_high, q_low, k_high, k_low, v_scale_ptr, mean_ptr, mask_ptr,
                     mask_strides, valid_ptr, valid_strides, cu_q_ptr, cu_k_ptr, len_ptr,
                     start_ptr, n_blocks, H_Q, GROUP, S_Q, S_KV, q_tiles, k_tiles, scale,
                     quantised_scale, window, diag, sink, D: tl.constexpr, DV: tl.constexpr,
                     BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_N: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr,
                     HIGH_SPANS: tl.constexpr, LOW_SPANS: tl.constexpr, HAS_HIGH: tl.constexpr,
                     CAUSAL: tl.constexpr, TOP_LEFT: tl.constexpr, WINDOW: tl.constexpr,
                     VARLEN: tl.constexpr, HAS_LEN: tl.constexpr, HAS_VALID: tl.constexpr,
                     MASK: tl.constexpr, MASK_FLOOR: tl.constexpr, SHIFT: tl.constexpr,
                     FP8_V: tl.constexpr, STORE_LSE: tl.constexpr, UPCAST: tl.constexpr):
    # Ids and offsets: the longest causal blocks start first
    bh = (tl.program_id(0) // n_blocks).to(tl.int64)
    block = n_blocks - 1 - tl.program_id(0) % n_blocks
    b = bh // H_Q
    h = bh % H_Q
    H_KV = H_Q // GROUP
    h_kv = h // GROUP
    first_q, n_q = sequence(b, cu_q_ptr, len_ptr, S_Q, VARLEN, False)
    first_k, kv_len = sequence(b, cu_k_ptr, len_ptr, S_KV, VARLEN, HAS_LEN)
    offset = kv_len - n_q
    if TOP_LEFT:
        offset = 0
    pos_0 = (offset & -BLOCK_M) + block * BLOCK_M
    q_lo = tl.maximum(pos_0, offset)
    q_hi = tl.minimum(pos_0 + BLOCK_M, offset + n_q)
    if q_lo >= q_hi:
        return
    start = 0
    if HAS_VALID:
        start = tl.load(start_ptr + b)
    lo, sink_end, diag_lo, diag_hi, hi = key_ranges(q_lo, q_hi, start, kv_len, window, diag, sink,
                                                    CAUSAL)
    common = common_keys(q_lo, q_hi, kv_len, window, CAUSAL)
    # Keys that some row of the block sees: others are not read, whatever they hold
    seen = (q_lo - window + 1 if WINDOW else 0, tl.minimum(kv_len, q_hi) if CAUSAL else kv_len)
    pos_m = pos_0 + tl.arange(0, BLOCK_M)
    i_q = (pos_m - offset).to(tl.int64)
    mask_m = (pos_m >= q_lo) & (pos_m < q_hi)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    if VARLEN:
        batch = b * 0
        q_head = h
        k_head = h_kv
        q_tile0 = (first_q >> 7) + 2 * b
        k_tile0 = (first_k >> 7) + 2 * b
    else:
        batch = b
        q_head = bh
        k_head = b * H_KV + h_kv
        q_tile0 = b * 0
        k_tile0 = b * 0
    q_row = q_head * S_Q + first_q + i_q
    k_row0 = k_head * S_KV + first_k
    q_tile = q_head * q_tiles + q_tile0 + (pos_m >> 7) - (offset >> 7)
    k_tile0 += k_head * k_tiles
    k_span = b * H_KV + h_kv
    q_base = q_ptr + batch * q_strides[0] + h * q_strides[1]
    values = (v_ptr + batch * v_strides[0] + h_kv * v_strides[1] - k_head * S_KV * v_strides[2],
              v_strides)
    k_base = k_ptr + batch * k_strides[0] + h_kv * k_strides[1] - k_head * S_KV * k_strides[2]
    mask_rows = b * mask_strides[0] + h * mask_strides[1] + i_q * mask_strides[2]
    masks = (valid_ptr, b * valid_strides[0], valid_strides[1], mask_ptr, mask_rows,
             mask_strides[3])
    # q . mean_k: in the LSE, and in scores of raw K
    shift = tl.zeros([BLOCK_M], tl.float32)
    if SHIFT:
        raw = _load_raw(q_base, q_strides, first_q + i_q, offs_d, mask_m, D).to(tl.float32)
        mean = tl.load(mean_ptr + k_span * D + offs_d, mask=offs_d < D, other=0.0)
        shift = tl.sum(raw * mean[None, :], 1) * scale
    # State
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # Ranges: high = sink and diagonal, low = the rest
    queries = (q_base, q_strides, first_q + i_q, q_row, q_tile, bh)
    keys = (k_base, k_strides, k_row0, k_tile0, k_span)
    if HAS_HIGH:
        acc, row_max, row_sum = _attend_ranges(
            acc, row_max, row_sum, queries, q_high, k_high,
            scale if HIGH == "none" else quantised_scale, shift, pos_m, mask_m, lo, sink_end,
            diag_lo, diag_hi, common, seen, keys, values, masks, window, D, DV, BLOCK_D,
            BLOCK_DV, BLOCK_M, BLOCK_N, HIGH, HIGH_SPANS, CAUSAL, WINDOW, HAS_VALID, MASK,
            MASK_FLOOR, SHIFT, FP8_V, UPCAST)
    acc, row_max, row_sum = _attend_ranges(
        acc, row_max, row_sum, queries, q_low, k_low,
        scale if LOW == "none" else quantised_scale, shift, pos_m, mask_m, sink_end, diag_lo,
        diag_hi, hi, common, seen, keys, values, masks, window, D, DV, BLOCK_D, BLOCK_DV,
        BLOCK_M, BLOCK_N, LOW, LOW_SPANS, CAUSAL, WINDOW, HAS_VALID, MASK, MASK_FLOOR, SHIFT,
        FP8_V, UPCAST)
    # Store
    inverse = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    acc = acc * inverse[:, None]
    if FP8_V:
        v_scale = tl.load(v_scale_ptr + k_span * DV + offs_dv, mask=offs_dv < DV, other=0.0)
        acc = acc * (v_scale[None, :] * 0.00390625)
    at = (first_q + i_q)[:, None] * out_strides[2] + offs_dv.to(tl.int64)[None, :] * out_strides[3]
    tl.store(out_ptr + batch * out_strides[0] + h * out_strides[1] + at,
             acc.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & (offs_dv < DV)[None, :])
    if STORE_LSE:
        lse = (row_max + tl.math.log2(row_sum) + shift) * 0.6931471805599453
        tl.store(lse_ptr + q_row, lse, mask=mask_m)


def launch(
    q: torch.Tensor,
    kv: PreparedKV,
    call: CallOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Fill out (B, H_q, S_q, Dv) and lse (B, H_q, S_q), or (1, H_q, total, ...) when packed."""
    if out.numel() == 0:
        return
    config = kv.config.canonical()
    _, kv_heads, n_kv, head_dim, value_dim = kv.shape
    heads, n_q = q.shape[1:3]
    n, longest = kv.rows.n, call.longest_q
    offset = None
    formats = (config.high_format, config.low_format)
    spans = [
        tuple(operand_span(f if f.quantised else None, kv.config, query) for query in (True, False))
        for f in formats
    ]
    if "tile" in (spans[0][0], spans[1][0]):
        offset = _query_offsets(kv.rows, call, n_q, n_kv, q.device)
    q_rows = Rows(n, longest, cu=call.cu_q, offset=offset)
    q_high, q_low = query_copies(q, kv, q_rows, call.scale, triton=True)
    block_d = max(triton.next_power_of_2(head_dim), 32)
    # 32 at least: with a 16-wide V tile the sm_90 product of Triton 3.6 gave wrong results
    block_dv = max(triton.next_power_of_2(value_dim), 32)
    tiles = portable_tiles(
        longest, block_d, block_dv, q.element_size(), shared_memory_limit(q.device)
    )
    n_blocks = triton.cdiv(longest, tiles.block_m) + 1
    mask, valid = call.mask, kv.rows.valid
    scale = call.scale * LOG2_E
    _portable_kernel[(n_blocks * n * heads,)](
        q,
        q.stride(),
        kv.k if kv.k is not None else q,
        kv.k.stride() if kv.k is not None else q.stride(),
        kv.v,
        kv.v.stride(),
        out,
        out.stride(),
        lse,
        pointers(q_high),
        pointers(q_low),
        pointers(kv.high),
        pointers(kv.low),
        kv.v_scale,
        kv.mean,
        mask,
        mask.stride() if mask is not None else (0, 0, 0, 0),
        valid,
        valid.stride() if valid is not None else (0, 0),
        call.cu_q,
        kv.rows.cu,
        kv.rows.length,
        kv.start,
        n_blocks,
        heads,
        heads // kv_heads,
        n_q,
        n_kv,
        q_rows.n_tiles(n_q),
        kv.rows.n_tiles(n_kv),
        scale,
        1.0 if kv.config.folds_scale else scale,
        call.window,
        config.diag,
        config.sink,
        D=head_dim,
        DV=value_dim,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        HIGH=config.high,
        LOW=config.low,
        HIGH_SPANS=spans[0],
        LOW_SPANS=spans[1],
        HAS_HIGH=has_high(config),
        CAUSAL=call.causal,
        TOP_LEFT=call.top_left,
        WINDOW=call.window > 0,
        VARLEN=kv.rows.cu is not None,
        HAS_LEN=kv.rows.length is not None,
        HAS_VALID=valid is not None,
        MASK="none" if mask is None else "bool" if mask.dtype == torch.bool else "float",
        MASK_FLOOR=mask_floor(mask.dtype) if mask is not None and mask.is_floating_point() else 0.0,
        SHIFT=needs_shift(kv, call.return_lse),
        FP8_V=kv.v_scale is not None,
        STORE_LSE=lse is not None,
        UPCAST=interpreting(),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _query_offsets(
    rows: Rows, call: CallOptions, n_q: int, n_kv: int, device: torch.device
) -> torch.Tensor:
    """int32 (n,) position of each sequence's first query."""
    if call.top_left:
        return torch.zeros(rows.n, dtype=torch.int32, device=device)
    if call.cu_q is not None and rows.cu is not None:
        return rows.cu.diff() - call.cu_q.diff()
    if rows.length is not None:
        return rows.length.clamp(0, n_kv) - n_q
    return torch.full((rows.n,), n_kv - n_q, dtype=torch.int32, device=device)
