"""Device functions of the folding kernels: a value in its format, and folded into E4M3 codes.

The arithmetic of `quant.encode` with hardware casts to FP8 and, for rotated values, reciprocals in
place of divisions: a value within an ulp of a rounding tie may land on its other side. Q and K that
are not rotated have 16 bits and meet ties often; they are divided. Under Triton's interpreter,
whose FP8 casts round wrongly, the encoders of `quant.jit` take their place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .jit import (
    INTERPRETED,
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


@triton.jit
def _wider(a, b):
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_abs(x, axis: tl.constexpr):
    """Largest magnitude along an axis; NaN where there is one."""
    if INTERPRETED:  # where only its own reductions are fast
        return tl.max(abs_bits(x), axis).to(tl.float32, bitcast=True)
    else:
        return tl.reduce(x, axis, _wider)


@triton.jit
def _to_e2m1(x, gain):
    """E2M1 value nearest to gain * x, ties to even: adding an even number, 2^23 at least, of quanta
    rounds, and rounds the product with it.

    In units of 2^22 that number is 1 (for 0) to 1.875, 2.75 and 4.5 for products below 2, 4 and 8.
    Not saturating: from 7 on the result is 8.
    """
    binade = ((x * gain).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.fma(binade, 0.875 * 2.0**22, 2.0**22)
    return tl.fma(x, gain, shift) - shift


@triton.jit
def _near_e2m1(x, gain):
    """`_to_e2m1` with an operation less, for values that do not meet ties: these go either way.

    The number of quanta is 2^22 |gain * x|, at least 1.5 * 2^22; a little less, so that the sum
    stays in its binade.
    """
    shift = tl.maximum(tl.abs(x * (gain * (2.0**22 - 4.0))), 1.5 * 2.0**22)
    return tl.fma(x, gain, shift) - shift


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
def _to_element(x, gain, FORMAT: tl.constexpr, SATURATE: tl.constexpr = False,
                TIES: tl.constexpr = True):
    """Element value nearest to gain * x, ties (TIES) to even, saturating; of NVFP4 if told so,
    since its block scales keep products below 7, except in blocks 2^-15 below the largest that
    shares the fp32 scale."""
    if element(FORMAT) == "e2m1":
        y = _to_e2m1(x, gain) if TIES else _near_e2m1(x, gain)
        if scale_kind(FORMAT) == "e8m0" or SATURATE:
            y = tl.minimum(tl.maximum(y, -element_max(FORMAT)), element_max(FORMAT))
        return y
    elif element(FORMAT) == "e4m3":
        return _to_e4m3(x * gain)
    elif INTERPRETED:
        y = x * gain
        return decode_e5m2(encode_fp8(tl.where(y == y, y, 0.0), FORMAT))
    else:
        y = tl.minimum(tl.maximum(x * gain, -element_max(FORMAT)), element_max(FORMAT))
        return y.to(tl.float8e5).to(tl.float32)


@triton.jit
def _candidate(x, top, gain, scale, FORMAT: tl.constexpr, SATURATE: tl.constexpr = False,
               TIES: tl.constexpr = True):
    """Values x (T, N, BLOCK) and the largest magnitudes top (T, N), to be multiplied by gain (T, N)
    to be in units of scale (T, N): elements, the scales, squared errors (T, N); top and gain.

    Products and what is added to them are fused here, not by the compiler, which chooses by
    variant: the same values must give the same codes in all of them. (The squares are left to it:
    they only choose between candidates, and ones that err alike.)
    """
    elements = _to_element(x, gain[:, :, None], FORMAT, SATURATE, TIES)
    diff = tl.fma(x, (gain * -1.0)[:, :, None], elements)
    return elements, scale, tl.sum(diff * diff, 2) * (scale * scale), top, gain


@triton.jit
def _better(first, second):
    """The candidate with the smaller error; ties: the first."""
    elements, scale, error, top, gain = first
    elements_1, scale_1, error_1, top_1, gain_1 = second
    better = error_1 < error
    return (tl.where(better[:, :, None], elements_1, elements), tl.where(better, scale_1, scale),
            tl.where(better, error_1, error), tl.where(better, top_1, top),
            tl.where(better, gain_1, gain))


@triton.jit
def _power(exponent):
    """2^exponent for int32 exponents, clamped to the normal range."""
    biased = tl.minimum(tl.maximum(exponent, -126), 126) + 127
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def _mx_candidate(x, amax, gain, exponent, FORMAT: tl.constexpr):
    return _candidate(x, amax, _power(-exponent) * gain, _power(exponent), FORMAT)


@triton.jit
def _mx_blocks(x, amax, gain, FORMAT: tl.constexpr, RULE: tl.constexpr):
    bits = (amax * tl.abs(gain)).to(tl.int32, bitcast=True)
    exponent = mx_exponent(bits, FORMAT, RULE)
    chosen = _mx_candidate(x, amax, gain, exponent, FORMAT)
    if RULE == "mse":
        chosen = _better(chosen, _mx_candidate(x, amax, gain, exponent + 1, FORMAT))
    elements, scale, _, top, gain = chosen
    return elements, scale, tl.abs(_to_element(top, gain, FORMAT)) * scale


@triton.jit
def reciprocal(x):
    """1 / x within an ulp, one instruction."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x],
                                         dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _nvfp4_candidate(x, amax, gain, factor, TARGET: tl.constexpr, FORMAT: tl.constexpr,
                     SPAN: tl.constexpr, EXACT: tl.constexpr):
    """The maximum goes on TARGET; factor (T, 1) is the second-level scale, and without EXACT x and
    amax are to be multiplied by gain (T, 1) to be relative to it."""
    if EXACT:
        scale = tl.div_rn(tl.div_rn(amax, TARGET), factor + tl.zeros_like(amax))
    else:
        scale = tl.abs(amax * gain) * (1.0 / TARGET)
    scale = _to_e4m3(tl.maximum(scale, constant("E4M3_MIN_SUBNORMAL")))
    if EXACT:
        scale *= factor
        scaled = tl.div_rn(x, scale[:, :, None] + tl.zeros_like(x))
        one = tl.zeros_like(scale) + 1.0
        return _candidate(scaled, tl.div_rn(amax, scale), one, scale, FORMAT,
                          SPAN == "tile")
    else:
        return _candidate(x, amax, gain * reciprocal(scale), scale, FORMAT, SPAN == "tile", False)


