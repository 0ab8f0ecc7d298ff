"""Device function `encode`: one quantised copy of a register tile, for all quantising kernels.

A tile of T tokens x BLOCK_D channels becomes codes, block scales and fp32 row scales, by the rules
of `quant.reference`. See `quant.jit` for what keeps the bits equal everywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .jit import (
    abs_bits,
    block,
    constant,
    decode_e4m3,
    decode_e8m0,
    decode_element,
    element_max,
    encode_element,
    encode_fp8,
    mx_exponent,
    nvfp4_divisor,
    scale_kind,
    token_shares,
    tree_sum,
)


@triton.jit
def _e8m0(exponent, bad):
    byte = tl.minimum(tl.maximum(exponent, -127), 127) + 127
    return tl.where(bad, 255, byte)


@triton.jit
def _e4m3_scale(raw, bad, MINIMUM: tl.constexpr):
    raw = tl.minimum(tl.maximum(raw, MINIMUM), constant("E4M3_MAX"))
    return tl.where(bad, constant("E4M3_NAN"), encode_fp8(raw, "mxfp8"))


@triton.jit
def _error(codes, scale, x, FORMAT: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
           BLOCK: tl.constexpr):
    diff = decode_element(codes, FORMAT) * scale - x
    return tree_sum(diff * diff, T, N, BLOCK)


@triton.jit
def _with_scale(x, scales, scale, FORMAT: tl.constexpr, RULE: tl.constexpr, T: tl.constexpr,
                N: tl.constexpr, BLOCK: tl.constexpr):
    """A candidate: codes of x (T, N, BLOCK) under block scales (T, N), their bytes, the error."""
    scale = scale[:, :, None] + tl.zeros_like(x)
    codes = encode_element(tl.div_rn(x, scale), FORMAT, RULE)
    error = tl.zeros([T, N], tl.float32)
    if RULE == "mse":
        error = _error(codes, scale, x, FORMAT, T, N, BLOCK)
    return codes, scales, error


@triton.jit
def _smaller_error(first, second):
    """Codes and scale bytes of the better candidate, block by block; ties take the first."""
    codes, scales, error = first
    codes_1, scales_1, error_1 = second
    better = error_1 < error
    return tl.where(better[:, :, None], codes_1, codes), tl.where(better, scales_1, scales)


@triton.jit
def _encode_mx(x, amax, FORMAT: tl.constexpr, RULE: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
               BLOCK: tl.constexpr):
    """x (T, N, BLOCK), amax bits (T, N) -> codes, E8M0 bytes (T, N)."""
    exponent = mx_exponent(amax, FORMAT, RULE)
    bad = amax >= 0x7F800000
    scales = _e8m0(exponent, bad)
    first = _with_scale(x, scales, decode_e8m0(scales), FORMAT, RULE, T, N, BLOCK)
    codes = first[0]
    if RULE == "mse":
        next_up = _e8m0(exponent + 1, bad)
        second = _with_scale(x, next_up, decode_e8m0(next_up), FORMAT, RULE, T, N, BLOCK)
        codes, scales = _smaller_error(first, second)
    return codes, scales


@triton.jit
def _nvfp4_candidate(x, amax, second_level, bad, TARGET: tl.constexpr, FORMAT: tl.constexpr,
                     RULE: tl.constexpr, T: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Put the block maximum on TARGET."""
    scales = _e4m3_scale(tl.div_rn(tl.div_rn(amax, TARGET), second_level), bad,
                         constant("E4M3_MIN_SUBNORMAL"))
    scale = decode_e4m3(scales) * second_level
    return _with_scale(x, scales, scale, FORMAT, RULE, T, N, BLOCK)


