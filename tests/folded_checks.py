"""The kernels that prepare Hopper's operands against PyTorch; for GPU and interpreter runs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dma_attn import DMAConfig
from dma_attn.attention.prepare import class_spans, quantise_operand
from dma_attn.quant.fold_jit import _near_e2m1, _to_e2m1
from dma_attn.quant.folded import fold_kv, fold_q, query_codes
from dma_attn.quant.reference import fold_reference
from dma_attn.quant.rows import Rows
from dma_attn.quant.transforms import key_mean
from dma_attn.schedule import TILE

CONFIGS = (
    "default,pv=fp8",
    "default,low=mxfp4,pv=fp8",
    "default,high=mxfp8_e5m2,scale_rule=floor",
    "nvfp4,granularity=tile,smooth_k=false",
    "mxfp8,rotate=false,scale_rule=mse",
    "default,rotate=false",
    "hopper,rotate=false,smooth_k=false",
    "hopper",
)
# The order of the keys of a group of 32 in V's codes, as the tensor core's registers want them
ORDER = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


def decode(codes: Tensor, scales: Tensor, kind: str, rows: int) -> Tensor:
    """Codes (..., S, D) with one scale for every `rows` rows -> fp64 values."""
    element = codes.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn).double()
    return element * scales.double().repeat_interleave(rows, -1)[..., None]


def expected(x: Tensor, config: DMAConfig, mean: Tensor | None, query: bool, rows: Rows) -> Tensor:
    """What x (B, H, S, D) should be in each class: fp64 (classes, B, H, S, D)."""
    canonical = config.canonical()
    formats = [canonical.low_format]
    if canonical.diag or canonical.sink:
        formats.insert(0, canonical.high_format)
    values = []
    for fmt in formats:
        copy, _ = quantise_operand(x, fmt, None, rows, config, mean, None, query, False)
        assert copy is not None
        value = copy.dequantize(torch.float32)
        if fmt.name != "int8":
            codes, scale = fold_reference(value, by_row=query)
            scale = scale if query else scale.repeat_interleave(TILE, -1)[..., : x.shape[2]]
            value = codes.view(torch.float8_e4m3fn).float() * scale[..., None]
        values.append(value.double())
    return torch.stack(values)


def close(out: Tensor, ref: Tensor, share: float = 4e-3) -> None:
    """NaN in the same rows (a product takes the whole row); all other values but a share, next to
    rounding ties, equal."""
    bad = ref.isnan().any(-1)
    assert torch.equal(out.isnan().any(-1), bad)
    out, ref = out[~bad], ref[~bad]
    differ = ~torch.isclose(out, ref, rtol=1e-5, atol=2.0**-17 * float(ref.abs().max()))
    assert differ.double().mean() <= share, f"{int(differ.sum())} of {ref.numel()} differ"
    assert (out - ref).norm() <= 2e-2 * ref.norm()


def check_fold(text: str, head_dim: int, dtype: torch.dtype, device: str, special: bool) -> None:
    """K, V and Q of one configuration: odd lengths, per-row key lengths, strides, NaN and Inf."""
    config = DMAConfig.parse(text)
    generator = torch.Generator().manual_seed(3)
    size, n_q, batch = 300, 77, 2
    k, v = (torch.randn(batch, size, 2, head_dim, generator=generator) + 0.5 for _ in range(2))
    q = torch.randn(batch, n_q, 4, head_dim, generator=generator)
    if special:
        for x in (q, k, v):
            x[0, 3, 0, 5], x[1, 7, 1, 2], x[0, 5] = torch.nan, torch.inf, 0.0
    q[0, 9, 0], q[0, 9, 0, 3], q[0, 9, 0, 4] = 0.5, 144.0, 72.0  # int8 of 63.5: a tie
    v[:, :, 1, 9] = 0.0  # a channel of zeros but for one value whose reciprocal overflows
    v[0, 11, 1, 9] = 1e-38 if dtype == torch.bfloat16 else 0.0
    k[1, 130:], v[1, 130:] = torch.nan, torch.nan  # not in use
    q, k, v = (x.to(device, dtype).transpose(1, 2) for x in (q, k, v))
    length = torch.tensor([size, 130], dtype=torch.int32, device=device)
    rows = Rows(batch, size, length=length)
    used = rows.in_use()
    assert used is not None
    folded = fold_kv(k, v, *class_spans(config, query=False), length, config)
    mean = key_mean(k, used) if config.smooth_k else None
    if mean is None:
        assert folded.mean is None
    else:
        torch.testing.assert_close(folded.mean, mean, rtol=1e-5, atol=1e-5)
    kind = config.canonical().low
    share = 4e-3 if config.rotate else 1e-3  # 16-bit values meet ties, and are divided
    clean = folded.mean
    out = decode(folded.codes, folded.scales, kind, TILE)[..., :size, :]
    ref = expected(k, config, clean, False, rows)
    for b, end in enumerate(length.tolist()):
        close(out[:, b, :, :end], ref[:, b, :, :end], share)
    if config.pv == "fp8":
        assert folded.v is not None and folded.v_scale is not None
        x = torch.where(used[:, None, :, None], v.float(), 0.0)
        amax = torch.where(x.isfinite(), x.abs(), 0.0).amax(2, keepdim=True)
        amax = torch.where(amax < 1e-20, 448.0, amax)
        torch.testing.assert_close(folded.v_scale, amax / 448)
        order = torch.tensor([16 * i + j for i in range(2) for j in ORDER], device=device)
        codes = folded.v.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 32))
        values = torch.empty_like(codes)
        values[..., order] = codes
        values = values.flatten(-2).mT[:, :, :size] * folded.v_scale
        for b, end in enumerate(length.tolist()):
            scaled = (x / folded.v_scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            scaled = torch.where(x.isfinite(), scaled, torch.nan) * folded.v_scale
            close(values[b, :, :end].double(), scaled[b, :, :end].double())
    spans = class_spans(config, query=True)
    codes, scales = room = query_codes(q, spans[0], length, size)
    shift = fold_q(q, *spans, length, size, config, -0.25, clean, room)
    for b, end in enumerate(length.tolist()):
        begin = (end - n_q) % TILE
        out = -decode(codes, scales, kind, 1)[:, b, :, begin : begin + n_q]
        aligned = torch.nn.functional.pad(q[b : b + 1], (0, 0, begin, 0))
        ref = expected(aligned, config, None, True, Rows(1, begin + n_q))[:, 0]
        close(out, ref[..., begin:, :], share)
        if clean is not None:
            assert shift is not None
            exact = -0.25 * (q[b].float() @ clean[b].repeat_interleave(2, 0).mT)[..., 0]
            torch.testing.assert_close(shift[b], exact, rtol=1e-4, atol=1e-4, equal_nan=True)


@triton.jit
def _e2m1_kernel(x_ptr, n, NEAR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    y = _near_e2m1(x, 1.0) if NEAR else _to_e2m1(x, 1.0)
    tl.store(x_ptr + at, y, mask=at < n)


def check_e2m1(device: str, stride: int) -> None:
    """Every stride-th float below 8, of both signs, and all ties with their neighbours; one of the
    two functions may take ties to either side."""
    eight = 0x41000000
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0]).view(torch.int32)
    around = torch.cat([ties + i for i in range(-3, 4)])
    chunk = stride * 2**24
    for begin in range(0, eight, chunk):
        bits = torch.arange(begin, min(begin + chunk, eight), stride, dtype=torch.int32)
        if begin == 0:
            bits = torch.cat([bits, around])
        x = bits.to(device).view(torch.float32)
        quantum = torch.exp2(torch.frexp(x.double().clamp(min=1.0)).exponent - 2.0)
        ref = torch.round(x / quantum) * quantum
        for sign, near in ((1, False), (-1, False), (1, True), (-1, True)):
            y = x * sign
            _e2m1_kernel[(-(-y.numel() // 1024),)](y, y.numel(), NEAR=near, BLOCK=1024)
            right = y.double() == sign * ref
            if near:
                right |= ((x - ref).abs() == quantum / 2) & ((y - x * sign).abs() == quantum / 2)
            assert right.all()
