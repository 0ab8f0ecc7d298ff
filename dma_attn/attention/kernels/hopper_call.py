"""What both Hopper kernels are launched with: views of the folded operands and common arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...formats import LOG2_E
from ...quant.kernels import Strided
from ...schedule import TILE
from ..prepare import widths
from ..types import CallOptions, PreparedKV

Queries = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class CallSpec:
    """What a compiled variant of either kernel depends on, besides operand types.

    Attributes:
        D, DV: Head dims.
        CLASSES: 2 with high and low tiles, 1 with one class.
        CAUSAL, WINDOW: Visibility rules in use.
        PV8: P V in FP8, else in V's 16-bit dtype.
        SHIFT: log2 of the factor on P.
    """

    D: int
    DV: int
    CLASSES: int
    CAUSAL: bool
    WINDOW: bool
    PV8: bool
    SHIFT: float


class HopperCall(NamedTuple):
    """Operands and arguments of a launch.

    Attributes:
        q, k: Codes as E4M3 or int8 (classes, B, H, rows, D).
        v: E4M3 codes (B, H_kv, Dv, tiles * 128), or V (B, H_kv, S_kv, Dv).
        blocks: Blocks of `rows` queries of one head.
        planes: Heads of all batch rows.
        arguments: The keyword arguments that the kernels share.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    blocks: int
    planes: int
    spec: CallSpec
    arguments: dict[str, Any]


def hopper_call(
    queries: Queries,
    kv: PreparedKV,
    call: CallOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    rows: int,
) -> HopperCall:
    """Arguments for out (B, H_q, S_q, Dv), from what `folded_queries` returned.

    Args:
        rows: Queries of a block of work.
    """
    assert kv.folded is not None  # what brought the call here
    codes, scales, shift = queries
    k_codes, k_scales = kv.folded
    batch, kv_heads, n_kv, head_dim, value_dim = kv.shape
    heads, n_q = out.shape[1:3]
    pv8 = kv.v_scale is not None
    code_type = torch.int8 if kv.config.canonical().low == "int8" else torch.float8_e4m3fn
    window, diag, sink = widths(kv.config, call, n_q, n_kv)
    blocks = codes.shape[3] // rows
    return HopperCall(
        q=codes.view(code_type),
        k=k_codes.view(code_type),
        v=kv.v.view(torch.float8_e4m3fn) if pv8 else kv.v,
        blocks=blocks,
        planes=batch * heads,
        spec=CallSpec(
            D=head_dim,
            DV=value_dim,
            CLASSES=codes.shape[0],
            CAUSAL=call.causal,
            WINDOW=call.window > 0,
            PV8=pv8,
            SHIFT=8.0 if pv8 else 0.0,
        ),
        arguments={
            "q_scale_ptr": scales,
            "k_scale_ptr": k_scales,
            "v_scale_ptr": kv.v_scale,
            "shift_ptr": shift,
            "out": Strided(out, out.stride()),
            "lse_ptr": lse,
            "length_ptr": kv.rows.length,
            "n_blocks": blocks,
            "q_planes": batch * heads,
            "H_Q": heads,
            "GROUP": heads // kv_heads,
            "S_Q": n_q,
            "S_KV": n_kv,
            "n_tiles": k_codes.shape[3] // TILE,
            "scale": abs(call.scale) * LOG2_E,
            "window": window,
            "diag": diag,
            "sink": sink,
        },
    )
