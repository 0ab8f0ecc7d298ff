"""Add the parts of an output that splits of the keys have left, each weighted by its LSE.

    out = sum_s w_s part_s + H sum_r w_r part_r      w = 2^(lse - max) / sum, r: parts of rotated V

The rotation is undone once a row, on the sum. Any GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ...quant.jit import constant, hadamard, item
from ...quant.kernels import Strided
from ...quant.launches import run


@triton.jit(do_not_specialize=["H_KV", "GROUP", "S_Q", "n_first", "n_newest", "n_splits"])
def _combine_kernel(part_ptr, lse_ptr, out, out_lse_ptr, H_KV, GROUP, S_Q, n_first, n_newest,
                    n_splits, M: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
                    SPLITS: tl.constexpr, TURNED: tl.constexpr, OVERLAP: tl.constexpr):
    """One row: its parts weighted by their LSE, those of rotated V turned back."""
    if OVERLAP:
        gdc_wait()
    rows = GROUP * S_Q
    plane = (tl.program_id(0) // rows).to(tl.int64)
    row = tl.program_id(0) % rows
    b = plane // H_KV
    head = plane % H_KV * GROUP + row // S_Q
    i = row % S_Q
    offs = tl.arange(0, BLOCK_DV)
    mask = offs < DV
    first = plane * n_splits * M + row
    top = tl.full([SPLITS], float("-inf"), tl.float32)
    for s in range(0, n_splits, SPLITS):
        split = s + tl.arange(0, SPLITS)
        lse = tl.load(lse_ptr + first + split * M, mask=split < n_splits, other=float("-inf"))
        top = tl.maximum(top, lse)
    base = tl.max(top, 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    total = tl.zeros([BLOCK_DV], tl.float32)
    turned = tl.zeros([BLOCK_DV], tl.float32)
    weights = tl.zeros([], tl.float32)
    for s in range(0, n_splits, SPLITS):
        split = s + tl.arange(0, SPLITS)
        lse = tl.load(lse_ptr + first + split * M, mask=split < n_splits, other=float("-inf"))
        weight = tl.math.exp2(lse - base)
        at = (first + split * M)[:, None] * DV + offs[None, :]
        part = tl.load(part_ptr + at, mask=(split < n_splits)[:, None] & mask[None, :], other=0.0)
        blind = lse == float("-inf")  # its part, of no key, may be NaN
        part = tl.where(blind[:, None], 0.0, part * weight[:, None])
        rotated = tl.where(split < n_first, item(TURNED, 0),
                           tl.where(split < n_first + n_newest, item(TURNED, 2),
                                    item(TURNED, 1)))
        total += tl.sum(tl.where(rotated[:, None], 0.0, part), 0)
        turned += tl.sum(tl.where(rotated[:, None], part, 0.0), 0)
        weights += tl.sum(weight, 0)
    total += hadamard(turned[None, :], DV, 1, BLOCK_DV).reshape(BLOCK_DV)
    blind = weights == 0.0
    total = tl.where(blind, 0.0, total / tl.where(blind, 1.0, weights))
    at = b * out.strides[0] + head * out.strides[1] + i * out.strides[2]
    tl.store(out.ptr + at + offs.to(tl.int64) * out.strides[3],
             total.to(out.ptr.dtype.element_ty), mask=mask)
    if out_lse_ptr is not None:
        lse = (base + tl.math.log2(tl.where(blind, 1.0, weights))) * constant("LN_2")
        tl.store(out_lse_ptr + (b * H_KV * GROUP + head) * S_Q + i,
                 tl.where(blind, float("-inf"), lse))


def launch(
    parts: torch.Tensor,
    lses: torch.Tensor,
    kinds: tuple[int, int],
    turned: tuple[bool, ...],
    group: int,
    n_q: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    overlap: bool,
) -> None:
    """Fill out (B, H_q, S_q, Dv) and lse (B, H_q, S_q).

    Args:
        parts: float32 (B * H_kv, splits, M, Dv), normalised; lses: (B * H_kv, splits, M), base 2.
        kinds: Splits of the first keys and of the newest, which come in that order; then the low.
        turned: Whether parts of first, low and newest keys are rotated.
        overlap: Start before the parts are there, and wait for them.
    """
    planes, n_splits, m, value_dim = parts.shape
    run(
        _combine_kernel,
        (planes * group * n_q,),
        parts,
        lses,
        Strided(out, out.stride()),
        lse,
        out.shape[1] // group,
        group,
        n_q,
        *kinds,
        n_splits,
        M=m,
        DV=value_dim,
        BLOCK_DV=triton.next_power_of_2(value_dim),
        SPLITS=32 if n_splits <= 32 else 128 if value_dim <= 128 else 64,
        TURNED=turned,
        OVERLAP=overlap,
        num_warps=2 if n_splits <= 32 else 4,
        launch_pdl=overlap,
    )
