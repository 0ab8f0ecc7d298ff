"""Combine partial attention results and compare results: `merge_states`, `precision_metrics`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .validate import check_layout


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    tensor_layout: str = "HND",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint sets of keys into attention over their union.

    Args:
        outs: Partial outputs of one shape, (..., H, S, Dv) for "HND", (..., S, H, Dv) for "NHD"
            (packed sequences are "NHD").
        lses: Their natural-log LSEs (..., H, S), float32.

    Returns:
        (out, lse) in outs[0]'s dtype and float32; a query with no key anywhere gives 0 and -inf.

    Raises:
        ValueError: no parts, numbers of parts or shapes that differ, unknown layout.
    """
    check_layout(tensor_layout)
    if not len(outs) or len(outs) != len(lses):
        raise ValueError(
            f"outs, lses: expected as many of each, at least one, got {len(outs)} and {len(lses)}"
        )
    shape = outs[0].shape[:-1]
    want = shape if tensor_layout == "HND" else (*shape[:-2], shape[-1], shape[-2])
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != outs[0].shape or tuple(lse.shape) != tuple(want):
            raise ValueError(
                f"outs, lses: expected shapes {tuple(outs[0].shape)} and {tuple(want)}, "
                f"got {tuple(out.shape)} and {tuple(lse.shape)}"
            )
    stacked = torch.stack([x.float() for x in lses])
    lse = torch.logsumexp(stacked, 0)
    weights = torch.exp(stacked - torch.where(lse == -math.inf, 0.0, lse))
    if tensor_layout == "NHD":
        weights = weights.transpose(-1, -2)
    # A part without keys weighs 0; its output is 0 by contract, but never let 0 * NaN in.
    total = sum(
        torch.where(w[..., None] == 0, 0.0, w[..., None] * o.float())
        for w, o in zip(weights, outs, strict=True)
    )
    assert isinstance(total, torch.Tensor)
    return total.to(outs[0].dtype), lse


@dataclass(frozen=True)
class PrecisionMetrics:
    """How far a result is from a reference; every field is NaN if either holds NaN or Inf.

    Attributes:
        cosine: Cosine similarity of the flattened tensors.
        rel_l1: sum|d| / sum|ref|.
        rmse: Root mean square of d.
        psnr: 20 log10(max|ref| / rmse) in dB, inf for equal tensors.
        rel_l2: norm(d) / norm(ref).
        max_abs: Largest |d|.
        worst_row: Largest rel-L2 of a row (the last dim).
    """

    cosine: float
    rel_l1: float
    rmse: float
    psnr: float
    rel_l2: float
    max_abs: float
    worst_row: float


def precision_metrics(out: torch.Tensor, ref: torch.Tensor) -> PrecisionMetrics:
    """Compare out with ref, in float64. cosine, rel-L1, RMSE and PSNR are the paper's four.

    Raises:
        ValueError: the shapes differ or are empty.
    """
    if out.shape != ref.shape or not out.numel():
        raise ValueError(
            f"out: expected ref's non-empty shape {tuple(ref.shape)}, got {tuple(out.shape)}"
        )
    x, r = out.double(), ref.double()
    if not (torch.isfinite(x).all() and torch.isfinite(r).all()):
        return PrecisionMetrics(*[math.nan] * 7)
    d = x - r
    norms = (x.norm() * r.norm()).item()
    rmse = d.square().mean().sqrt().item()
    peak = r.abs().max().item()
    rows = _ratio(d.norm(dim=-1), r.norm(dim=-1)) if d.dim() else _ratio(d.abs(), r.abs())
    return PrecisionMetrics(
        cosine=(x * r).sum().item() / norms if norms else float(torch.equal(x, r)),
        rel_l1=_ratio(d.abs().sum(), r.abs().sum()).item(),
        rmse=rmse,
        psnr=math.inf if rmse == 0 else 20 * math.log10(peak / rmse) if peak else -math.inf,
        rel_l2=_ratio(d.norm(), r.norm()).item(),
        max_abs=d.abs().max().item(),
        worst_row=rows.max().item(),
    )


def _ratio(error: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """error / size, 0 where both are 0."""
    return torch.where(error == 0, 0.0, error / size)
