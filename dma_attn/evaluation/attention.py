"""Switch a model's attention for the length of a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..config import DMAConfig


@contextmanager
def using_attention(model: Any, implementation: str) -> Iterator[None]:
    """Run a transformers model with a registered attention function, then restore its own."""
    previous = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


@contextmanager
def using_config(model: Any, config: DMAConfig | None) -> Iterator[None]:
    """Run a transformers model with DMA attention; None keeps the model's own attention."""
    if config is None:
        yield
        return
    from ..integrations.transformers import enable_dma

    with using_attention(model, model.config._attn_implementation):
        enable_dma(model, config)
        yield
