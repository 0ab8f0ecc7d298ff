"""The fused quantiser taken apart, for the ablation of its fusion (arXiv 2604.03950).

    unfused             every step an operation of PyTorch
    + encode            scales and codes of a format by one kernel; the rest by PyTorch: Hadamard,
                        packing of 4-bit codes, fp32 block scales to bytes
    + pack              the kernel packs
    + scale conversion  the kernel writes scale bytes
    fused               one kernel for the Hadamard transform and both formats

All give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import device_guard
from ..formats import BlockFormat, get_format
from .api import quantize_pair
from .encode import encode
from .jit import bits, block, decode_e4m3, decode_e8m0, scale_kind
from .tensor import BlockScaledTensor, pack_nibbles
from .transforms import rotate as rotated

STAGES = ("unfused", "+ encode", "+ pack", "+ scale conversion", "fused")
ELEMENTS = 4096  # of a program


def quantize_pair_stage(
    x: torch.Tensor, high: str, low: str, stage: str, *, rotate: bool, scale_rule: str = "auto"
) -> tuple[BlockScaledTensor | None, BlockScaledTensor | None]:
    """`quantize_pair` by token as a stage of `STAGES` does it.

    Args:
        x: (..., D), contiguous, D a power of two from 32 up.
        high, low: Names of formats with block scales.

    Raises:
        ValueError: an unknown stage or format, another D, an x that is not contiguous.
    """
    if stage not in STAGES:
        raise ValueError(f"stage: expected one of {STAGES}, got {stage!r}")
    if stage in ("unfused", "fused"):
        return quantize_pair(x, high, low, rotate=rotate, scale_rule=scale_rule,
                             impl="triton" if stage == "fused" else "reference")
    head_dim = x.shape[-1]
    if not x.is_contiguous() or head_dim < 32 or head_dim & (head_dim - 1):
        raise ValueError("x: expected a contiguous tensor and a last dim that is a power of two "
                         f"from 32 up, got {tuple(x.shape)}")
    formats = get_format(high, "high"), get_format(low, "low")
    for name, fmt in zip(("high", "low"), formats, strict=True):
        if fmt.block is None:
            raise ValueError(f"{name}: expected a format with block scales, got {fmt.name!r}")
    y = rotated(x.float()) if rotate else x.float()
    done = STAGES.index(stage)
    pack, convert = done >= STAGES.index("+ pack"), done >= STAGES.index("+ scale conversion")
    with device_guard(x.device):
        first, second = (_encoded(y, f, f.resolve_rule(scale_rule), pack, convert) for f in formats)
    return first, second


def _encoded(
    y: torch.Tensor, fmt: BlockFormat, rule: str, pack: bool, convert: bool
) -> BlockScaledTensor:
    """y float32 by one kernel, and what the kernel leaves by PyTorch."""
    head_dim, rows = y.shape[-1], y.numel() // y.shape[-1]
    packed = pack and fmt.bits == 4
    codes = y.new_empty((*y.shape[:-1], head_dim // 2 if packed else head_dim), dtype=torch.uint8)
    scales = y.new_empty((*y.shape[:-1], fmt.n_blocks(head_dim)),
                         dtype=torch.uint8 if convert else torch.float32)
    row_scale = y.new_empty((*y.shape[:-1], 1)) if fmt.has_global_scale else None
    tokens = max(ELEMENTS // head_dim, 1)
    if rows:
        _encode_kernel[(-(-rows // tokens),)](
            y, codes, scales, row_scale, rows, FORMAT=fmt.name, RULE=rule, PACK=packed,
            CONVERT=convert, T=tokens, D=head_dim, enable_fp_fusion=False)
    if fmt.bits == 4 and not packed:
        codes = pack_nibbles(codes)
    if not convert:
        scales = _scale_bytes(scales, fmt)
    return BlockScaledTensor(codes, scales, row_scale, fmt.name, y.shape)


def _scale_bytes(scales: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """Block scales, float32 values that their format has, as its bytes."""
    if fmt.scale == "e4m3":
        return scales.to(torch.float8_e4m3fn).view(torch.uint8)
    exponent = (scales.view(torch.int32) >> 23) & 255
    return torch.where(scales.isnan(), 255, exponent).to(torch.uint8)


@triton.jit
def _encode_kernel(x_ptr, codes_ptr, scales_ptr, row_ptr, n, FORMAT: tl.constexpr,
                   RULE: tl.constexpr, PACK: tl.constexpr, CONVERT: tl.constexpr, T: tl.constexpr,
                   D: tl.constexpr):
    """T of n rows x (n, D) float32: codes, block scales and fp32 row scales."""
    row = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    mask = (row < n)[:, None]
    x = tl.load(x_ptr + row[:, None] * D + tl.arange(0, D)[None, :], mask=mask, other=0.0)
    codes, scales, row_scale = encode(x, 0, FORMAT, RULE, "token", T, D)
    WIDTH: tl.constexpr = D * bits(FORMAT) // 8 if PACK else D
    if PACK:
        low, high = tl.split(codes.reshape(T, D // 2, 2))
        codes = low | (high << 4)
    tl.store(codes_ptr + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], codes.to(tl.uint8),
             mask=mask)
    N: tl.constexpr = D // block(FORMAT, D)
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    if CONVERT:
        tl.store(scales_ptr + at, scales.to(tl.uint8), mask=mask)
    elif scale_kind(FORMAT) == "e8m0":
        tl.store(scales_ptr + at, decode_e8m0(scales), mask=mask)
    else:
        tl.store(scales_ptr + at, decode_e4m3(scales), mask=mask)
    if row_ptr is not None:
        tl.store(row_ptr + row, row_scale, mask=row < n)
