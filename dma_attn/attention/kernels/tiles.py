"""The tile vocabulary of the attention kernels: load and decode a tile, hide keys, a block of the
online softmax, map the key loop, store the result.

A quantised copy holds codes, block scales and fp32 row scales of B * H * S rows. `load_tile`
returns the elements times their block scales, exact in bf16 (at most 7 significant bits); a row's
fp32 scale is applied to the scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...quant.jit import (
    bits,
    block,
    constant,
    decode_e4m3,
    decode_e8m0,
    decode_element,
    encode_fp8,
    scale_kind,
)


@triton.constexpr_function
def has_row_scale(fmt):
    """True when an fp32 scale multiplies whole rows of scores."""
    return scale_kind(fmt) in ("e4m3", "fp32")


@triton.jit
def load_raw(x, base, row, mask_r, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(R, BLOCK_D) of a strided 16- or 32-bit operand; hidden rows and padding channels are 0."""
    offs_d = tl.arange(0, BLOCK_D)
    at = row[:, None] * x.strides[2] + offs_d.to(tl.int64)[None, :] * x.strides[3]
    return tl.load(base + at, mask=mask_r[:, None] & (offs_d < D)[None, :], other=0.0)


@triton.jit
def load_codes(copy, row, mask_r, D: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr):
    """Rows `row` (R,) of a quantised copy: codes (R, bytes) and block scale bytes (R, n), where a
    format has none the codes again; 0 for hidden rows and padding channels."""
    N_BYTES: tl.constexpr = D * bits(FORMAT) // 8
    offs = tl.arange(0, BLOCK_D * bits(FORMAT) // 8)
    codes = tl.load(copy.codes + row[:, None] * N_BYTES + offs[None, :],
                    mask=mask_r[:, None] & (offs < N_BYTES)[None, :], other=0)
    if scale_kind(FORMAT) == "fp32":
        return codes, codes
    else:
        BLOCK: tl.constexpr = block(FORMAT, BLOCK_D)
        N: tl.constexpr = (D + BLOCK - 1) // BLOCK
        offs_n = tl.arange(0, BLOCK_D // BLOCK)
        scales = tl.load(copy.scales + row[:, None] * N + offs_n[None, :],
                         mask=mask_r[:, None] & (offs_n < N)[None, :], other=0)
        return codes, scales


@triton.jit
def decoded(codes, scales, R: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr):
    """What `load_codes` gives as elements times their block scales, (R, BLOCK_D) fp32."""
    code = codes.to(tl.int32)
    if bits(FORMAT) == 4:
        x = tl.join(decode_element(code & 15, FORMAT), decode_element(code >> 4, FORMAT))
        x = x.reshape(R, BLOCK_D)
    else:
        x = decode_element(code, FORMAT)
    if scale_kind(FORMAT) != "fp32":
        BLOCK: tl.constexpr = block(FORMAT, BLOCK_D)
        byte = scales.to(tl.int32)
        scale = decode_e8m0(byte) if scale_kind(FORMAT) == "e8m0" else decode_e4m3(byte)
        x = (x.reshape(R, BLOCK_D // BLOCK, BLOCK) * scale[:, :, None]).reshape(R, BLOCK_D)
    return x


@triton.jit
def load_tile(copy, row, mask_r, D: tl.constexpr, BLOCK_D: tl.constexpr, R: tl.constexpr,
              FORMAT: tl.constexpr):
    """Rows `row` (R,) of a quantised copy: (R, BLOCK_D) bf16, padding channels 0."""
    codes, scales = load_codes(copy, row, mask_r, D, BLOCK_D, FORMAT)
    return decoded(codes, scales, R, BLOCK_D, FORMAT).to(tl.bfloat16)


@triton.jit
def load_row_scale(copy, row, tile, span, mask_r, SPAN: tl.constexpr):
    """fp32 scales of R rows: one each, one a tile of 128, or one for the head."""
    if SPAN == "token":
        return tl.load(copy.row_scales + row, mask=mask_r, other=0.0)
    elif SPAN == "tile":
        return tl.load(copy.row_scales + tile, mask=mask_r, other=0.0)
    else:
        return tl.load(copy.row_scales + span + row * 0, mask=mask_r, other=0.0)


@triton.jit
def key_block(i, lo, gap_lo, gap_hi, BLOCK_N: tl.constexpr):
    """First key of block i of the sequence [lo, gap_lo) then [gap_hi, ...)."""
    first = tl.cdiv(gap_lo - lo, BLOCK_N)
    return tl.where(i < first, lo + i * BLOCK_N, gap_hi + (i - first) * BLOCK_N)


@triton.jit
def n_key_blocks(lo, gap_lo, gap_hi, hi, BLOCK_N: tl.constexpr):
    """Number of blocks of [lo, gap_lo) then [gap_hi, hi)."""
    return tl.cdiv(gap_lo - lo, BLOCK_N) + tl.cdiv(hi - gap_hi, BLOCK_N)


@triton.jit
def round_e4m3(x):
    """fp32 -> the nearest E4M3 value, in bf16 (exact), on every GPU."""
    return decode_e4m3(encode_fp8(x, "mxfp8")).to(tl.bfloat16)


@triton.jit
def product(a, b, acc, UPCAST: tl.constexpr):
    """a @ b + acc in fp32; fp32 operands in three TF32 products."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def hide(scores, start_n, pos_m, pos_n, mask_n, common, valid_ptr, mask_ptr, mask_m, mask_rows,
         mask_stride, window, SPEC: tl.constexpr):
    """Scores with hidden keys at -inf; a block that every row sees whole needs no comparison."""
    if mask_ptr is not None:
        at = mask_rows[:, None] + pos_n.to(tl.int64)[None, :] * mask_stride
        bias = tl.load(mask_ptr + at, mask=mask_m[:, None] & mask_n[None, :], other=0)
        if mask_ptr.dtype.element_ty == tl.int1:
            scores = tl.where(bias, scores, float("-inf"))
        else:
            bias = bias.to(tl.float32)
            shifted = scores + bias * constant("LOG2_E")
            scores = tl.where(bias > SPEC.MASK_FLOOR, shifted, float("-inf"))
    if valid_ptr is not None or (start_n < common[0] or start_n + SPEC.BLOCK_N > common[1]):
        visible = mask_n[None, :]
        if SPEC.CAUSAL:
            visible = visible & (pos_n[None, :] <= pos_m[:, None])
        if SPEC.WINDOW:
            visible = visible & (pos_n[None, :] > pos_m[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def _opaque(x):
    """x, which Triton must not fold into the accumulator of the product that it comes from."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True,
                                     pack=1)


@triton.jit
def online_softmax(acc, row_max, row_sum, scores, v, V_FP8: tl.constexpr, NATIVE: tl.constexpr,
                   MERGE: tl.constexpr, UPCAST: tl.constexpr):
    """A block of keys: scores (M, N) in base 2, V (N, BLOCK_DV), raw or E4M3 codes.

    NATIVE: FP8 tensor cores, MERGE: whose sums of a block are added in fp32 (Hopper's keep about 14
    bits, others may); else P and V are rounded to E4M3 and multiplied in bf16, exactly.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.math.exp2(scores - base[:, None])
    decay = tl.math.exp2(row_max - base)
    row_sum = row_sum * decay + tl.sum(p, 1)
    acc = acc * decay[:, None]
    if V_FP8 and NATIVE:
        p = encode_fp8(p * constant("P_FP8_SCALE"), "mxfp8")  # a cast rounds twice on 8.9
        p = p.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        v = v.to(tl.float8e4nv, bitcast=True)
        if MERGE:
            acc += _opaque(tl.dot(p, v))
        else:
            acc = tl.dot(p, v, acc)
    elif V_FP8:
        p = round_e4m3(p * constant("P_FP8_SCALE"))
        v = decode_e4m3(v.to(tl.int32)).to(tl.bfloat16)
        acc = product(p, v, acc, UPCAST)
    else:
        acc = product(p.to(v.dtype), v, acc, UPCAST)
    return acc, new_max, row_sum


@triton.jit
def store_result(acc, row_max, row_sum, shift, out, out_stride, lse_ptr, q_row, mask_m, v_scale_ptr,
                 k_span, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Rows of the output, at pointers `out` (M, 1), and their LSE: 0 and -inf for a row without a
    visible key, whatever q and V hold."""
    offs_dv = tl.arange(0, BLOCK_DV)
    blind = row_sum == 0.0
    acc = tl.where(blind[:, None], 0.0, acc * (1.0 / row_sum)[:, None])
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr + k_span * DV + offs_dv, mask=offs_dv < DV,
                          other=0.0)
        acc = acc * (v_scale[None, :] * (1.0 / constant("P_FP8_SCALE")))
    tl.store(out + offs_dv.to(tl.int64)[None, :] * out_stride, acc.to(out.dtype.element_ty),
             mask=mask_m[:, None] & (offs_dv < DV)[None, :])
    if lse_ptr is not None:
        lse = (row_max + tl.math.log2(row_sum) + shift) * constant("LN_2")
        tl.store(lse_ptr + q_row, tl.where(blind, float("-inf"), lse), mask=mask_m)
