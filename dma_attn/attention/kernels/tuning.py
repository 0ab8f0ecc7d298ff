"""Tile sizes of the kernels: one table, each row with its reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...device import device_info


@dataclass(frozen=True)
class TileConfig:
    """Launch shape: query rows and keys of a block, warps, pipeline stages of the key loop."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def portable_tiles(
    n_q: int, block_d: int, block_dv: int, element_bytes: int, shared_memory: int
) -> TileConfig:
    """Tile sizes of the portable kernel.

    block_m divides the 128-query precision tile; few queries take few rows, down to the 16 that a
    tensor-core product needs. Wide heads halve the keys of a block, so that the upcast K tile, V
    and the accumulator stay in registers and in the shared memory that the GPU offers (99 KB on
    consumer parts, 227 KB on Hopper). With FP8 P V of 128 dims 4 warps spill 96 bytes a thread on
    8.9, and were still faster on an H200 than 8, which spill none (`docs/kernels.md`).
    """
    widest = max(block_d, block_dv)
    block_m = 16 if n_q <= 16 else 32 if n_q <= 32 else 64
    block_n = 32 if widest > 128 or element_bytes == 4 else 64
    num_warps = 4 if widest <= 128 else 8
    stages = 2
    while stages > 1 and _shared_bytes(block_m, block_n, widest, element_bytes, stages) > (
        shared_memory
    ):
        stages -= 1
    if _shared_bytes(block_m, block_n, widest, element_bytes, stages) > shared_memory:
        block_m, block_n = min(block_m, 32), 16
    return TileConfig(block_m, block_n, num_warps, stages)


def blackwell_tiles(device: torch.device) -> TileConfig:
    """Tile sizes with block-scaled products.

    block_n is the tile of 128 keys whose scales lie together. On 10.x 128 queries fill a tcgen05
    product, whose scores 8 warps hold in half of their registers. On 12.x, without tensor memory,
    the accumulators are registers, too: half as many queries. (FP8 P V of 128 dims spills up to 224
    bytes there; a quarter of the queries would spill 8, and load each byte of V twice as often.)
    """
    info = device_info(device)
    if info is not None and info.capability[0] == 12:
        return TileConfig(64, 128, 8, 2)
    return TileConfig(128, 128, 8, 2)


def _shared_bytes(block_m: int, block_n: int, width: int, element_bytes: int, stages: int) -> int:
    """Upper estimate: Q once, raw K and V per stage, and the upcast K tile, all `width` wide."""
    return width * element_bytes * (block_m + block_n * (2 * stages + 1))
