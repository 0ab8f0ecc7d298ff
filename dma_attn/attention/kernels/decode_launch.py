"""Launches of a decode step: the splits of a cache's keys, and which kernel takes them.

The low keys go to `decode_registers` where its formats and sizes are, else to `decode` with the
first and the newest; `combine` adds the parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ...device import device_info, gluon_runs, interpreting, processor_count
from ...formats import LOG2_E
from ...quant.kernels import Quantised, Strided
from ...quant.store import Copies
from . import combine
from .decode import Spec, decode_kernel, query_kernel

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


def launch(
    q: torch.Tensor,
    mean: torch.Tensor | None,
    turn: bool,
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
        q: (B, H_q, S_q, D), any strides.
        mean: float32 (B, H_kv, 1, D) subtracted from quantised K, or None.
        turn, rotated: Whether quantised K, quantised V is rotated.
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
    turned = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    shift = None if mean is None else torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    query_kernel[(batch * heads * n_q,)](
        Strided(q, q.stride()),
        mean,
        turned,
        shift,
        heads,
        group,
        n_q,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        ROTATE=turn,
        num_warps=1,
    )
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
        from .decode_registers import low_keys_kernel, variant

        low_keys_kernel[(planes, n_low)](
            turned,
            shift,
            _parts(k, "low"),
            _parts(v, "low"),
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
            **variant(tiles.LOW[0], tiles.LOW[2], head_dim, group * n_q),
            num_warps=1,
        )
    if not in_registers or n_first + n_newest:
        decode_kernel[(planes, n_first + n_newest + (0 if in_registers else n_low))](
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
    """Whether `decode_registers` serves the low keys: its formats, 64 or 128 dims, 16 rows."""
    info = None if interpreting() else device_info(device)
    if info is None or not gluon_runs(info):
        return False
    from .decode_registers import FORMATS

    dims = (spec.D, spec.DV) in ((64, 64), (128, 128))
    return dims and spec.M == 16 and spec.LOW[0] in FORMATS and spec.LOW[2] in FORMATS


def _parts(copies: Copies, kind: str) -> Quantised:
    """A store as kernel arguments; that of every token where there is no such store."""
    store = getattr(copies, kind) or copies.low
    if not store.format.quantised:
        return Quantised(store.parts[0], None, None)
    if store.format.scale == "fp32":
        return Quantised(store.parts[0], None, store.parts[1])
    return Quantised(store.parts[0], store.parts[1],
                     store.parts[2] if store.format.has_global_scale else None)
