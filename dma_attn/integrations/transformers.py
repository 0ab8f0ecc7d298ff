"""DMA as an attention implementation of Hugging Face transformers (5.17 up to below 6).

    model = enable_dma(AutoModelForCausalLM.from_pretrained(...), "default,diag=512")
    model.generate(**inputs)

transformers asks two registered functions: `dma_mask` once a forward pass, `dma_attention_forward`
once a layer. Without the mask function it would hand over no mask for a padded batch.

Decode: a call with at most `DECODE_MAX_QUERIES` queries and more keys than queries runs in 16 bits
(preset "off", same kernel), since quantising a 16-bit cache anew in each step gains nothing.

`DMACache` makes those steps read a mixed-precision cache instead: hand it to the model as
`past_key_values=DMACache(model.config)`.

Packed sequences: `cu_seq_lens_q/k` as for flash attention, read on the device only. Without them,
on a prefill without attention mask, transformers (no cache) or this module (with a cache) looks for
position ids that restart, and the sequences found are kept apart; with one, for padding
(`transformers_masks`). That look is the only host read, once a forward pass; decode steps,
torch.compile and CUDA graph capture do without it, so give `cu_seq_lens_q/k` there.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from .. import DMAConfig, dma_attention, dma_attention_varlen
from ..attention.api import masked_attention
from ..attention.prepare import visible_keys
from ..cache import dma_attention_with_kvcache
from .transformers_cache import CachedStates, DMACache, DMALayer
from .transformers_masks import dma_mask, is_full, key_mask, last_key, new_keys, once_a_pass
from .transformers_packing import PACKING, packing

__all__ = ["NAME", "DMACache", "dma_attention_forward", "dma_mask", "enable_dma", "register"]

NAME = "dma"
"""The attention implementation's name in transformers."""

DECODE_MAX_QUERIES = 16
"""Calls with at most this many queries, and more keys than queries, use 16-bit keys."""

CONFIG_ATTRIBUTE = "dma_config"
"""Attribute of an attention module that holds its `DMAConfig`; without it the default counts."""

CHANGES_RESULT = {
    "softcap": "logit soft-capping",
    "s_aux": "a learned softmax sink, which has nothing to do with DMA's sink tiles",
    "sinks": "a learned softmax sink, which has nothing to do with DMA's sink tiles",
    "position_bias": "an additive position bias",
    "head_mask": "a head mask",
}
"""Keywords whose effect the kernels do not have, with what they ask for."""

HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "deterministic",
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "return_dict",
        "token_type_ids",
        "use_cache",
    }
)
"""Keywords that models pass through to every attention function and that none of them reads."""

Model = TypeVar("Model", bound=nn.Module)


def register() -> None:
    """Register attention and mask function as "dma"; calling it again changes nothing."""
    AttentionInterface.register(NAME, dma_attention_forward)
    AttentionMaskInterface.register(NAME, dma_mask)


def enable_dma(
    model: Model,
    config: DMAConfig | str | None = None,
    *,
    layer_configs: Mapping[int, DMAConfig | str] | None = None,
) -> Model:
    """Switch a transformers model to DMA attention, in place, and return it.

    config: for all layers; text is read by `DMAConfig.parse`, None is `DMAConfig()`.
    layer_configs: other configs for single layers, by `layer_idx`. Both end up in the attribute
    `dma_config` of each attention module, which may also be set directly. Calling this again
    replaces every config; `model.set_attn_implementation("sdpa")` switches back.

    Raises:
        TypeError: not a transformers model, or a config of another type.
        ValueError: a layer that the model does not have, or a config that does not parse.
        NotImplementedError: the architecture does not go through transformers' AttentionInterface.
    """
    common = _as_config(config)
    single = {index: _as_config(value) for index, value in (layer_configs or {}).items()}
    switch = getattr(model, "set_attn_implementation", None)
    if not callable(switch):
        raise TypeError(f"model: expected a transformers model, got {type(model).__name__}")
    modules = [m for m in model.modules() if "attention" in type(m).__name__.lower()]
    layers = {i for m in modules if isinstance(i := getattr(m, "layer_idx", None), int)}
    if missing := sorted(set(single) - layers):
        raise ValueError(f"layer_configs: expected layers of {sorted(layers)}, got {missing}")

    register()
    switch(NAME)
    other = [m for m in modules if _implementation(m) != NAME]
    if _implementation(model) != NAME or len(other) == len(modules):
        raise NotImplementedError(
            "model: expected an architecture that goes through transformers' AttentionInterface, "
            f"got {type(model).__name__}, which computes attention by itself"
        )
    if other:
        names = sorted({type(m).__name__ for m in other})
        warnings.warn(f"these modules keep their own attention: {names}", stacklevel=2)
    for module in modules:
        setattr(module, CONFIG_ATTRIBUTE, single.get(getattr(module, "layer_idx", -1), common))
    return model


