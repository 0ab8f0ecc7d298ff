"""What the public calls hand to an implementation: prepared keys and values, and call options."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import DMAConfig
from ..quant.rows import Rows
from ..quant.tensor import BlockScaledTensor, QueryCodes


@dataclass(frozen=True)
class PreparedKV:
    """K and V quantised once, ready for many `dma_attention_prepared` calls.

    Attributes:
        config: The configuration they were prepared with.
        shape: (B, H_kv, S_kv, D, Dv); (1, H_kv, total, D, Dv) for packed sequences.
        dtype: dtype of the K and V that were given; queries must have it.
        rows: Sequences, key lengths and valid keys.
        start: int32 (B,) first valid key of each row, or None when it is 0 everywhere.
        mean: float32 (B, H_kv, 1, D) subtracted from K, or None.
        high, low: Quantised copies of K; None where no tile is in that class or it is "none", and
            with `folded`.
        k: K itself, (B, H_kv, S_kv, D), a view, kept only when a class is "none".
        v: V itself, a view, or its E4M3 codes (uint8) with `pv="fp8"`; with `folded` these are
            transposed, (B, H_kv, Dv, tiles * 128).
        v_scale: float32 (B, H_kv, 1, Dv) channel scales of FP8 V, or None.
        swizzled: Block scales of `high` and `low` for the Blackwell kernel (`kernels.swizzle`),
            which then serves every call; else None.
        folded: Codes and scales of K for the Hopper kernel (`quant.folded`), which then serves
            every call; else None.
        fork: In a call that prepares its own keys for that kernel, room for the codes of Q and the
            moment from which another stream may fill it.
        tensor_layout: Layout of the K and V that were given, expected of q too.
    """

    config: DMAConfig
    shape: tuple[int, int, int, int, int]
    dtype: torch.dtype
    rows: Rows
    start: torch.Tensor | None
    mean: torch.Tensor | None
    high: BlockScaledTensor | None
    low: BlockScaledTensor | None
    k: torch.Tensor | None
    v: torch.Tensor
    v_scale: torch.Tensor | None
    swizzled: tuple[torch.Tensor | None, torch.Tensor | None] | None = None
    folded: tuple[torch.Tensor, torch.Tensor] | None = None
    fork: tuple[QueryCodes, torch.cuda.Event] | None = None
    tensor_layout: str = "HND"

    @property
    def device(self) -> torch.device:
        """Device of every tensor in here."""
        return self.v.device

    @property
    def nbytes(self) -> int:
        """Bytes of the quantised copies and scales (views of the caller's tensors not counted)."""
        parts = [c.nbytes for c in (self.high, self.low) if c is not None]
        small = (self.mean, self.v_scale, *(self.folded or ()), *(self.swizzled or ()))
        parts += [t.numel() * t.element_size() for t in small if t is not None]
        if self.v_scale is not None:
            parts.append(self.v.numel())
        return sum(parts)


@dataclass(frozen=True)
class CallOptions:
    """Options of one attention call, validated.

    Attributes:
        causal: Query i sees keys up to its own position.
        top_left: Query i sits at position i (torch's causal rule), else at i + S_kv - S_q.
        scale: Softmax scale.
        window: Most recent keys that a query sees; 0 for all.
        mask: (B, H_q, S_q, S_kv), expanded with stride 0 where it broadcasts: bool (True =
            visible) or float (added to the scaled scores); None for no mask.
        return_lse: Also return the log-sum-exp.
        cu_q: int32 (n + 1,) cumulative query lengths of packed sequences, or None.
        longest_q: Longest query sequence.
    """

    causal: bool
    top_left: bool
    scale: float
    window: int
    mask: torch.Tensor | None
    return_lse: bool
    longest_q: int
    cu_q: torch.Tensor | None = None


def mask_floor(dtype: torch.dtype) -> float:
    """Additive mask values at or below this count as "not visible" (finfo.min idioms, -inf)."""
    return torch.finfo(dtype).min / 2


def needs_shift(kv: PreparedKV, return_lse: bool) -> bool:
    """True when q . mean_k enters: for the LSE, or because raw K is mixed with smoothed copies."""
    return kv.mean is not None and (return_lse or kv.k is not None)
