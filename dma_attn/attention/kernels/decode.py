"""The decode kernel: up to 16 queries a sequence against a mixed-precision cache, any GPU.

    O = softmax(scale * Q K^T + mask) V     K and V as `quant.store` keeps them, three kinds of keys

             first       low, in splits            newest
    keys  |  high  | low | low | low | low | low |  high  |

A program takes M queries that share a KV head, and one split of the keys: some of the first, of the
low, or of the newest. It leaves its part of the output, in the space that V's copy is in, and its
LSE; `combine` adds the parts. Rows are (head of the group, query). Queries in two tiles of 128
positions see a tile of keys in two classes: each skips the keys of a split that it sees in the
other.

A key's elements come in two halves of the head dim, which 4-bit codes hold in low and high nibbles.
Elements times block scales are exact in bf16; fp32 scales of a token multiply scores and P. For
quantised K, Q is rotated where K is, and is the sum of two bf16 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ...quant.jit import (
    bits,
    block,
    decode_e4m3,
    decode_e8m0,
    hadamard,
    item,
    scale_kind,
)
from .tiles import has_row_scale, product
from .unpack import elements, nibbles


@dataclass(frozen=True)
class Spec:
    """What a compiled variant depends on.

    Attributes:
        D, DV, HALF, HALF_V: Head dims; half of each, padded.
        M: Rows of a program, padded. N: keys of a block.
        FIRST, LOW, NEWEST: (format of K, where its token lies, format of V, where its token lies)
            of the three kinds of keys; where: "direct", "ring" or "first".
        TURNED: Whether V's copies of the three kinds are rotated.
        WINDOW: Keys are hidden by age. UPCAST: fp32 products (for the interpreter).
    """

    D: int
    DV: int
    HALF: int
    HALF_V: int
    M: int
    N: int
    FIRST: tuple[str, ...]
    LOW: tuple[str, ...]
    NEWEST: tuple[str, ...]
    TURNED: tuple[bool, ...]
    WINDOW: bool
    UPCAST: bool


@triton.jit
def _scaled(x, copy, row, mask, BEGIN: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr):
    """Elements x (N, HALF) of dims from BEGIN on, times their block scales, in bf16."""
    if scale_kind(FORMAT) == "fp32":
        return x
    else:
        BLOCK: tl.constexpr = block(FORMAT, D)
        N_SCALES: tl.constexpr = (D + BLOCK - 1) // BLOCK
        offs = tl.arange(0, x.shape[1])
        at = row[:, None] * N_SCALES + ((offs + BEGIN) // BLOCK)[None, :]
        byte = tl.load(copy.scales + at, mask=mask, other=0).to(tl.int32)
        scale = decode_e8m0(byte) if scale_kind(FORMAT) == "e8m0" else decode_e4m3(byte)
        return tl.where(mask, x.to(tl.float32) * scale, 0.0).to(tl.bfloat16)


@triton.jit
def _halves(copy, row, mask_n, D: tl.constexpr, HALF: tl.constexpr, FORMAT: tl.constexpr):
    """Both halves of rows (N,) of a store, (N, HALF) each; a code that is masked is 0."""
    offs = tl.arange(0, HALF)
    mask = mask_n[:, None] & (offs < D // 2)[None, :]
    if FORMAT == "none":
        at = copy.codes + row[:, None] * D + offs[None, :]
        return tl.load(at, mask=mask, other=0.0), tl.load(at + D // 2, mask=mask, other=0.0)
    else:
        if bits(FORMAT) == 4:
            at = copy.codes + row[:, None] * (D // 2) + offs[None, :]
            low, high = nibbles(tl.load(at, mask=mask, other=0), FORMAT)
        else:
            at = copy.codes + row[:, None] * D + offs[None, :]
            low = elements(tl.load(at, mask=mask, other=0), FORMAT)
            high = elements(tl.load(at + D // 2, mask=mask, other=0), FORMAT)
        return (_scaled(low, copy, row, mask, 0, D, FORMAT),
                _scaled(high, copy, row, mask, D // 2, D, FORMAT))


@triton.jit
def _scores(q, k0, k1, FORMAT: tl.constexpr, UPCAST: tl.constexpr):
    """Q K^T from halves; of quantised K with Q as hi + lo."""
    raw0, raw1, turned0, turned1 = q
    zero = tl.zeros([raw0.shape[0], k0.shape[0]], tl.float32)
    if FORMAT == "none":
        s = product(raw0, tl.trans(k0), zero, UPCAST)
        return product(raw1, tl.trans(k1), s, UPCAST)
    else:
        hi0 = turned0.to(tl.bfloat16)
        hi1 = turned1.to(tl.bfloat16)
        s = product((turned0 - hi0.to(tl.float32)).to(tl.bfloat16), tl.trans(k0), zero, UPCAST)
        s = product((turned1 - hi1.to(tl.float32)).to(tl.bfloat16), tl.trans(k1), s, UPCAST)
        s = product(hi0, tl.trans(k0), s, UPCAST)
        return product(hi1, tl.trans(k1), s, UPCAST)


@triton.jit
def _row(plane, size, pos, ring, begin, WHERE: tl.constexpr):
    """Rows of a store's tokens at positions."""
    if WHERE == "ring":
        at = pos % ring
    elif WHERE == "first":
        at = pos - begin
    else:
        at = pos
    return plane * size + at


