"""The quantiser in PyTorch: the specification that the Triton kernel equals bit for bit.

    x -> float32 -> (x - mean) -> Hadamard -> amax per block -> scale -> round(x / scale)

Bit rules: IEEE division, no fused multiply-add; amax is an integer maximum over absolute bits, so
NaN survives; exponents come from bits; powers of two are built from bits; squared errors are summed
as a tree of halves (i with i + n / 2); elements are clamped before they are cast.
"""

from __future__ import annotations

import torch

from ..formats import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN_SUBNORMAL,
    E8M0_BIAS,
    E8M0_NAN,
    NVFP4_SCALE_TARGET,
    NVFP4_SECOND_TARGET,
    PAPER_EMAX,
    PAPER_NVFP4_MIN_SCALE,
    PAPER_NVFP4_TOKEN_MAX,
    TOKEN_MSE_SHARES,
    BlockFormat,
)
from ..schedule import TILE
from .tensor import (
    BlockScaledTensor,
    decode_elements,
    decode_scales,
    pack_nibbles,
    spread_tiles,
)

INF_BITS = 0x7F800000


def quantize_reference(
    x: torch.Tensor,
    fmt: BlockFormat,
    rule: str,
    granularity: str,
    global_scale: torch.Tensor | None = None,
) -> BlockScaledTensor:
    """Quantise float32 x (..., S, D) along its last dim.

    Args:
        rule: A rule of `fmt.rules`.
        granularity: Span of the fp32 scale: "token", "tile" (128 rows from row 0), "head" (the last
            two dims) or "tensor" (all of x).
        global_scale: Use this NVFP4 second-level scale instead of computing it.
    """
    if fmt.block is None:
        codes, scales = _encode_tokens(x, fmt, rule, granularity)
    else:
        # Pad to whole blocks with zeros: they change neither amax nor the squared error.
        blocks = _blocks(x, fmt.block)
        if fmt.scale == "e8m0":
            codes, scales = _encode_mx(blocks, fmt, rule)
        else:
            if global_scale is None:
                global_scale = nvfp4_global_scale(x, rule, granularity)
            per_row = spread_tiles(global_scale, x.shape[-2])
            codes, scales = _encode_nvfp4(blocks, fmt, rule, per_row)
        codes = codes.flatten(-2)[..., : x.shape[-1]]
    data = pack_nibbles(codes) if fmt.bits == 4 else codes
    return BlockScaledTensor(
        data.contiguous(), scales.contiguous(), global_scale, fmt.name, x.shape
    )


def abs_bits(x: torch.Tensor) -> torch.Tensor:
    """int32 bits of |x|: ordered like |x|, NaN above Inf above every finite value."""
    return x.view(torch.int32) & 0x7FFFFFFF