@triton.jit
def _nvfp4_blocks(x, amax, gain, FORMAT: tl.constexpr, RULE: tl.constexpr, SPAN: tl.constexpr,
                  EXACT: tl.constexpr):
    largest = tl.max(amax, 1)
    if SPAN == "tile":
        largest = tl.maximum(largest, tl.max(largest, 0))
    if EXACT:
        factor = tl.div_rn(largest, nvfp4_divisor(RULE))
        x *= gain
    else:
        factor = largest * (tl.abs(gain) * (1.0 / nvfp4_divisor(RULE)))
    factor = tl.where(factor < 2.0**-100, 1.0, factor)
    gain = (reciprocal(factor) * gain)[:, None]
    factor = factor[:, None]
    chosen = _nvfp4_candidate(x, amax, gain, factor, constant("E2M1_MAX"), FORMAT, SPAN, EXACT)
    if RULE == "mse":
        second = _nvfp4_candidate(x, amax, gain, factor, constant("NVFP4_SECOND_TARGET"), FORMAT,
                                  SPAN, EXACT)
        chosen = _better(chosen, second)
    elements, scale, _, top, gain = chosen
    if not EXACT:
        scale *= factor
    top = _to_element(top, gain, FORMAT, SPAN == "tile", EXACT)
    return elements, scale, tl.abs(top) * scale


