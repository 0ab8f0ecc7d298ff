"""The only place that asks about hardware, with an override for tests.

| compute capability | Triton path |
|---|---|
| below 8.0 | refused: no bf16 tensor cores |
| 9.0 | the Hopper kernel (Triton 3.6) for what `attention.dispatch` lists, else the portable one |
| others from 8.0 on (8.0, 8.6, 8.9, 10.0, 10.3, 12.0, 12.1, ...) | the portable kernel |
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util

import torch

from .formats import check_choice

HOPPER_OR = "8-bit tensor cores for what `explain` says, else "
IMPLS = ("auto", "reference", "triton")
MIN_CAPABILITY = (8, 0)
MIN_TRITON = (3, 6)
GLUON_TRITON = (3, 6)  # Gluon, which the Hopper kernel is written in, is experimental


@dataclass(frozen=True)
class DeviceInfo:
    """What the library needs to know of a GPU: name, compute capability, shared memory a block."""

    name: str
    capability: tuple[int, int]
    shared_memory: int
    triton: str | None


@dataclass(frozen=True)
class DeviceStatus:
    """Which path runs on a device: "triton", "reference" or "refused", the kernel, and why."""

    path: str
    kernel: str
    reason: str


_override: DeviceInfo | None = None


@contextlib.contextmanager
def override_device(info: DeviceInfo) -> Iterator[None]:
    """Pretend that every device is `info` (tests of the dispatch)."""
    global _override
    previous, _override = _override, info
    try:
        yield
    finally:
        _override = previous


def interpreting() -> bool:
    """True under the Triton interpreter, which runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "True")


@functools.cache
def triton_version() -> str | None:
    """The installed Triton's version, None when it cannot be imported, "unknown" if unnamed."""
    try:
        found = util.find_spec("triton") is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        return None
    for name in ("triton", "pytorch-triton", "triton-windows"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "unknown"


def device_info(device: torch.device | str) -> DeviceInfo | None:
    """Facts of a CUDA device (or of the test override); None for other devices."""
    if _override is not None:
        return _override
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return _cuda_info(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _cuda_info(device: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 101376)
    capability = (properties.major, properties.minor)
    return DeviceInfo(properties.name, capability, shared, triton_version())


def device_status(device: torch.device | str) -> DeviceStatus:
    """Which path `impl="auto"` takes for tensors on `device`, and why."""
    device = torch.device(device)
    info = device_info(device)
    if info is None:
        if device.type == "cpu" and interpreting():
            return DeviceStatus("triton", "portable", "TRITON_INTERPRET is set")
        return DeviceStatus("reference", "reference", f"{device.type} tensors use PyTorch")
    return _gpu_status(info, torch.version.hip is not None and _override is None)


@functools.cache
def _gpu_status(info: DeviceInfo, amd: bool) -> DeviceStatus:
    major, minor = info.capability
    where = f"{info.name} (compute capability {major}.{minor}, triton {info.triton})"
    if amd:
        return DeviceStatus(
            "refused", "none", f"{where}: needs an NVIDIA GPU; use impl='reference'"
        )
    if info.triton is None:
        return DeviceStatus(
            "refused", "none", f"{where}: triton is not installed; pip install 'triton>=3.6'"
        )
    if () < _version(info.triton) < MIN_TRITON:
        return DeviceStatus(
            "refused", "none", f"{where}: triton is too old; pip install -U 'triton>=3.6'"
        )
    if info.capability < MIN_CAPABILITY:
        return DeviceStatus(
            "refused",
            "none",
            f"{where}: the kernels need compute capability 8.0 or newer; use impl='reference'",
        )
    portable = "16-bit tensor cores on upcast tiles"
    if hopper_runs(info):
        return DeviceStatus("triton", "hopper, portable", f"{where}: {HOPPER_OR}{portable}")
    return DeviceStatus("triton", "portable", f"{where}: {portable}")


def hopper_runs(info: DeviceInfo) -> bool:
    """True when the Hopper kernel can run: the capability, and a Triton that it was tested with."""
    return info.capability == (9, 0) and _version(info.triton or "") == GLUON_TRITON


def gluon_runs(info: DeviceInfo) -> bool:
    """True when Gluon kernels for mma.sync can run: 8.0 or newer, and a tested Triton."""
    return info.capability >= (8, 0) and _version(info.triton or "") == GLUON_TRITON


def use_triton(device: torch.device, impl: str) -> bool:
    """Resolve `impl` for tensors on `device`; an explicit choice never falls back.

    Raises:
        ValueError: unknown `impl`.
        RuntimeError: the Triton path was chosen (explicitly, or by "auto" on a GPU) and cannot run.
    """
    check_choice("impl", impl, IMPLS)
    if impl == "reference":
        return False
    status = device_status(device)
    if status.path == "refused":
        raise RuntimeError(status.reason)
    if impl == "triton":
        if status.path != "triton":
            raise RuntimeError(
                f'impl: expected CUDA tensors for "triton" (or TRITON_INTERPRET=1), got {device}'
            )
        if triton_version() is None:
            raise RuntimeError("impl: triton is not installed; pip install 'triton>=3.6'")
        return True
    return status.path == "triton" and device.type == "cuda"


def shared_memory_limit(device: torch.device | str) -> int:
    """Shared memory that one block may take, in bytes."""
    info = device_info(device)
    return info.shared_memory if info is not None else 101376


@functools.cache
def processor_count(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; those of an H100 where there is none to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _version(text: str) -> tuple[int, ...]:
    parts = text.split("+")[0].split(".")[:2]
    return tuple(int(p) for p in parts if p.isdigit())


def device_guard(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a CUDA device current: Triton launches on the current device, not on the tensors'."""
    if device.type == "cuda":
        return torch.cuda.device(device)
    return contextlib.nullcontext()


def fits_tma(x: torch.Tensor) -> bool:
    """TMA reads x (B, H, S, D) as it lies: unit last stride, the rest multiples of 16 bytes."""
    step = 16 // x.element_size()
    strides = [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]
    aligned = all(s % step == 0 for s in x.stride()[:3]) and x.data_ptr() % 16 == 0
    return x.stride(3) == 1 and aligned and all(s > 0 for s in strides)