def dma_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: `dma_attention` under the model's arguments.

    query (B, H_q, S_q, D), key (B, H_kv, S_kv, D), value (B, H_kv, S_kv, D_v), any strides, K and V
    never repeated; the result is (B, S_q, H_q, D_v), contiguous, and no attention weights.
    attention_mask has one of `dma_mask`'s forms; a 2-d one may also hold integers, and a 4-d one
    stands alone: causality and window are not added to it. Queries are the newest tokens before
    the last visible key. `is_causal` None means the module's own attribute. Under autocast all
    three inputs are cast to the autocast dtype, as torch's own attention does.

    `cu_seq_lens_q/k` select variable-length attention; for a `max_length_q/k` that is None or a
    device tensor the total length stands in. A query without a visible key gives 0.

    With a `DMACache` key and value are its handles. Its first tokens are attended to as without a
    cache; later queries read the cache, under a 2-d mask or none.

    Raises:
        NotImplementedError: an argument asks for something that would change the result and is not
            supported, or is not known; dropout in training; attention weights.
        ValueError, TypeError: a mask or packing that does not fit.
    """
    _check_arguments(module, dropout, kwargs)
    layer = None
    if isinstance(key, CachedStates):
        layer, key = key.layer, key.take()
    if isinstance(value, CachedStates):
        value = value.take()
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    with torch.autocast(device_type, enabled=False):  # fp32 steps of the reference stay fp32
        options = (attention_mask, scaling, sliding_window, is_causal, kwargs)
        if layer is None:
            return _attend(module, query, key, value, *options), None
        return _attend_cached(layer, module, query, key, value, *options), None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    sliding_window: int | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """`dma_attention_forward` on checked arguments and inputs of one dtype."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    config = _config_of(module, query.shape[2], key.shape[2])
    # (B, S, H, D) views: the output then has the layout that transformers wants
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    if attention_mask is not None and attention_mask.ndim == 4:
        if kwargs.get("cu_seq_lens_q") is not None:
            raise ValueError("cu_seq_lens_q: expected no 4-d attention_mask beside it, got one")
        _attend_masked(module, query, key, value, attention_mask, causal, scaling, config, out)
        return out
    if sliding_window is not None and not causal:
        raise NotImplementedError(
            f"sliding_window: expected causal attention, got {sliding_window} without it"
        )
    packed_as = packing(module, q, k, attention_mask, causal, kwargs)
    if packed_as is not None:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # views when B is 1
        packed = dma_attention_varlen(
            q,
            k,
            v,
            *packed_as,
            is_causal=causal,
            scale=scaling,
            config=config,
            window_size=sliding_window,
        )
        assert isinstance(packed, Tensor)  # no LSE was asked for
        return packed.view(out.shape)
    mask = end = None
    if attention_mask is not None and not is_full(attention_mask):
        mask = visible = key_mask(attention_mask, k.shape[0], k.shape[1])
        if causal and q.shape[1] != k.shape[1]:
            end = once_a_pass(attention_mask, module, "end", lambda: last_key(visible))
    dma_attention(
        q,
        k,
        v,
        is_causal=causal,
        scale=scaling,
        config=config,
        key_padding_mask=mask,
        kv_len=end,
        window_size=sliding_window,
        tensor_layout="NHD",
        out=out,
    )
    return out


