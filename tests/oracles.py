"""Slow numpy oracles of the formats, the scale rules and the transforms.

Written from the published rules (OCP MX 1.0, NVFP4, docs/numerics.md) and sharing no code
with the package: FP8 rounding is ml_dtypes', E2M1 rounding is a search in the table of its values,
exponents come from ``frexp`` and powers of two from ``ldexp``. All arithmetic is fp32, one IEEE
operation at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

ml_dtypes = pytest.importorskip("ml_dtypes")

TILE = 128
MX_FORMATS = ("mxfp8", "mxfp8_e5m2", "mxfp4")
TOKEN_FORMATS = ("int8", "int4", "fp4")
RULES = {
    "mxfp8": ("floor", "rceil", "even", "mse"),
    "mxfp8_e5m2": ("floor", "rceil", "even", "mse"),
    "mxfp4": ("floor", "rceil", "even", "mse"),
    "nvfp4": ("amax", "mse"),
    "int8": ("amax",),
    "int4": ("amax", "mse"),
    "fp4": ("amax", "mse"),
}
AUTO = {
    "mxfp8": "rceil",
    "mxfp8_e5m2": "rceil",
    "mxfp4": "mse",
    "nvfp4": "mse",
    "int8": "amax",
    "int4": "mse",
    "fp4": "mse",
}
GRANULARITIES = dict.fromkeys(RULES, ("token",))
GRANULARITIES["nvfp4"] = ("token", "tile", "tensor")
GRANULARITIES["int8"] = ("token", "tile")
PACKED = ("mxfp4", "nvfp4", "int4", "fp4")

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_MX_ELEMENT = {  # largest value, its exponent, mantissa bits
    "mxfp8": (448.0, 8, 3),
    "mxfp8_e5m2": (57344.0, 15, 2),
    "mxfp4": (6.0, 2, 1),
}
_MSE_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)


@dataclass(frozen=True)
class Oracle:
    """What a format holds for an array of shape (..., D).

    codes: uint8 (..., D), one element a byte. scales: uint8 (..., n_blocks) or float32.
    values: float32 (..., D). poisoned: bool (..., D), True in blocks with NaN or Inf, where the
    codes are free.
    """

    codes: np.ndarray
    scales: np.ndarray
    global_scale: np.ndarray | None
    values: np.ndarray
    poisoned: np.ndarray


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """The exact fp32 values of a floating tensor."""
    return x.detach().to(torch.float32).contiguous().numpy()


def pack(codes: np.ndarray) -> np.ndarray:
    """Two 4-bit codes a byte, even index in the low nibble."""
    return (codes[..., 0::2] & 15) | ((codes[..., 1::2] & 15) << 4).astype(np.uint8)


def unpack(data: np.ndarray) -> np.ndarray:
    """Inverse of `pack`."""
    return np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], 2 * data.shape[-1])


def e2m1_codes(x: np.ndarray) -> np.ndarray:
    """Nearest E2M1 code with ties to the even code, saturating, sign of zero kept."""
    magnitude = np.minimum(np.abs(x.astype(np.float64)), 6.0)
    upper = np.clip(np.searchsorted(E2M1_VALUES, magnitude), 1, 7)
    to_lower = magnitude - E2M1_VALUES[upper - 1]
    to_upper = E2M1_VALUES[upper] - magnitude
    pick_lower = (to_lower < to_upper) | ((to_lower == to_upper) & (upper % 2 == 1))
    code = np.where(pick_lower, upper - 1, upper)
    return (code + 8 * np.signbit(x)).astype(np.uint8)


def e2m1_decode(codes: np.ndarray) -> np.ndarray:
    """E2M1 codes to fp32."""
    return np.where(codes & 8, -E2M1_VALUES[codes & 7], E2M1_VALUES[codes & 7])


def e2m1_paper_codes(x: np.ndarray) -> np.ndarray:
    """The authors' encoder: truncated exponent, mantissa bit above a threshold, no carry."""
    a = np.minimum(np.abs(x), np.float32(6))
    code = np.zeros(a.shape, np.uint8)
    for lower, threshold, value_code in (
        (0.0, 0.125, 0),
        (1.0, 1.25, 2),
        (2.0, 2.5, 4),
        (4.0, 5.0, 6),
    ):
        code = np.where(a >= lower, np.where(a > threshold, value_code + 1, value_code), code)
    return (code + 8 * (x < 0)).astype(np.uint8)


