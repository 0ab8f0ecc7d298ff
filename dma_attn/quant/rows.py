"""`Rows`: which rows of a (B, H, S, D) operand hold data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..schedule import TILE, tile_count


@dataclass(frozen=True)
class Rows:
    """Sequences within an operand; all tensors are on its device, and kept contiguous.

    Attributes:
        n: Number of sequences (batch rows).
        longest: Longest sequence (S without `cu`): sizes the launch grid.
        cu: int32 (n + 1,) cumulative lengths of packed sequences, or None.
        length: int32 (n,) number of rows that hold data, or None for all.
        valid: bool (n, S), True = the row counts, or None for all.
        offset: int32 (n,) position of row 0 in its tile grid, or None for 0.
    """

    n: int
    longest: int
    cu: torch.Tensor | None = None
    length: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("cu", "length", "valid", "offset"):
            tensor = getattr(self, name)
            if tensor is not None:
                object.__setattr__(self, name, tensor.contiguous())

    def n_tiles(self, rows: int) -> int:
        """Entries to allocate for one value per tile of 128 rows."""
        if self.cu is not None:
            return rows // TILE + 2 * self.n
        return tile_count(rows) + (self.offset is not None)

    def in_use(self) -> torch.Tensor | None:
        """bool (n, longest): rows within their length and valid; None when all are. No `cu`."""
        if self.length is None:
            return self.valid
        position = torch.arange(self.longest, device=self.length.device)
        used = position < self.length[:, None]
        return used if self.valid is None else used & self.valid
