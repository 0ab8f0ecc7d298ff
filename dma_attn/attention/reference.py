"""Diagonal-tiled attention in PyTorch, a query tile at a time: readable, any device, O(S * 128).

    for each tile of 128 queries:
        S = scale * (Q_high K_high^T | Q_low K_low^T | ...)   classes by key range
        P = exp(S - max S), rounded as the kernels round it
        O = P V / sum P,  LSE = max S + log sum P + scale * q . mean_k

It computes the same function as the kernels up to the rounding of sums; what a kernel's tile order
changes (the running maximum against the final one) stays within the bounds of docs/numerics.md.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import torch

from ..formats import P_FP8_SCALE
from ..quant.rows import Rows
from ..quant.tensor import BlockScaledTensor
from ..schedule import TILE, common_keys, key_ranges
from .prepare import query_copies
from .types import CallOptions, PreparedKV, mask_floor, needs_shift


def attend(
    q: torch.Tensor, kv: PreparedKV, call: CallOptions, out: torch.Tensor
) -> torch.Tensor | None:
    """Fill out (B, H_q, S_q, Dv) and return the LSE (B, H_q, S_q) float32 if asked for."""
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return lse if call.return_lse else None
    # float32 products stay float32, and a mask that requires grad starts no graph
    with torch.autocast(q.device.type, enabled=False), torch.no_grad():
        for b in range(q.shape[0]):
            mask = None if call.mask is None else call.mask[b]
            out[b], lse[b] = _attend_row(q[b], _row(kv, b), call, mask)
    return lse if call.return_lse else None


def _attend_row(
    q: torch.Tensor, kv: PreparedKV, call: CallOptions, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch row: q (H_q, S_q, D) -> out (H_q, S_q, Dv) float32, LSE (H_q, S_q)."""
    heads, n_q, _ = q.shape
    _, kv_heads, n_kv, _, dv = kv.shape
    config = kv.config.canonical()
    length = n_kv if kv.rows.length is None else min(max(int(kv.rows.length[0]), 0), n_kv)
    start = 0 if kv.start is None else int(kv.start[0])
    first = 0 if call.top_left else length - n_q
    shape = (kv_heads, heads // kv_heads)

    quantised_factor = math.log(2.0) if kv.config.folds_scale else call.scale
    q_high, q_low = (_grouped(x, shape) for x in _quantised_queries(q, kv, call.scale, first))
    k_high, k_low = (None if c is None else c.dequantize()[0] for c in (kv.high, kv.low))
    # Contiguous float32 operands: one order of summation for every memory layout.
    raw_q = q.float().contiguous().reshape(*shape, *q.shape[1:])
    raw_k = None if kv.k is None else kv.k[0].float().contiguous()
    shift = None
    if kv.mean is not None and needs_shift(kv, call.return_lse):
        shift = call.scale * (raw_q * kv.mean[0][:, None]).sum(-1)
    v, v_scale = _values(kv, length)
    valid = None if kv.rows.valid is None else kv.rows.valid[0]

    out = torch.zeros(*shape, n_q, dv, dtype=torch.float32, device=q.device)
    lse = torch.full((*shape, n_q), -math.inf, dtype=torch.float32, device=q.device)
    for tile in range(first >> 7, ((first + n_q - 1) >> 7) + 1 if n_q else first >> 7):
        q_lo, q_hi = max(tile * TILE, first), min((tile + 1) * TILE, first + n_q)
        bounds = key_ranges(
            q_lo, q_hi, start, length, call.window, int(config.diag), config.sink, call.causal
        )
        lo, hi = bounds[0], bounds[-1]
        if lo >= hi:
            continue
        i = slice(q_lo - first, q_hi - first)
        pieces = []
        for n, (begin, end) in enumerate(pairwise(bounds)):
            high = n in (0, 2)
            xq, xk = (q_high, k_high) if high else (q_low, k_low)
            factor = quantised_factor
            if (config.high if high else config.low) == "none":
                xq, xk, factor = raw_q, raw_k, call.scale
            if begin == end or xq is None or xk is None:
                continue
            scores = xq[:, :, i] @ xk[:, None, begin:end].transpose(-1, -2) * factor
            if shift is not None and xq is raw_q:
                scores = scores - shift[:, :, i, None]
            pieces.append(scores)
        scores = torch.cat(pieces, -1)
        scores = _apply_masks(scores, (q_lo, q_hi), (lo, hi), length, call, valid,
                              None if mask is None else mask[:, i, lo:hi])
        row_max = scores.amax(-1, keepdim=True)
        row_max = torch.where(row_max == -math.inf, 0.0, row_max)
        p = torch.exp(scores - row_max)
        row_sum = p.sum(-1, keepdim=True)
        seen = max(lo, q_lo - call.window + 1) if call.window else lo
        values = v[:, None, seen:hi].float().contiguous()
        weighted = _round_p(p[..., seen - lo :], kv, v.dtype) @ values
        # A row without a visible key is 0, whatever q and V hold
        out[:, :, i] = torch.where(row_sum == 0, 0.0, weighted * v_scale / row_sum)
        lse[:, :, i] = (row_max + torch.log(row_sum))[..., 0]
    if shift is not None:
        lse = torch.where(lse == -math.inf, lse, lse + shift)
    return out.reshape(heads, n_q, dv), lse.reshape(heads, n_q)


def _quantised_queries(
    q: torch.Tensor, kv: PreparedKV, scale: float, first: int
) -> tuple[torch.Tensor | None, ...]:
    """Q's dequantised copies (H_q, S_q, D); zero rows in front align tiles to positions."""
    pad = first % TILE
    padded = torch.nn.functional.pad(q[None], (0, 0, pad, 0))
    copies = query_copies(padded, kv, Rows(1, padded.shape[2]), scale, triton=False)
    return tuple(None if c is None else c.dequantize()[0, :, pad:] for c in copies)


def _apply_masks(
    scores: torch.Tensor,
    queries: tuple[int, int],
    keys: tuple[int, int],
    length: int,
    call: CallOptions,
    valid: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Scores (H_kv, G, m, n) with hidden keys at -inf; mask is (H_q, m, n)."""
    if mask is not None:
        mask = mask.reshape(scores.shape)
        if mask.dtype != torch.bool:
            floor = mask_floor(mask.dtype)
            scores = scores + torch.where(mask > floor, mask.float(), 0.0)
            mask = mask > floor
        scores = scores.masked_fill(~mask, -math.inf)
    if valid is not None:
        scores = scores.masked_fill(~valid[keys[0] : keys[1]], -math.inf)
    common = common_keys(*queries, length, call.window, call.causal)
    if common[0] <= keys[0] and keys[1] <= common[1]:
        return scores
    i = torch.arange(*queries, device=scores.device)[:, None]
    j = torch.arange(*keys, device=scores.device)
    hidden = j >= length
    if call.causal:
        hidden = hidden | (j > i)
    if call.window:
        hidden = hidden | (j <= i - call.window)
    return scores.masked_fill(hidden, -math.inf)


def _values(kv: PreparedKV, length: int) -> tuple[torch.Tensor, torch.Tensor | float]:
    """V with the keys that must not be read zeroed, and what multiplies the weighted sum."""
    v = kv.v[0]
    factor: torch.Tensor | float = 1.0
    if kv.v_scale is not None:
        v = v.view(torch.float8_e4m3fn).float()
        factor = kv.v_scale[0][:, None] / P_FP8_SCALE
    used = kv.rows.in_use()
    if used is not None:
        v = torch.where(used[0][:, None], v, 0)
    return v, factor


def _round_p(p: torch.Tensor, kv: PreparedKV, v_dtype: torch.dtype) -> torch.Tensor:
    """P as P V uses it: V's 16-bit dtype, or E4M3 after a power of two that keeps small weights."""
    if kv.v_scale is not None:
        return (p * P_FP8_SCALE).to(torch.float8_e4m3fn).float()
    return p.to(v_dtype).float()


def _grouped(x: torch.Tensor | None, shape: tuple[int, int]) -> torch.Tensor | None:
    """(H_q, S, D) -> (H_kv, G, S, D)."""
    return None if x is None else x.reshape(*shape, *x.shape[1:])


def _row(kv: PreparedKV, b: int) -> PreparedKV:
    """The prepared keys and values of one batch row."""

    def at(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t[b : b + 1]

    def copy(c: BlockScaledTensor | None) -> BlockScaledTensor | None:
        if c is None:
            return None
        return BlockScaledTensor(
            c.data[b : b + 1],
            c.scales[b : b + 1],
            at(c.global_scale),
            c.format,
            torch.Size((1, *c.shape[1:])),
        )

    rows = Rows(1, kv.rows.longest, None, at(kv.rows.length), at(kv.rows.valid))
    return replace(
        kv,
        shape=(1, *kv.shape[1:]),
        rows=rows,
        start=at(kv.start),
        mean=at(kv.mean),
        high=copy(kv.high),
        low=copy(kv.low),
        k=at(kv.k),
        v=kv.v[b : b + 1],
        v_scale=at(kv.v_scale),
    )
