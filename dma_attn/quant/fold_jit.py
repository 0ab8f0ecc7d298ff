"""Device functions of the folding kernels: a value in its format, and folded into E4M3 codes.

The arithmetic of `quant.encode` with reciprocals in place of divisions and hardware casts to FP8: a
value within an ulp of a rounding tie may land on its other side. Under Triton's interpreter, whose
FP8 casts round wrongly, the encoders of `quant.jit` take their place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import interpreting
from .jit import (
    abs_bits,
    block,
    constant,
    decode_e4m3,
    decode_e5m2,
    element,
    element_max,
    encode_fp8,
    mantissa_of_max,
    mx_exponent,
    nvfp4_divisor,
    scale_kind,
)

INTERPRETED = tl.constexpr(interpreting())


@triton.jit
def _to_e2m1(x):
    """Nearest E2M1 value, ties to even: adding 1.5 * 2^22 quanta rounds at the quantum of x.

    Not saturating: from 7 on the result is 8.
    """
    binade = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    magic = (binade + 0x0B400000).to(tl.float32, bitcast=True)
    return (x + magic) - magic


@triton.jit
def e4m3_code(x):
    """Nearest E4M3 code (uint8) of fp32 x, ties to even, saturating; NaN stays NaN."""
    if INTERPRETED:  # its casts to FP8 round wrongly
        code = encode_fp8(tl.where(x == x, x, 0.0), "mxfp8")
        return tl.where(x == x, code, constant("E4M3_NAN")).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _to_e4m3(x):
    """Nearest E4M3 value of fp32 x, saturating."""
    if INTERPRETED:
        return decode_e4m3(e4m3_code(x).to(tl.int32))
    else:
        return x.to(tl.float8e4nv).to(tl.float32)


@triton.jit
def _to_element(x, FORMAT: tl.constexpr):
    """Nearest element value of fp32 x, saturating; E2M1 only in MX formats, since NVFP4's block
    scales keep x below 7, except in blocks 2^-15 below the largest of the token."""
    if element(FORMAT) == "e2m1":
        x = _to_e2m1(x)
        if scale_kind(FORMAT) == "e8m0":
            x = tl.minimum(tl.maximum(x, -element_max(FORMAT)), element_max(FORMAT))
        return x
    elif element(FORMAT) == "e4m3":
        return _to_e4m3(x)
    elif INTERPRETED:
        return decode_e5m2(encode_fp8(tl.where(x == x, x, 0.0), FORMAT))
    else:
        x = tl.minimum(tl.maximum(x, -element_max(FORMAT)), element_max(FORMAT))
        return x.to(tl.float8e5).to(tl.float32)


@triton.jit
def _candidate(x, scale, inverse, FORMAT: tl.constexpr):
    """Elements of x (T, N, BLOCK) under block scales (T, N), the scales, squared errors (T, N)."""
    scaled = x * inverse[:, :, None]
    elements = _to_element(scaled, FORMAT)
    diff = elements - scaled
    return elements, scale, tl.sum(diff * diff, 2) * (scale * scale)


@triton.jit
def _better(first, second):
    """Values of the candidate with the smaller error; ties take the first."""
    elements, scale, error = first
    elements_1, scale_1, error_1 = second
    better = error_1 < error
    scale = tl.where(better, scale_1, scale)
    return tl.where(better[:, :, None], elements_1, elements) * scale[:, :, None]


@triton.jit
def _power(exponent):
    """2^exponent for int32 exponents, clamped to the normal range."""
    biased = tl.minimum(tl.maximum(exponent, -126), 126) + 127
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def _mx_values(x, amax, FORMAT: tl.constexpr, RULE: tl.constexpr):
    exponent = mx_exponent(amax, FORMAT, RULE)
    first = _candidate(x, _power(exponent), _power(-exponent), FORMAT)
    values = first[0] * first[1][:, :, None]
    if RULE == "mse":
        second = _candidate(x, _power(exponent + 1), _power(-exponent - 1), FORMAT)
        values = _better(first, second)
    return values


@triton.jit
def reciprocal(x):
    """1 / x within an ulp, one instruction."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x],
                                         dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _nvfp4_candidate(x, amax, TARGET: tl.constexpr, FORMAT: tl.constexpr):
    """x and block maxima relative to the second-level scale; the maximum goes on TARGET."""
    scale = tl.maximum(amax * (1.0 / TARGET), constant("E4M3_MIN_SUBNORMAL"))
    scale = _to_e4m3(scale)
    return _candidate(x, scale, reciprocal(scale), FORMAT)


