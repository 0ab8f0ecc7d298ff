"""Device functions: format look-ups, element encoders and decoders, transforms; for all kernels.

They work on a register tile of T tokens x BLOCK_D channels, viewed as (T, N_BLOCKS, BLOCK). All is
integer or plain fp32 arithmetic with IEEE division, so that the interpreter, every GPU and the
PyTorch reference agree bit for bit; kernels that call them set enable_fp_fusion=False. Where the
target converts to a format by an instruction, that is taken: it rounds and saturates alike.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from .. import formats, schedule
from ..device import interpreting
from . import transforms

INTERPRETED = tl.constexpr(interpreting())
# The interpreter runs plain Python, and refuses to wrap a module that does not import triton.
key_ranges = schedule.key_ranges if interpreting() else triton.jit(schedule.key_ranges)
rotation_size = triton.constexpr_function(transforms.hadamard_size)
common_keys = schedule.common_keys if interpreting() else triton.jit(schedule.common_keys)


@triton.constexpr_function
def constant(name):
    """A number of `formats`, by name."""
    return getattr(formats, name)


@triton.constexpr_function
def element(fmt):
    return formats.FORMATS[fmt].element


@triton.constexpr_function
def bits(fmt):
    return formats.FORMATS[fmt].bits


@triton.constexpr_function
def scale_kind(fmt):
    return formats.FORMATS[fmt].scale


@triton.constexpr_function
def block(fmt, block_d):
    """Elements that share a scale, in a row padded to block_d channels."""
    return formats.FORMATS[fmt].block or block_d


@triton.constexpr_function
def emax(fmt, rule):
    f = formats.FORMATS[fmt]
    return formats.PAPER_EMAX[f.element] if rule == "paper" else f.emax


@triton.constexpr_function
def mantissa_bits(fmt):
    return formats.FORMATS[fmt].mantissa_bits


@triton.constexpr_function
def element_max(fmt):
    return formats.FORMATS[fmt].max


@triton.constexpr_function
def mantissa_of_max(fmt):
    """The 23 mantissa bits of the largest element."""
    m, _ = math.frexp(formats.FORMATS[fmt].max)
    return int((2 * m - 1) * 2**23)


@triton.constexpr_function
def nvfp4_divisor(rule):
    """amax over this is the second-level scale."""
    if rule == "paper":
        return formats.PAPER_NVFP4_TOKEN_MAX
    return formats.E2M1_MAX * formats.NVFP4_SCALE_TARGET[rule]


@triton.constexpr_function
def token_shares(rule):
    return formats.TOKEN_MSE_SHARES if rule == "mse" else formats.TOKEN_MSE_SHARES[:1]


@triton.constexpr_function
def log2(n):
    return n.bit_length() - 1


@triton.constexpr_function
def rotation_norm(head_dim):
    """1 / sqrt(n), rounded to fp32 where it becomes an operand."""
    return rotation_size(head_dim) ** -0.5


@triton.constexpr_function
def item(values, i):
    """values[i] of a compile-time tuple, as a compile-time value."""
    return values[i]


@triton.jit
def abs_bits(x):
    """int32 bits of |x|: ordered like |x|, NaN above Inf above every finite value."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def sequence(b, cu_ptr, len_ptr, size, longest):
    """First row and length of sequence b: packed (cu_seqlens), per-row lengths, or all of it.

    A packed sequence is cut at `longest`, the length that grids and buffers were made for.
    """
    first = tl.zeros([], tl.int64)
    length = size
    if cu_ptr is not None:
        begin = tl.load(cu_ptr + b)
        length = tl.minimum(tl.load(cu_ptr + b + 1) - begin, longest).to(tl.int32)
        first = begin.to(tl.int64)
    if len_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(len_ptr + b), 0), size).to(tl.int32)
    return first, length


