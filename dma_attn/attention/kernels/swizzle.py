"""Block scales in the order that Blackwell's tensor cores read them.

A tile of 128 rows and 4 scales lies in 512 bytes: byte 16 (r mod 32) + 4 (r div 32) + c is scale c
of row r, so that the copy to tensor memory finds the 4 scales of rows r, r + 32, r + 64 and r + 96
in 16 bytes. Tiles follow one another along the scales, then along the rows; what fills up the last
ones is 0. The layout of cuBLAS ("1D block scaling factors layout") and torchao's `to_blocked`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, SCALES = 128, 4


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Scales uint8 (..., S, n) -> (..., ceil(S / 128), ceil(n / 4), 2, 256), contiguous."""
    rows, n = scales.shape[-2:]
    pad = (0, -n % SCALES, 0, -rows % ROWS)
    tiles = torch.nn.functional.pad(scales, pad).unflatten(-1, (-1, SCALES))
    tiles = tiles.unflatten(-3, (-1, SCALES, ROWS // SCALES))  # (..., tiles, 4, 32, n / 4, 4)
    return tiles.movedim((-2, -3), (-4, -3)).contiguous().flatten(-3).unflatten(-1, (2, 256))


def unswizzle(swizzled: torch.Tensor, rows: int, n: int) -> torch.Tensor:
    """The scales (..., rows, n) that `swizzle` was given."""
    tiles = swizzled.flatten(-2).unflatten(-1, (ROWS // SCALES, SCALES, SCALES))
    return tiles.movedim((-4, -3), (-2, -3)).flatten(-2).flatten(-4, -2)[..., :rows, :n]


@triton.jit
def unswizzled(x, N: tl.constexpr):
    """A tile (1, 1, ceil(N / 4), 2, 256) of `swizzle` -> (128, N), for `tl.dot_scaled`."""
    N_TILES: tl.constexpr = (N + 3) // 4
    x = x.reshape(1, N_TILES, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(128, N_TILES * 4)
    if N == 2:
        x = tl.split(x.reshape(128, 2, 2).permute(0, 2, 1))[0]
    return x