@triton.jit
def _encode_nvfp4(x, amax_bits, second_level, FORMAT: tl.constexpr, RULE: tl.constexpr,
                  T: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """x (T, N, 16), second-level scale (T,) -> codes, E4M3 bytes (T, N)."""
    bad = amax_bits >= 0x7F800000
    amax = amax_bits.to(tl.float32, bitcast=True)
    second_level = second_level[:, None] + tl.zeros_like(amax)
    if RULE == "paper":
        exact = tl.div_rn(tl.div_rn(amax, second_level), constant("E2M1_MAX"))
        exact = tl.maximum(exact, constant("PAPER_NVFP4_MIN_SCALE"))
        scales = _e4m3_scale(exact, bad, 0.0)
        exact = tl.where(bad, float("nan"), exact)
        shared = tl.div_rn(x, second_level[:, :, None] + tl.zeros_like(x))
        codes = _with_scale(shared, scales, exact, FORMAT, RULE, T, N, BLOCK)[0]
    else:
        first = _nvfp4_candidate(x, amax, second_level, bad, constant("E2M1_MAX"), FORMAT, RULE,
                                 T, N, BLOCK)
        codes, scales, _ = first
        if RULE == "mse":
            second = _nvfp4_candidate(x, amax, second_level, bad, constant("NVFP4_SECOND_TARGET"),
                                      FORMAT, RULE, T, N, BLOCK)
            codes, scales = _smaller_error(first, second)
    return codes, scales


@triton.jit
def _token_share(i, RULE: tl.constexpr):
    """Share i of amax: a chain of selects, so that the loop over shares stays a loop."""
    share = 1.0
    for j in tl.static_range(1, len(token_shares(RULE))):
        share = tl.where(i == j, token_shares(RULE)[j], share)
    return share


@triton.jit
def _encode_tokens(x, amax, FORMAT: tl.constexpr, RULE: tl.constexpr, T: tl.constexpr,
                   BLOCK: tl.constexpr):
    """x (T, 1, BLOCK), amax bits (T,) -> codes, fp32 scales (T,); the first best share wins."""
    codes = tl.zeros([T, 1, BLOCK], tl.int32)
    scale = tl.zeros([T], tl.float32)
    error = tl.zeros([T, 1], tl.float32)
    for i in range(len(token_shares(RULE))):
        share = _token_share(i, RULE)
        scale_1 = tl.div_rn(amax.to(tl.float32, bitcast=True) * share, element_max(FORMAT))
        scale_1 = tl.where(scale_1 == 0.0, 1.0, scale_1)
        scale_1 = tl.where(amax >= 0x7F800000, float("nan"), scale_1)
        per_row = scale_1[:, None, None] + tl.zeros_like(x)
        codes_1 = encode_element(tl.div_rn(x, per_row), FORMAT, RULE)
        if RULE == "mse":
            error_1 = _error(codes_1, per_row, x, FORMAT, T, 1, BLOCK)
            better = (error_1 < error) | (i == 0)
            codes = tl.where(better[:, :, None], codes_1, codes)
            scale = tl.where(better.reshape(T), scale_1, scale)
            error = tl.where(better, error_1, error)
        else:
            codes, scale = codes_1, scale_1
    return codes, scale


@triton.jit
def encode(x, span_amax, FORMAT: tl.constexpr, RULE: tl.constexpr, SPAN: tl.constexpr,
           T: tl.constexpr, BLOCK_D: tl.constexpr):
    """One quantised copy of x (T, BLOCK_D) fp32: the device function of all quantising kernels.

    Args:
        span_amax: Bits of the finite |x| maximum over the head or tensor (SPAN "head").
        SPAN: What the fp32 scale spans: "token", "tile" (all T rows), "head".

    Returns:
        codes (T, BLOCK_D) int32, block scale bytes (T, N) int32, fp32 row scale (T,).
    """
    BLOCK: tl.constexpr = block(FORMAT, BLOCK_D)
    N: tl.constexpr = BLOCK_D // BLOCK
    raw = abs_bits(x)
    blocks = x.reshape(T, N, BLOCK)
    if scale_kind(FORMAT) == "fp32":
        amax = tl.max(raw, 1)
        if SPAN == "tile":
            amax = tl.zeros_like(amax) + tl.max(amax, 0)
        codes, row_scale = _encode_tokens(blocks, amax, FORMAT, RULE, T, BLOCK)
        scales = tl.zeros([T, N], tl.int32)
    else:
        amax = tl.max(raw.reshape(T, N, BLOCK), 2)
        row_scale = tl.zeros([T], tl.float32)
        if scale_kind(FORMAT) == "e8m0":
            codes, scales = _encode_mx(blocks, amax, FORMAT, RULE, T, N, BLOCK)
        else:
            finite = tl.max(tl.where(raw < 0x7F800000, raw, 0), 1)
            if SPAN == "tile":
                finite = tl.zeros_like(finite) + tl.max(finite, 0)
            elif SPAN == "head":
                finite = tl.zeros_like(finite) + span_amax
            row_scale = tl.div_rn(finite.to(tl.float32, bitcast=True), nvfp4_divisor(RULE))
            row_scale = tl.where(row_scale == 0.0, 1.0, row_scale)
            codes, scales = _encode_nvfp4(blocks, amax, row_scale, FORMAT, RULE, T, N, BLOCK)
    return codes.reshape(T, BLOCK_D), scales, row_scale
