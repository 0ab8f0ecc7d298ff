"""The portable attention kernel: any GPU from sm_80 on, and the interpreter; with block-scaled
products (`blackwell.py`) the Blackwell kernel.

    O = softmax(scale * (Q_class K_class^T) + mask) V    over the ranges of `schedule.key_ranges`

             sink     low            diagonal   low
    keys  |  high  |  low  low  low |  high  |  low  low |

One program = BLOCK_M queries of one head; two loops over keys: the high ranges, then the low ones.

Operands: quantised Q and K as (codes, block scales, fp32 row scales), upcast to bf16 in registers
or, where K comes by TMA, multiplied as they are; raw Q and K (16- or 32-bit, any strides) where a
class is "none"; V raw or E4M3. Online softmax in fp32 and base 2. A row whose keys are all hidden
gives 0 and LSE -inf. Device needs: 16-bit tensor cores; FP8 is decoded by integer arithmetic, so
sm_80 runs every format. Beside block-scaled products, and on 8.9, E4M3 P and V are multiplied as
they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...device import FP8_VALUES, device_info, interpreting, shared_memory_limit
from ...formats import LOG2_E
from ...quant.jit import common_keys, item, key_ranges, sequence
from ...quant.kernels import Strided, quantised, row_arguments, strided
from ...quant.rows import Rows
from ..prepare import has_high, operand_span, query_copies, widths
from ..types import CallOptions, PreparedKV, mask_floor, needs_shift
from .blackwell import descriptors, emulated, scaled_product
from .tiles import (
    has_row_scale,
    hide,
    key_block,
    load_codes,
    load_raw,
    load_row_scale,
    load_tile,
    n_key_blocks,
    online_softmax,
    product,
    store_result,
)
from .tuning import blackwell_tiles, portable_tiles


@dataclass(frozen=True)
class Spec:
    """Everything that a compiled variant of the kernel depends on, besides operand types.

    Attributes:
        D, DV, BLOCK_D, BLOCK_DV: Head dims and their padded sizes.
        BLOCK_M, BLOCK_N: Queries and keys of a block.
        HIGH, LOW: Format, then the spans of Q's and K's fp32 scales, of the two classes; HIGH is
            None where no tile is high.
        CAUSAL, TOP_LEFT, WINDOW: Visibility rules in use.
        MASK_FLOOR: Additive mask values at or below it hide a key.
        EMULATED: Kinds of scales that block-scaled products are not given (`blackwell.emulated`).
        FP8: P V in E4M3 by FP8 tensor cores, else in bf16, which holds the same values.
        MERGE: They sum a block of keys; fp32 adds what blocks give.
        UPCAST: fp32 products (the interpreter's bf16 product is wrong).
    """

    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_M: int
    BLOCK_N: int
    HIGH: tuple[str, str, str] | None
    LOW: tuple[str, str, str]
    CAUSAL: bool
    TOP_LEFT: bool
    WINDOW: bool
    MASK_FLOOR: float
    EMULATED: tuple[str, ...]
    FP8: bool
    MERGE: bool
    UPCAST: bool


@triton.jit
def _attend_ranges(state, queries, keys, values, masks, ranges, bounds, q_copy, k_copy, k_codes,
                   k_scales, scale, shift, zero, window, SPEC: tl.constexpr, CLASS: tl.constexpr):
    """Online softmax over the keys [lo, gap_lo) and [gap_hi, hi), all of one precision class.

    k_codes, k_scales: TMA descriptors (`blackwell.descriptors`) for block-scaled products, or None.
    """
    D: tl.constexpr = SPEC.D
    DV: tl.constexpr = SPEC.DV
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    UPCAST: tl.constexpr = SPEC.UPCAST
    acc, row_max, row_sum = state
    q, q_base, q_raw_row, q_row, q_tile, q_span, pos_m, mask_m = queries
    k, k_base, k_row0, k_tile0, k_span = keys
    v, v_base, v_scale_ptr = values
    valid_ptr, valid_row, mask_ptr, mask_rows, mask_stride = masks
    lo, gap_lo, gap_hi, hi = ranges
    common, seen_lo, seen_hi = bounds
    FORMAT: tl.constexpr = item(CLASS, 0)
    Q_SPAN: tl.constexpr = item(CLASS, 1)
    K_SPAN: tl.constexpr = item(CLASS, 2)
    M: tl.constexpr = SPEC.BLOCK_M
    N: tl.constexpr = SPEC.BLOCK_N
    row_factor = tl.zeros([M], tl.float32) + scale
    if FORMAT == "none":
        q_tile_data = load_raw(q, q_base, q_raw_row, mask_m, D, BLOCK_D)
    elif k_codes is not None:
        q_tile_data, q_scales = load_codes(q_copy, q_row, mask_m, D, BLOCK_D, FORMAT)
    else:
        q_tile_data = load_tile(q_copy, q_row, mask_m, D, BLOCK_D, M, FORMAT)
    if has_row_scale(FORMAT):
        row_factor *= load_row_scale(q_copy, q_row, q_tile, q_span, mask_m, Q_SPAN)
    for i in range(0, n_key_blocks(lo, gap_lo, gap_hi, hi, N)):
        start_n = key_block(i, lo, gap_lo, gap_hi, N)
        pos_n = start_n + tl.arange(0, N)
        mask_n = (pos_n >= seen_lo) & (pos_n < seen_hi)
        if valid_ptr is not None:
            seen = tl.load(valid_ptr + valid_row + pos_n, mask=mask_n, other=0)
            mask_n = mask_n & (seen != 0)
        row_n = k_row0 + pos_n.to(tl.int64)
        # Scores, in base 2; by TMA come rows that none sees, too, which `hide` takes care of
        if FORMAT != "none" and k_codes is not None:
            scores = scaled_product(
                q_tile_data, q_scales, k_codes.load([(k_row0 + start_n).to(tl.int32), 0]),
                k_scales.load([0, (k_tile0 + (start_n >> 7)).to(tl.int32), 0, 0, 0]), zero, SPEC,
                FORMAT)
        else:
            if FORMAT == "none":
                k_tile_data = load_raw(k, k_base, row_n, mask_n, D, BLOCK_D)
            else:
                k_tile_data = load_tile(k_copy, row_n, mask_n, D, BLOCK_D, N, FORMAT)
            scores = product(q_tile_data, tl.trans(k_tile_data), tl.zeros([M, N], tl.float32),
                             UPCAST)
        scores = scores * row_factor[:, None]
        if has_row_scale(FORMAT):
            k_scale = load_row_scale(k_copy, row_n, k_tile0 + (pos_n >> 7), k_span, mask_n, K_SPAN)
            scores = scores * k_scale[None, :]
        if FORMAT == "none":
            scores = scores - shift[:, None]
        scores = hide(scores, start_n, pos_m, pos_n, mask_n, common, valid_ptr, mask_ptr, mask_m,
                      mask_rows, mask_stride, window, SPEC)
        v_tile = load_raw(v, v_base, row_n, mask_n, DV, BLOCK_DV)
        acc, row_max, row_sum = online_softmax(acc, row_max, row_sum, scores, v_tile,
                                               v_scale_ptr is not None, SPEC.FP8, SPEC.MERGE,
                                               UPCAST)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["m_stride_b", "m_stride_h", "m_stride_m", "m_stride_n", "n_blocks",
                               "H_Q", "GROUP", "S_Q", "S_KV", "longest_q", "longest_k", "q_tiles",
                               "k_tiles", "window", "diag", "sink"])
def _portable_kernel(q, k, v, out, lse_ptr, q_high, q_low, k_high, k_low, high_codes, high_scales,
                     low_codes, low_scales, v_scale_ptr, mean_ptr, mask_ptr, m_stride_b, m_stride_h,
                     m_stride_m, m_stride_n, cu_q_ptr, row_args, start_ptr, n_blocks, H_Q, GROUP,
                     S_Q, S_KV, longest_q, longest_k, q_tiles, k_tiles, scale, quantised_scale,
                     zero, window, diag, sink, SPEC: tl.constexpr):
    D: tl.constexpr = SPEC.D
    DV: tl.constexpr = SPEC.DV
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    CAUSAL: tl.constexpr = SPEC.CAUSAL
    # Ids and offsets: the longest causal blocks start first
    bh = (tl.program_id(0) // n_blocks).to(tl.int64)
    block = n_blocks - 1 - tl.program_id(0) % n_blocks
    b = bh // H_Q
    h = bh % H_Q
    h_kv = h // GROUP
    k_span = b * (H_Q // GROUP) + h_kv
    first_q, n_q = sequence(b, cu_q_ptr, None, S_Q, longest_q)
    first_k, kv_len = sequence(b, row_args.cu, row_args.length, S_KV, longest_k)
    offset = kv_len - n_q
    if SPEC.TOP_LEFT:
        offset = 0
    pos_0 = (offset & -BLOCK_M) + block * BLOCK_M
    q_lo = tl.maximum(pos_0, offset)
    q_hi = tl.minimum(pos_0 + BLOCK_M, offset + n_q)
    if q_lo >= q_hi:
        return
    start = 0
    if start_ptr is not None:
        start = tl.load(start_ptr + b)
    lo, sink_end, diag_lo, diag_hi, hi = key_ranges(q_lo, q_hi, start, kv_len, window, diag, sink,
                                                    CAUSAL)
    # Keys that some row of the block sees; others are not read, whatever they hold
    seen_lo = q_lo - window + 1 if SPEC.WINDOW else 0
    seen_hi = tl.minimum(kv_len, q_hi) if CAUSAL else kv_len
    bounds = (common_keys(q_lo, q_hi, kv_len, window, CAUSAL), seen_lo, seen_hi)
    pos_m = pos_0 + tl.arange(0, BLOCK_M)
    i_q = (pos_m - offset).to(tl.int64)
    mask_m = (pos_m >= q_lo) & (pos_m < q_hi)
    # Where the operands lie: (B, H, S, ...), packed sequences (1, H, total, ...)
    if row_args.cu is not None:
        batch = b * 0
        q_plane = h
        k_plane = h_kv
        q_tile0 = h * q_tiles + (first_q >> 7) + 2 * b
        k_tile0 = h_kv * k_tiles + (first_k >> 7) + 2 * b
    else:
        batch = b
        q_plane = bh
        k_plane = k_span
        q_tile0 = bh * q_tiles
        k_tile0 = k_span * k_tiles
    q_row = q_plane * S_Q + first_q + i_q
    k_row0 = k_plane * S_KV + first_k
    plane_0 = k_plane * S_KV  # raw K and V count rows from their own first key
    q_base = q.ptr + batch * q.strides[0] + h * q.strides[1]
    k_base = k.ptr + batch * k.strides[0] + h_kv * k.strides[1] - plane_0 * k.strides[2]
    v_base = v.ptr + batch * v.strides[0] + h_kv * v.strides[1] - plane_0 * v.strides[2]
    queries = (q, q_base, first_q + i_q, q_row, q_tile0 + (pos_m >> 7) - (offset >> 7), bh, pos_m,
               mask_m)
    keys = (k, k_base, k_row0, k_tile0, k_span)
    values = (v, v_base, v_scale_ptr)
    mask_rows = b * m_stride_b + h * m_stride_h + i_q * m_stride_m
    masks = (row_args.valid, b * S_KV, mask_ptr, mask_rows, m_stride_n)
    # q . mean_k: in the LSE, and in scores of raw K
    shift = tl.zeros([BLOCK_M], tl.float32)
    if mean_ptr is not None:
        raw = load_raw(q, q_base, first_q + i_q, mask_m, D, BLOCK_D).to(tl.float32)
        offs_d = tl.arange(0, BLOCK_D)
        mean = tl.load(mean_ptr + k_span * D + offs_d, mask=offs_d < D, other=0.0)
        shift = tl.sum(raw * mean[None, :], 1) * scale
    # State
    state = (tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
             tl.full([BLOCK_M], float("-inf"), tl.float32),
             tl.zeros([BLOCK_M], tl.float32))
    # Ranges: high = sink and diagonal, low = the rest
    HIGH: tl.constexpr = SPEC.HIGH
    LOW: tl.constexpr = SPEC.LOW
    if HIGH is not None:
        state = _attend_ranges(
            state, queries, keys, values, masks, (lo, sink_end, diag_lo, diag_hi), bounds, q_high,
            k_high, high_codes, high_scales, scale if item(HIGH, 0) == "none" else quantised_scale,
            shift, zero, window, SPEC, HIGH)
    acc, row_max, row_sum = _attend_ranges(
        state, queries, keys, values, masks, (sink_end, diag_lo, diag_hi, hi), bounds, q_low,
        k_low, low_codes, low_scales, scale if item(LOW, 0) == "none" else quantised_scale, shift,
        zero, window, SPEC, LOW)
    at = out.ptr + batch * out.strides[0] + h * out.strides[1]
    at += (first_q + i_q)[:, None] * out.strides[2]
    store_result(acc, row_max, row_sum, shift, at, out.strides[3], lse_ptr, q_row, mask_m,
                 v_scale_ptr, k_span, DV, BLOCK_DV)


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
    high, low = (
        (f.name, operand_span(f, kv.config, query=True), operand_span(f, kv.config, query=False))
        for f in (config.high_format, config.low_format)
    )
    offset = None
    if "tile" in (high[1], low[1]):
        offset = _query_offsets(kv.rows, call, n_q, n_kv, q.device)
    q_rows = Rows(kv.rows.n, call.longest_q, cu=call.cu_q, offset=offset)
    q_high, q_low = query_copies(q, kv, q_rows, call.scale, triton=True)
    block_d = max(triton.next_power_of_2(head_dim), 32)
    # 32 at least: with a 16-wide V tile the sm_90 product of Triton 3.6 gave wrong results
    block_dv = max(triton.next_power_of_2(value_dim), 32)
    info = device_info(q.device)
    fp8 = kv.v_scale is not None and _fp8_products(q, kv)
    if kv.swizzled is None:
        tiles = portable_tiles(
            call.longest_q, block_d, block_dv, q.element_size(), shared_memory_limit(q.device)
        )
        native = [None] * 4
    else:
        tiles = blackwell_tiles(q.device)
        native = [x for copy, scales in zip((kv.high, kv.low), kv.swizzled, strict=True)
                  for x in descriptors(copy, scales)]
    n_blocks = -(-call.longest_q // tiles.block_m) + 1
    mask = call.mask
    scale = call.scale * LOG2_E
    spec = Spec(
        D=head_dim,
        DV=value_dim,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        HIGH=high if has_high(config) else None,
        LOW=low,
        CAUSAL=call.causal,
        TOP_LEFT=call.top_left,
        WINDOW=call.window > 0,
        MASK_FLOOR=mask_floor(mask.dtype) if mask is not None and mask.is_floating_point() else 0.0,
        EMULATED=emulated(),
        FP8=fp8,
        MERGE=fp8 and info is not None and info.capability[0] != 10,
        UPCAST=interpreting(),
    )
    _portable_kernel[(n_blocks * kv.rows.n * heads,)](
        Strided(q, q.stride()),
        strided(kv.k if kv.k is not None else q, 4),
        Strided(kv.v, kv.v.stride()),
        Strided(out, out.stride()),
        lse,
        quantised(q_high),
        quantised(q_low),
        quantised(kv.high),
        quantised(kv.low),
        *native,
        kv.v_scale,
        kv.mean if needs_shift(kv, lse is not None) else None,
        mask,
        *(mask.stride() if mask is not None else (0, 0, 0, 0)),
        call.cu_q,
        row_arguments(kv.rows),
        kv.start,
        n_blocks,
        heads,
        heads // kv_heads,
        n_q,
        n_kv,
        call.longest_q,
        kv.rows.longest,
        q_rows.n_tiles(n_q),
        kv.rows.n_tiles(n_kv),
        scale,
        1.0 if kv.config.folds_scale else scale,
        0.0,
        *widths(kv.config, call, call.longest_q, kv.rows.longest),
        SPEC=spec,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _fp8_products(q: torch.Tensor, kv: PreparedKV) -> bool:
    """Whether FP8 tensor cores multiply E4M3 P and V: on 8.9, for 16-bit Q and up to 128 dims, and
    beside block-scaled products."""
    info = device_info(q.device)
    if info is None or interpreting():
        return False
    narrow = q.element_size() == 2 and max(kv.shape[3:]) <= 128
    return kv.swizzled is not None or (info.capability == FP8_VALUES and narrow)


def _query_offsets(
    rows: Rows, call: CallOptions, n_q: int, n_kv: int, device: torch.device
) -> torch.Tensor:
    """int32 (n,) position of each sequence's first query."""
    if call.top_left:
        return torch.zeros(rows.n, dtype=torch.int32, device=device)
    if call.cu_q is not None and rows.cu is not None:
        return rows.cu.diff().clamp(max=rows.longest) - call.cu_q.diff().clamp(max=call.longest_q)
    if rows.length is not None:
        return rows.length.clamp(0, n_kv) - n_q
    return torch.full((rows.n,), n_kv - n_q, dtype=torch.int32, device=device)
