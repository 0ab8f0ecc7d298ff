"""Teacher-forced perplexity over consecutive windows, with the logits made a few rows at a time.

For window tokens t_0 .. t_{n-1}, NLL = -sum_{i>=1} log p(t_i | t_0 .. t_{i-1}) and perplexity =
exp(sum NLL / number of predicted tokens). Windows do not see each other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from .errors import SettingError
from .text import windows

Progress = Callable[[int, int], None]
_LOGIT_ROWS = 1024


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity `value`, and `window_nll`: each window's mean NLL per predicted token, in nats."""

    value: float
    window_nll: tuple[float, ...]
    tokens: int
    seconds: float


def check_window(model: Any, window: int) -> None:
    """Raise SettingError for a window longer than the model's positions."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and window > limit:
        raise SettingError(
            f"expected a window of at most the model's {limit} positions, got {window}", "tokens"
        )


@torch.no_grad()
def evaluate_perplexity(
    model: Any,
    token_ids: torch.Tensor,
    window: int,
    n_windows: int,
    *,
    batch_size: int = 1,
    progress: Progress | None = None,
) -> PerplexityResult:
    """Perplexity of `model` on the first `n_windows` windows of `window` tokens.

    Memory: hidden states of `batch_size` windows and logits of at most 1024 tokens. A model whose
    logits are not just the output embedding of the last hidden state needs those of `batch_size`
    windows.

    Args:
        token_ids: int64 (n,), on any device.
        progress: Called with (windows done, windows in all).

    Raises:
        SettingError: a text that is too short, or a window longer than the model's positions.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
    check_window(model, window)
    ids = windows(token_ids, window, n_windows).to(model.device)
    start = time.perf_counter()
    token_nll = _token_nll_from_hidden if _has_plain_head(model) else _token_nll_from_logits
    nll: list[float] = []
    for first in range(0, n_windows, batch_size):
        rows = token_nll(model, ids[first : first + batch_size])
        nll.extend(rows.double().mean(1).tolist())
        if progress:
            progress(len(nll), n_windows)
    mean = sum(nll) / n_windows
    value = math.exp(mean) if mean < 700 else math.inf
    return PerplexityResult(
        value, tuple(nll), n_windows * (window - 1), time.perf_counter() - start
    )


def _token_nll_from_hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """NLL of each predicted token, fp32 (B, S - 1), logits made `_LOGIT_ROWS` rows at a time."""
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    rows, targets = hidden.flatten(0, 1), ids[:, 1:].flatten()  # (B * (S - 1), E), (B * (S - 1),)
    head = model.get_output_embeddings()
    parts = [
        cross_entropy(head(some_rows).float(), some_targets, reduction="none")
        for some_rows, some_targets in zip(
            rows.split(_LOGIT_ROWS), targets.split(_LOGIT_ROWS), strict=True
        )
    ]
    return torch.cat(parts).view(ids.shape[0], -1)


def _token_nll_from_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The same for a model that scales or caps its logits after the output embedding."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # (B, S - 1, V)
    parts = [
        cross_entropy(row.float(), targets, reduction="none")
        for row, targets in zip(logits, ids[:, 1:], strict=True)
    ]
    return torch.stack(parts)


def _has_plain_head(model: Any) -> bool:
    """Whether logits are just the output embedding of the last hidden state (asks two tokens)."""
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return False
    probe = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    logits = model(input_ids=probe, use_cache=False).logits
    hidden = getattr(model.base_model(input_ids=probe, use_cache=False), "last_hidden_state", None)
    return hidden is not None and torch.allclose(
        head(hidden).float(), logits.float(), rtol=1e-3, atol=1e-3
    )
