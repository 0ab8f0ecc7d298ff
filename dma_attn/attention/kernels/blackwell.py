"""The Blackwell attention kernel: block-scaled tensor cores multiply the codes themselves.

    MXFP8 tiles   tcgen05.mma kind::mxf8f6f4     (sm_100; sm_120: mma.sync with the same kinds)
    MXFP4, NVFP4  tcgen05.mma kind::mxf4 and mxf4nvf4, twice as fast
    "none"        16-bit products of raw Q and K

Schedule, inner loop and numerics are the portable kernel's; its operands, too, but K's block scales
are swizzled (`swizzle.py`), and TMA brings K's codes and scales: on sm_100 scales of 4 and more a
row go from shared to tensor memory without passing registers. P V is in 16 bits or in E4M3.
`attention.dispatch` lists what it covers. One program = BLOCK_M queries of one head.

`zero` is a run-time 0: in a loop, Triton 3.6 to 3.9 cannot compile `dot_scaled` without an
accumulator, or with one that it sees is zero, for sm_100.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ...device import device_info, interpreting
from ...formats import LOG2_E
from ...quant.jit import (
    bits,
    block,
    common_keys,
    decode_e4m3,
    decode_e8m0,
    decode_element,
    element,
    item,
    key_ranges,
    scale_kind,
)
from ...quant.kernels import Strided, quantised, strided
from ...quant.rows import Rows
from ...quant.tensor import BlockScaledTensor
from ...schedule import TILE
from ..prepare import has_high, operand_span, query_copies, widths
from ..types import CallOptions, PreparedKV, needs_shift
from .swizzle import unswizzled
from .tiles import (
    has_row_scale,
    hide,
    key_block,
    load_raw,
    load_row_scale,
    n_key_blocks,
    online_softmax,
    product,
    store_result,
)
from .tuning import blackwell_tiles

TRITON = tuple(int(x) for x in triton.__version__.split(".")[:2])


@dataclass(frozen=True)
class Spec:
    """What a compiled variant depends on, besides operand types.

    Attributes:
        D, DV: Head dims, powers of two.
        BLOCK_M, BLOCK_N: Queries and keys of a block; BLOCK_N is the tile of 128.
        HIGH, LOW: Format, then the spans of Q's and K's fp32 scales, of the two classes; HIGH is
            None where no tile is high.
        CAUSAL, WINDOW: Visibility rules in use.
        UPCAST: fp32 products (the interpreter's bf16 product is wrong).
        EMULATED: Kinds of scales that are multiplied before the product. None on a GPU; the
            interpreter has `dot_scaled` from Triton 3.8 on, and with E8M0 scales only.
    """

    D: int
    DV: int
    BLOCK_M: int
    BLOCK_N: int
    HIGH: tuple[str, str, str] | None
    LOW: tuple[str, str, str]
    CAUSAL: bool
    WINDOW: bool
    UPCAST: bool
    EMULATED: tuple[str, ...]
    MASK_FLOOR: float = 0.0


@triton.constexpr_function
def _emulated(fmt, kinds):
    return scale_kind(fmt) in kinds


@triton.jit
def _decoded(codes, scales, D: tl.constexpr, R: tl.constexpr, FORMAT: tl.constexpr):
    """Elements times block scales, (R, D) fp32."""
    code = codes.to(tl.int32)
    if bits(FORMAT) == 4:
        x = tl.join(decode_element(code & 15, FORMAT), decode_element(code >> 4, FORMAT))
    else:
        x = decode_element(code, FORMAT)
    scale = scales.to(tl.int32)
    scale = decode_e8m0(scale) if scale_kind(FORMAT) == "e8m0" else decode_e4m3(scale)
    BLOCK: tl.constexpr = block(FORMAT, D)
    return (x.reshape(R, D // BLOCK, BLOCK) * scale[:, :, None]).reshape(R, D)


@triton.jit
def _scaled_product(q, q_scales, k, k_scales, zero, SPEC: tl.constexpr, FORMAT: tl.constexpr):
    """(q * q_scales) (k * k_scales)^T in fp32, of codes and scale bytes (M or N, ...)."""
    D: tl.constexpr = SPEC.D
    M: tl.constexpr = SPEC.BLOCK_M
    N: tl.constexpr = SPEC.BLOCK_N
    if _emulated(FORMAT, SPEC.EMULATED):
        return tl.dot(_decoded(q, q_scales, D, M, FORMAT),
                      tl.trans(_decoded(k, k_scales, D, N, FORMAT)), input_precision="ieee")
    else:
        if element(FORMAT) == "e4m3":
            q = q.to(tl.float8e4nv, bitcast=True)
            k = k.to(tl.float8e4nv, bitcast=True)
        elif element(FORMAT) == "e5m2":
            q = q.to(tl.float8e5, bitcast=True)
            k = k.to(tl.float8e5, bitcast=True)
        if scale_kind(FORMAT) == "e4m3":  # bytes are read as E8M0
            q_scales = q_scales.to(tl.float8e4nv, bitcast=True)
            k_scales = k_scales.to(tl.float8e4nv, bitcast=True)
        acc = tl.full([M, N], 1.0, tl.float32) * zero
        return tl.dot_scaled(q, q_scales, element(FORMAT), tl.trans(k), k_scales, element(FORMAT),
                             acc)


@triton.jit
def _query_tile(copy, row, mask_m, D: tl.constexpr, FORMAT: tl.constexpr):
    """Codes (M, bytes) and block scales (M, n) of a block of queries; 0 for rows that are none."""
    N_BYTES: tl.constexpr = D * bits(FORMAT) // 8
    N: tl.constexpr = D // block(FORMAT, D)
    codes = tl.load(copy.codes + row[:, None] * N_BYTES + tl.arange(0, N_BYTES)[None, :],
                    mask=mask_m[:, None], other=0)
    scales = tl.load(copy.scales + row[:, None] * N + tl.arange(0, N)[None, :],
                     mask=mask_m[:, None], other=0)
    return codes, scales


@triton.jit
def _attend_ranges(state, queries, keys, values, ranges, bounds, q_copy, k_copy, k_codes, k_scales,
                   scale, shift, zero, window, SPEC: tl.constexpr, CLASS: tl.constexpr):
    """Online softmax over the keys [lo, gap_lo) and [gap_hi, hi), all of one precision class."""
    D: tl.constexpr = SPEC.D
    DV: tl.constexpr = SPEC.DV
    M: tl.constexpr = SPEC.BLOCK_M
    N: tl.constexpr = SPEC.BLOCK_N
    acc, row_max, row_sum = state
    q, q_base, i_q, q_row, q_tile, q_span, pos_m, mask_m = queries
    k, k_base, k_row0, k_tile0, k_span = keys
    v, v_base, v_scale_ptr = values
    lo, gap_lo, gap_hi, hi = ranges
    common, seen_lo, seen_hi = bounds
    FORMAT: tl.constexpr = item(CLASS, 0)
    Q_SPAN: tl.constexpr = item(CLASS, 1)
    K_SPAN: tl.constexpr = item(CLASS, 2)
    row_factor = tl.zeros([M], tl.float32) + scale
    if FORMAT == "none":
        q_data = load_raw(q, q_base, i_q, mask_m, D, D)
    else:
        q_data, q_scales = _query_tile(q_copy, q_row, mask_m, D, FORMAT)
    if has_row_scale(FORMAT):
        row_factor *= load_row_scale(q_copy, q_row, q_tile, q_span, mask_m, Q_SPAN)
    for i in range(0, n_key_blocks(lo, gap_lo, gap_hi, hi, N)):
        start_n = key_block(i, lo, gap_lo, gap_hi, N)
        pos_n = start_n + tl.arange(0, N)
        mask_n = (pos_n >= seen_lo) & (pos_n < seen_hi)
        row_n = k_row0 + pos_n.to(tl.int64)
        # Scores, in base 2; rows of K that none sees may be anything, and are hidden below
        if FORMAT == "none":
            k_data = load_raw(k, k_base, row_n, mask_n, D, D)
            scores = product(q_data, tl.trans(k_data), tl.zeros([M, N], tl.float32), SPEC.UPCAST)
        else:
            k_data = k_codes.load([(k_row0 + start_n).to(tl.int32), 0])
            tile = k_scales.load([0, (k_tile0 + (start_n >> 7)).to(tl.int32), 0, 0, 0])
            scores = _scaled_product(q_data, q_scales, k_data,
                                     unswizzled(tile, D // block(FORMAT, D)), zero, SPEC, FORMAT)
        scores = scores * row_factor[:, None]
        if has_row_scale(FORMAT):
            k_scale = load_row_scale(k_copy, row_n, k_tile0 + (pos_n >> 7), k_span, mask_n, K_SPAN)
            scores = scores * k_scale[None, :]
        if FORMAT == "none":
            scores = scores - shift[:, None]
        scores = hide(scores, start_n, pos_m, pos_n, mask_n, common, None, None, mask_m, i_q, 0,
                      window, SPEC)
        v_tile = load_raw(v, v_base, row_n, mask_n, DV, DV)
        acc, row_max, row_sum = online_softmax(acc, row_max, row_sum, scores, v_tile,
                                               v_scale_ptr is not None, not SPEC.UPCAST,
                                               SPEC.UPCAST)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["n_blocks", "H_Q", "GROUP", "S_Q", "S_KV", "q_tiles", "k_tiles",
                               "window", "diag", "sink"])
def _blackwell_kernel(q, k, v, out, lse_ptr, q_high, q_low, k_high, k_low, high_codes, high_scales,
                      low_codes, low_scales, v_scale_ptr, mean_ptr, length_ptr, n_blocks, H_Q,
                      GROUP, S_Q, S_KV, q_tiles, k_tiles, scale, quantised_scale, zero, window,
                      diag, sink, SPEC: tl.constexpr):
    D: tl.constexpr = SPEC.D
    DV: tl.constexpr = SPEC.DV
    M: tl.constexpr = SPEC.BLOCK_M
    CAUSAL: tl.constexpr = SPEC.CAUSAL
    # Ids and offsets: the longest causal blocks start first
    bh = (tl.program_id(0) // n_blocks).to(tl.int64)
    block_m = n_blocks - 1 - tl.program_id(0) % n_blocks
    b = bh // H_Q
    h = bh % H_Q
    h_kv = h // GROUP
    plane = b * (H_Q // GROUP) + h_kv
    kv_len = S_KV
    if length_ptr is not None:
        kv_len = tl.minimum(tl.maximum(tl.load(length_ptr + b), 0), S_KV)
    offset = kv_len - S_Q
    pos_0 = (offset & -M) + block_m * M
    q_lo = tl.maximum(pos_0, offset)
    q_hi = tl.minimum(pos_0 + M, offset + S_Q)
    if q_lo >= q_hi:
        return
    lo, sink_end, diag_lo, diag_hi, hi = key_ranges(q_lo, q_hi, 0, kv_len, window, diag, sink,
                                                    CAUSAL)
    # Keys that some row of the block sees; V's others are not read, whatever they hold
    seen_lo = q_lo - window + 1 if SPEC.WINDOW else 0
    seen_hi = tl.minimum(kv_len, q_hi) if CAUSAL else kv_len
    bounds = (common_keys(q_lo, q_hi, kv_len, window, CAUSAL), seen_lo, seen_hi)
    pos_m = pos_0 + tl.arange(0, M)
    i_q = (pos_m - offset).to(tl.int64)
    mask_m = (pos_m >= q_lo) & (pos_m < q_hi)
    q_row = bh * S_Q + i_q
    k_row0 = plane * S_KV
    q_base = q.ptr + b * q.strides[0] + h * q.strides[1]
    k_base = k.ptr + b * k.strides[0] + h_kv * k.strides[1] - k_row0 * k.strides[2]
    v_base = v.ptr + b * v.strides[0] + h_kv * v.strides[1] - k_row0 * v.strides[2]
    queries = (q, q_base, i_q, q_row, bh * q_tiles + (pos_m >> 7) - (offset >> 7), bh, pos_m,
               mask_m)
    keys = (k, k_base, k_row0, plane * k_tiles, plane)
    values = (v, v_base, v_scale_ptr)
    # q . mean_k: in the LSE, and in scores of raw K
    shift = tl.zeros([M], tl.float32)
    if mean_ptr is not None:
        raw = load_raw(q, q_base, i_q, mask_m, D, D).to(tl.float32)
        mean = tl.load(mean_ptr + plane * D + tl.arange(0, D))
        shift = tl.sum(raw * mean[None, :], 1) * scale
    state = (tl.zeros([M, DV], tl.float32), tl.full([M], float("-inf"), tl.float32),
             tl.zeros([M], tl.float32))
    # Ranges: high = sink and diagonal, low = the rest
    HIGH: tl.constexpr = SPEC.HIGH
    LOW: tl.constexpr = SPEC.LOW
    if HIGH is not None:
        state = _attend_ranges(
            state, queries, keys, values, (lo, sink_end, diag_lo, diag_hi), bounds, q_high, k_high,
            high_codes, high_scales, scale if item(HIGH, 0) == "none" else quantised_scale, shift,
            zero, window, SPEC, HIGH)
    acc, row_max, row_sum = _attend_ranges(
        state, queries, keys, values, (sink_end, diag_lo, diag_hi, hi), bounds, q_low, k_low,
        low_codes, low_scales, scale if item(LOW, 0) == "none" else quantised_scale, shift, zero,
        window, SPEC, LOW)
    at = out.ptr + b * out.strides[0] + h * out.strides[1] + i_q[:, None] * out.strides[2]
    store_result(acc, row_max, row_sum, shift, at, out.strides[3], lse_ptr, q_row, mask_m,
                 v_scale_ptr, plane, DV, DV)


def launch(
    q: torch.Tensor,
    kv: PreparedKV,
    call: CallOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Fill out (B, H_q, S_q, Dv) and lse (B, H_q, S_q)."""
    if out.numel() == 0:
        return
    assert kv.swizzled is not None  # what brought the call here
    config = kv.config.canonical()
    batch, kv_heads, n_kv, head_dim, value_dim = kv.shape
    heads, n_q = q.shape[1:3]
    high, low = (
        (f.name, operand_span(f, kv.config, query=True), operand_span(f, kv.config, query=False))
        for f in (config.high_format, config.low_format)
    )
    offset = None
    if "tile" in (high[1], low[1]):
        lengths = n_kv if kv.rows.length is None else kv.rows.length.clamp(0, n_kv)
        offset = torch.zeros(batch, dtype=torch.int32, device=q.device) + lengths - n_q
    q_rows = Rows(batch, n_q, offset=offset)
    q_high, q_low = query_copies(q, kv, q_rows, call.scale, triton=True)
    info = device_info(q.device)
    tiles = blackwell_tiles((10, 0) if info is None else info.capability)
    n_blocks = -(-n_q // tiles.block_m) + 1
    scale = call.scale * LOG2_E
    spec = Spec(
        D=head_dim,
        DV=value_dim,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        HIGH=high if has_high(config) else None,
        LOW=low,
        CAUSAL=call.causal,
        WINDOW=call.window > 0,
        UPCAST=interpreting(),
        EMULATED=() if not interpreting() else ("e4m3",) if TRITON >= (3, 8) else ("e8m0", "e4m3"),
    )
    _blackwell_kernel[(n_blocks * batch * heads,)](
        Strided(q, q.stride()),
        strided(kv.k if kv.k is not None else q, 4),
        Strided(kv.v, kv.v.stride()),
        Strided(out, out.stride()),
        lse,
        quantised(q_high),
        quantised(q_low),
        quantised(kv.high),
        quantised(kv.low),
        *_descriptors(kv.high, kv.swizzled[0]),
        *_descriptors(kv.low, kv.swizzled[1]),
        kv.v_scale,
        kv.mean if needs_shift(kv, lse is not None) else None,
        kv.rows.length,
        n_blocks,
        heads,
        heads // kv_heads,
        n_q,
        n_kv,
        q_rows.n_tiles(n_q),
        kv.rows.n_tiles(n_kv),
        scale,
        1.0 if kv.config.folds_scale else scale,
        0.0,
        *widths(kv.config, call, n_q, n_kv),
        SPEC=spec,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _descriptors(
    copy: BlockScaledTensor | None, swizzled: torch.Tensor | None
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """TMA descriptors of a copy's codes, as rows of bytes, and of its swizzled scales."""
    if copy is None or swizzled is None:
        return None, None
    codes = copy.data.flatten(0, 2)
    scales = swizzled.flatten(0, 2)[None]  # (1, tiles of all heads, n / 4, 2, 256)
    return (TensorDescriptor.from_tensor(codes, [TILE, codes.shape[1]]),
            TensorDescriptor.from_tensor(scales, [1, 1, *scales.shape[2:]]))
