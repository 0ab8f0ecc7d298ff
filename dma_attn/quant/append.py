"""The append to a KV cache: both copies of new tokens, written where the cache keeps them.

    advance_kernel     lengths, the first token with high copies, those that count: a row a program
    append_kernel      x (B, H, n, D) -> (- mean) -> Hadamard -> low copy, at the token's position
                                                              -> high copy: ring, first tokens

Positions are read from the device, so that a step with its append can be captured. Copies are
bit-equal to `quant.reference`'s. Tokens beyond the capacity, which only a graph's replay can bring,
are counted and not written. Runs on every GPU that Triton compiles for and under its interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .encode import encode
from .jit import bits, block, item, scale_kind
from .kernels import Quantised, RowArgs, Strided, TileSpec, load_rows, strided
from .launches import run
from .store import Copies, Store

MARKED = 1024  # tokens at a time
FEW = 16  # tokens, up to which each is a program


@triton.jit(do_not_specialize=["n", "diag", "valid_size"])
def advance_kernel(lengths_ptr, starts_ptr, near_ptr, valid_ptr, mask, n, diag, valid_size,
                   BLOCK: tl.constexpr):
    """One row: n more tokens, all or those of `mask` (B, n) count."""
    b = tl.program_id(0)
    length = tl.load(lengths_ptr + b)
    start = tl.load(starts_ptr + b)
    first = length
    if mask.ptr is not None or valid_ptr is not None:
        found = length + n
        for begin in range(0, n, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            counts = (i < n).to(tl.int8)
            if mask.ptr is not None:
                at = b.to(tl.int64) * mask.strides[0] + i.to(tl.int64) * mask.strides[1]
                counts = tl.load(mask.ptr + at, mask=i < n, other=0).to(tl.int8)
            if valid_ptr is not None:
                at = b.to(tl.int64) * valid_size + length + i
                inside = (i < n) & (length + i < valid_size)
                tl.store(valid_ptr + at, counts != 0, mask=inside)
            found = tl.minimum(found, tl.min(tl.where(counts != 0, length + i, length + n), 0))
        first = tl.where(found < length + n, found, -1)
    tl.store(starts_ptr + b, tl.where(start < 0, first, start))
    tl.store(lengths_ptr + b, length + n)
    if b == 0:
        near = tl.load(near_ptr)
        tl.store(near_ptr, tl.maximum(near, (((length + n - 1) >> 7) << 7) - diag))


@triton.jit
def _halves(codes, T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """4-bit codes (T, BLOCK_D) -> bytes (T, BLOCK_D / 2): dim d low, d + D / 2 high."""
    if D == BLOCK_D:
        low, high = tl.split(codes.reshape(T, 2, BLOCK_D // 2).permute(0, 2, 1))
    else:
        offs = tl.zeros([T, BLOCK_D // 2], tl.int32) + tl.arange(0, BLOCK_D // 2)[None, :]
        low = tl.gather(codes, offs, 1)
        high = tl.gather(codes, tl.minimum(offs + D // 2, BLOCK_D - 1), 1)
    return low | (high << 4)


@triton.jit
def _encoded(x, y, S: tl.constexpr, C: tl.constexpr):
    """What a store keeps of rows: of y, quantised as C = (format, rule) says, or x itself."""
    FORMAT: tl.constexpr = item(C, 0)
    if FORMAT == "none":
        return x, x, x
    else:
        codes, scales, row_scale = encode(y, 0, FORMAT, item(C, 1), "token", S.T, S.BLOCK_D)
        if bits(FORMAT) == 4:
            codes = _halves(codes, S.T, S.D, S.BLOCK_D)
        return codes.to(tl.uint8), scales.to(tl.uint8), row_scale


@triton.jit
def _put(parts, store, row, mask, S: tl.constexpr, C: tl.constexpr):
    """Write rows where a mask (T,) is set."""
    FORMAT: tl.constexpr = item(C, 0)
    BLOCK_D: tl.constexpr = S.BLOCK_D
    codes, scales, row_scale = parts
    WIDTH: tl.constexpr = S.D if FORMAT == "none" else S.D * bits(FORMAT) // 8
    offs = tl.arange(0, codes.shape[1])
    tl.store(store.codes + row[:, None] * WIDTH + offs[None, :], codes,
             mask=mask[:, None] & (offs < WIDTH)[None, :])
    if FORMAT != "none":
        if scale_kind(FORMAT) != "fp32":
            BLOCK: tl.constexpr = block(FORMAT, BLOCK_D)
            N: tl.constexpr = (S.D + BLOCK - 1) // BLOCK
            offs = tl.arange(0, BLOCK_D // BLOCK)
            tl.store(store.scales + row[:, None] * N + offs[None, :], scales,
                     mask=mask[:, None] & (offs < N)[None, :])
        if scale_kind(FORMAT) != "e8m0":
            tl.store(store.row_scales + row, row_scale, mask=mask)


@triton.jit(do_not_specialize=["n_blocks", "H", "n", "capacity", "ring", "sink"])
def append_kernel(x, mean, low, newest, first, lengths_ptr, starts_ptr, n_blocks, H, n, capacity,
                  ring, sink, sink_size, SPEC: tl.constexpr, LOW: tl.constexpr,
                  HIGH: tl.constexpr):
    """Up to T of a head's n new tokens, the last ones of lengths_ptr."""
    T: tl.constexpr = SPEC.T
    i_block = tl.program_id(0) % n_blocks
    plane = (tl.program_id(0) // n_blocks).to(tl.int64)
    b, h = plane // H, plane % H
    i = i_block * T + tl.arange(0, T)
    pos = tl.load(lengths_ptr + b) - n + i
    mask = (i < n) & (pos < capacity)
    rows = i.to(tl.int64)
    y = load_rows(x, mean, RowArgs(None, None, None), b, h, tl.zeros([], tl.int64), rows, n, n,
                  None, SPEC)
    offs = tl.arange(0, SPEC.BLOCK_D)
    at = b * x.strides[0] + h * x.strides[1] + rows[:, None] * x.strides[2]
    at += offs.to(tl.int64)[None, :] * x.strides[3]
    raw = tl.load(x.ptr + at, mask=mask[:, None] & (offs < SPEC.D)[None, :], other=0.0)
    _put(_encoded(raw, y, SPEC, LOW), low, plane * capacity + pos, mask, SPEC, LOW)
    if HIGH is not None:
        parts = _encoded(raw, y, SPEC, HIGH)
        if newest.codes is not None:
            kept = mask & (i >= n - ring)
            _put(parts, newest, plane * ring + pos % ring, kept, SPEC, HIGH)
        if first.codes is not None:
            start = tl.load(starts_ptr + b)
            begin = (start >> 7) << 7
            end = ((start + sink + 127) >> 7) << 7
            inside = mask & (start >= 0) & (pos >= begin) & (pos < end)
            _put(parts, first, plane * sink_size + pos - begin, inside, SPEC, HIGH)


def stored(store: Store | None) -> Quantised:
    """A store as a kernel argument; None for what it lacks."""
    if store is None:
        return Quantised(None, None, None)
    if not store.format.quantised:
        return Quantised(store.parts[0], None, None)
    if store.format.scale == "fp32":
        return Quantised(store.parts[0], None, store.parts[1])
    return Quantised(store.parts[0], store.parts[1],
                     store.parts[2] if store.format.has_global_scale else None)


def launch_advance(
    lengths: torch.Tensor,
    starts: torch.Tensor,
    near: torch.Tensor,
    valid: torch.Tensor | None,
    mask: torch.Tensor | None,
    n: int,
    diag: int,
) -> None:
    """n more tokens on the device: lengths, starts int32 (B,), near int32 (1,), valid bool (B,
    capacity) or None; those of mask, bool (B, n), count, or all."""
    run(
        advance_kernel, (lengths.numel(),),
        lengths, starts, near, valid, strided(mask, 2), n, diag,
        0 if valid is None else valid.shape[1],
        BLOCK=min(MARKED, triton.next_power_of_2(n)), num_warps=1 if n <= 32 else 4,
    )


def launch_append(
    x: torch.Tensor,
    copies: Copies,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    sink: int,
    *,
    mean: torch.Tensor | None,
    rotate: bool,
    scale_rule: str,
) -> None:
    """Write the copies of x (B, H, n, D), the newest n tokens of `lengths`, to a cache's stores.

    Args:
        sink: Tokens that are high from a row's first one on.
        mean: float32 (B, H, 1, D) subtracted before quantisation, or None.
    """
    _, heads, n, head_dim = x.shape
    block_d = max(triton.next_power_of_2(head_dim), 32)
    t = 1 if n <= FEW else max(4096 // block_d, 16)
    n_blocks = -(-n // t)
    near = copies.newest or copies.first

    def how(store: Store | None) -> tuple[str, str] | None:
        if store is None:
            return None
        f = store.format
        return f.name, f.resolve_rule(scale_rule) if f.quantised else ""

    run(
        append_kernel,
        (n_blocks * x.shape[0] * heads,),
        Strided(x, x.stride()),
        strided(None if mean is None else mean.expand(-1, -1, n, -1), 4),
        stored(copies.low),
        stored(copies.newest),
        stored(copies.first),
        lengths,
        starts,
        n_blocks,
        heads,
        n,
        copies.low.parts[0].shape[2],
        1 if copies.newest is None else copies.newest.parts[0].shape[2],
        sink,
        0 if copies.first is None else copies.first.parts[0].shape[2],
        SPEC=TileSpec(t, head_dim, block_d, rotate),
        LOW=how(copies.low),
        HIGH=how(near),
        num_warps=1 if t == 1 else 4,
        enable_fp_fusion=False,
    )