@triton.jit
def tile_max(x, T: tl.constexpr, D: tl.constexpr):
    """Largest magnitude among the rows of x (T, D) without NaN or Inf; over NVFP4's blocks, whose
    maxima are then computed once."""
    BLOCK: tl.constexpr = block("nvfp4", D)
    rows = max_abs(max_abs(x.reshape(T, D // BLOCK, BLOCK), 2), 1)
    return tl.max(tl.where(rows < float("inf"), rows, 0.0), 0)


@triton.jit
def in_format(x, gain, top, FORMAT: tl.constexpr, RULE: tl.constexpr, SPAN: tl.constexpr,
              EXACT: tl.constexpr, T: tl.constexpr, D: tl.constexpr):
    """What gain * x, x (T, D) fp32, becomes in a block-scaled format.

    Elements (T, N, BLOCK), their scales (T, N), rows (T,) that hold NaN or Inf, whose elements mean
    nothing, and the largest magnitude, or a bound of it, of all other rows, given top, their
    `tile_max`; of each row (T,) where top is None. With EXACT, where gain is 1 or -1, divisions as
    in `quant.encode`.
    """
    CLIPS: tl.constexpr = FORMAT != "mxfp8" or RULE != "rceil"
    BLOCK: tl.constexpr = block(FORMAT if CLIPS else "nvfp4", D)
    blocks = x.reshape(T, D // BLOCK, BLOCK)
    amax = max_abs(blocks, 2)
    bad = ~(max_abs(amax, 1) < float("inf"))
    amax = tl.where(amax < float("inf"), amax, 0.0)
    largest = tl.where(bad, 0.0, tl.max(amax, 1)) if top is None else top
    if not CLIPS:  # folding rounds the same mantissas, once, whatever the blocks
        elements, scale = blocks, amax * 0.0 + gain
        largest *= tl.abs(gain)
    else:
        if scale_kind(FORMAT) == "e8m0":
            elements, scale, tops = _mx_blocks(blocks, amax, gain, FORMAT, RULE)
        else:
            elements, scale, tops = _nvfp4_blocks(blocks, amax, gain, FORMAT, RULE, SPAN, EXACT)
        if scale_kind(FORMAT) == "e4m3" and SPAN == "token":
            largest *= tl.abs(gain) * constant("NVFP4_OVERSHOOT")
        else:  # also of NVFP4 by tile, where all of a row may lie far below the scale's reach
            largest = tl.where(bad, 0.0, tl.max(tops, 1))
            if top is not None:
                largest = tl.max(largest, 0)
    return elements, scale, bad, largest


@triton.jit
def int8_codes(x, gain, SPAN: tl.constexpr, EXACT: tl.constexpr):
    """gain * x (T, D) fp32 -> int8 codes, fp32 scales (T,): NaN where a row, or another of its
    span, holds NaN or Inf, and the codes mean nothing."""
    amax = max_abs(x, 1)
    if SPAN == "tile":
        amax = amax * 0.0 + max_abs(amax, 0)  # NaN for Inf, which counts as NaN below
    if EXACT:
        scale = tl.div_rn(amax, element_max("int8"))
    else:
        scale = amax * (tl.abs(gain) * (1.0 / element_max("int8")))
    # Zeros get a small scale: the kernel's integer trick rounds row maxima to 2^23 scales
    scale = tl.where(scale == 0.0, 2.0**-60, scale)
    magic = 12582912.0  # 1.5 * 2^23: adding it rounds to the nearest integer
    if EXACT:
        codes = tl.div_rn(x * gain, scale[:, None] + tl.zeros_like(x)) + magic
    else:
        codes = tl.fma(x, (gain / scale)[:, None], magic)
    codes = codes.to(tl.int32, bitcast=True).to(tl.int8)
    return codes, tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def fold(elements, scale, bad, largest, BY_ROW: tl.constexpr, T: tl.constexpr, D: tl.constexpr):
    """What `in_format` returned -> E4M3 codes (T, D) and the power of two, or with BY_ROW those of
    the rows (T,), that they multiply.

    The power is the smallest with which `largest` fits; 1 where that is 0, and within 2^-100 and
    2^100. NaN goes to the power of a row (BY_ROW), else to the row's codes.
    """
    amax = largest.to(tl.int32, bitcast=True)
    exponent = (amax >> 23) - 8 + ((amax & 0x7FFFFF) > mantissa_of_max("mxfp8")).to(tl.int32)
    exponent = tl.where(amax == 0, 127, tl.minimum(tl.maximum(exponent, 27), 227))
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    if BY_ROW:
        power = tl.where(bad, float("nan"), power)
    else:
        inverse = tl.where(bad, float("nan"), inverse)
    codes = e4m3_code(elements * (scale * inverse[:, None])[:, :, None]).reshape(T, D)
    return codes, power