@triton.jit
def _nvfp4_values(blocks, amax, FORMAT: tl.constexpr, RULE: tl.constexpr, SPAN: tl.constexpr):
    """Values relative to the second-level scale, and that scale (T,); amax: bits (T, N), finite."""
    largest = tl.max(amax, 1)
    if SPAN == "tile":
        largest = tl.zeros_like(largest) + tl.max(largest, 0)
    factor = largest.to(tl.float32, bitcast=True) * (1.0 / nvfp4_divisor(RULE))
    factor = tl.where(factor < 2.0**-100, 1.0, factor)
    inverse = reciprocal(factor)
    blocks *= inverse[:, None, None]
    amax = amax.to(tl.float32, bitcast=True) * inverse[:, None]
    first = _nvfp4_candidate(blocks, amax, constant("E2M1_MAX"), FORMAT)
    values = first[0] * first[1][:, :, None]
    if RULE == "mse":
        second = _nvfp4_candidate(blocks, amax, constant("NVFP4_SECOND_TARGET"), FORMAT)
        values = _better(first, second)
    return values, factor


@triton.jit
def in_format(x, FORMAT: tl.constexpr, RULE: tl.constexpr, SPAN: tl.constexpr, T: tl.constexpr,
              D: tl.constexpr):
    """What x (T, D) fp32 becomes in a block-scaled format: values (T, D) and a factor (T,) on them.

    NaN for a block that holds NaN or Inf. The arithmetic of `quant.encode` with reciprocals in
    place of divisions: a value within an ulp of a rounding tie may land on its other side.
    """
    factor = tl.full([T], 1.0, tl.float32)
    if FORMAT == "mxfp8" and RULE == "rceil":
        # A power of two that clips nothing: folding rounds the same mantissas, once
        values = tl.where(abs_bits(x) >= 0x7F800000, float("nan"), x)
    else:
        BLOCK: tl.constexpr = block(FORMAT, D)
        blocks = x.reshape(T, D // BLOCK, BLOCK)
        amax = tl.max(abs_bits(blocks), 2)
        bad = amax >= 0x7F800000
        if scale_kind(FORMAT) == "e8m0":
            values = _mx_values(blocks, amax, FORMAT, RULE)
        else:
            values, factor = _nvfp4_values(blocks, tl.where(bad, 0, amax), FORMAT, RULE, SPAN)
        values = tl.where(bad[:, :, None], float("nan"), values).reshape(T, D)
    return values, factor


@triton.jit
def int8_codes(x, SPAN: tl.constexpr):
    """x (T, D) fp32 -> int8 codes, fp32 scales (T,); NaN in the scale where a row holds it."""
    amax = tl.max(abs_bits(x), 1)
    if SPAN == "tile":
        amax = tl.zeros_like(amax) + tl.max(amax, 0)
    scale = amax.to(tl.float32, bitcast=True) * (1.0 / element_max("int8"))
    scale = tl.where(scale == 0.0, 1.0, scale)
    bad = amax >= 0x7F800000
    codes = x * (1.0 / scale)[:, None] + 12582912.0  # 1.5 * 2^23: rounds to the nearest integer
    codes = codes.to(tl.int32, bitcast=True).to(tl.int8)
    return tl.where(bad[:, None], 0, codes), tl.where(bad, float("nan"), scale)


@triton.jit
def fold(values, factor, BY_ROW: tl.constexpr):
    """values (T, D) * factor (T,) -> E4M3 codes relative to the smallest power of two with which
    the largest of a row, or of the tile's rows without NaN, fits; that power (T,), 1 for zeros and
    within 2^-100 and 2^100."""
    amax = tl.max(abs_bits(values), 1)
    amax = tl.where(amax < 0x7F800000, amax, 0).to(tl.float32, bitcast=True) * factor
    if not BY_ROW:
        amax = tl.zeros_like(amax) + tl.max(amax, 0)
    amax = amax.to(tl.int32, bitcast=True)
    exponent = (amax >> 23) - 8 + ((amax & 0x7FFFFF) > mantissa_of_max("mxfp8")).to(tl.int32)
    exponent = tl.where(amax == 0, 127, tl.minimum(tl.maximum(exponent, 27), 227))
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    codes = e4m3_code(values * (factor * inverse)[:, None])
    return codes, (exponent << 23).to(tl.float32, bitcast=True)
