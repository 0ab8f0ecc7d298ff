"""`BlockScaledTensor`: low-bit codes with their scales, a plain frozen dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..formats import E2M1_VALUES, BlockFormat, get_format
from ..schedule import TILE


class QueryCodes(NamedTuple):
    """Q as the Hopper kernel reads it (`quant.folded`), or room for it.

    Attributes:
        codes: uint8 (classes, B, H, blocks * 128, D), E4M3 or int8, at absolute positions.
        scales: float32 (classes, B, H, blocks * 128).
    """

    codes: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class BlockScaledTensor:
    """A tensor (..., S, D) stored in a block-scaled format.

    Attributes:
        data: uint8 codes, (..., S, D), or (..., S, D / 2) for 4-bit formats with the even index in
            the low nibble. int8 and int4 codes are two's complement.
        scales: Block scales, uint8 (..., S, n_blocks) in E8M0 (MX) or E4M3 (NVFP4); float32
            (..., S, 1) for int4, fp4 and int8, (..., ceil(S / 128), 1) for int8 by tile.
        global_scale: NVFP4's second level, float32, multiplied on dequantisation: (..., S, 1) by
            token, (..., ceil(S / 128), 1) by tile, (..., 1, 1) or () by tensor. None elsewhere.
        format: Canonical format name.
        shape: Shape of the tensor that was quantised.
    """

    data: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None
    format: str
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        parts = [self.data, self.scales]
        if self.global_scale is not None:
            parts.append(self.global_scale)
        return sum(t.numel() * t.element_size() for t in parts)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values in `dtype`, shape `self.shape`; computed in float32, rounded once."""
        fmt = get_format(self.format)
        codes = decode_elements(self.data, fmt)
        rows = codes.shape[-2] if codes.dim() > 1 else 1
        if fmt.block is None:
            scale = spread_tiles(self.scales, rows)
        else:
            scale = decode_scales(self.scales, fmt)
            if self.global_scale is not None:
                scale = scale * spread_tiles(self.global_scale, rows)
            scale = scale.repeat_interleave(fmt.block, -1)[..., : codes.shape[-1]]
        return (codes * scale).reshape(self.shape).to(dtype)

    def to(self, device: torch.device | str) -> BlockScaledTensor:
        """The same tensor on another device."""
        return BlockScaledTensor(
            self.data.to(device),
            self.scales.to(device),
            None if self.global_scale is None else self.global_scale.to(device),
            self.format,
            self.shape,
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors only (safetensors-ready); the format travels as its name's UTF-8 bytes."""
        state = {
            "data": self.data,
            "scales": self.scales,
            "format": torch.tensor(list(self.format.encode()), dtype=torch.uint8),
            "shape": torch.tensor(list(self.shape), dtype=torch.int64),
        }
        if self.global_scale is not None:
            state["global_scale"] = self.global_scale
        return state

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> BlockScaledTensor:
        """The way back from `state_dict()`.

        Raises:
            ValueError: a key is missing or the format is unknown.
        """
        missing = {"data", "scales", "format", "shape"} - set(state)
        if missing:
            raise ValueError(f"state: expected keys data, scales, format, shape; no {missing}")
        name = bytes(state["format"].tolist()).decode()
        return cls(
            state["data"],
            state["scales"],
            state.get("global_scale"),
            get_format(name).name,
            torch.Size(state["shape"].tolist()),
        )


def unpack_nibbles(data: torch.Tensor) -> torch.Tensor:
    """(..., D / 2) bytes -> (..., D) codes 0..15; the even index is the low nibble."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """(..., D) codes 0..15 -> (..., D / 2) bytes, the inverse of `unpack_nibbles`."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode_elements(data: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """uint8 codes -> float32 element values before scaling, unpacked along the last dim."""
    if fmt.element == "e4m3":
        return data.view(torch.float8_e4m3fn).float()
    if fmt.element == "e5m2":
        return data.view(torch.float8_e5m2).float()
    if fmt.element == "int8":
        return data.view(torch.int8).float()
    codes = unpack_nibbles(data).int()
    if fmt.element == "int4":
        return ((codes ^ 8) - 8).float()
    table = torch.tensor(E2M1_VALUES, device=data.device)
    magnitude = table[codes & 7]
    return torch.where(codes > 7, -magnitude, magnitude)


def decode_scales(scales: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """uint8 block scales -> float32. E8M0 byte b is 2^(b-127), byte 255 is NaN."""
    if fmt.scale == "e4m3":
        return scales.view(torch.float8_e4m3fn).float()
    bits = scales.int() << 23
    bits = torch.where(scales == 0, 0x00400000, bits)  # 2^-127 is subnormal in float32
    bits = torch.where(scales == 255, 0x7FC00000, bits)
    return bits.int().view(torch.float32)


def spread_tiles(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Spread a scale by tile of 128 tokens over `rows` tokens; other spans broadcast already."""
    if scale.dim() < 2 or scale.shape[-2] in (1, rows):
        return scale
    return scale.repeat_interleave(TILE, -2)[..., :rows, :]
