"""Show a caller the queries, keys and values of every attention layer, in one exact forward pass.

A recorder takes the place of the model's attention function. It answers with exact attention, so
that every layer sees exact inputs, and hands the layer's tensors to a visitor; nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from .attention import using_attention

_RECORDER = "dma_recorder"  # names with "flash" or "sdpa" get special treatment in transformers


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention call, causal over one unpadded window of S tokens.

    q (1, H_q, S, D) and k, v (1, H_kv, S, D) are as the model made them: after its rotary
    embedding, not repeated for grouped heads, possibly strided. exact is fp32 (1, H_q, S, D_v).
    window is the sliding window in keys, None for full attention.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int | None
    exact: torch.Tensor


@torch.no_grad()
def visit_attention(
    model: Any, token_ids: torch.Tensor, visitor: Callable[[AttentionCall], None]
) -> None:
    """Run `token_ids`, int64 (S,), through a transformers model and visit each layer in order.

    Raises:
        NotImplementedError: the model adds to or caps its attention scores.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def record(
        module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        for name in ("softcap", "s_aux", "sinks", "position_bias"):
            if options.get(name) is not None:
                raise NotImplementedError(f"{name}: expected plain attention scores, got {name}")
        scale = options.get("scaling") or q.shape[-1] ** -0.5
        window = options.get("sliding_window")
        exact = exact_attention(q, k, v, scale, window)
        visitor(AttentionCall(module.layer_idx, q, k, v, scale, window, exact))
        return exact.to(q.dtype).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_RECORDER, record)
    AttentionMaskInterface.register(_RECORDER, _no_mask)
    with using_attention(model, _RECORDER):
        model.base_model(input_ids=token_ids[None].to(model.device), use_cache=False)


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """Causal float32 attention by torch; q (B, H_q, S, D), k and v (B, H_kv, S, D)."""
    q, k, v = q.float(), k.float(), v.float()
    size = q.shape[2]
    if not window or window >= size:
        return torch_sdpa(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    position = torch.arange(size, device=q.device)
    distance = position[:, None] - position
    mask = (distance >= 0) & (distance < window)
    return torch_sdpa(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _no_mask(*_args: Any, **_options: Any) -> None:
    """The recorder needs no mask: one window, nothing padded."""
