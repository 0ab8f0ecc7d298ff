"""Launches of a decode step: the splits of a cache's keys, and which kernel takes them.

The low keys go to `decode_registers` where its formats and sizes are, else to `decode` with the
first and the newest; `combine` adds the parts. From Hopper on these kernels overlap (programmatic
dependent launch): each may start when all programs of the one before have, and the last one waits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ...device import DeviceInfo, device_info, gluon_runs, interpreting, processor_count
from ...formats import LOG2_E
from ...quant.append import stored
from ...quant.kernels import Strided
from ...quant.launches import run, scratch
from ...quant.store import Copies
from . import combine
from .decode import Spec, decode_kernel, query_kernel

BLOCK_BYTES = 64 * 128 * 2  # of a block of keys, where they are not quantised
ROW_BYTES = 32 * 2  # of a column of a program's queries, at most; Triton takes wgmma for 64 rows
SPLIT = 256  # keys of a split of the first or the newest, and at least of a low one
PROGRAMS = 4  # on an SM


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
    rows = group * n_q
    m = min(ROW_BYTES // q.element_size(), max(16, triton.next_power_of_2(rows)))
    chunks = -(-rows // m)
    tiles = Spec(
        D=head_dim,
        DV=value_dim,
        HALF=max(16, triton.next_power_of_2(head_dim // 2)),
        HALF_V=max(16, triton.next_power_of_2(value_dim // 2)),
        M=m,
        N=_keys_of_a_block(max(head_dim, value_dim), q.element_size()),
        FIRST=kinds[0],
        LOW=kinds[1],
        NEWEST=kinds[2],
        TURNED=tuple(rotated and x[2] != "none" for x in kinds),
        WINDOW=window > 0,
        UPCAST=interpreting(),
    )
    planes = batch * kv_heads
    info = None if interpreting() else device_info(q.device)
    overlap = info is not None and info.capability >= (9, 0)
    in_registers = info is not None and q.dtype != torch.float32 and _in_registers(tiles, info)
    n_first = -(-layout.first // SPLIT) if layout.sink else 0
    n_newest = -(-layout.ring // SPLIT) if layout.diag else 0
    sms = processor_count(q.device)
    if in_registers:
        from .decode_registers import low_keys_kernel, resident, variant

        kernel = variant(tiles.LOW[0], tiles.LOW[2], head_dim, rows)
        low_chunks = -(-rows // kernel["M"])
        n_low = resident(kernel) * sms // (planes * low_chunks)
    else:
        n_low = PROGRAMS * sms // (planes * chunks) - n_first - n_newest
    n_low = max(1, min(n_low, layout.capacity // SPLIT))
    n_splits = n_first + n_newest + n_low
    shape = planes, n_splits, chunks * m
    parts = scratch((*shape, value_dim), torch.float32, q.device)
    lses = scratch(shape, torch.float32, q.device)
    lengths = layout.lengths, layout.near, layout.starts, layout.valid
    ends = layout.diag, layout.sink
    valid_size = 0 if layout.valid is None else layout.valid.shape[1]
    near = n_first + n_newest + (0 if in_registers else n_low)
    if near:
        turned = shift = None
        quantised = tiles.LOW[:1] * (not in_registers) + tiles.FIRST[:1] * bool(n_first)
        if set(quantised + tiles.NEWEST[:1] * bool(n_newest)) - {"none"}:
            turned, shift = _turned(q, mean, group, turn)
        run(
            decode_kernel,
            (planes, near, chunks),
            Strided(q, q.stride()),
            turned,
            shift,
            *(stored(store or c.low) for c in (k, v) for store in (c.first, c.low, c.newest)),
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
            OVERLAP=overlap,
            num_warps=4,
            num_stages=2,
        )
    if in_registers:
        run(
            low_keys_kernel,
            (planes, n_low, low_chunks),
            Strided(q, q.stride()),
            mean,
            stored(k.low),
            stored(v.low),
            parts,
            lses,
            *lengths,
            kv_heads,
            group,
            n_q,
            n_first + n_newest,
            n_low,
            n_splits,
            chunks * m,
            *ends,
            layout.capacity,
            valid_size,
            scale * LOG2_E,
            window,
            ROTATE=turn,
            WINDOW=window > 0,
            OVERLAP=overlap,
            **kernel,
            num_warps=1,
            launch_pdl=overlap and near > 0,
        )
    combine.launch(parts, lses, (n_first, n_newest), tiles.TURNED, group, n_q, out, lse, overlap)


def _keys_of_a_block(head_dim: int, size: int) -> int:
    """So many that two blocks of K and V and the queries fit 99 KB of shared memory."""
    return max(16, min(64, BLOCK_BYTES // (triton.next_power_of_2(head_dim) * size)))


def _in_registers(spec: Spec, info: DeviceInfo) -> bool:
    """Whether `decode_registers` serves the low keys: its formats, 64 or 128 dims."""
    if not gluon_runs(info):
        return False
    from .decode_registers import FORMATS

    formats = {spec.LOW[0], spec.LOW[2]}
    dims = (spec.D, spec.DV) in ((64, 64), (128, 128))
    return (dims and formats <= set(FORMATS)
            and (info.capability >= (8, 9) or not formats & {"nvfp4", "mxfp8"}))  # E4M3 -> fp16


def _turned(
    q: torch.Tensor, mean: torch.Tensor | None, group: int, turn: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Q as quantised K wants it, float32: rotated if told so; and its product with K's mean."""
    batch, heads, n_q, head_dim = q.shape
    turned = scratch(q.shape, torch.float32, q.device)
    shift = None if mean is None else scratch(q.shape[:3], torch.float32, q.device)
    run(
        query_kernel,
        (batch * heads * n_q,),
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
    return turned, shift
