"""Compile every kernel that a call launches for a GPU target, on a machine without that GPU.

A stand-in driver answers Triton's questions about the device and each launch becomes a compilation
(`warmup`), so the signatures are those of real calls. Nothing runs: results are meaningless.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from dma_attn.device import DeviceInfo, override_device

SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448,
                 120: 101376, 121: 101376}


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


@contextlib.contextmanager
def as_older_gpu(capability: int) -> Iterator[None]:
    """Within, kernels are compiled to the PTX of an older GPU, which ptxas assembles for the one
    that is here, and the library sees that older GPU and its shared memory: its code runs.

    Instructions keep their meaning between GPUs (PTX ISA, `.target`), not their times or how much
    more than that they do: on sm_90 an FP8 `mma.sync` becomes conversions and fp16 products, which
    sum in fp32. Once in a process, before its first launch: Triton keeps the target it first sees.
    """
    real = torch.cuda.get_device_capability()
    if divmod(capability, 10) > real:
        raise ValueError(f"expected a GPU of capability {capability} or newer, got {real}")
    make_cubin = CUDABackend.make_cubin

    def assemble(self: CUDABackend, src: Any, metadata: Any, options: Any, arch: int) -> bytes:
        here = real[0] * 10 + real[1] if arch == capability else arch
        return make_cubin(self, src, metadata, options, here)

    target = GPUTarget("cuda", capability, 32)
    info = DeviceInfo(f"{torch.cuda.get_device_name()} as an older GPU", divmod(capability, 10),
                      SHARED_MEMORY[capability], triton.__version__)
    cache = Path(tempfile.gettempdir()) / f"dma_attn_{capability}_on_{real[0]}{real[1]}"
    with (mock.patch.object(type(driver.active), "get_current_target", lambda _: target),
          mock.patch.object(CUDABackend, "make_cubin", assemble),
          mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(cache)), override_device(info)):
        yield


def device_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A CPU tensor that stands for one on the device."""
    return torch.zeros(*shape, dtype=dtype)


def check_fp8_products(kernel: Any) -> int:
    """FP8 products of `mma.sync` begin at zero: fp32 adds what they give. Returns how many."""
    found = re.findall(r"= tt\.dot %\w+, %\w+, %(\w+),.*f8E4M3FN", kernel.asm["ttgir"])
    assert all(name.startswith("cst") for name in found), found
    return len(found)


def machine_code(kernel: Any, folder: Path) -> str:
    """SASS, by the disassembler that comes with Triton."""
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def hot_loops(sass: str) -> list[str]:
    """Machine code of the loops over tiles, one a consumer warpgroup."""
    lines = sass.splitlines()
    labels = {line.strip(" :"): i for i, line in enumerate(lines) if line.startswith(".L_x_")}
    spans = []
    for end, line in enumerate(lines):
        target = re.search(r"@!?P\d+ +BRA.*`\((\.L_x_\d+)\)", line)
        begin = labels.get(target[1], end) if target else end
        if begin < end and any("GMMA.64x" in x for x in lines[begin:end]):
            spans.append(range(begin, end))
    inner = [s for s in spans if not any(o != s and o[0] in s and o[-1] in s for o in spans)]
    return ["\n".join(lines[s[0] : s[-1]]) for s in inner]
