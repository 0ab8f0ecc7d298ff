"""Operands of the Hopper kernel: one 8-bit code per value, laid out for TMA and wgmma.

    K, Q -> transforms -> value in each class's format -> E4M3(value / s)    s a power of two
    K, Q -> transforms -> int8 code                                         s the int8 scale
    V    -> E4M3(V / channel scale), transposed, keys permuted in groups of 16

s spans a tile of 128 keys (K) or one query (Q). Folding a block scale into an element is exact for
MXFP4 up to 14 binades below the tile maximum, keeps MXFP8's mantissas among E4M3's normal numbers,
and rounds NVFP4 once more (docs/numerics.md has the bounds). Rows sit at absolute positions: Q's
first block may start before the first query. In the last tile in use, rows of K without data are
zeros, and keys of V are zeros or repeat the last one; other rows without data hold anything.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..config import DMAConfig
from ..device import device_info, fits_tma, hopper_runs, interpreting, processor_count
from ..formats import BlockFormat
from ..schedule import TILE, tile_count
from .fold_kernels import combine_kernel, fold_kv_kernel, fold_q_kernel, statistics_kernel
from .kernels import Strided
from .tensor import QueryCodes

STATISTICS_ROWS = 256  # keys to a program
FOLD_PROGRAMS = 2  # of the fold of K and V by TMA, on each SM
# A launch that may begin before the one before it has ended, and waits for that where it must
_DEPENDENT = {} if interpreting() else {"launch_pdl": True}
QUERY_TILES = {1: 8, 2: 2}  # tiles of Q to a program, which fetches the Hadamard matrix once


class FoldedKV(NamedTuple):
    """K and V as the Hopper kernel reads them.

    Attributes:
        codes: uint8 (classes, B, H, tiles * 128, D), E4M3 or int8, the high class first.
        scales: float32 (classes, B, H, tiles).
        mean: float32 (B, H, 1, D) subtracted from K, or None.
        v: E4M3 codes (uint8) (B, H, Dv, tiles * 128), or None where V is read as it lies.
        v_scale: float32 (B, H, 1, Dv) channel scales, or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    mean: torch.Tensor | None
    v: torch.Tensor | None
    v_scale: torch.Tensor | None


