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


def _element(to: str, x: str, at: int, fmt: str, kind: str, scale: str) -> str:
    """Elements at bits `at` of both halves of x, times what `scale` holds unless it is empty."""
    name = get_format(fmt).element
    if name == "int4":  # exponent | (n ^ 8) is 2^7 or 2^10 plus (n ^ 8)
        magic = "0x43084308" if kind == "bf16" else "0x64086408"
        text = (_shifted("m", x, -at)
                + f"lop3.b32 m, m, 0x000F000F, {magic}, 0x6A;\n"
                + f"fma.rn.{kind}x2 {to}, m, factor, last;\n")
    else:
        width, places = _PLACES[name]
        place, _ = places[kind]
        mask = ((1 << width) - 1) << place
        text = (_shifted("m", x, place - at) + f"and.b32 m, m, {mask * 0x10001:#x};\n"
                + _shifted("n", x, 15 - width - at) + "lop3.b32 m, n, 0x80008000, m, 0xEA;\n"
                + f"fma.rn.{kind}x2 {to}, m, factor, last;\n")
    return text + (f"fma.rn.{kind}x2 {to}, {to}, {scale}, zero;\n" if scale else "")


def _wrapped(body: str, fmt: str, kind: str) -> str:
    one = {"bf16": 0x3F80, "f16": 0x3C00}[kind]
    name = get_format(fmt).element
    factor, last = ((one, 0xC308 if kind == "bf16" else 0xE408) if name == "int4"
                    else (_PLACES[name][1][kind][1], 0x8000))
    return ("{\n.reg .b32 a, b, m, n, s, t, factor, last, zero;\n"
            f"mov.b32 factor, {factor * 0x10001:#x};\nmov.b32 last, {last * 0x10001:#x};\n"
            f"mov.b32 zero, 0x80008000;\n{body}}}")


@functools.cache
def key_asm(fmt: str) -> tuple[str, str]:
    """Bytes 0 to 3 of a key in the order 0, 2, 1, 3: of low nibbles, then of high ones."""
    f = get_format(fmt)
    kind = _key_kind(fmt)
    outs = 4 if f.bits == 4 else 2
    scales = _scaled(fmt)
    x = f"${outs}"
    body = ""
    for i in range(outs // 2):
        scale = f"${outs + 1 + 2 * i}" if scales else ""
        for j in range(2):
            body += _element(f"${2 * i + j}", x, 8 * j + 4 * i, fmt, kind, scale)
    inputs = "r" + ",r,r" * (outs // 2 if scales else 0)
    return _wrapped(body, fmt, kind), "=r," * outs + inputs


@functools.cache
def value_asm(fmt: str) -> tuple[str, str]:
    """Bytes 0 to 3 of two keys -> pairs: of bytes 0, 1, of 2, 3; of low nibbles, then high ones."""
    f = get_format(fmt)
    nibbles = 2 if f.bits == 4 else 1
    outs = 4 * nibbles
    scales = _scaled(fmt)
    body = (f"prmt.b32 a, ${outs}, ${outs + 1}, 0x5410;\n"
            f"prmt.b32 b, ${outs}, ${outs + 1}, 0x7632;\n")
    for i in range(nibbles):
        scale = ""
        if scales:
            scale = "st"[i]
            even = outs + 2 + 4 * i
            body += f"prmt.b32 {scale}, ${even}, ${even + 2}, 0x5410;\n"
        for j in range(2):
            for e in range(2):
                body += _element(f"${4 * i + 2 * j + e}", "ab"[j], 8 * e + 4 * i, fmt, "bf16",
                                 scale)
    inputs = "r,r" + ",r,r,r,r" * (nibbles if scales else 0)
    return _wrapped(body, fmt, "bf16"), "=r," * outs + inputs


def _scaled(fmt: str) -> bool:
    return get_format(fmt).scale != "fp32"


def _key_kind(fmt: str) -> str:
    """What K is multiplied in: "f16" or "bf16"."""
    return "bf16" if get_format(fmt).scale == "e8m0" else "f16"