@triton.jit
def _attend(q, k, v, plane, sizes, keys, limits, valid_ptr, valid_row, scale, shift, window, begin,
            SPEC: tl.constexpr, KIND: tl.constexpr, NEAR: tl.constexpr):
    """Online softmax over keys [lo, hi) of one kind: two halves of the sum, maxima, sums of P."""
    K_FORMAT: tl.constexpr = item(KIND, 0)
    V_FORMAT: tl.constexpr = item(KIND, 2)
    M: tl.constexpr = SPEC.M
    N: tl.constexpr = SPEC.N
    HALF_V: tl.constexpr = SPEC.HALF_V
    D: tl.constexpr = SPEC.D
    DV: tl.constexpr = SPEC.DV
    HALF: tl.constexpr = SPEC.HALF
    UPCAST: tl.constexpr = SPEC.UPCAST
    k_size, v_size, ring = sizes
    lo, hi, seen = keys
    pos_m, near_lo = limits
    acc0 = tl.zeros([M, HALF_V], tl.float32)
    acc1 = tl.zeros([M, HALF_V], tl.float32)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    for start in range(lo, hi, N):
        pos = start + tl.arange(0, N)
        mask_n = (pos >= seen) & (pos < hi)  # what no query sees counts as 0
        if valid_ptr is not None:
            mask_n = mask_n & (tl.load(valid_ptr + valid_row + pos, mask=mask_n, other=0) != 0)
        row = _row(plane, k_size, pos, ring, begin, item(KIND, 1))
        k0, k1 = _halves(k, row, mask_n, D, HALF, K_FORMAT)
        scores = _scores(q, k0, k1, K_FORMAT, UPCAST) * scale
        if has_row_scale(K_FORMAT):
            scores *= tl.load(k.row_scales + row, mask=mask_n, other=0.0)[None, :]
        if K_FORMAT != "none":
            scores += shift[:, None]
        visible = mask_n[None, :] & (pos[None, :] <= pos_m[:, None])
        if SPEC.WINDOW:
            visible = visible & (pos[None, :] > pos_m[:, None] - window)
        if NEAR == "newest":
            visible = visible & (pos[None, :] >= near_lo[:, None])
        elif NEAR == "low":
            visible = visible & (pos[None, :] < near_lo[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.math.exp2(scores - base[:, None])
        decay = tl.math.exp2(row_max - base)
        row_sum = row_sum * decay + tl.sum(p, 1)
        row_max = new_max
        row = _row(plane, v_size, pos, ring, begin, item(KIND, 3))
        if has_row_scale(V_FORMAT):
            p *= tl.load(v.row_scales + row, mask=mask_n, other=0.0)[None, :]
        v0, v1 = _halves(v, row, mask_n, DV, HALF_V, V_FORMAT)
        acc0 = product(p.to(v0.dtype), v0, acc0 * decay[:, None], UPCAST)
        acc1 = product(p.to(v1.dtype), v1, acc1 * decay[:, None], UPCAST)
    return acc0, acc1, row_max, row_sum


@triton.jit(do_not_specialize=["H", "GROUP", "S_Q"])
def query_kernel(q, mean_ptr, turned_ptr, shift_ptr, H, GROUP, S_Q, D: tl.constexpr,
                 BLOCK_D: tl.constexpr, ROTATE: tl.constexpr):
    """One query as quantised K wants it: float32, rotated; and its product with K's mean."""
    row = tl.program_id(0).to(tl.int64)
    b, h, i = row // (H * S_Q), row // S_Q % H, row % S_Q
    offs = tl.arange(0, BLOCK_D)
    mask = offs < D
    at = b * q.strides[0] + h * q.strides[1] + i * q.strides[2] + offs * q.strides[3]
    x = tl.load(q.ptr + at, mask=mask, other=0.0).to(tl.float32)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + (b * (H // GROUP) + h // GROUP) * D + offs, mask=mask, other=0.0)
        tl.store(shift_ptr + row, tl.sum(x * mean, 0))
    if ROTATE:
        x = hadamard(x[None, :], D, 1, BLOCK_D).reshape(BLOCK_D)
    tl.store(turned_ptr + row * D + offs, x, mask=mask)


@triton.jit(do_not_specialize=["H_KV", "GROUP", "S_Q", "n_first", "n_newest", "n_low", "n_splits",
                               "diag",
                               "sink", "ring", "sink_size", "capacity", "valid_size", "window"])
def decode_kernel(q, turned_ptr, shift_ptr, k_first, k_low, k_newest, v_first, v_low, v_newest,
                   part_ptr, lse_ptr, lengths_ptr, near_ptr, starts_ptr, valid_ptr, H_KV, GROUP,
                   S_Q, n_first, n_newest, n_low, n_splits, diag, sink, ring, sink_size, capacity,
                   valid_size, scale, window, SPEC: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()
    M: tl.constexpr = SPEC.M
    N: tl.constexpr = SPEC.N
    D: tl.constexpr = SPEC.D
    DV: tl.constexpr = SPEC.DV
    HALF: tl.constexpr = SPEC.HALF
    HALF_V: tl.constexpr = SPEC.HALF_V
    FIRST: tl.constexpr = SPEC.FIRST
    LOW: tl.constexpr = SPEC.LOW
    NEWEST: tl.constexpr = SPEC.NEWEST
    plane = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    b = plane // H_KV
    h = plane % H_KV
    length = tl.minimum(tl.load(lengths_ptr + b), capacity)
    start = tl.load(starts_ptr + b)
    rows = tl.program_id(2) * M + tl.arange(0, M)
    mask_m = rows < GROUP * S_Q
    head = h * GROUP + rows // S_Q
    i = rows % S_Q
    pos_m = length - S_Q + i
    # Key ranges of the newest tile's queries, and of those one tile before
    begin = (tl.maximum(start, 0) >> 7) << 7
    first_hi = begin
    if sink > 0 and start >= 0:
        first_hi = tl.minimum(((start + sink + 127) >> 7) << 7, length)
    near_lo = tl.maximum(((pos_m >> 7) << 7) - diag + 128, tl.load(near_ptr))
    near_lo = tl.maximum(tl.where(diag > 0, near_lo, length), first_hi)
    oldest = tl.min(tl.where(mask_m, near_lo, length), 0)
    newest = tl.max(tl.where(mask_m, tl.minimum(near_lo, length), 0), 0)
    seen = tl.maximum(length - S_Q - window + 1, 0) if SPEC.WINDOW else 0
    limits = (pos_m, near_lo)
    # Q: as it is, and as quantised K wants it
    offs = tl.arange(0, HALF)
    mask = mask_m[:, None] & (offs < D // 2)[None, :]
    at = (b * q.strides[0] + head * q.strides[1] + i * q.strides[2])[:, None]
    at += offs.to(tl.int64)[None, :] * q.strides[3]
    raw0 = tl.load(q.ptr + at, mask=mask, other=0.0)
    raw1 = tl.load(q.ptr + at + (D // 2) * q.strides[3], mask=mask, other=0.0)
    q_row = (b * H_KV * GROUP + head) * S_Q + i
    turned0 = raw0
    turned1 = raw1
    if turned_ptr is not None:
        at = q_row[:, None] * D + offs[None, :]
        turned0 = tl.load(turned_ptr + at, mask=mask, other=0.0)
        turned1 = tl.load(turned_ptr + at + D // 2, mask=mask, other=0.0)
    queries = (raw0, raw1, turned0, turned1)
    shift = tl.zeros([M], tl.float32)
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + q_row, mask=mask_m, other=0.0) * scale
    valid_row = b * valid_size
    if split < n_first:
        per = tl.cdiv(tl.maximum(first_hi - begin, 0), n_first)
        lo = tl.maximum(begin + split * per, seen)
        hi = tl.minimum(begin + (split + 1) * per, first_hi)
        sizes = (sink_size if item(FIRST, 1) == "first" else capacity,
                 sink_size if item(FIRST, 3) == "first" else capacity, ring)
        acc0, acc1, row_max, row_sum = _attend(
            queries, k_first, v_first, plane, sizes, (lo, hi, seen), limits, valid_ptr, valid_row,
            scale, shift, window, begin, SPEC, FIRST, "first")
    elif split < n_first + n_newest:
        n = split - n_first
        per = tl.cdiv(tl.maximum(length - oldest, 0), n_newest)
        lo = tl.maximum(oldest + n * per, seen)
        hi = tl.minimum(oldest + (n + 1) * per, length)
        sizes = (ring if item(NEWEST, 1) == "ring" else capacity,
                 ring if item(NEWEST, 3) == "ring" else capacity, ring)
        acc0, acc1, row_max, row_sum = _attend(
            queries, k_newest, v_newest, plane, sizes, (lo, hi, seen), limits, valid_ptr, valid_row,
            scale, shift, window, begin, SPEC, NEWEST, "newest")
    else:
        n = split - n_first - n_newest
        bottom = tl.maximum(first_hi, (seen // N) * N)
        per = tl.cdiv(tl.cdiv(tl.maximum(newest - bottom, 0), n_low), N) * N
        lo = bottom + n * per
        hi = tl.minimum(lo + per, newest)
        sizes = (capacity, capacity, ring)
        acc0, acc1, row_max, row_sum = _attend(
            queries, k_low, v_low, plane, sizes, (lo, hi, seen), limits, valid_ptr, valid_row,
            scale, shift, window, begin, SPEC, LOW, "low")
    to = (plane * n_splits + split) * (tl.num_programs(2) * M) + rows
    lse = row_max + tl.math.log2(row_sum)
    blind = row_sum == 0.0  # NaN is not
    tl.store(lse_ptr + to, tl.where(blind, float("-inf"), lse), mask=mask_m)
    inverse = tl.where(blind, 0.0, 1.0 / row_sum)[:, None]
    offs = tl.arange(0, HALF_V)
    mask = mask_m[:, None] & (offs < DV // 2)[None, :]
    at = part_ptr + to[:, None] * DV + offs[None, :]
    tl.store(at, acc0 * inverse, mask=mask)
    tl.store(at + DV // 2, acc1 * inverse, mask=mask)