@triton.jit
def _butterfly(x, H: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr):
    """(a, b) -> (a + b, a - b) for channels H apart.

    Sums over an axis of two are exact additions, done in the layout that x has (registers or
    shuffles); splitting and joining the halves would move them through shared memory.
    """
    pairs = x.reshape(T, BLOCK_D // (2 * H), 2, H)
    first = (tl.arange(0, 2) == 0)[None, None, :, None]
    total = tl.sum(pairs, 2)[:, :, None, :]
    difference = tl.sum(tl.where(first, pairs, -pairs), 2)[:, :, None, :]
    return tl.where(first, total, difference).reshape(T, BLOCK_D)


@triton.jit
def hadamard(x, D: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Butterflies h = 1, 2, 4, ... along the channels, then the factor 1 / sqrt(n)."""
    for i in tl.static_range(log2(rotation_size(D))):
        x = _butterfly(x, 1 << i, T, BLOCK_D)
    return x * rotation_norm(D)


@triton.jit
def tree_sum(x, T: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """(T, N, BLOCK) -> (T, N): sum of halves, i with i + n / 2."""
    for i in tl.static_range(log2(BLOCK)):
        x = tl.sum(x.reshape(T, N, 2, BLOCK >> (i + 1)), 2)
    return x.reshape(T, N)


@triton.jit
def mx_exponent(amax, FORMAT: tl.constexpr, RULE: tl.constexpr):
    """Exponent of an MX block's scale from the bits of its largest magnitude; "mse" starts here."""
    exponent = amax
    if RULE == "even":
        exponent = amax + (1 << (22 - mantissa_bits(FORMAT)))
    exponent = (exponent >> 23) - 127 - emax(FORMAT, RULE)
    if RULE == "rceil":
        exponent += ((amax & 0x7FFFFF) > mantissa_of_max(FORMAT)).to(tl.int32)
    return exponent


@triton.jit
def decode_e8m0(byte):
    """int32 byte -> 2^(byte - 127), NaN for 255."""
    raw = tl.where(byte == 0, 0x00400000, byte << 23)
    raw = tl.where(byte == 255, 0x7FC00000, raw)
    return raw.to(tl.float32, bitcast=True)


@triton.jit
def decode_e4m3(code):
    """int32 code 0..255 -> fp32. The exponent field lands in fp16's, 8 too low."""
    h = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.uint16).to(tl.float16, bitcast=True)
    value = h.to(tl.float32) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def decode_e5m2(code):
    """int32 code -> fp32: E5M2 is the upper byte of fp16."""
    return (code << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def decode_e2m1(code):
    """int32 code 0..15 -> fp32. The exponent field lands in fp16's, 14 too low."""
    h = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.uint16).to(tl.float16, bitcast=True)
    return h.to(tl.float32) * 16384.0


@triton.jit
def decode_element(code, FORMAT: tl.constexpr):
    """int32 code -> fp32 element value before scaling."""
    if element(FORMAT) == "e4m3":
        return decode_e4m3(code)
    elif element(FORMAT) == "e5m2":
        return decode_e5m2(code)
    elif element(FORMAT) == "e2m1":
        return decode_e2m1(code)
    elif element(FORMAT) == "int8":
        return ((code ^ 128) - 128).to(tl.float32)
    else:
        return ((code ^ 8) - 8).to(tl.float32)


@triton.constexpr_function
def converts(fmt, numel):
    """True when the target has an instruction that rounds fp32 to a format's elements: FP8 from
    sm_89 on, E2M1 on Blackwell (sm_100 to sm_121). It takes four elements of a thread, which a
    tensor of `numel` has for sure when its up to 16 warps get them."""
    if INTERPRETED or numel < 4 * 16 * 32:
        return False
    if formats.FORMATS[fmt].element == "e2m1":
        return cuda_capability_geq(10, 0) and not cuda_capability_geq(13, 0)
    return formats.FORMATS[fmt].element in ("e4m3", "e5m2") and cuda_capability_geq(8, 9)


@triton.constexpr_function
def _conversion(fmt):
    bits = formats.FORMATS[fmt].bits
    pair = f"{{.reg .b{2 * bits} low, high; .reg .b32 all;"
    for half, first in (("low", 4), ("high", 6)):
        to = formats.FORMATS[fmt].element
        pair += f"cvt.rn.satfinite.{to}x2.f32 {half}, ${first + 1}, ${first};"
    both = "{low, high}" if bits == 8 else "{low, high, low, high}"
    fields = "".join(f"bfe.u32 ${i}, all, {i * bits}, {bits};" for i in range(4))
    return f"{pair} mov.b32 all, {both}; {fields}}}"


@triton.jit
def _convert(x, FORMAT: tl.constexpr):
    """Codes of fp32 x by the hardware: nearest, ties to the even code, saturating.

    Not `x.to(tl.float8e4nv)`: ptxas 12.8 joins its pairs, and of codes that are used again some are
    garbage.
    """
    return tl.inline_asm_elementwise(_conversion(FORMAT), "=r,=r,=r,=r,r,r,r,r", [x],
                                     dtype=tl.int32, is_pure=True, pack=4)


@triton.jit
def encode_e2m1(x):
    """Nearest, ties to the even code, saturating."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    code += (a > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def encode_e2m1_paper(x):
    """The authors' encoder: rounding up never carries into the exponent."""
    a = tl.abs(x)
    code = (a > 0.125).to(tl.int32) + (a >= 1.0).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 2.0).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 4.0).to(tl.int32)
    code += (a > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def encode_fp8(x, FORMAT: tl.constexpr):
    """Nearest even, clamped to the largest finite value; E4M3 (bias 7) or E5M2 (bias 15)."""
    if converts(FORMAT, x.numel):
        return _convert(x, FORMAT)
    else:
        M: tl.constexpr = mantissa_bits(FORMAT)
        BIAS: tl.constexpr = 7 if element(FORMAT) == "e4m3" else 15
        a = tl.minimum(tl.abs(x), element_max(FORMAT))
        raw = a.to(tl.int32, bitcast=True)
        rounded = raw + ((1 << (22 - M)) - 1) + ((raw >> (23 - M)) & 1)
        normal = (rounded >> (23 - M)) - ((127 - BIAS) << M)
        # Subnormals: adding 2^23 rounds to an integer number of quanta, nearest even.
        quanta = a * (2.0 ** (BIAS - 1 + M)) + 8388608.0
        subnormal = quanta.to(tl.int32, bitcast=True) & 0x7FFFFF
        code = tl.where(a < 2.0 ** (1 - BIAS), subnormal, normal)
        return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def encode_element(x, FORMAT: tl.constexpr, RULE: tl.constexpr):
    """Scaled fp32 -> int32 code; clamps before rounding; NaN -> 0."""
    x = tl.where(x == x, x, 0.0)
    if element(FORMAT) == "e2m1":
        if RULE == "paper":
            return encode_e2m1_paper(x)
        elif converts(FORMAT, x.numel):
            return _convert(x, FORMAT)
        else:
            return encode_e2m1(x)
    elif element(FORMAT) == "int8":
        return _round_int(tl.minimum(tl.maximum(x, -127.0), 127.0)) & 255
    elif element(FORMAT) == "int4":
        return _round_int(tl.minimum(tl.maximum(x, -8.0), 7.0)) & 15
    else:
        return encode_fp8(x, FORMAT)


@triton.jit
def _round_int(x):
    """Small fp32 -> nearest int32, ties to even, by the mantissa of x + 1.5 * 2^23."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
