"""Block-scaled products for the portable kernel on Blackwell: tensor cores multiply the codes.

    MXFP8 tiles   tcgen05.mma kind::mxf8f6f4     (12.x: mma.sync with the same kinds)
    MXFP4, NVFP4  tcgen05.mma kind::mxf4 and mxf4nvf4, twice as fast

Q's codes and scales are read where they lie; K's codes and swizzled scales (`swizzle.py`) come by
TMA, and on 10.x scales of 4 and more a row go from shared to tensor memory without passing
registers. `attention.dispatch` lists what calls take this.

`zero` is a run-time 0: in a loop, Triton 3.6 to 3.9 cannot compile `dot_scaled` without an
accumulator, or with one that it sees is zero, for sm_100.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ...device import interpreting
from ...quant.jit import block, element, scale_kind
from ...quant.tensor import BlockScaledTensor
from ...schedule import TILE
from .swizzle import unswizzled
from .tiles import decoded

TRITON = tuple(int(x) for x in triton.__version__.split(".")[:2])


@triton.constexpr_function
def _emulated(fmt, kinds):
    return scale_kind(fmt) in kinds


@triton.jit
def scaled_product(q, q_scales, k, k_tile, zero, SPEC: tl.constexpr, FORMAT: tl.constexpr):
    """(q * q_scales) (k * k_scales)^T in fp32: of codes (M or N, bytes), q's scales (M, n), bytes,
    and the swizzled ones of k."""
    D: tl.constexpr = SPEC.D
    M: tl.constexpr = SPEC.BLOCK_M
    N: tl.constexpr = SPEC.BLOCK_N
    k_scales = unswizzled(k_tile, D // block(FORMAT, D))
    if _emulated(FORMAT, SPEC.EMULATED):
        return tl.dot(decoded(q, q_scales, M, D, FORMAT),
                      tl.trans(decoded(k, k_scales, N, D, FORMAT)), input_precision="ieee")
    else:
        if element(FORMAT) == "e4m3":
            q = q.to(tl.float8e4nv, bitcast=True)
            k = k.to(tl.float8e4nv, bitcast=True)
        elif element(FORMAT) == "e5m2":
            q = q.to(tl.float8e5, bitcast=True)
            k = k.to(tl.float8e5, bitcast=True)
        if scale_kind(FORMAT) == "e4m3":  # bytes are read as E8M0
            q_scales = q_scales.to(tl.float8e4nv, bitcast=True)
            k_scales = k_scales.to(tl.float8e4nv, bitcast=True)
        acc = tl.full([M, N], 1.0, tl.float32) * zero
        return tl.dot_scaled(q, q_scales, element(FORMAT), tl.trans(k), k_scales, element(FORMAT),
                             acc)


def emulated() -> tuple[str, ...]:
    """Kinds of scales that are multiplied before the product: none on a GPU; the interpreter has
    `dot_scaled` from Triton 3.8 on, and with E8M0 scales only."""
    if not interpreting():
        return ()
    return ("e4m3",) if TRITON >= (3, 8) else ("e8m0", "e4m3")


def descriptors(
    copy: BlockScaledTensor | None, swizzled: torch.Tensor | None
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """TMA descriptors of a copy's codes, as rows of bytes, and of its swizzled scales."""
    if copy is None or swizzled is None:
        return None, None
    codes = copy.data.flatten(0, 2)
    scales = swizzled.flatten(0, 2)[None]  # (1, tiles of all heads, n / 4, 2, 256)
    return (TensorDescriptor.from_tensor(codes, [TILE, codes.shape[1]]),
            TensorDescriptor.from_tensor(scales, [1, 1, *scales.shape[2:]]))
