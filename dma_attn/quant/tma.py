"""TMA descriptors for Gluon kernels: boxes of a tensor, and how they lie in shared memory."""

from __future__ import annotations

import functools

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

GLUON_TYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int8: gl.int8,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
}


def descriptor(x: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """TMA boxes of x; beyond its ends they read zeros."""
    return TensorDescriptor.from_tensor(x, list(box), shared_layout(box, x.dtype))


@functools.cache
def shared_layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Shared memory of a box as TMA writes it and wgmma reads it."""
    return gl.NVMMASharedLayout.get_default_for(list(box), GLUON_TYPES[dtype])
