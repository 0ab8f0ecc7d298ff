"""Compile every kernel that a call launches for a GPU target, on a machine without that GPU.

A stand-in driver answers Triton's questions about the device and each launch becomes a compilation
(`warmup`), so the signatures are those of real calls. Nothing runs: results are meaningless.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from dma_attn.device import DeviceInfo, override_device

SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


class _Driver:
    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compile_only(capability: int) -> Iterator[list[Any]]:
    """Within, launches on CPU tensors compile for `capability`; yields the compiled kernels."""
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_instead(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    info = DeviceInfo("test GPU", divmod(capability, 10), SHARED_MEMORY[capability],
                      triton.__version__)
    previous = driver._active
    driver.set_active(_Driver(capability))
    try:
        with mock.patch.object(JITFunction, "run", compile_instead), override_device(info):
            yield compiled
    finally:
        driver._active = previous


def device_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A CPU tensor that stands for one on the device."""
    return torch.zeros(*shape, dtype=dtype)
