"""PTX from codes in a register to pairs of bf16 or fp16 elements, for `decode_registers`."""

from __future__ import annotations

import functools

from ...formats import get_format

# Of an element's bits without the sign: how many, where bf16 and fp16 have the lowest, and what
# the number is to be multiplied by then
_PLACES = {
    "e2m1": (3, {"bf16": (6, 0x7E80), "f16": (9, 0x7400)}),
    "e4m3": (7, {"bf16": (4, 0x7B80)}),
    "e5m2": (7, {"bf16": (5, 0x7780)}),
}


def _shifted(to: str, x: str, left: int) -> str:
    if left == 0:
        return f"mov.b32 {to}, {x};\n"
    return f"{'shl' if left > 0 else 'shr'}.b32 {to}, {x}, {abs(left)};\n"


def _element(to: str, x: str, at: int, fmt: str, kind: str, scale: str, exact: bool = True) -> str:
    """Elements at bits `at` of both halves of x, times what `scale` holds unless it is empty; not
    `exact`: times the power of two of their place."""
    name = get_format(fmt).element
    if name == "int4":  # exponent | (n ^ 8) is 2^7 or 2^10 plus (n ^ 8)
        magic = "0x43084308" if kind == "bf16" else "0x64086408"
        return (_shifted("m", x, -at)
                + f"lop3.b32 m, m, 0x000F000F, {magic}, 0x6A;\n"
                + f"fma.rn.{kind}x2 {to}, m, factor, last;\n")
    width, places = _PLACES[name]
    place, _ = places[kind]
    mask = ((1 << width) - 1) << place
    raw = "m" if exact or scale else to
    text = (_shifted("m", x, place - at) + f"and.b32 m, m, {mask * 0x10001:#x};\n"
            + _shifted("n", x, 15 - width - at) + f"lop3.b32 {raw}, n, 0x80008000, m, 0xEA;\n")
    if exact:
        text += f"fma.rn.{kind}x2 {to}, m, factor, last;\n"
    return text + (f"fma.rn.{kind}x2 {to}, {to if exact else 'm'}, {scale}, zero;\n"
                   if scale else "")


def _wrapped(body: str, fmt: str, kind: str) -> str:
    one = {"bf16": 0x3F80, "f16": 0x3C00}[kind]
    name = get_format(fmt).element
    factor, last = ((one, 0xC308 if kind == "bf16" else 0xE408) if name == "int4"
                    else (_PLACES[name][1][kind][1], 0x8000))
    return ("{\n.reg .b32 a, b, m, n, s, t, factor, last, zero;\n"
            ".reg .b16 lo, hi;\n.reg .f32 x, y;\n"
            f"mov.b32 factor, {factor * 0x10001:#x};\nmov.b32 last, {last * 0x10001:#x};\n"
            f"mov.b32 zero, 0x80008000;\n{body}}}")


@functools.cache
def key_asm(fmt: str) -> tuple[str, str]:
    """Elements of bytes 0 to 3 of a key, times 2^-`key_power` and, for 4 bits, their block scales.

    4 bits: bytes in the order 0, 2, 1, 3, of low nibbles, then of high ones; int4 with 8 added, and
    high nibbles times 16. Block scales come as they are stored (E4M3) or in bf16 (E8M0).
    8 bits: bytes as they lie.
    """
    f = get_format(fmt)
    if f.element == "e4m3":
        body = ("mov.b32 {lo, hi}, $2;\ncvt.rn.f16x2.e4m3x2 $0, lo;\n"
                "cvt.rn.f16x2.e4m3x2 $1, hi;\n")
    elif f.element == "e5m2":  # the upper byte of fp16
        body = "mov.b32 zero, 0;\nprmt.b32 $0, $2, zero, 0x1404;\nprmt.b32 $1, $2, zero, 0x3424;\n"
    if f.bits == 8:
        return _bare(body), "=r,=r,r"
    if f.element == "int4":  # small integers are fp16's subnormal numbers
        body = "shr.b32 m, $4, 8;\n" + "".join(
            f"lop3.b32 ${2 * i + j}, {'m' if j else '$4'}, {0xF000F << 4 * i:#x}, "
            f"{0x80008 << 4 * i:#x}, 0x6A;\n" for i in range(2) for j in range(2))
        return _bare(body), "=r,=r,=r,=r,r"
    kind = "bf16" if f.scale == "e8m0" else "f16"
    body, scales, inputs = "", ("", ""), ""
    if f.scale == "e4m3":
        inputs, scales = ",r,r", ("s", "t")
        body = "mov.b32 b, 0x58005800;\n"  # 2^7
        for scale, byte in zip(scales, ("$5", "$6"), strict=True):
            body += (f"mov.b32 {{lo, hi}}, {byte};\ncvt.rn.f16x2.e4m3x2 a, lo;\n"
                     f"mul.rn.f16x2 {scale}, a, b;\n")
    elif f.scale == "e8m0":
        inputs, scales = ",r,r,r,r", ("$5", "$7")
    for i in range(2):
        for j in range(2):
            body += _element(f"${2 * i + j}", "$4", 8 * j + 4 * i, fmt, kind, scales[i],
                             exact=f.scale == "e8m0")
    return _wrapped(body, fmt, kind), "=r,=r,=r,=r,r" + inputs


def key_power(fmt: str) -> int:
    """See `key_asm`."""
    return {"int4": 24, "fp4": 14, "nvfp4": 7}.get(fmt, 0)


@functools.cache
def value_asm(fmt: str) -> tuple[str, str]:
    """Elements of bytes 0 to 3 of two keys, times 2^-`value_power` and their block scales, in
    pairs: of bytes 0, 1, of 2, 3; of low nibbles, then high ones. Scales as in `key_asm`."""
    f = get_format(fmt)
    nibbles = 2 if f.bits == 4 else 1
    outs = 4 * nibbles
    inputs = "r,r"
    body = (f"prmt.b32 a, ${outs}, ${outs + 1}, 0x5410;\n"
            f"prmt.b32 b, ${outs}, ${outs + 1}, 0x7632;\n")
    for i in range(nibbles):
        scale = ""
        if f.scale == "e8m0":
            scale = "st"[i]
            even = outs + 2 + 4 * i
            inputs += ",r,r,r,r"
            body += f"prmt.b32 {scale}, ${even}, ${even + 2}, 0x5410;\n"
        elif f.scale == "e4m3":
            scale = "st"[i]
            even = outs + 2 + 2 * i
            inputs += ",r,r"
            body += (f"prmt.b32 m, ${even}, ${even + 1}, 0x5140;\nmov.b32 {{lo, hi}}, m;\n"
                     "cvt.rn.f16x2.e4m3x2 m, lo;\nmov.b32 {lo, hi}, m;\n"
                     "cvt.f32.f16 x, lo;\ncvt.f32.f16 y, hi;\n"
                     "mul.f32 x, x, 0f7A800000;\nmul.f32 y, y, 0f7A800000;\n"  # 2^118
                     f"cvt.rn.bf16x2.f32 {scale}, y, x;\n")
        for j in range(2):
            for e in range(2):
                body += _element(f"${4 * i + 2 * j + e}", "ab"[j], 8 * e + 4 * i, fmt, "bf16",
                                 scale, exact=f.scale != "e4m3")
    return _wrapped(body, fmt, "bf16"), "=r," * outs + inputs


def value_power(fmt: str) -> int:
    """See `value_asm`."""
    return 8 if get_format(fmt).scale == "e4m3" else 0


def _bare(body: str) -> str:
    return "{\n.reg .b32 m, zero;\n.reg .b16 lo, hi;\n" + body + "}"
