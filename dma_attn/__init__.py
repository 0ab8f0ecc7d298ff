"""Diagonal-tiled mixed-precision attention (arXiv 2604.03950) for LLM inference.

Public names are imported when they are first used, so that `import dma_attn` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention.api import (
        dma_attention,
        dma_attention_prepared,
        dma_attention_varlen,
        prepare_kv,
        scaled_dot_product_attention,
    )
    from .attention.explain import explain
    from .attention.merge import PrecisionMetrics, merge_states, precision_metrics
    from .attention.types import PreparedKV
    from .cache.attend import dma_attention_with_kvcache
    from .cache.mixed import MixedKVCache
    from .config import DMAConfig
    from .quant.api import quantize, quantize_pair
    from .quant.tensor import BlockScaledTensor

__version__ = "0.1.0"

__all__ = [
    "BlockScaledTensor",
    "DMAConfig",
    "MixedKVCache",
    "PrecisionMetrics",
    "PreparedKV",
    "__version__",
    "dma_attention",
    "dma_attention_prepared",
    "dma_attention_varlen",
    "dma_attention_with_kvcache",
    "explain",
    "merge_states",
    "precision_metrics",
    "prepare_kv",
    "quantize",
    "quantize_pair",
    "scaled_dot_product_attention",
]

_HOME = {
    "BlockScaledTensor": "quant.tensor",
    "DMAConfig": "config",
    "MixedKVCache": "cache.mixed",
    "PrecisionMetrics": "attention.merge",
    "PreparedKV": "attention.types",
    "dma_attention": "attention.api",
    "dma_attention_prepared": "attention.api",
    "dma_attention_varlen": "attention.api",
    "dma_attention_with_kvcache": "cache.attend",
    "explain": "attention.explain",
    "merge_states": "attention.merge",
    "precision_metrics": "attention.merge",
    "prepare_kv": "attention.api",
    "quantize": "quant.api",
    "quantize_pair": "quant.api",
    "scaled_dot_product_attention": "attention.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
