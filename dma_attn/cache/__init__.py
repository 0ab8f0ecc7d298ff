"""A KV cache of mixed precision, and attention over it."""

from .attend import dma_attention_with_kvcache
from .mixed import MixedKVCache

__all__ = ["MixedKVCache", "dma_attention_with_kvcache"]
