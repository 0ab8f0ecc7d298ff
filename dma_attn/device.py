"""The only place that asks about hardware, with an override for tests.

| compute capability | Triton path |
|---|---|
| below 8.0 | refused: no bf16 tensor cores |
| 8.0, 8.6, 8.7 | emulated: the portable kernel, 16-bit tensor cores on upcast tiles |
| 8.9 | emulated likewise, but for E4M3 P V of 16-bit calls: FP8 tensor cores |
| 9.0 | native for what `attention.dispatch` lists: the Hopper kernel (Triton 3.6); else emulated |
| 10.0, 10.3, 12.0, 12.1 | native likewise: the Blackwell kernel (12.1: Triton 3.8); else emulated |
| 11.0, 13.0 and newer | emulated: nothing is known of their tensor cores |
| not NVIDIA | refused |
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

NATIVE = {"hopper": "8-bit tensor cores", "blackwell": "block-scaled tensor cores"}
NATIVE_OR = "{} for what `explain` says, else "
KNOWN = (
    ((7, 5), "T4, RTX 20"),
    ((8, 0), "A100"),
    ((8, 6), "A10, RTX 30"),
    ((8, 9), "L4, L40S, RTX 40"),
    ((9, 0), "H100, H200"),
    ((10, 0), "B200"),
    ((10, 3), "B300"),
    ((12, 0), "RTX 50, RTX PRO 6000"),
    ((12, 1), "GB10"),
)
"""Compute capabilities with GPUs that have them."""
IMPLS = ("auto", "reference", "triton")
MIN_CAPABILITY = (8, 0)
MIN_TRITON = (3, 6)
SM121_TRITON = (3, 8)  # 3.6 and 3.7 upcast 12.1's block-scaled products, or fail to compile them
FP8_VALUES = (8, 9)  # where the portable kernel multiplies E4M3 P and V by FP8 tensor cores
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
    if info.capability == FP8_VALUES:
        portable += ", FP8 ones for E4M3 P V"
    for kernel, runs in (("hopper", hopper_runs), ("blackwell", blackwell_runs)):
        if runs(info):
            first = NATIVE_OR.format(NATIVE[kernel])
            return DeviceStatus("triton", f"{kernel}, portable", f"{where}: {first}{portable}")
    return DeviceStatus("triton", "portable", f"{where}: {portable}")


def dispatch_table() -> list[tuple[str, str, str, str]]:
    """Of known GPUs, with the Triton that is here: compute capability, examples, "native" (for what
    `explain` says, else emulated), "emulated" (16-bit tensor cores) or "refused", and the kernels
    or what to do."""
    rows = []
    for capability, examples in KNOWN:
        status = _gpu_status(DeviceInfo(examples, capability, 101376, triton_version()), amd=False)
        native = any(kernel in status.kernel for kernel in NATIVE)
        path = "refused" if status.path == "refused" else "native" if native else "emulated"
        remedy = status.reason.rpartition("; ")[2]
        rows.append(("{}.{}".format(*capability), examples, path,
                     remedy if path == "refused" else status.kernel))
    return [*rows, ("-", "not NVIDIA", "refused", "use impl='reference'")]


def hopper_runs(info: DeviceInfo) -> bool:
    """True when the Hopper kernel can run: the capability, and a Triton that it was tested with."""
    return info.capability == (9, 0) and _version(info.triton or "") == GLUON_TRITON


def blackwell_runs(info: DeviceInfo) -> bool:
    """True when the Blackwell kernel can run: `tl.dot_scaled` has the GPU's instructions."""
    needed = SM121_TRITON if info.capability > (12, 0) else MIN_TRITON
    return info.capability[0] in (10, 12) and _version(info.triton or "") >= needed


def gluon_runs(info: DeviceInfo) -> bool:
    """True when Gluon kernels for mma.sync can run: 8.0 or newer, and a tested Triton."""
    return info.capability >= (8, 0) and _version(info.triton or "") == GLUON_TRITON


def compiled_kernels_repeat(device: torch.device) -> bool:
    """Whether `quant.launches` may launch compiled kernels itself: on a GPU, a tested Triton."""
    return (device.type == "cuda" and not interpreting()
            and _version(triton_version() or "") == GLUON_TRITON)


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