def _attend_cached(
    layer: DMALayer,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    sliding_window: int | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """`_attend` with a layer of a `DMACache`; key and value are its new tokens."""
    mask, new = attention_mask, key.shape[2]
    if kwargs.get("cu_seq_lens_q") is not None or (mask is not None and mask.ndim == 3):
        raise NotImplementedError(
            "cu_seq_lens_q: expected None with a DMACache, whose rows hold one sequence each, "
            "got packed sequences"
        )
    if layer.get_seq_length() == 0:
        out = _attend(module, query, key, value, mask, scaling, sliding_window, is_causal, kwargs)
        counts = None
        if mask is not None and mask.ndim == 4:
            counts = visible_keys(mask, (*query.shape[:3], new))
        elif mask is not None and not is_full(mask):
            counts = key_mask(mask, key.shape[0], new)
        layer.append(key, value, counts)
        return out
    if not bool(getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotImplementedError("is_causal: expected True with a DMACache, got False")
    if mask is not None and mask.ndim != 2:
        raise NotImplementedError(
            "attention_mask: expected 2 dimensions once a DMACache holds tokens, "
            f"got {tuple(mask.shape)}"
        )
    assert layer.cache is not None  # it holds tokens
    keys = layer.get_seq_length() + new
    counts = None
    if mask is not None and not is_full(mask):
        seen, batch = mask, key.shape[0]
        sizes = batch, keys, new
        counts = once_a_pass(mask, module, sizes, lambda: new_keys(seen, *sizes))
    result = dma_attention_with_kvcache(
        query,
        layer.cache,
        k=key,
        v=value,
        key_padding_mask=counts,
        scale=scaling,
        window_size=sliding_window,
    )
    assert isinstance(result, Tensor)  # no LSE was asked for
    return result.transpose(1, 2).contiguous()


def _attend_masked(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    causal: bool,
    scale: float | None,
    config: DMAConfig,
    out: Tensor,
) -> None:
    """Attention under a 4-d mask alone, into out (B, S_q, H_q, D_v): SDPA's masks, any config."""
    shape = (*q.shape[:3], k.shape[2])
    visible = once_a_pass(mask, module, shape, lambda: visible_keys(mask, shape))
    end = last_key(visible) if causal and q.shape[2] != k.shape[2] else None
    masked_attention(
        q,
        k,
        v,
        mask,
        scale=scale,
        config=config,
        valid=visible,
        kv_len=end,
        out=out.transpose(1, 2),
    )


def _as_config(config: DMAConfig | str | None) -> DMAConfig:
    if config is None:
        return DMAConfig()
    if isinstance(config, str):
        return DMAConfig.parse(config)
    if isinstance(config, DMAConfig):
        return config
    raise TypeError(f"config: expected a DMAConfig or text, got {type(config).__name__}")


def _implementation(module: nn.Module) -> str | None:
    """The attention implementation of a module's own config; "dma" where it has no config."""
    return getattr(getattr(module, "config", None), "_attn_implementation", NAME)


def _config_of(module: nn.Module, queries: int, keys: int) -> DMAConfig:
    if queries <= DECODE_MAX_QUERIES and queries < keys:
        return DMAConfig.preset("off")
    config = getattr(module, CONFIG_ATTRIBUTE, None)
    return DMAConfig() if config is None else config


def _check_arguments(module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout and module.training:
        raise NotImplementedError(f"dropout: expected 0 (inference only), got {dropout}")
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "output_attentions: expected False, since the weights are never in memory, got True; "
            'use attn_implementation="eager" for them'
        )
    known = {*HARMLESS, *PACKING, "position_ids", "output_attentions"}
    if kwargs.get("cu_seq_lens_q") is not None:
        known.add("seq_idx")  # says the same once more
    for name, value in kwargs.items():
        if value is not None and name not in known:
            what = CHANGES_RESULT.get(name, "a keyword that this attention function does not know")
            raise NotImplementedError(f"{name}: expected None, got {type(value).__name__} ({what})")
