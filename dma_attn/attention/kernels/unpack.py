"""Codes of a cache to bf16 elements, two at a time, in the registers that they were loaded to.

    int4     0x4300 | (n ^ 8) is 128 + (n ^ 8) in bf16; minus 136
    E2M1, E4M3, E5M2    sign and the other bits put where bf16 has them; times 2^(127 - bias)

The Triton interpreter has `decode_element` instead. Codes for NaN and Inf, which no quantiser here
writes (their scale is NaN), count as numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...quant.jit import INTERPRETED, decode_element, element

_SPREAD = "prmt.b32 a, {x}, 0, 0x4140;\nprmt.b32 b, {x}, 0, 0x4342;\n"


def _int4(to: str, x: str) -> str:
    """Nibbles at bits 0 to 3 of both halves of x."""
    return (f"lop3.b32 {x}, {x}, 0x000F000F, 0x43084308, 0x6A;\n"
            f"fma.rn.bf16x2 {to}, {x}, factor, last;\n")


def _float(to: str, x: str, left: int, mask: int, sign: int) -> str:
    """Codes in both halves of x: the bits of `mask` after a shift, the sign after another."""
    return (f"shl.b32 m, {x}, {left};\nand.b32 m, m, {mask * 0x10001:#x};\n"
            f"shl.b32 s, {x}, {sign};\nlop3.b32 m, s, 0x80008000, m, 0xEA;\n"
            f"fma.rn.bf16x2 {to}, m, factor, last;\n")


def _asm(body: str, factor: int, last: int) -> str:
    """The elements are what `body` makes, times a bf16 number and plus another."""
    return ("{\n.reg .b32 a, b, c, d, m, s, factor, last;\n"
            f"mov.b32 factor, {factor * 0x10001:#x};\nmov.b32 last, {last * 0x10001:#x};\n"
            f"{body}}}")


_ASM = {
    "int4": _asm(
        _SPREAD.format(x="$4") + "shr.b32 c, a, 4;\nshr.b32 d, b, 4;\n"
        + _int4("$0", "a") + _int4("$1", "b") + _int4("$2", "c") + _int4("$3", "d"),
        0x3F80, 0xC308),
    "e2m1": _asm(
        _SPREAD.format(x="$4") + _float("$0", "a", 6, 0x01C0, 12) + _float("$1", "b", 6, 0x01C0, 12)
        + _float("$2", "a", 2, 0x01C0, 8) + _float("$3", "b", 2, 0x01C0, 8), 0x7E80, 0),
    "e4m3": _asm(
        _SPREAD.format(x="$2") + _float("$0", "a", 4, 0x07F0, 8) + _float("$1", "b", 4, 0x07F0, 8),
        0x7B80, 0),
    "e5m2": _asm(
        _SPREAD.format(x="$2") + _float("$0", "a", 5, 0x0FE0, 8) + _float("$1", "b", 5, 0x0FE0, 8),
        0x7780, 0),
}


@triton.constexpr_function
def _asm_of(fmt):
    return _ASM[element(fmt)]


@triton.jit
def nibbles(byte, FORMAT: tl.constexpr):
    """uint8 codes of two dims -> bf16 elements of the low nibbles and of the high ones."""
    if INTERPRETED:
        code = byte.to(tl.int32)
        return (decode_element(code & 15, FORMAT).to(tl.bfloat16),
                decode_element(code >> 4, FORMAT).to(tl.bfloat16))
    else:
        return tl.inline_asm_elementwise(_asm_of(FORMAT), "=r,=r,=r,=r,r", [byte],
                                         dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)


@triton.jit
def elements(byte, FORMAT: tl.constexpr):
    """uint8 codes -> bf16 elements of an 8-bit format."""
    if INTERPRETED or element(FORMAT) == "int8":
        return decode_element(byte.to(tl.int32), FORMAT).to(tl.bfloat16)
    else:
        return tl.inline_asm_elementwise(_asm_of(FORMAT), "=r,=r,r", [byte], dtype=tl.bfloat16,
                                         is_pure=True, pack=4)
