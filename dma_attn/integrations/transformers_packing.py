"""Packed sequences: how transformers says that a row holds several."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, int32, nn

from .transformers_masks import is_traced, once_a_pass

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Keywords that cut the tokens of a call into sequences."""


class Packing(NamedTuple):
    """Cumulative lengths, int32 (sequences + 1,), and the longest sequence, for q and for k."""

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int


def packing(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    causal: bool,
    kwargs: dict[str, Any],
) -> Packing | None:
    """How the tokens of q and k, (B, S, H, D), are cut into sequences; None if they are not."""
    cu_q, cu_k, longest_q, longest_k = (kwargs.get(name) for name in PACKING)
    if cu_q is not None or cu_k is not None:
        if cu_q is None or cu_k is None:
            raise ValueError("cu_seq_lens_q, cu_seq_lens_k: expected both, got one")
        if mask is not None and mask.ndim != 3:
            raise ValueError(
                f"cu_seq_lens_q: expected no padding mask beside it, got {tuple(mask.shape)}"
            )
        return Packing(
            cu_q.to(int32),
            cu_k.to(int32),
            _longest(longest_q, q.shape[0] * q.shape[1]),
            _longest(longest_k, k.shape[0] * k.shape[1]),
        )
    if mask is not None and mask.ndim == 3:
        segments = mask[:, 0]
        if q.shape[1] != k.shape[1] or segments.shape != k.shape[:2]:
            raise ValueError(
                f"attention_mask: expected sequence numbers for {q.shape[1]} queries and as many "
                f"keys, got {tuple(mask.shape)} and {k.shape[1]} keys"
            )
        return once_a_pass(mask, module, "cuts", lambda: _cut(segments.diff(dim=1) != 0))
    ids = kwargs.get("position_ids")
    if mask is not None or ids is None or ids.ndim != 2 or not causal:
        return None
    if not 1 < q.shape[1] == k.shape[1] == ids.shape[1] or is_traced(q):
        return None

    def restarts() -> Packing | None:
        falls = ids.diff(dim=1).expand(q.shape[0], -1) <= 0
        return _cut(falls) if bool(falls.any()) else None

    return once_a_pass(ids, module, "restarts", restarts)


def _cut(boundary: Tensor) -> Packing:
    """Sequences of B packed rows one after the other.

    boundary: bool (B, S - 1), True between two tokens of different sequences; a row starts one too.
    """
    starts = nn.functional.pad(boundary, (1, 0), value=True).flatten()
    cu = nn.functional.pad(starts.nonzero().flatten(), (0, 1), value=starts.numel())
    longest = int(cu.diff().max())
    cu = cu.to(int32)
    return Packing(cu, cu, longest, longest)


def _longest(value: int | Tensor | None, tokens: int) -> int:
    """A bound on the sequence lengths, without reading a device tensor on the host."""
    if value is None or (isinstance(value, Tensor) and value.device.type != "cpu"):
        return tokens
    return int(value)
