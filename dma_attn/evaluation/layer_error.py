"""Error of the attention output, layer by layer, on the model's own queries, keys and values.

Every layer is asked by itself: `dma_attention` and exact float32 attention get the same inputs,
those of an exact forward pass, so that no error is carried from one layer into the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .. import DMAConfig, dma_attention, precision_metrics
from ..schedule import TILE
from .capture import AttentionCall, visit_attention

_FIELDS = ("cosine", "rel_l1", "rel_l2", "rmse", "psnr", "max_abs", "worst_row")


@dataclass(frozen=True)
class LayerError:
    """`precision_metrics` of one configuration in one layer, over all heads and rows."""

    layer: int
    cosine: float
    rel_l1: float
    rel_l2: float
    rmse: float
    psnr: float
    max_abs: float
    worst_row: float


@dataclass(frozen=True)
class AttentionMap:
    """Mean attention weight of one head over squares of `cell` x `cell` tokens.

    weights: fp32 (ceil(tokens / cell), ceil(tokens / cell)), queries by keys, on the CPU.
    """

    layer: int
    head: int
    tokens: int
    cell: int
    weights: torch.Tensor


@dataclass(frozen=True)
class LayerErrorResult:
    """`layers[label]` lists one `LayerError` a layer, in order."""

    layers: dict[str, tuple[LayerError, ...]]
    attention_map: AttentionMap
    tokens: int


def measure_layer_error(
    model: Any,
    token_ids: torch.Tensor,
    configs: Mapping[str, DMAConfig],
    *,
    map_layer: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LayerErrorResult:
    """Per-layer error of each configuration on one window, and one head's attention as a heat map.

    Args:
        token_ids: int64 (S,).
        map_layer: Layer of the heat map, by default the middle one. Its head is the one that
            attends most beyond the diagonal and sink tiles, where low precision is at work.
        progress: Called with (layers done, layers in all).

    Raises:
        ValueError: the model has no layer `map_layer`.
    """
    n_layers = int(model.config.num_hidden_layers)
    wanted = n_layers // 2 if map_layer is None else map_layer
    if not 0 <= wanted < n_layers:
        raise ValueError(f"map_layer: expected a layer from 0 to {n_layers - 1}, got {wanted}")
    layers: dict[str, list[LayerError]] = {label: [] for label in configs}
    maps: list[AttentionMap] = []

    def compare(call: AttentionCall) -> None:
        for label, config in configs.items():
            layers[label].append(_layer_error(call, config))
        if call.layer == wanted:
            maps.append(attention_map(call))
        if progress:
            progress(call.layer + 1, n_layers)

    visit_attention(model, token_ids, compare)
    if not maps:
        raise ValueError(f"map_layer: layer {wanted} of this model has no attention")
    rows = {label: tuple(errors) for label, errors in layers.items()}
    return LayerErrorResult(rows, maps[0], token_ids.numel())


def attention_map(call: AttentionCall, *, cells: int = 128) -> AttentionMap:
    """The attention weights of the head that looks most beyond diagonal and sink, over squares.

    One head's S x S weights exist at a time; the map has at most `cells` rows and columns.
    """
    size, heads = call.q.shape[2], call.q.shape[1]
    cell = max(1, -(-size // cells))
    group = heads // call.k.shape[1]
    position = torch.arange(size, device=call.q.device)
    distance = position[:, None] - position
    hidden = distance < 0
    if call.window:
        hidden |= distance >= call.window
    squares = torch.arange(-(-size // cell), device=call.q.device) * cell // TILE
    far = (squares[:, None] > squares) & (squares > 0)
    best = AttentionMap(call.layer, 0, size, cell, torch.empty(0))
    best_mass = -1.0
    for head in range(heads):
        logits = call.q[0, head].float() @ call.k[0, head // group].float().T * call.scale
        weights = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
        pooled = torch.nn.functional.avg_pool2d(weights[None, None], cell, ceil_mode=True)[0, 0]
        mass = float((pooled * far).sum())
        if mass > best_mass:
            best_mass, best = mass, AttentionMap(call.layer, head, size, cell, pooled.cpu())
    return best


def _layer_error(call: AttentionCall, config: DMAConfig) -> LayerError:
    out = dma_attention(
        call.q,
        call.k,
        call.v,
        is_causal=True,
        scale=call.scale,
        window_size=call.window,
        config=config,
    )
    assert isinstance(out, torch.Tensor)  # no LSE was asked for
    metrics = precision_metrics(out.float(), call.exact)
    return LayerError(call.layer, **{name: float(getattr(metrics, name)) for name in _FIELDS})