def fold_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    high: tuple[BlockFormat, str] | None,
    low: tuple[BlockFormat, str],
    length: torch.Tensor | None,
    config: DMAConfig,
) -> FoldedKV:
    """K (B, H, S, D) and V (B, H, S, Dv), 16-bit, any strides, for the Hopper kernel.

    Args:
        high, low: Format and span of its fp32 scale; high is None with one class.
        length: int32 (B,) keys that hold data, or None for all.
    """
    batch, heads, size, head_dim = k.shape
    value_dim = v.shape[3]
    n_tiles = tile_count(size)
    planes = batch * heads

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=k.device)

    fp8 = config.pv == "fp8"
    matrix = _hadamard(head_dim, k.dtype, k.device) if config.rotate else None
    mean = empty(batch, heads, 1, head_dim) if config.smooth_k else None
    v_scale = empty(batch, heads, 1, value_dim) if fp8 else None
    rotated = mean
    k_arg, v_arg = Strided(k, k.stride()), Strided(v, v.stride())
    if mean is not None or fp8:
        n_blocks = -(-size // STATISTICS_ROWS)
        if mean is not None and matrix is not None:
            rotated = torch.empty_like(mean)
        partial = empty(planes, n_blocks, head_dim + value_dim)
        statistics_kernel[(n_blocks * planes,)](
            k_arg,
            v_arg,
            length,
            partial,
            n_blocks,
            heads,
            size,
            MEAN=mean is not None,
            AMAX=fp8,
            ROWS=STATISTICS_ROWS,
            T=8,
            D=head_dim,
            DV=value_dim,
            num_warps=4,
            maxnreg=128,
            **_DEPENDENT,
        )
        parts = int(mean is not None) + int(fp8)
        combine_kernel[(parts * planes,)](
            k_arg,
            v_arg,
            partial,
            length,
            mean,
            rotated,
            v_scale,
            n_blocks,
            heads,
            size,
            ROTATE=matrix is not None,
            ROWS=STATISTICS_ROWS,
            D=head_dim,
            DV=value_dim,
            PARTS=parts,
            num_warps=4,
            maxnreg=128,  # with which it starts beside the statistics
            **_DEPENDENT,
        )
    classes = 1 if high is None else 2
    codes = empty(classes, batch, heads, n_tiles * TILE, head_dim, dtype=torch.uint8)
    scales = empty(classes, batch, heads, n_tiles)
    v_codes = empty(batch, heads, value_dim, n_tiles * TILE, dtype=torch.uint8) if fp8 else None
    results = codes, scales, v_codes, v_scale
    sizes = n_tiles, planes, heads, size
    specs = {
        "HIGH": _class_spec(high, config.scale_rule),
        "LOW": _class_spec(low, config.scale_rule),
        "num_warps": 8,
        "maxnreg": 128,
        **(_DEPENDENT if mean is not None or fp8 else {}),
    }
    if matrix is not None and _feeds_by_tma(k) and (not fp8 or _feeds_by_tma(v)):
        from .fold_hopper import fold_kv_tma_kernel, layouts, matrix_descriptor
        from .tma import descriptor

        programs = min(n_tiles * planes, FOLD_PROGRAMS * processor_count(k.device))
        fold_kv_tma_kernel[(programs,)](
            descriptor(k, (1, 1, TILE, head_dim)),
            descriptor(v, (1, 1, TILE, value_dim)) if fp8 else None,
            matrix_descriptor(matrix),
            length,
            rotated,
            *results,
            *sizes,
            **layouts(head_dim, value_dim),
            **specs,
        )
    else:
        fold_kv_kernel[(n_tiles * planes,)](
            k_arg,
            v_arg,
            length,
            rotated,
            matrix,
            *results,
            *sizes,
            T=TILE,
            D=head_dim,
            DV=value_dim,
            **specs,
        )
    return FoldedKV(codes, scales, mean, v_codes, v_scale)


def query_codes(
    q: torch.Tensor,
    high: tuple[BlockFormat, str] | None,
    length: torch.Tensor | None,
    n_kv: int,
) -> QueryCodes:
    """Room for Q (B, H, S, D) at absolute positions; arguments as those of `fold_q`."""
    batch, heads, size, head_dim = q.shape
    classes = 1 if high is None else 2
    if length is None:
        n_tiles = tile_count(((n_kv - size) & (TILE - 1)) + size)
    else:
        n_tiles = tile_count(size) + 1
    shape = (classes, batch, heads, n_tiles * TILE)
    codes = torch.empty(*shape, head_dim, dtype=torch.uint8, device=q.device)
    return QueryCodes(codes, torch.empty(shape, dtype=torch.float32, device=q.device))


def fold_q(
    q: torch.Tensor,
    high: tuple[BlockFormat, str] | None,
    low: tuple[BlockFormat, str],
    length: torch.Tensor | None,
    n_kv: int,
    config: DMAConfig,
    scale: float,
    mean: torch.Tensor | None,
    room: QueryCodes,
) -> torch.Tensor | None:
    """Fill `room` from Q (B, H, S, D); scale * q . mean (B, H, S) where mean (of K) is given.

    A negative `scale` goes into the codes: the kernel's maxima need factors >= 0.
    """
    batch, heads, size, head_dim = q.shape
    classes = 1 if high is None else 2
    # A scale that spans a tile of queries needs them in one program; else two halves run better
    rows = TILE if "tile" in [cls[1] for cls in (high, low) if cls] else TILE // 2
    shift = None
    if mean is not None:
        shift = torch.empty(batch, heads, size, dtype=torch.float32, device=q.device)
    n_tiles = room.codes.shape[3] // rows
    fold_q_kernel[(-(-n_tiles // QUERY_TILES[classes]) * batch * heads,)](
        Strided(q, q.stride()),
        _rows_descriptor(q, rows),
        length,
        _hadamard(head_dim, q.dtype, q.device) if config.rotate else None,
        *room,
        shift,
        mean,
        n_tiles,
        batch * heads,
        heads,
        1 if mean is None else heads // mean.shape[1],
        size,
        n_kv,
        -1.0 if scale < 0 else 1.0,
        scale,
        T=rows,
        TILES=QUERY_TILES[classes],
        D=head_dim,
        HIGH=_class_spec(high, config.scale_rule),
        LOW=_class_spec(low, config.scale_rule),
        num_warps=rows // 16,
        num_stages=1 if classes == 2 else 3,
        maxnreg=128,
    )
    return shift


def _feeds_by_tma(x: torch.Tensor) -> bool:
    """True when the kernel that TMA feeds can take x."""
    info = None if interpreting() else device_info(x.device)
    return info is not None and hopper_runs(info) and fits_tma(x)


def _rows_descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor | None:
    """TMA boxes of rows of x (B, H, S, D); None where it cannot read them."""
    if interpreting() or not fits_tma(x):
        return None
    return TensorDescriptor.from_tensor(x, [1, 1, rows, x.shape[3]])


@functools.cache
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The unnormalised Hadamard matrix, its columns in the order that the kernels want."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    columns = torch.arange(size).view(size // 64, 4, 8, 2).transpose(1, 2).flatten()
    return matrix[:, columns].to(device, dtype)


def _class_spec(
    cls: tuple[BlockFormat, str] | None, scale_rule: str
) -> tuple[str, str, str] | None:
    return None if cls is None else (cls[0].name, cls[0].resolve_rule(scale_rule), cls[1])
