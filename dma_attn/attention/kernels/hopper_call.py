"""The launch of the Hopper kernel: TMA descriptors of its operands, the variant, the arguments."""

from __future__ import annotations

import functools

import torch
from triton.experimental.gluon import language as gl

from ...device import fits_tma, processor_count
from ...formats import LOG2_E
from ...quant.kernels import Strided
from ...quant.tma import descriptor, shared_layout
from ...schedule import TILE
from ..prepare import FoldedQueries, widths
from ..types import CallOptions, PreparedKV
from .hopper import hopper_kernel
from .hopper_step import Spec

STAGES = 2  # tiles of K and V in shared memory
FIXED_KEYS = 2048  # from how many on a second launch, of blocks to do again, pays for itself
INT_BIAS = 12582912.0  # 1.5 * 2^23: its bits plus a small integer are their sum


def run(
    queries: FoldedQueries,
    kv: PreparedKV,
    call: CallOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Fill out (B, H_q, S_q, Dv), not empty, and lse (B, H_q, S_q) from `folded_queries`."""
    assert kv.folded is not None  # what brought the call here
    codes, raw = queries.codes, queries.raw
    k_codes, k_scales = kv.folded
    batch, kv_heads, n_kv, head_dim, value_dim = kv.shape
    heads, n_q = out.shape[1:3]
    fp8 = kv.v_scale is not None
    code_type = torch.int8 if kv.config.canonical().low == "int8" else torch.float8_e4m3fn
    window, diag, sink = widths(kv.config, call, n_q, n_kv)
    blocks = codes.shape[3] // TILE
    work = blocks * batch * heads
    programs = min(work, processor_count(out.device))
    if fp8:
        v = kv.v.view(torch.float8_e4m3fn)
        v_desc = descriptor(v.flatten(0, 1), (1, value_dim, TILE))
    else:
        v = kv.v
        v_desc = descriptor(v, (1, 1, TILE, value_dim))
    fixed = v.dtype == torch.bfloat16 and call.window == 0 and n_kv >= FIXED_KEYS
    if raw is not None and raw.data_ptr() == out.data_ptr():
        fixed = False  # Q is gone when blocks would be done again
    left = _flags(work, programs, out.device) if fixed else None
    launch = functools.partial(
        hopper_kernel[(programs,)],
        q_desc=descriptor(codes.view(code_type).flatten(0, 2), (1, TILE // 2, head_dim)),
        k_desc=descriptor(k_codes.view(code_type).flatten(0, 2), (1, TILE, head_dim)),
        v_desc=v_desc,
        q_raw_desc=None if raw is None else descriptor(raw, (1, 1, TILE // 2, head_dim)),
        k_raw_desc=None if kv.k is None else descriptor(kv.k, (1, 1, TILE, head_dim)),
        out_desc=descriptor(out, (1, 1, TILE // 2, value_dim)) if fits_tma(out) else None,
        q_scale_ptr=queries.scales,
        k_scale_ptr=k_scales,
        v_scale_ptr=kv.v_scale,
        shift_ptr=queries.shift,
        out=Strided(out, out.stride()),
        lse_ptr=lse,
        length_ptr=kv.rows.length,
        left_ptr=left,
        work=work,
        rounds=-(-work // programs),
        n_blocks=blocks,
        k_planes=batch * kv_heads,
        H_Q=heads,
        GROUP=heads // kv_heads,
        S_Q=n_q,
        S_KV=n_kv,
        n_tiles=k_codes.shape[3] // TILE,
        scale=abs(call.scale) * LOG2_E,
        window=window,
        diag=diag,
        sink=sink,
        num_warps=4,
    )
    for part in ("fixed", "redo") if fixed else ("all",):
        spec = _spec(
            head_dim,
            value_dim,
            classes=codes.shape[0],
            raw=raw is not None,
            causal=call.causal,
            window=call.window > 0,
            tail=kv.rows.length is not None and not fp8,
            lse=lse is not None,
            part=part,
            integer=code_type == torch.int8,
            value_type=v.dtype,
        )
        launch(SPEC=spec, launch_pdl=part == "redo")


def _flags(work: int, programs: int, device: torch.device) -> torch.Tensor:
    """Room for what the first launch leaves: by warpgroup, a flag for each block and program."""
    return torch.empty(2, work + programs, dtype=torch.int32, device=device)


@functools.cache
def _spec(
    head_dim: int,
    value_dim: int,
    classes: int,
    raw: bool,
    causal: bool,
    window: bool,
    tail: bool,
    lse: bool,
    part: str,
    integer: bool,
    value_type: torch.dtype,
) -> Spec:
    """The variant with its layouts."""
    fp8 = value_type == torch.float8_e4m3fn
    k = 32 if fp8 else 16
    o_layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, value_dim, k])
    return Spec(
        D=head_dim,
        DV=value_dim,
        CLASSES=classes,
        RAW=raw,
        STAGES=STAGES,
        BLOCKS=2 if not raw or value_dim == 64 or fp8 else 1,
        CAUSAL=causal,
        WINDOW=window,
        TAIL=tail,
        PV8=fp8,
        LSE=lse,
        FIXED=part == "fixed",
        REDO=part == "redo",
        SHIFT=8.0 if fp8 else 0.0,
        BIAS=INT_BIAS if integer else 0.0,
        S_LAYOUT=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32]),
        SUM_LAYOUT=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, k]),
        O_LAYOUT=o_layout,
        P_LAYOUT=gl.DotOperandLayout(0, o_layout, 4 if fp8 else 2),
        RAW_LAYOUT=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16]),
        K_LAYOUT=shared_layout((1, TILE, head_dim), torch.float8_e4m3fn),
        EIGHTHS_LAYOUT=shared_layout((8, 128), value_type),
    )
