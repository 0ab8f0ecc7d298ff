"""Teacher-forced perplexity through the decode path: what a KV cache costs.

Windows are rows of a batch. The tokens go in `step` at a time (up to 16, so that the queries stay
in 16 bits and read the cache), each step predicts the next ones. NLL and perplexity are those of
`evaluate_perplexity`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from .perplexity import PerplexityResult, Progress, check_window
from .text import windows


@torch.no_grad()
def evaluate_decode_perplexity(
    model: Any,
    token_ids: torch.Tensor,
    window: int,
    n_windows: int,
    make_cache: Callable[[], Any],
    *,
    step: int = 1,
    progress: Progress | None = None,
) -> PerplexityResult:
    """Perplexity of `model` on the first `n_windows` windows of `window` tokens, over a cache.

    Args:
        token_ids: int64 (n,), on any device.
        make_cache: An empty transformers cache for the model.
        step: Tokens of a forward pass, 1 to 16.
        progress: Called with (tokens done, tokens in all).

    Raises:
        SettingError: a text that is too short, or a window longer than the model's positions.
        ValueError: another step.
    """
    if not 1 <= step <= 16:
        raise ValueError(f"step: expected 1 to 16, got {step}")
    check_window(model, window)
    ids = windows(token_ids, window, n_windows).to(model.device)
    start = time.perf_counter()
    cache = make_cache()
    nll = torch.zeros(n_windows, dtype=torch.float64, device=model.device)
    for first in range(0, window - 1, step):
        last = min(first + step, window - 1)
        logits = model(input_ids=ids[:, first:last], past_key_values=cache, use_cache=True).logits
        targets = ids[:, first + 1 : last + 1]
        losses = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        nll += losses.double().view(n_windows, -1).sum(1)
        if progress:
            progress(last, window - 1)
    means = (nll / (window - 1)).tolist()
    mean = sum(means) / n_windows
    value = math.exp(mean) if mean < 700 else math.inf
    return PerplexityResult(
        value, tuple(means), n_windows * (window - 1), time.perf_counter() - start
    )
