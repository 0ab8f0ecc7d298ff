"""Error of the attention output by layer and head, on the model's own queries, keys and values.

As in `layer_error`, each layer gets the inputs of an exact forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.nn.functional import avg_pool2d

from .. import DMAConfig, dma_attention
from .capture import AttentionCall, visit_attention
from .layer_error import AttentionMap, attention_map

COLUMNS = 256  # of the identity that stands in for V, to read weights off an output
FAR = 8.0  # deviations from the median, of which the typical one is the median


@dataclass(frozen=True)
class HeadErrors:
    """One layer's heads: ||out - exact|| / ||exact|| (Frobenius), cosine of both, and the largest
    relative error of a row."""

    layer: int
    rel_l2: tuple[float, ...]
    cosine: tuple[float, ...]
    worst_row: tuple[float, ...]


def measure_head_errors(
    model: Any,
    token_ids: torch.Tensor,
    config: DMAConfig,
    *,
    layer_configs: Mapping[int, DMAConfig] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[HeadErrors]:
    """Every layer's errors on one window, int64 (S,); `layer_configs` are for single layers."""
    found: list[HeadErrors] = []
    single = layer_configs or {}

    def compare(call: AttentionCall) -> None:
        out = dma_attention(call.q, call.k, call.v, is_causal=True, scale=call.scale,
                            window_size=call.window, config=single.get(call.layer, config))
        assert isinstance(out, torch.Tensor)  # no LSE was asked for
        out, exact = out[0].double(), call.exact[0].double()
        gap, size = (out - exact).norm(dim=-1), exact.norm(dim=-1)  # (H, S)
        cosine = torch.cosine_similarity(out.flatten(1), exact.flatten(1), dim=1)
        found.append(HeadErrors(
            call.layer, tuple((gap.norm(dim=1) / size.norm(dim=1)).tolist()),
            tuple(cosine.tolist()),
            tuple((gap / size.clamp(min=torch.finfo(torch.float32).tiny)).amax(1).tolist())))
        if progress:
            progress(call.layer + 1, int(model.config.num_hidden_layers))

    visit_attention(model, token_ids, compare)
    return found


def outlying_layers(errors: Sequence[HeadErrors]) -> list[int]:
    """Layers whose mean error is far above the others': beyond the median by `FAR` times the
    median deviation, and twice as large; and those that are not finite."""
    means = {x.layer: sum(x.rel_l2) / len(x.rel_l2) for x in errors}
    finite = [x for x in means.values() if math.isfinite(x)]
    middle = median(finite) if finite else 0.0
    spread = median(abs(x - middle) for x in finite) if finite else 0.0
    most = max(middle + FAR * spread, 2 * middle)
    return [i for i, x in means.items() if not x <= most]


def measure_error_map(
    model: Any, token_ids: torch.Tensor, config: DMAConfig, *, layer: int | None = None,
    cells: int = 64,
) -> AttentionMap:
    """|P_quantised - P| of one head, means over at most `cells` x `cells` squares (the paper's
    Figure 1): of the head of a layer, the middle one by default, that looks most at low tiles.

    Raises:
        ValueError: the model has no attention in that layer.
    """
    wanted = int(model.config.num_hidden_layers) // 2 if layer is None else layer
    found: list[AttentionMap] = []

    def compare(call: AttentionCall) -> None:
        if call.layer == wanted:
            found.append(_error_map(call, config, cells))

    visit_attention(model, token_ids, compare)
    if not found:
        raise ValueError(f"layer: layer {wanted} of this model has no attention")
    return found[0]


def _error_map(call: AttentionCall, config: DMAConfig, cells: int) -> AttentionMap:
    plain = attention_map(call, cells=cells)
    size, group = call.q.shape[2], call.q.shape[1] // call.k.shape[1]
    q = call.q[:, plain.head : plain.head + 1]
    k = call.k[:, plain.head // group : plain.head // group + 1]

    def weights(of: DMAConfig) -> torch.Tensor:
        parts = []
        for begin in range(0, size, COLUMNS):
            unit = torch.zeros(1, 1, size, COLUMNS, dtype=q.dtype, device=q.device)
            unit[0, 0, begin : begin + COLUMNS].fill_diagonal_(1)
            out = dma_attention(q, k, unit, is_causal=True, scale=call.scale,
                                window_size=call.window, config=of)
            assert isinstance(out, torch.Tensor)  # no LSE was asked for
            parts.append(out[0, 0, :, : size - begin].float())
        return torch.cat(parts, 1)

    gap = (weights(config.replace(pv="fp16")) - weights(DMAConfig.preset("off"))).abs()
    pooled = avg_pool2d(gap[None, None], plain.cell, ceil_mode=True)[0, 0]
    return AttentionMap(plain.layer, plain.head, size, plain.cell, pooled.cpu())
