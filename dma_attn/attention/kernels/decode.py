"""The decode kernel: up to 16 queries a sequence against a mixed-precision cache, any GPU.

    O = softmax(scale * Q K^T + mask) V     K and V as `quant.store` keeps them, three kinds of keys

             first       low, in splits            newest
    keys  |  high  | low | low | low | low | low |  high  |

A program takes all queries that share a KV head, and one split of the keys: some of the first, of
the low, or of the newest. It leaves its part of the output, in the space that V's copy is in, and
its LSE; `combine` adds the parts. Rows are (head of the group,
query). Queries in two tiles of 128 positions see a tile of keys in two classes: each skips the
keys of a split that it sees in the other.

A key's elements come in two halves of the head dim, which 4-bit codes hold in low and high nibbles.
Elements times block scales are exact in bf16; fp32 scales of a token multiply scores and P. For
quantised K, Q is rotated where K is, and is the sum of two bf16 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...device import device_info, gluon_runs, interpreting, processor_count
from ...formats import LOG2_E
from ...quant.jit import (
    bits,
    block,
    decode_e4m3,
    decode_e8m0,
    item,
    scale_kind,
)
from ...quant.kernels import Quantised, Strided
from ...quant.store import Copies
from . import combine
from .tiles import has_row_scale
from .unpack import elements, nibbles

BLOCK_N = 64
NEAR_SPLIT = 256  # keys of a split of the first or the newest
PROGRAMS = 4  # on an SM
WARPS = 11  # on an SM, of the kernel that keeps low keys in registers


class Layout(NamedTuple):
    """Where a cache's tokens lie.

    Attributes:
        lengths, starts: int32 (B,) tokens, and the first that counts or -1.
        near: int32 (1,), the first token with high copies in the ring.
        valid: bool (B, capacity), or None when all tokens count.
        diag, sink: Widths of the high regions in tokens, 0 where no store has them.
        capacity, ring, first: Tokens of the three kinds of stores.
    """

    lengths: torch.Tensor
    starts: torch.Tensor
    near: torch.Tensor
    valid: torch.Tensor | None
    diag: int
    sink: int
    capacity: int
    ring: int
    first: int


@dataclass(frozen=True)
class Spec:
    """What a compiled variant depends on.

    Attributes:
        D, DV, HALF, HALF_V: Head dims; half of each, padded.
        M: Rows, padded. N: keys of a block.
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
def _dot(a, b, acc, UPCAST: tl.constexpr):
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="tf32x3")


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
        s = _dot(raw0, tl.trans(k0), zero, UPCAST)
        return _dot(raw1, tl.trans(k1), s, UPCAST)
    else:
        hi0 = turned0.to(tl.bfloat16)
        hi1 = turned1.to(tl.bfloat16)
        s = _dot((turned0 - hi0.to(tl.float32)).to(tl.bfloat16), tl.trans(k0), zero, UPCAST)
        s = _dot((turned1 - hi1.to(tl.float32)).to(tl.bfloat16), tl.trans(k1), s, UPCAST)
        s = _dot(hi0, tl.trans(k0), s, UPCAST)
        return _dot(hi1, tl.trans(k1), s, UPCAST)


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
    lo, hi = keys
    pos_m, near_lo = limits
    acc0 = tl.zeros([M, HALF_V], tl.float32)
    acc1 = tl.zeros([M, HALF_V], tl.float32)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    for start in range(lo, hi, N):
        pos = start + tl.arange(0, N)
        mask_n = pos < hi
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
        acc0 = _dot(p.to(v0.dtype), v0, acc0 * decay[:, None], UPCAST)
        acc1 = _dot(p.to(v1.dtype), v1, acc1 * decay[:, None], UPCAST)
    return acc0, acc1, row_max, row_sum


@triton.jit(do_not_specialize=["H_KV", "GROUP", "S_Q", "n_first", "n_newest", "n_low", "n_splits",
                               "diag",
                               "sink", "ring", "sink_size", "capacity", "valid_size", "window"])
