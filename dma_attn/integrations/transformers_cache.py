"""`DMACache`: transformers' cache of `MixedKVCache` layers.

A layer's `update` hands out `CachedStates` instead of tensors: how far the cache goes and the new
tokens. The attention function, which also knows the padding mask, appends and attends.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from ..cache import MixedKVCache
from ..config import DMAConfig

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""What transformers calls layers whose queries see all earlier keys, or the last of them."""

REFUSED = {
    "kv_lora_rank": "latent attention expands what its cache holds",
    "num_kv_shared_layers": "its last layers attend to what an earlier one cached",
    "cross_attention_layers": "its cross-attention reads the cached tensors themselves",
}
"""Fields that a config must leave unset, with the reason."""


class CachedStates:
    """The keys or the values of a layer: those in its `MixedKVCache`, then new ones.

    Stands in for a tensor (B, H_kv, past + S, D) between the cache and `dma_attention_forward`. It
    has its shape, dtype and device; all other uses raise TypeError.

    Args:
        layer: Where the tokens belong; they are not in it yet.
        new: (B, H_kv, S, D), the new tokens.
    """

    def __init__(self, layer: DMALayer, new: Tensor) -> None:
        self.layer = layer
        self.new = new
        self.past = layer.get_seq_length()
        self.shape = torch.Size((*new.shape[:2], self.past + new.shape[2], new.shape[3]))
        self.dtype = new.dtype
        self.device = new.device

    def take(self) -> Tensor:
        """The new tokens, to be appended to the layer.

        Raises:
            RuntimeError: the layer has changed since they were handed out.
        """
        if self.layer.get_seq_length() != self.past:
            raise RuntimeError(
                f"past_key_values: expected the {self.past} tokens of the time when the new ones "
                f"came, got {self.layer.get_seq_length()}; a DMACache appends tokens only once"
            )
        return self.new

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse()

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> NoReturn:
        cls._refuse()

    @staticmethod
    def _refuse() -> NoReturn:
        raise TypeError(
            "past_key_values: a DMACache works only with a model that enable_dma(model) has "
            "switched and that passes keys and values from the cache to the attention as they are"
        )


