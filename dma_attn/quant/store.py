"""How a KV cache keeps copies of its tokens, in any format of `formats`.

A copy is stored token by token, (B, H, tokens, width) for each of its parts: codes, block scales,
second-level scale. 4-bit codes have dims 0 to D/2 - 1 in the low nibbles and the others in the high
ones, so that a kernel unpacks two halves of a row instead of interleaving them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..formats import BlockFormat, get_format
from .tensor import BlockScaledTensor, pack_nibbles, unpack_nibbles

Parts = tuple[torch.Tensor, ...]


class Store:
    """Tokens of one copy, all rows alike.

    Attributes:
        parts: (B, H, tokens, width) each; for "none" the values themselves.
    """

    def __init__(
        self, fmt: BlockFormat, batch: int, heads: int, tokens: int, head_dim: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:
        self.format = fmt
        self.head_dim = head_dim
        widths = [(head_dim, dtype)]
        if fmt.quantised:
            scale = torch.float32 if fmt.scale == "fp32" else torch.uint8
            widths = [(fmt.row_bytes(head_dim), torch.uint8), (fmt.n_blocks(head_dim), scale)]
            widths += [(1, torch.float32)] * fmt.has_global_scale
        self.parts: Parts = tuple(
            torch.zeros(batch, heads, tokens, width, dtype=kind, device=device)
            for width, kind in widths
        )

    def grow(self, tokens: int) -> None:
        """Room for so many tokens; those there are kept."""
        old = self.parts
        self.parts = tuple(x.new_zeros(*x.shape[:2], tokens, x.shape[3]) for x in old)
        for new, part in zip(self.parts, old, strict=True):
            new[:, :, : part.shape[2]] = part

    def write(self, positions: torch.Tensor, values: Parts) -> None:
        """values (B, H, n, width) at positions (n,) of all rows, or (B, n) of each."""
        for part, new in zip(self.parts, values, strict=True):
            if positions.dim() == 1:
                part.index_copy_(2, positions, new)
            else:
                part.scatter_(2, _spread(positions, part), new)

    def copy(self, positions: slice | torch.Tensor) -> BlockScaledTensor:
        """A slice of tokens, or tokens (n,), of a quantised store as `quantize()` makes them."""
        codes, *scales = self._at(positions)
        data = _interleaved(codes) if self.format.bits == 4 else codes
        second = scales[1] if self.format.has_global_scale else None
        shape = torch.Size((*data.shape[:-1], self.head_dim))
        return BlockScaledTensor(data, scales[0], second, self.format.name, shape)

    def values(self, positions: slice | torch.Tensor) -> torch.Tensor:
        """float32 (B, H, n, D) of a slice of tokens, or of tokens (n,)."""
        if not self.format.quantised:
            return self._at(positions)[0].to(torch.float32, copy=True)
        return self.copy(positions).dequantize()

    def _at(self, positions: slice | torch.Tensor) -> Parts:
        if isinstance(positions, slice):
            return tuple(x[:, :, positions].contiguous() for x in self.parts)
        return tuple(x.index_select(2, positions) for x in self.parts)

    def reorder(self, index: torch.Tensor) -> None:
        """Row i becomes row index[i]."""
        self.parts = tuple(select_rows(x, index) for x in self.parts)


class Copies(NamedTuple):
    """K or V: one copy of every token, and high copies of the newest (a ring) and of the first.

    With one class, `low` holds it, and there are no others.
    """

    low: Store
    newest: Store | None
    first: Store | None

    @property
    def stores(self) -> list[Store]:
        """Those there are."""
        return [x for x in self if x is not None]


def encode(copy: BlockScaledTensor | None, x: torch.Tensor) -> Parts:
    """What a store keeps of a copy of x; of x itself where there is none (format "none")."""
    if copy is None:
        return (x,)
    data = _halves(copy.data) if get_format(copy.format).bits == 4 else copy.data
    parts = (data, copy.scales)
    return parts if copy.global_scale is None else (*parts, copy.global_scale)


def select_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of x, in its own memory where their number stays."""
    rows = x.index_select(0, index)
    return x.copy_(rows) if rows.shape == x.shape else rows


def _spread(positions: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return positions[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3])


def _halves(data: torch.Tensor) -> torch.Tensor:
    """Two neighbours' codes in a byte -> those of dims d and d + D/2."""
    low, high = unpack_nibbles(data).chunk(2, -1)
    return low | (high << 4)


def _interleaved(data: torch.Tensor) -> torch.Tensor:
    return pack_nibbles(torch.cat((data & 15, data >> 4), -1))
