"""Error against exact attention on captured queries, keys and values: this library and its peers.

A capture is a safetensors file of bf16 tensors, causal self-attention of one window of S tokens:
`q.<layer>` (1, H, S, D), `k.<layer>` and `v.<layer>` (1, H_kv, S, D), after the rotary embedding.
`benchmarks/capture_qkv.py` writes one. The scale is D ** -0.5; errors are rel-L2 over all heads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import dma_attention
from ..attention.dispatch import hopper_gap, use_native
from ..config import DMAConfig
from ..quant.rows import Rows
from ..testing import dense_oracle
from .peers import Call, Inputs, find_peers, result
from .prefill import FA3_FP8

CONFIGS = ("hopper", "default", "default,pv=fp8", "mxfp8,pv=fp8")
COMPARED = (*FA3_FP8, "fa3-bf16")
ALL_LAYERS = "all"
MUST = 0.5


@dataclass(frozen=True)
class ErrorRow:
    """Rel-L2 error of a candidate in one layer, or in `ALL_LAYERS` concatenated."""

    layer: str
    candidate: str
    error: float


def load_capture(path: Path) -> dict[str, Inputs]:
    """Q, K and V of each layer on the CPU, layers in their order.

    Raises:
        ValueError: the file is no capture.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"expected a safetensors file, got {path} ({error})") from error
    layers = {name.partition(".")[2] for name in tensors}
    wanted = {f"{part}.{layer}" for part in "qkv" for layer in layers}
    if not layers or wanted != set(tensors):
        found = ", ".join(sorted(tensors)[:6]) or "nothing"
        raise ValueError(f"expected q, k and v of each layer, got {path} with {found}")
    for name, tensor in tensors.items():
        if tensor.dtype != torch.bfloat16 or tensor.ndim != 4 or tensor.shape[0] != 1:
            raise ValueError(
                f"{name}: expected bfloat16 (1, H, S, D), got {tensor.dtype} {tuple(tensor.shape)}"
            )
    ordered = sorted(layers, key=lambda layer: (len(layer), layer))
    return {layer: (tensors[f"q.{layer}"], tensors[f"k.{layer}"], tensors[f"v.{layer}"])
            for layer in ordered}


def measure_errors(
    layers: Mapping[str, Inputs],
    configs: Sequence[str] = CONFIGS,
    peers: Sequence[str] = COMPARED,
    device: str = "cuda",
    notify: Callable[[str], None] = print,
) -> list[ErrorRow]:
    """Every configuration and peer in every layer, then over all layers.

    A candidate that did not run in every layer has no row over all of them. `notify` gets a line
    for each peer that is missing and each configuration that the Hopper kernel does not cover.
    """
    rows: list[ErrorRow] = []
    norms: list[float] = []
    gaps: defaultdict[str, list[float]] = defaultdict(list)
    notes: dict[str, None] = {}
    for layer, captured in layers.items():
        q, k, v = (x.to(device) for x in captured)
        exact = exact_causal(q, k, v)
        norms.append(float(exact.square().sum()))
        calls, missing = find_peers((q, k, v), True, tuple(peers))
        notes |= dict.fromkeys(f"{name} is missing: {why}" for name, why in missing.items())
        for text in configs:
            calls[text], uncovered = _own(q, k, v, DMAConfig.parse(text))
            if uncovered:
                notes[f"{text} is not on the Hopper kernel: {uncovered}"] = None
        for name, call in calls.items():
            gaps[name].append(float((result(call).double() - exact).square().sum()))
            rows.append(ErrorRow(layer, name, math.sqrt(gaps[name][-1] / norms[-1])))
    for note in notes:
        notify(note)
    return rows + [
        ErrorRow(ALL_LAYERS, name, math.sqrt(sum(parts) / sum(norms)))
        for name, parts in gaps.items()
        if len(parts) == len(norms)
    ]


def _own(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: DMAConfig
) -> tuple[Call, str]:
    """This library's call, and why the Hopper kernel does not cover it ("" when it does)."""

    def attend() -> torch.Tensor:
        with use_native():
            out = dma_attention(q, k, v, is_causal=True, config=config)
        assert isinstance(out, torch.Tensor)  # no LSE was asked for
        return out

    with use_native():
        return attend, hopper_gap(k, v, config, Rows(k.shape[0], k.shape[2]), masked=False)


def exact_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Fp64 causal attention (1, H, S, D), one head at a time: S * S logits are in memory."""
    group = q.shape[1] // k.shape[1]
    heads = []
    for head in range(q.shape[1]):
        own = slice(head // group, head // group + 1)
        out, _ = dense_oracle(q[:, head : head + 1], k[:, own], v[:, own], is_causal=True)
        heads.append(out)
    return torch.cat(heads, dim=1)


def error_ratio(rows: Iterable[ErrorRow]) -> float | None:
    """Error over all layers of `hopper` relative to FA3's with FP8, None if one was not measured.

    The aim is at most `MUST`.
    """
    errors = {row.candidate: row.error for row in rows if row.layer == ALL_LAYERS}
    ours, theirs = errors.get("hopper"), errors.get(FA3_FP8[0])
    return None if ours is None or theirs is None else ours / theirs
