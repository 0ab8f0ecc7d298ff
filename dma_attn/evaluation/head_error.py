"""Error of the attention output by layer and head, on the model's own queries, keys and values.

As in `layer_error`, each layer gets the inputs of an exact forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from .. import DMAConfig, dma_attention
from .capture import AttentionCall, visit_attention

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
    median deviation, and twice as large."""
    means = {x.layer: sum(x.rel_l2) / len(x.rel_l2) for x in errors}
    middle = median(means.values())
    spread = median(abs(x - middle) for x in means.values())
    return [i for i, x in means.items() if x > max(middle + FAR * spread, 2 * middle)]