class DMALayer(DynamicLayer):
    """One layer of a `DMACache`.

    Args:
        options: Keywords for its `MixedKVCache`, which is made when the first tokens come.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.cache: MixedKVCache | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note dtype and device; the `MixedKVCache` is made by `append`, after autocast."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(  # type: ignore[override]  # handles in place of tensors
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[CachedStates, CachedStates]:
        """Handles of all keys and values; the new ones, (B, H_kv, S, D or D_v), wait in them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return CachedStates(self, key_states), CachedStates(self, value_states)

    def append(self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> None:
        """`MixedKVCache.append`; an empty layer takes any batch size, heads, dims and dtype."""
        cache = self.cache
        sizes = (k.shape[0], k.shape[1], (k.shape[3], v.shape[3]), k.dtype, k.device)
        if cache is not None and cache.length == 0:
            has = (cache.batch, cache.kv_heads, cache.head_dims, cache.dtype, cache.device)
            cache = cache if has == sizes else None
        if cache is None:
            cache = self.cache = MixedKVCache(
                k.shape[0], k.shape[1], k.shape[3], head_dim_v=v.shape[3], dtype=k.dtype,
                device=k.device, **self.options,
            )
        cache.append(k, v, key_padding_mask=key_padding_mask)

    def get_seq_length(self) -> int:
        """Tokens of a row, padding included."""
        return 0 if self.cache is None else self.cache.length

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the last -n tokens; with n > 0 keep the first n (transformers' older rule)."""
        n, length = int(tokens_to_remove), self.get_seq_length()
        if self.cache is not None:
            self.cache.crop(min(n, length) if n > 0 else max(length + n, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        if self.cache is not None and self.cache.length:
            self.cache.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after the other."""
        if self.cache is not None and self.cache.length:
            rows = torch.arange(self.cache.batch, device=self.cache.device)
            self.cache.reorder(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows that `indices`, integers or a bool per row, name."""
        if self.cache is not None and self.cache.length:
            rows = torch.arange(self.cache.batch, device=self.cache.device)
            self.cache.reorder(rows[indices])

    def reset(self) -> None:
        """Forget all tokens; what is allocated stays."""
        if self.cache is not None:
            self.cache.reset()

    def offload(self) -> None:
        """Not supported."""
        raise NotImplementedError("offload: a DMACache stays on its device")

    def prefetch(self) -> None:
        """Not supported."""
        raise NotImplementedError("prefetch: a DMACache stays on its device")


class DMACache(Cache):
    """A KV cache with high- and low-precision tokens for a model switched by `enable_dma`.

        model.generate(**inputs, past_key_values=DMACache(model.config))

    The first call attends as without a cache, in the formats of `enable_dma`; later ones read the
    cache, in its own formats. A row holds one sequence. Whether a token counts or is padding is
    fixed by the mask of the call that appends it; masks of later calls do not change it. Make
    another cache, or `reset()` this one, for another conversation.

    Args:
        model_config: The model's config; of a composite one, its text decoder's counts.
        config: Formats and transforms of K, widths of the high regions; text is read by
            `DMAConfig.parse`. None: 16 bits high, int4 low.
        v_high, v_low, rotate_v, max_len: As in `MixedKVCache`.

    Raises:
        TypeError, ValueError: what `MixedKVCache` raises for these options; no transformers config.
        NotImplementedError: the architecture has layers other than full and sliding attention.
    """

    def __init__(
        self,
        model_config: PreTrainedConfig,
        config: DMAConfig | str | None = None,
        *,
        v_high: str = "none",
        v_low: str = "int4",
        rotate_v: bool = True,
        max_len: int | None = None,
    ) -> None:
        if not isinstance(model_config, PreTrainedConfig):
            raise TypeError("model_config: expected a transformers config, as model.config, "
                            f"got {type(model_config).__name__}")
        if isinstance(config, str):
            config = DMAConfig.parse(config)
        if config is not None and not isinstance(config, DMAConfig):
            raise TypeError(f"config: expected a DMAConfig or text, got {type(config).__name__}")
        layers = _layer_count(model_config)
        options: dict[str, Any] = {"config": config, "v_high": v_high, "v_low": v_low,
                                   "rotate_v": rotate_v, "max_len": max_len}
        MixedKVCache(1, 1, 32, device="meta", **options)  # raises now what it would later
        super().__init__(layers=[DMALayer(**options) for _ in range(layers)])

    def nbytes(self) -> int:
        """Bytes allocated by all layers."""
        caches = [layer.cache for layer in self.layers if isinstance(layer, DMALayer)]
        return sum(cache.nbytes() for cache in caches if cache is not None)


def _layer_count(model_config: PreTrainedConfig) -> int:
    """Decoder layers; NotImplementedError if they are not all full or sliding attention."""
    text = model_config.get_text_config(decoder=True)
    name = f"model_config: DMACache does not support {type(text).__name__}"
    if model_config.is_encoder_decoder or text.is_encoder_decoder:
        raise NotImplementedError(f"{name}: cross-attention has a cache of its own")
    for field, reason in REFUSED.items():
        if getattr(text, field, None):
            raise NotImplementedError(f"{name}: it has {field}, and {reason}")
    types = getattr(text, "layer_types", None)
    if types is None and not getattr(text, "sliding_window", None):
        types = ["chunked_attention"] if getattr(text, "attention_chunk_size", None) else None
    if other := sorted(set(types or ()) - LAYER_TYPES):
        raise NotImplementedError(f"{name}: expected layers of {sorted(LAYER_TYPES)}, got {other}")
    count = getattr(text, "num_hidden_layers", None)
    if not isinstance(count, int):
        raise NotImplementedError(f"{name}: it does not say num_hidden_layers")
    return count
