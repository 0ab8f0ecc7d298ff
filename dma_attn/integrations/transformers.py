"""DMA as an attention implementation of Hugging Face transformers (5.17 up to below 6).

    model = enable_dma(AutoModelForCausalLM.from_pretrained(...), "default,diag=512")
    model.generate(**inputs)

transformers asks two registered functions: `dma_mask` once a forward pass, `dma_attention_forward`
once a layer. Without the mask function it would hand over no mask for a padded batch.

Decode: a call with at most `DECODE_MAX_QUERIES` queries and more keys than queries runs in 16 bits
(preset "off", same kernel), since quantising a 16-bit cache anew in each step gains nothing.

Packed sequences: `cu_seq_lens_q/k` as for flash attention, read on the device only. Without them,
on a prefill without attention mask, transformers (no cache) or this module (with a cache) looks for
position ids that restart, and the sequences found are kept apart. That look is the only host read,
once a forward pass; decode steps, calls with an attention mask, torch.compile and CUDA graph
capture do without it, so give `cu_seq_lens_q/k` there.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from .. import DMAConfig, dma_attention, dma_attention_varlen
from ..attention.api import masked_attention
from ..attention.prepare import visible_keys
from .transformers_masks import dma_mask, is_traced, key_mask, last_key, once_a_pass

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

_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

Model = TypeVar("Model", bound=nn.Module)


class _Packing(NamedTuple):
    """Cumulative lengths, int32 (sequences + 1,), and the longest sequence, for q and for k."""

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int


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
    key: Tensor,
    value: Tensor,
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

    Raises:
        NotImplementedError: an argument asks for something that would change the result and is not
            supported, or is not known; dropout in training; attention weights.
        ValueError, TypeError: a mask or packing that does not fit.
    """
    _check_arguments(module, dropout, kwargs)
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    with torch.autocast(device_type, enabled=False):  # fp32 steps of the reference stay fp32
        return _attend(
            module, query, key, value, attention_mask, scaling, sliding_window, is_causal, kwargs
        ), None


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
    packing = _packing(module, q, k, attention_mask, causal, kwargs)
    if packing is not None:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # views when B is 1
        packed = dma_attention_varlen(
            q,
            k,
            v,
            *packing,
            is_causal=causal,
            scale=scaling,
            config=config,
            window_size=sliding_window,
        )
        assert isinstance(packed, Tensor)  # no LSE was asked for
        return packed.view(out.shape)
    mask = end = None
    if attention_mask is not None:
        mask = visible = key_mask(attention_mask, k.shape[0], k.shape[1])
        if causal and q.shape[1] != k.shape[1]:
            end = once_a_pass(attention_mask, module, lambda: last_key(visible))
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
    visible = once_a_pass(mask, module, lambda: visible_keys(mask, shape))
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
    known = {*HARMLESS, *_PACKING, "position_ids", "output_attentions"}
    if kwargs.get("cu_seq_lens_q") is not None:
        known.add("seq_idx")  # says the same once more
    for name, value in kwargs.items():
        if value is not None and name not in known:
            what = CHANGES_RESULT.get(name, "a keyword that this attention function does not know")
            raise NotImplementedError(f"{name}: expected None, got {type(value).__name__} ({what})")


def _packing(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    causal: bool,
    kwargs: dict[str, Any],
) -> _Packing | None:
    """How the tokens of q and k, (B, S, H, D), are cut into sequences; None if they are not."""
    cu_q, cu_k, longest_q, longest_k = (kwargs.get(name) for name in _PACKING)
    if cu_q is not None or cu_k is not None:
        if cu_q is None or cu_k is None:
            raise ValueError("cu_seq_lens_q, cu_seq_lens_k: expected both, got one")
        if mask is not None and mask.ndim != 3:
            raise ValueError(
                f"cu_seq_lens_q: expected no padding mask beside it, got {tuple(mask.shape)}"
            )
        return _Packing(
            cu_q.to(torch.int32),
            cu_k.to(torch.int32),
            _longest(longest_q, q.shape[0] * q.shape[1]),
            _longest(longest_k, k.shape[0] * k.shape[1]),
        )
    if mask is not None and mask.ndim == 3:
        segments = mask[:, 0]
        if q.shape[1] != k.shape[1] or segments.shape != k.shape[:2]:
            raise ValueError(
                f"attention_mask: expected sequence numbers for {q.shape[1]} queries and as many "
                f"keys, got {tuple(mask.shape)} and {k.shape[1]} keys"
            )
        return once_a_pass(mask, module, lambda: _cut(segments.diff(dim=1) != 0))
    ids = kwargs.get("position_ids")
    if mask is not None or ids is None or ids.ndim != 2 or not causal:
        return None
    if not 1 < q.shape[1] == k.shape[1] == ids.shape[1] or is_traced(q):
        return None

    def restarts() -> _Packing | None:
        falls = ids.diff(dim=1).expand(q.shape[0], -1) <= 0
        return _cut(falls) if bool(falls.any()) else None

    return once_a_pass(ids, module, restarts)


def _cut(boundary: Tensor) -> _Packing:
    """Sequences of B packed rows one after the other.

    boundary: bool (B, S - 1), True between two tokens of different sequences; a row starts one too.
    """
    starts = nn.functional.pad(boundary, (1, 0), value=True).flatten()
    cu = nn.functional.pad(starts.nonzero().flatten(), (0, 1), value=starts.numel())
    longest = int(cu.diff().max())
    cu = cu.to(torch.int32)
    return _Packing(cu, cu, longest, longest)


def _longest(value: int | Tensor | None, tokens: int) -> int:
    """A bound on the sequence lengths, without reading a device tensor on the host."""
    if value is None or (isinstance(value, Tensor) and value.device.type != "cpu"):
        return tokens
    return int(value)
