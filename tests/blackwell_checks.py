"""The Blackwell kernel against the oracle: under Triton's interpreter, or emulated on a GPU."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from dma_attn import DMAConfig, dma_attention, dma_attention_prepared, prepare_kv
from dma_attn.attention.api import masked_attention
from dma_attn.attention.dispatch import native_kernel
from dma_attn.device import DeviceInfo, override_device
from dma_attn.quant.rows import Rows
from dma_attn.testing import assert_rel_l2, error_budget, random_qkv
from tests.impls import check_result

BLACKWELL = DeviceInfo("pretended Blackwell", (10, 0), 232448, triton.__version__)
E8M0_CONFIGS = ("default,low=mxfp4", "mxfp8", "default,high=mxfp8_e5m2,low=mxfp4,pv=fp8",
                "default,high=none,low=mxfp4,sink=0", "default,low=none", "paper,low=mxfp4",
                "default,low=mxfp4,rotate=false,smooth_k=false,diag=0,sink=0")
E4M3_CONFIGS = ("default", "paper", "nvfp4", "default,high=none,sink=256", "default,pv=fp8",
                "default,low=nvfp4,granularity=tile", "default,high=nvfp4,low=mxfp4,diag=256",
                "default,granularity=tensor")
SHAPES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "causal": ({"heads": (2, 1), "lengths": (150, 300)}, {"is_causal": True}),
    "full": ({"heads": (3, 1), "lengths": (5, 270)}, {}),
    "more queries than keys": ({"heads": (1, 1), "lengths": (200, 130)}, {"is_causal": True}),
    "window": ({"heads": (2, 2), "lengths": (140, 400)}, {"is_causal": True, "window_size": 150}),
    "kv_len": ({"batch": 2, "lengths": (20, 290)}, {"is_causal": True, "kv_len": [260, 7]}),
    "one query": ({"heads": (4, 2), "lengths": (1, 129)}, {"is_causal": True}),
    "dims": ({"lengths": (30, 140), "dims": (128, 64)}, {"is_causal": True}),
    "strides": ({"lengths": (40, 260), "dtype": torch.float16}, {"is_causal": True}),
    "padding": ({"batch": 2, "lengths": (20, 290)}, {"is_causal": True, "pads": [140, 1]}),
    "negative scale": ({"lengths": (40, 140)}, {"scale": -0.2}),
}


def check_shape(shape: str, config: str, device: str = "cpu") -> None:
    """One call; memory that no query may see is NaN."""
    options, call = SHAPES[shape]
    options = {"batch": 1, "heads": (2, 1), "dims": 64, "device": device, **options}
    arguments = dict(call)
    q, k, v = random_qkv(**options)  # type: ignore[arg-type]
    if shape == "strides":
        q, k, v = (_spread(x) for x in (q, k, v))
    if "kv_len" in arguments:
        ends = torch.tensor(arguments["kv_len"], dtype=torch.int32, device=device)
        arguments["kv_len"] = ends
        hidden = (torch.arange(k.shape[2], device=device) >= ends[:, None])[:, None, :, None]
        k, v = k.masked_fill(hidden, math.nan), v.masked_fill(hidden, math.nan)
    if "pads" in arguments:
        pads = torch.tensor(arguments.pop("pads"), device=device)
        arguments["key_padding_mask"] = torch.arange(k.shape[2], device=device) >= pads[:, None]
        hidden = ~arguments["key_padding_mask"][:, None, :, None]  # type: ignore[index]
        k, v = k.masked_fill(hidden, math.nan), v.masked_fill(hidden, math.nan)
    if "window_size" in arguments:
        k[:, :, :100] = v[:, :, :100] = math.nan
    parsed = DMAConfig.parse(config)
    with override_device(BLACKWELL):
        length = arguments.get("kv_len")
        rows = Rows(k.shape[0], k.shape[2], length=length)  # type: ignore[arg-type]
        assert native_kernel(k, v, parsed, rows, False) == ("blackwell", "")
        out, lse = dma_attention(q, k, v, config=parsed, return_lse=True, impl="triton",
                                 **arguments)  # type: ignore[arg-type]
    check_result(out, lse, q, k, v, parsed, **arguments)


def check_prepared_and_layouts(device: str = "cpu") -> None:
    """Prepared keys, an output of one's own, and the other layout give the same bits."""
    q, k, v = random_qkv(2, (4, 2), (33, 200), 64, device=device)
    config = DMAConfig.parse("default,low=mxfp4")
    with override_device(BLACKWELL):
        expected = dma_attention(q, k, v, config=config, is_causal=True, impl="triton")
        prepared = prepare_kv(k, v, config=config, impl="triton")
        assert prepared.swizzled is not None
        out = torch.empty_like(q)
        dma_attention_prepared(q, prepared, is_causal=True, out=out, impl="triton")
        turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        other = dma_attention(*turned, config=config, is_causal=True, tensor_layout="NHD",
                              impl="triton")
    assert torch.equal(out, expected)  # type: ignore[arg-type]
    assert torch.equal(other.transpose(1, 2), expected)  # type: ignore[union-attr, arg-type]


def _spread(x: Tensor) -> Tensor:
    """The values of x with odd strides."""
    room = x.new_zeros(*x.shape[:2], 2 * x.shape[2], x.shape[3] + 3)
    view = room[:, :, ::2, : x.shape[3]]
    view.copy_(x)
    return view


def check_attention_mask(device: str = "cpu") -> None:
    """An additive mask of one's own, causality by position on top of it left to torch's rule."""
    q, k, v = random_qkv(1, (2, 1), (40, 150), 64, device=device)
    mask = torch.randn(1, 2, 40, 150, generator=torch.Generator().manual_seed(0)).to(device)
    mask[:, :, 3] = -math.inf
    mask[..., 120:] = -math.inf
    config = DMAConfig.parse("default,low=mxfp4,smooth_k=false")
    with override_device(BLACKWELL):
        out = masked_attention(q, k, v, mask, config=config, impl="triton")
    ref = masked_attention(q, k, v, mask, config=config, impl="reference")
    assert not out[:, :, 3].any()  # type: ignore[index]
    assert_rel_l2(out, ref, 2 * error_budget(config, q.numel()).rel_l2)  # type: ignore[arg-type]
