"""What a measurement ran on: versions and the machine, as plain strings."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

from ..device import triton_version

_PACKAGES = ("transformers", "numpy")


def environment(device: torch.device | str) -> dict[str, str]:
    """Versions of Python, torch, triton and transformers, and the names of processor and GPU."""
    device = torch.device(device)
    facts = {
        "dma_attn": _version("dma-attn"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version() or "not installed",
        **{name: _version(name) for name in _PACKAGES},
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": f"{_processor()}, {torch.get_num_threads()} threads",
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda or "unknown"
    return facts


def _version(package: str) -> str:
    if package == "dma-attn":
        from .. import __version__

        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or f"{os.cpu_count()} cores"