def _decode_kernel(q, turned_ptr, shift_ptr, k_first, k_low, k_newest, v_first, v_low, v_newest,
                   part_ptr, lse_ptr, lengths_ptr, near_ptr, starts_ptr, valid_ptr, H_KV, GROUP,
                   S_Q, n_first, n_newest, n_low, n_splits, diag, sink, ring, sink_size, capacity,
                   valid_size, scale, window, SPEC: tl.constexpr):
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
    length = tl.load(lengths_ptr + b)
    start = tl.load(starts_ptr + b)
    rows = tl.arange(0, M)
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
            queries, k_first, v_first, plane, sizes, (lo, hi), limits, valid_ptr, valid_row, scale,
            shift, window, begin, SPEC, FIRST, "first")
    elif split < n_first + n_newest:
        n = split - n_first
        per = tl.cdiv(tl.maximum(length - oldest, 0), n_newest)
        lo = tl.maximum(oldest + n * per, seen)
        hi = tl.minimum(oldest + (n + 1) * per, length)
        sizes = (ring if item(NEWEST, 1) == "ring" else capacity,
                 ring if item(NEWEST, 3) == "ring" else capacity, ring)
        acc0, acc1, row_max, row_sum = _attend(
            queries, k_newest, v_newest, plane, sizes, (lo, hi), limits, valid_ptr, valid_row,
            scale, shift, window, begin, SPEC, NEWEST, "newest")
    else:
        n = split - n_first - n_newest
        bottom = tl.maximum(first_hi, (seen // N) * N)
        per = tl.cdiv(tl.cdiv(tl.maximum(newest - bottom, 0), n_low), N) * N
        lo = bottom + n * per
        hi = tl.minimum(lo + per, newest)
        sizes = (capacity, capacity, ring)
        acc0, acc1, row_max, row_sum = _attend(
            queries, k_low, v_low, plane, sizes, (lo, hi), limits, valid_ptr, valid_row, scale,
            shift, window, begin, SPEC, LOW, "low")
    to = (plane * n_splits + split) * M + rows
    lse = row_max + tl.math.log2(row_sum)
    tl.store(lse_ptr + to, tl.where(row_sum > 0.0, lse, float("-inf")), mask=mask_m)
    inverse = tl.where(row_sum > 0.0, 1.0 / row_sum, 0.0)[:, None]
    offs = tl.arange(0, HALF_V)
    mask = mask_m[:, None] & (offs < DV // 2)[None, :]
    at = part_ptr + to[:, None] * DV + offs[None, :]
    tl.store(at, acc0 * inverse, mask=mask)
    tl.store(at + DV // 2, acc1 * inverse, mask=mask)


def launch(
    q: torch.Tensor,
    turned: torch.Tensor,
    shift: torch.Tensor | None,
    k: Copies,
    v: Copies,
    rotated: bool,
    layout: Layout,
    scale: float,
    window: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Fill out (B, H_q, S_q, Dv) and lse (B, H_q, S_q).

    Args:
        q: (B, H_q, S_q, D), any strides; turned: the same, float32, contiguous, rotated where K is.
        shift: float32 (B, H_q, S_q) q . mean of K, or None.
        rotated: Whether quantised V is rotated.
    """
    batch, heads, n_q, head_dim = q.shape
    kv_heads, value_dim = k.low.parts[0].shape[1], out.shape[3]
    group = heads // kv_heads
    kinds = []
    for kind, where in (("first", "first"), ("low", "direct"), ("newest", "ring")):
        spec: list[str] = []
        for copies in (k, v):
            store = getattr(copies, kind)
            spec += [copies.low.format.name, "direct"] if store is None else [
                store.format.name, where]
        kinds.append(tuple(spec))
    m = max(16, triton.next_power_of_2(group * n_q))
    tiles = Spec(
        D=head_dim,
        DV=value_dim,
        HALF=max(16, triton.next_power_of_2(head_dim // 2)),
        HALF_V=max(16, triton.next_power_of_2(value_dim // 2)),
        M=m,
        N=BLOCK_N,
        FIRST=kinds[0],
        LOW=kinds[1],
        NEWEST=kinds[2],
        TURNED=tuple(rotated and x[2] != "none" for x in kinds),
        WINDOW=window > 0,
        UPCAST=interpreting(),
    )
    planes = batch * kv_heads
    in_registers = _low_in_registers(tiles, q.device)
    n_first = -(-layout.first // NEAR_SPLIT) if layout.sink else 0
    n_newest = -(-layout.ring // NEAR_SPLIT) if layout.diag else 0
    programs = WARPS if in_registers else PROGRAMS
    n_low = programs * processor_count(q.device) // planes - n_first - n_newest
    n_low = max(1, min(n_low, layout.capacity // 256))
    n_splits = n_first + n_newest + n_low
    parts = torch.empty(planes, n_splits, m, value_dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(planes, n_splits, m, dtype=torch.float32, device=q.device)
    lengths = layout.lengths, layout.near, layout.starts, layout.valid
    ends = layout.diag, layout.sink
    valid_size = 0 if layout.valid is None else layout.valid.shape[1]
    if in_registers:
        from .decode_int4 import KEYS, layouts, low_int4_kernel

        low_int4_kernel[(planes, n_low)](
            turned,
            shift,
            *k.low.parts,
            *v.low.parts,
            parts,
            lses,
            *lengths,
            kv_heads,
            group,
            n_q,
            n_first + n_newest,
            n_low,
            n_splits,
            *ends,
            layout.capacity,
            valid_size,
            scale * LOG2_E,
            window,
            WINDOW=window > 0,
            N=KEYS,
            **layouts(KEYS),
            num_warps=1,
        )
    if not in_registers or n_first + n_newest:
        _decode_kernel[(planes, n_first + n_newest + (0 if in_registers else n_low))](
            Strided(q, q.stride()),
            turned,
            shift,
            *(_parts(c, kind) for c in (k, v) for kind in ("first", "low", "newest")),
            parts,
            lses,
            *lengths,
            kv_heads,
            group,
            n_q,
            n_first,
            n_newest,
            n_low,
            n_splits,
            *ends,
            max(layout.ring, 1),
            layout.first,
            layout.capacity,
            valid_size,
            scale * LOG2_E,
            window,
            SPEC=tiles,
            num_warps=4,
            num_stages=2,
        )
    combine.launch(parts, lses, (n_first, n_newest), tiles.TURNED, group, n_q, out, lse)


def _low_in_registers(spec: Spec, device: torch.device) -> bool:
    """Whether `decode_int4` serves the low keys: both int4, 128 dims, up to 16 rows."""
    formats = spec.LOW[0], spec.LOW[2]
    if formats != ("int4", "int4") or (spec.D, spec.DV, spec.M) != (128, 128, 16):
        return False
    info = None if interpreting() else device_info(device)
    return info is not None and gluon_runs(info)


def _parts(copies: Copies, kind: str) -> Quantised:
    """A store as kernel arguments; that of every token where there is no such store."""
    store = getattr(copies, kind) or copies.low
    if not store.format.quantised:
        return Quantised(store.parts[0], None, None)
    if store.format.scale == "fp32":
        return Quantised(store.parts[0], None, store.parts[1])
    return Quantised(store.parts[0], store.parts[1],
                     store.parts[2] if store.format.has_global_scale else None)
