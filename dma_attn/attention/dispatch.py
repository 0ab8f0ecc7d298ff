"""Which Triton kernel a call takes, by explicit rules: what the Hopper and Blackwell kernels cover.

Hopper:

- Compute capability 9.0 and Triton 3.6, whose Gluon it is written in; float16 and bfloat16; D and
  Dv of 64 or 128.
- Classes of mxfp8, mxfp8_e5m2, mxfp4 and nvfp4, alone or in pairs, or below 16-bit high tiles
  (`high="none"`, where K's strides are multiples of 16 bytes); or int8 with tile scales. Not
  `low="none"`, `int4`, `fp4`, int8 with token scales or in a pair, scale_rule "paper" or
  granularity "tensor".
- Full and causal attention, windows, grouped queries, any lengths, `kv_len`, LSE, any strides of Q,
  K and the output. Not padding or attention masks, top-left causal, packed sequences.
- `pv="fp8"` with any V; `pv="fp16"` where V's strides are multiples of 16 bytes.

Blackwell:

- Compute capability 10.x, 12.0 and, with Triton 3.8, 12.1; float16 and bfloat16; D and Dv of 64
  or 128.
- Classes of mxfp8, mxfp8_e5m2, mxfp4, nvfp4 and "none", not both "none"; every scale rule and
  granularity.
- All of what attention can be asked for, but packed sequences.

Everything else takes the portable kernel. The choice depends on what `prepare_kv` sees, so prepared
keys serve every `dma_attention_prepared`. `use_native(False)` turns both off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..config import DMAConfig
from ..device import (
    GLUON_TRITON,
    MIN_TRITON,
    SM121_TRITON,
    blackwell_runs,
    device_info,
    fits_tma,
    hopper_runs,
)
from ..quant.rows import Rows

FOLDED = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")
HEAD_DIMS = (64, 128)

_native = True


@contextlib.contextmanager
def use_native(on: bool = True) -> Iterator[None]:
    """Within, calls that the GPU's own kernel covers take it, as they do by default, or (False)
    none does: what folded copies cost, and what the kernel gains. Not thread-safe."""
    global _native
    previous, _native = _native, on
    try:
        yield
    finally:
        _native = previous


def hopper_gap(
    k: torch.Tensor, v: torch.Tensor, config: DMAConfig, rows: Rows, masked: bool
) -> str:
    """Why the Hopper kernel does not cover a call; "" when it does.

    Args:
        k, v: (B, H_kv, S_kv, D or Dv), any strides.
        masked: An attention mask or torch's top-left causal rule is in use.
    """
    info = device_info(k.device)
    if info is None or info.capability != (9, 0):
        return "compute capability 9.0 is needed"
    if not _native:
        return "turned off by use_native(False)"
    if not hopper_runs(info):
        return "triton {}.{} is needed, found {}".format(*GLUON_TRITON, info.triton)
    canonical = config.canonical()
    if gap := _config_gap(canonical) or _tensor_gap(k, v, rows):
        return gap
    if masked or rows.valid is not None:
        return "a mask"
    if canonical.high == "none" and (canonical.diag or canonical.sink) and not fits_tma(k):
        return f"K's strides {k.stride()}; 16-bit tiles need multiples of 16 bytes"
    if config.pv == "fp16" and not fits_tma(v):
        return f"V's strides {v.stride()}; pv=fp16 needs multiples of 16 bytes"
    return ""


def blackwell_gap(k: torch.Tensor, v: torch.Tensor, config: DMAConfig, rows: Rows) -> str:
    """Why the Blackwell kernel does not cover a call, as `hopper_gap`; "" when it does."""
    info = device_info(k.device)
    if info is None or info.capability[0] not in (10, 12):
        return "compute capability 10.x or 12.x is needed"
    if not blackwell_runs(info):
        needed = SM121_TRITON if info.capability > (12, 0) else MIN_TRITON
        return "triton {}.{} is needed, found {}".format(*needed, info.triton)
    if not _native:
        return "turned off by use_native(False)"
    if gap := _tensor_gap(k, v, rows):
        return gap
    if k.shape[:3].numel() >= 2**31:
        return f"{k.shape[:3].numel()} keys of all heads; TMA counts to 2^31"
    canonical = config.canonical()
    names = {canonical.low}
    if canonical.diag or canonical.sink:
        names.add(canonical.high)
    if uncovered := sorted(names - {*FOLDED, "none"}):
        return f"format {uncovered[0]}"
    return "16-bit tiles only" if names == {"none"} else ""


def native_kernel(
    k: torch.Tensor, v: torch.Tensor, config: DMAConfig, rows: Rows, masked: bool
) -> tuple[str, str]:
    """"hopper", "blackwell" or "portable", and for the last why it is not the GPU's own kernel."""
    info = device_info(k.device)
    if info is not None and info.capability[0] in (10, 12):
        gap = blackwell_gap(k, v, config, rows)
        return ("portable", f"not the Blackwell kernel: {gap}") if gap else ("blackwell", "")
    gap = hopper_gap(k, v, config, rows, masked)
    return ("portable", f"not the Hopper kernel: {gap}") if gap else ("hopper", "")


def _tensor_gap(k: torch.Tensor, v: torch.Tensor, rows: Rows) -> str:
    """What neither kernel covers, whatever the formats."""
    if k.dtype not in (torch.float16, torch.bfloat16):
        return f"{k.dtype} inputs"
    if k.shape[3] not in HEAD_DIMS or v.shape[3] not in HEAD_DIMS:
        return f"head dims {k.shape[3]} and {v.shape[3]}; 64 and 128 are covered"
    if k.numel() == 0:
        return "no keys"
    return "packed sequences" if rows.cu is not None else ""


def _config_gap(canonical: DMAConfig) -> str:
    if canonical.scale_rule == "paper":
        return 'scale_rule="paper"'
    names = {canonical.low}
    if canonical.diag or canonical.sink:
        names.add(canonical.high)
    if canonical.low in FOLDED:
        names.discard("none")
    if names == {"int8"}:
        return "" if canonical.granularity == "tile" else 'int8 without granularity="tile"'
    if uncovered := sorted(names - set(FOLDED)):
        return f"format {uncovered[0]}" + (" in a pair" if uncovered[0] == "int8" else "")
    if "nvfp4" in names and canonical.granularity == "tensor":
        return 'granularity="tensor"'
    return ""