def fold_reference(values: torch.Tensor, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes of values (..., S, D) relative to a power of two per row or per 128 rows.

    The power is the smallest (within 2^-100 and 2^100; 1 for zeros) with which the largest finite
    value fits; NaN and Inf become NaN. This
    is how Hopper's FP8 tensor cores, which know no block scales, read a block-scaled copy.

    Returns:
        codes (uint8), scales float32 (..., S) or (..., tiles).
    """
    values = values.float()
    raw = abs_bits(values)
    amax = torch.where(raw < INF_BITS, raw, 0).amax(-1)
    if not by_row:
        tiles = torch.nn.functional.pad(amax, (0, -amax.shape[-1] % TILE)).unflatten(-1, (-1, TILE))
        amax = tiles.amax(-1)
    exponent = (amax >> 23) - 8 + ((amax & 0x7FFFFF) > 0x600000).to(amax.dtype)
    exponent = torch.where(amax == 0, 127, exponent.clamp(27, 227))
    scale = (exponent << 23).to(torch.int32).view(torch.float32)
    per_row = scale if by_row else scale.repeat_interleave(TILE, -1)[..., : values.shape[-2]]
    scaled = torch.where(values.isfinite(), values, torch.nan) / per_row[..., None]
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale


def divide(x: torch.Tensor, constant: float) -> torch.Tensor:
    """IEEE x / constant: on a GPU, PyTorch multiplies by the reciprocal of a Python number."""
    return x / torch.full_like(x, constant)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """float32 -> E2M1 codes 0..15 (uint8): nearest, ties to the even code, saturating; NaN -> 0."""
    a = x.abs()
    code = (a > 0.25).int() + (a >= 0.75).int() + (a > 1.25).int() + (a >= 1.75).int()
    code = code + (a > 2.5).int() + (a >= 3.5).int() + (a > 5.0).int()
    return _with_sign(code, x)


def round_e2m1_paper(x: torch.Tensor) -> torch.Tensor:
    """The authors' E2M1 encoder: a mantissa that rounds up never carries (1.9 -> 1.5, not 2)."""
    a = x.abs()
    code = (a > 0.125).int() + (a >= 1.0).int() + (a > 1.25).int() + (a >= 2.0).int()
    code = code + (a > 2.5).int() + (a >= 4.0).int() + (a > 5.0).int()
    return _with_sign(code, x)


def nvfp4_global_scale(x: torch.Tensor, rule: str, granularity: str) -> torch.Tensor:
    """NVFP4's fp32 second level from the finite values of x (..., S, D); 1 for a zero group."""
    amax = _span_amax(torch.where(torch.isfinite(x), x, 0.0), granularity).view(torch.float32)
    if rule == "paper":
        scale = divide(amax, PAPER_NVFP4_TOKEN_MAX)
    else:
        scale = divide(amax, E2M1_MAX * NVFP4_SCALE_TARGET[rule])
    return torch.where(scale == 0, 1.0, scale)


def _encode_elements(x: torch.Tensor, fmt: BlockFormat, rule: str = "") -> torch.Tensor:
    """Scaled float32 values -> uint8 codes (unpacked); clamps first; NaN -> 0."""
    x = torch.where(torch.isnan(x), 0.0, x)
    if fmt.element == "e2m1":
        return round_e2m1_paper(x) if rule == "paper" else round_e2m1(x)
    if fmt.element == "e4m3":
        return x.clamp(-fmt.max, fmt.max).to(torch.float8_e4m3fn).view(torch.uint8)
    if fmt.element == "e5m2":
        return x.clamp(-fmt.max, fmt.max).to(torch.float8_e5m2).view(torch.uint8)
    low = -fmt.max if fmt.element == "int8" else -8.0
    codes = torch.round(x.clamp(low, fmt.max)).to(torch.int8).view(torch.uint8)
    return codes & 15 if fmt.element == "int4" else codes


def _encode_mx(
    blocks: torch.Tensor, fmt: BlockFormat, rule: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., n, block) -> codes of the same shape and E8M0 bytes (..., n)."""
    amax = abs_bits(blocks).amax(-1)
    emax = PAPER_EMAX[fmt.element] if rule == "paper" else fmt.emax
    rounded = amax + (1 << (22 - fmt.mantissa_bits)) if rule == "even" else amax
    exponent = (rounded >> 23) - E8M0_BIAS - emax
    if rule == "rceil":
        mantissa_of_max = int(torch.tensor(fmt.max).view(torch.int32)) & 0x7FFFFF
        exponent = exponent + ((amax & 0x7FFFFF) > mantissa_of_max).int()
    bad = amax >= INF_BITS
    scales = _e8m0(exponent, bad)
    scale = decode_scales(scales, fmt)[..., None]
    codes = _encode_elements(blocks / scale, fmt, rule)
    if rule == "mse":
        scales_1 = _e8m0(exponent + 1, bad)
        scale_1 = decode_scales(scales_1, fmt)[..., None]
        codes_1 = _encode_elements(blocks / scale_1, fmt)
        better = _error(codes_1, scale_1, blocks, fmt) < _error(codes, scale, blocks, fmt)
        codes = torch.where(better[..., None], codes_1, codes)
        scales = torch.where(better, scales_1, scales)
    return codes, scales


def _encode_nvfp4(
    blocks: torch.Tensor, fmt: BlockFormat, rule: str, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., n, 16) -> codes and E4M3 bytes (..., n); global_scale broadcasts over (..., S, 1)."""
    amax_bits = abs_bits(blocks).amax(-1)
    bad = amax_bits >= INF_BITS
    amax = amax_bits.view(torch.float32)
    if rule == "paper":
        exact = divide(amax / global_scale, E2M1_MAX).clamp(min=PAPER_NVFP4_MIN_SCALE)
        exact = torch.where(bad, float("nan"), exact)
        codes = _encode_elements(blocks / global_scale[..., None] / exact[..., None], fmt, rule)
        return codes, _e4m3_scale(exact, bad, minimum=0.0)

    def candidate(target: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scales = _e4m3_scale(divide(amax, target) / global_scale, bad, E4M3_MIN_SUBNORMAL)
        scale = (decode_scales(scales, fmt) * global_scale)[..., None]
        return _encode_elements(blocks / scale, fmt), scales, scale

    codes, scales, scale = candidate(E2M1_MAX)
    if rule == "mse":
        codes_1, scales_1, scale_1 = candidate(NVFP4_SECOND_TARGET)
        better = _error(codes_1, scale_1, blocks, fmt) < _error(codes, scale, blocks, fmt)
        codes = torch.where(better[..., None], codes_1, codes)
        scales = torch.where(better, scales_1, scales)
    return codes, scales


def _encode_tokens(
    x: torch.Tensor, fmt: BlockFormat, rule: str, granularity: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Formats with one fp32 scale per token (int8 also per tile): codes (..., D), scales."""
    amax = _span_amax(x, granularity)
    shares = TOKEN_MSE_SHARES if rule == "mse" else TOKEN_MSE_SHARES[:1]
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for share in shares:
        scale = divide(amax.view(torch.float32) * share, fmt.max)
        scale = torch.where(scale == 0, 1.0, scale)
        scale = torch.where(amax >= INF_BITS, float("nan"), scale)
        per_row = spread_tiles(scale, x.shape[-2])
        codes = _encode_elements(x / per_row, fmt)
        if len(shares) == 1:
            return codes, scale
        error = _error(codes, per_row, x, fmt)[..., None]
        if best is None:
            best = (codes, scale, error)
            continue
        better = error < best[2]
        tried = (codes, scale, error)
        best = (
            torch.where(better, tried[0], best[0]),
            torch.where(better, tried[1], best[1]),
            torch.where(better, tried[2], best[2]),
        )
    assert best is not None
    return best[0], best[1]


def _error(
    codes: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, fmt: BlockFormat
) -> torch.Tensor:
    """Squared error of a candidate, summed over the last dim as a tree of halves."""
    data = pack_nibbles(codes) if fmt.bits == 4 else codes
    diff = decode_elements(data, fmt) * scale - x
    square = diff * diff
    n = 1 << max(square.shape[-1] - 1, 0).bit_length()
    square = torch.nn.functional.pad(square, (0, n - square.shape[-1]))
    while square.shape[-1] > 1:
        half = square.shape[-1] // 2
        square = square[..., :half] + square[..., half:]
    return square[..., 0]


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % block))
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def _e8m0(exponent: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
    byte = exponent.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS
    return torch.where(bad, E8M0_NAN, byte).to(torch.uint8)


def _e4m3_scale(raw: torch.Tensor, bad: torch.Tensor, minimum: float) -> torch.Tensor:
    raw = torch.where(bad, float("nan"), raw.clamp(minimum, E4M3_MAX))
    return raw.to(torch.float8_e4m3fn).view(torch.uint8)


def _span_amax(x: torch.Tensor, granularity: str) -> torch.Tensor:
    """Bits of the largest |x| over a token, a tile of 128 tokens, a head or the whole tensor."""
    amax = abs_bits(x)
    if granularity == "tensor":
        return amax.amax() if amax.numel() else amax.new_zeros(())
    amax = amax.amax(-1, keepdim=True)
    if granularity == "token":
        return amax
    rows = amax.shape[-2]
    if granularity == "head":
        return amax.amax(-2, keepdim=True) if rows else amax.new_zeros(*amax.shape[:-2], 1, 1)
    amax = torch.nn.functional.pad(amax, (0, 0, 0, -rows % TILE))
    return amax.unflatten(-2, (-(-rows // TILE), TILE)).amax(-2)


def _with_sign(code: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (code | ((x.view(torch.int32) >> 28) & 8)).to(torch.uint8)