def e4m3_codes(x: np.ndarray) -> np.ndarray:
    """Nearest-even E4M3 bytes, saturating at 448."""
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def e4m3_decode(codes: np.ndarray) -> np.ndarray:
    """E4M3 bytes to fp32."""
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _element_codes(x: np.ndarray, fmt: str) -> np.ndarray:
    if fmt == "mxfp8":
        return e4m3_codes(x)
    if fmt == "mxfp8_e5m2":
        return np.clip(x, -57344, 57344).astype(ml_dtypes.float8_e5m2).view(np.uint8)
    if fmt in ("int8", "int4"):
        low, high = (-127, 127) if fmt == "int8" else (-8, 7)
        return np.clip(np.rint(x), low, high).astype(np.int8).view(np.uint8)
    return e2m1_codes(x)


def _element_values(codes: np.ndarray, fmt: str) -> np.ndarray:
    if fmt == "mxfp8":
        return e4m3_decode(codes)
    if fmt == "mxfp8_e5m2":
        return codes.view(ml_dtypes.float8_e5m2).astype(np.float32)
    if fmt in ("int8", "int4"):
        return codes.view(np.int8).astype(np.float32)
    return e2m1_decode(codes)


def _exponent_and_significand(amax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    significand, exponent = np.frexp(amax)
    return exponent.astype(np.int64) - 1, significand * np.float32(2)


def pow2(exponent: np.ndarray) -> np.ndarray:
    """fp32 powers of two, subnormals included."""
    return np.ldexp(np.ones(np.shape(exponent), np.float32), np.asarray(exponent, np.int32))


def tree_sum(x: np.ndarray) -> np.ndarray:
    """fp32 sum over the last axis as a tree of halves (i with i + n/2), zero-padded to 2^k."""
    n = 1 << max(x.shape[-1] - 1, 0).bit_length()
    x = _pad_last(x, n)
    while n > 1:
        n //= 2
        x = x[..., :n] + x[..., n:]
    return x[..., 0]


def _pad_last(x: np.ndarray, size: int) -> np.ndarray:
    pad = [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]
    return np.pad(x, pad)


def _blocked(x: np.ndarray, block: int) -> np.ndarray:
    n_blocks = -(-x.shape[-1] // block)
    return _pad_last(x, n_blocks * block).reshape(*x.shape[:-1], n_blocks, block)


def _flat(blocks: np.ndarray, head_dim: int) -> np.ndarray:
    width = blocks.shape[-2] * blocks.shape[-1]
    return blocks.reshape(*blocks.shape[:-2], width)[..., :head_dim]


def _finite_amax(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), np.abs(x), np.float32(0))


def _squared_error(codes: np.ndarray, scale: np.ndarray, x: np.ndarray, fmt: str) -> np.ndarray:
    difference = _element_values(codes, fmt) * scale - x
    return tree_sum(difference * difference)


def mx_exponents(amax: np.ndarray, fmt: str, rule: str) -> np.ndarray:
    """The E8M0 exponent of each block under floor, rceil or even."""
    largest, emax, mantissa = _MX_ELEMENT[fmt]
    exponent, significand = _exponent_and_significand(amax)
    if rule == "rceil":
        exponent = exponent + (significand > np.ldexp(largest, -emax))
    elif rule == "even":
        exponent = exponent + (significand >= 2 - 2.0 ** -(mantissa + 1))
    elif rule == "paper":
        emax = {"mxfp8": 7, "mxfp4": 3}[fmt]
    return np.where(amax == 0, -127, np.clip(exponent - emax, -127, 127))


def quantize_mx(x: np.ndarray, fmt: str, rule: str) -> Oracle:
    """MX formats: blocks of 32, E8M0 scales."""
    blocks = _blocked(x, 32)
    bad = ~np.isfinite(blocks).all(-1)
    clean = np.where(bad[..., None], np.float32(0), blocks)
    amax = np.abs(clean).max(-1, initial=0)

    def encode(exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale = pow2(exponents)[..., None]
        if fmt == "mxfp4" and rule == "paper":
            return e2m1_paper_codes(clean / scale), scale
        return _element_codes(clean / scale, fmt), scale

    exponents = mx_exponents(amax, fmt, "floor" if rule == "mse" else rule)
    codes, scale = encode(exponents)
    if rule == "mse":
        following = np.where(amax == 0, -127, np.minimum(exponents + 1, 127))
        other_codes, other_scale = encode(following)
        better = _squared_error(other_codes, other_scale, clean, fmt) < _squared_error(
            codes, scale, clean, fmt
        )
        exponents = np.where(better, following, exponents)
        codes = np.where(better[..., None], other_codes, codes)
        scale = np.where(better[..., None], other_scale, scale)
    values = np.where(bad[..., None], np.float32(np.nan), _element_values(codes, fmt) * scale)
    scales = np.where(bad, 255, exponents + 127).astype(np.uint8)
    poisoned = np.broadcast_to(bad[..., None], blocks.shape)
    d = x.shape[-1]
    return Oracle(_flat(codes, d), scales, None, _flat(values, d), _flat(poisoned, d))


def _group_amax(x: np.ndarray, granularity: str) -> tuple[np.ndarray, np.ndarray]:
    """(amax as stored, amax broadcast to (..., S, 1)) of |x| by granularity."""
    magnitude = _finite_amax(x)
    per_token = magnitude.max(-1, initial=0, keepdims=True)
    if granularity == "token":
        return per_token, per_token
    if granularity == "tensor":
        stored = np.float32(magnitude.max(initial=0))
        return stored, np.broadcast_to(stored, per_token.shape)
    length = x.shape[-2]
    n_tiles = -(-length // TILE)
    stored = np.zeros((*x.shape[:-2], n_tiles, 1), np.float32)
    for tile in range(n_tiles):
        stored[..., tile, :] = per_token[..., tile * TILE : (tile + 1) * TILE, :].max(-2)
    return stored, np.repeat(stored, TILE, axis=-2)[..., :length, :]


def group_amax(x: np.ndarray, granularity: str) -> np.ndarray:
    """Largest finite |x| of each group, in the shape its fp32 scale is stored in."""
    if x.ndim == 1:
        return _group_amax(x[None], granularity)[0][0]
    return _group_amax(x, granularity)[0]


def nvfp4_global_scale(amax: np.ndarray, rule: str) -> np.ndarray:
    """fp32 second-level scale of a group."""
    divisor = {"amax": 6 * 448, "mse": 6 * 256, "paper": 2**7}[rule]
    return np.where(amax == 0, np.float32(1), amax / np.float32(divisor)).astype(np.float32)


def nvfp4_block_scale_codes(amax: np.ndarray, target: int, global_scale: np.ndarray) -> np.ndarray:
    """E4M3 byte of (amax / target) / global_scale, clamped to [2^-9, 448]."""
    return e4m3_codes(np.clip(amax / np.float32(target) / global_scale, 2.0**-9, 448))


def quantize_nvfp4(x: np.ndarray, rule: str, granularity: str) -> Oracle:
    """NVFP4: blocks of 16, E4M3 scales, one fp32 scale a token, a tile or the tensor."""
    stored_amax, token_amax = _group_amax(x, granularity)
    stored = nvfp4_global_scale(stored_amax, rule)
    group = nvfp4_global_scale(token_amax, rule)
    blocks = _blocked(x, 16)
    bad = ~np.isfinite(blocks).all(-1)
    clean = np.where(bad[..., None], np.float32(0), blocks)
    amax = np.abs(clean).max(-1, initial=0)

    def encode(target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scales = nvfp4_block_scale_codes(amax, target, group)
        product = (e4m3_decode(scales) * group)[..., None]
        return e2m1_codes(clean / product), scales, product

    if rule == "paper":
        codes, scales, product = _encode_nvfp4_paper(clean, amax, group)
    else:
        codes, scales, product = encode(6)
    if rule == "mse":
        other_codes, other_scales, other_product = encode(4)
        better = _squared_error(other_codes, other_product, clean, "nvfp4") < _squared_error(
            codes, product, clean, "nvfp4"
        )
        scales = np.where(better, other_scales, scales)
        codes = np.where(better[..., None], other_codes, codes)
        product = np.where(better[..., None], other_product, product)
    values = np.where(bad[..., None], np.float32(np.nan), e2m1_decode(codes) * product)
    scales = np.where(bad, 0x7F, scales).astype(np.uint8)
    poisoned = np.broadcast_to(bad[..., None], blocks.shape)
    d = x.shape[-1]
    return Oracle(_flat(codes, d), scales, stored, _flat(values, d), _flat(poisoned, d))


def _encode_nvfp4_paper(
    blocks: np.ndarray, amax: np.ndarray, group: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The authors divide by the unrounded block scale and multiply by the rounded one."""
    scaled = blocks / group[..., None]
    unrounded = amax / group / np.float32(6)
    codes = e2m1_paper_codes(scaled / np.maximum(unrounded, np.float32(1e-9))[..., None])
    scales = e4m3_codes(unrounded)
    return codes, scales, (e4m3_decode(scales) * group)[..., None]


def quantize_token(x: np.ndarray, fmt: str, rule: str, granularity: str) -> Oracle:
    """int8, int4 and fp4: one fp32 scale a token (int8 also a tile of 128 tokens)."""
    largest = np.float32({"int8": 127, "int4": 7, "fp4": 6}[fmt])
    row_bad = ~np.isfinite(x).all(-1, keepdims=True)
    stored_bad, token_bad = _group_amax(row_bad.astype(np.float32), granularity)
    bad = token_bad != 0
    clean = np.where(bad, np.float32(0), x)
    stored_amax, token_amax = _group_amax(clean, granularity)
    factors = _MSE_FACTORS if rule == "mse" else (1.0,)
    best_error = codes = scales = stored = None
    for factor in factors:
        candidate = token_amax * np.float32(factor) / largest
        divisor = np.where(token_amax == 0, np.float32(1), candidate)
        trial = _element_codes(clean / divisor, fmt)
        error = _squared_error(trial, divisor, clean, fmt)[..., None]
        if best_error is None:
            best_error, codes, scales = error, trial, divisor
            stored = np.where(stored_amax == 0, np.float32(1), stored_amax / largest)
        else:
            better = error < best_error
            best_error = np.where(better, error, best_error)
            codes = np.where(better, trial, codes)
            scales = np.where(better, divisor, scales)
    if granularity == "token":
        stored = scales
    values = np.where(bad, np.float32(np.nan), _element_values(codes, fmt) * scales)
    stored = np.where(stored_bad != 0, np.float32(np.nan), stored).astype(np.float32)
    return Oracle(codes, stored, None, values, np.broadcast_to(bad, x.shape))


def quantize(
    x: np.ndarray, fmt: str, rule: str = "auto", granularity: str = "token"
) -> Oracle:
    """The whole quantiser. x: float32 (..., D), one dimension counting as one token."""
    rule = AUTO[fmt] if rule == "auto" else rule
    if x.ndim == 1:
        out = quantize(x[None], fmt, rule, granularity)
        second = out.global_scale
        if second is not None and second.ndim:
            second = second[0]
        return Oracle(out.codes[0], out.scales[0], second, out.values[0], out.poisoned[0])
    with np.errstate(all="ignore"):
        if fmt in MX_FORMATS:
            return quantize_mx(x, fmt, rule)
        if fmt == "nvfp4":
            return quantize_nvfp4(x, rule, granularity)
        return quantize_token(x, fmt, rule, granularity)


def hadamard(x: np.ndarray) -> np.ndarray:
    """Block-diagonal Sylvester Hadamard transform of the last axis by fp32 butterflies.

    The block is the largest power of two that divides D; 1/sqrt(n) is one multiplication, last.
    """
    d = x.shape[-1]
    n = d & -d
    out = x.astype(np.float32).reshape(-1, n).copy()
    h = 1
    while h < n:
        for start in range(0, n, 2 * h):
            top = out[:, start : start + h].copy()
            bottom = out[:, start + h : start + 2 * h].copy()
            out[:, start : start + h] = top + bottom
            out[:, start + h : start + 2 * h] = top - bottom
        h *= 2
    return (out * np.float32(1 / np.sqrt(np.float64(n)))).reshape(x.shape)


def sylvester_matrix(head_dim: int) -> np.ndarray:
    """The float64 orthonormal matrix that `hadamard` applies."""
    n = head_dim & -head_dim
    block = np.ones((1, 1))
    while block.shape[0] < n:
        block = np.kron(np.array([[1, 1], [1, -1]]), block)
    return np.kron(np.eye(head_dim // n), block) / np.sqrt(n)


def rel_l2(values: np.ndarray, reference: np.ndarray) -> float:
    """Relative L2 error in float64."""
    difference = values.astype(np.float64) - reference.astype(np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(reference.astype(np.float64)))
