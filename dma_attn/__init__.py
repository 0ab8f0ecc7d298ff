"""Diagonal-tiled mixed-precision attention (arXiv 2604.03950) for LLM inference."""

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
from .config import DMAConfig
from .quant.api import quantize, quantize_pair
from .quant.tensor import BlockScaledTensor

__version__ = "0.1.0"

__all__ = [
    "BlockScaledTensor",
    "DMAConfig",
    "PrecisionMetrics",
    "PreparedKV",
    "__version__",
    "dma_attention",
    "dma_attention_prepared",
    "dma_attention_varlen",
    "explain",
    "merge_states",
    "precision_metrics",
    "prepare_kv",
    "quantize",
    "quantize_pair",
    "scaled_dot_product_attention",
]
