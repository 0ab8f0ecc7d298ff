"""Greedy chat answers, so that native and DMA attention can be read side by side."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from ..config import DMAConfig
from .attention import using_config
from .errors import SettingError


@dataclass(frozen=True)
class Answer:
    """A greedy answer: its text, token ids, prompt length in tokens, wall time, and the bytes that
    its KV cache came to (of a mixed one allocated, of a 16-bit one in use)."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    seconds: float
    cache_bytes: int


def shared_prefix(first: Answer, second: Answer) -> int:
    """How many leading tokens two answers share."""
    for i, (a, b) in enumerate(zip(first.tokens, second.tokens, strict=False)):
        if a != b:
            return i
    return min(len(first.tokens), len(second.tokens))


def check_prompt(prompt: str) -> None:
    """Raise SettingError for a prompt without text."""
    if not prompt.strip():
        raise SettingError("expected some text, got an empty string", "prompt")


@torch.no_grad()
def generate_answer(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    config: DMAConfig | None = None,
    max_new_tokens: int = 64,
    mixed_cache: bool = False,
) -> Answer:
    """The model's greedy answer to one user message; with `config` by DMA attention.

    mixed_cache: Decode from a `DMACache` with its default formats, which needs a `config`.

    Uses the tokenizer's chat template; without one the prompt is continued as plain text.

    Raises:
        SettingError: a mixed cache without DMA attention, an empty prompt, `max_new_tokens` < 1, or
            more tokens than the model has positions for.
    """
    check_prompt(prompt)
    if max_new_tokens < 1:
        raise SettingError(f"expected at least 1, got {max_new_tokens}", "max_new_tokens")
    if mixed_cache and config is None:
        raise SettingError("expected DMA attention with a mixed cache, got native", "kv_cache")
    ids = _prompt_ids(tokenizer, prompt)
    n_prompt = ids.shape[1]
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and n_prompt + max_new_tokens > limit:
        raise SettingError(
            f"expected at most {limit} tokens, the model's positions, got {n_prompt} of the prompt "
            f"+ {max_new_tokens} of the answer",
            "max_new_tokens",
            "prompt",
        )
    ids = ids.to(model.device)
    start = time.perf_counter()
    cache = {}
    if mixed_cache:
        from ..integrations.transformers import DMACache

        length = n_prompt + max_new_tokens
        cache = {"past_key_values": DMACache(model.config, max_len=length)}
    with using_config(model, config):
        result = model.generate(
            ids,
            **cache,
            return_dict_in_generate=True,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=pad_token(model, tokenizer),
        )
    new = result.sequences[0, n_prompt:]
    text = tokenizer.decode(
        new, skip_special_tokens=True, clean_up_tokenization_spaces=False
    ).strip()
    seconds = time.perf_counter() - start
    return Answer(
        text, tuple(new.tolist()), n_prompt, seconds, _cache_bytes(result.past_key_values)
    )


def _cache_bytes(cache: Any) -> int:
    """Bytes of a transformers cache's keys and values."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes())
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _prompt_ids(tokenizer: Any, prompt: str) -> torch.Tensor:
    """Token ids of the prompt, int64 (1, n)."""
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    else:
        ids = tokenizer(prompt, verbose=False).input_ids
    return torch.tensor([ids], dtype=torch.int64)


def pad_token(model: Any, tokenizer: Any) -> int:
    """A pad id for `generate`, which asks for one even when nothing is padded."""
    eos = model.generation_config.eos_token_id
    first_eos = eos[0] if isinstance(eos, list) else eos
    for token in (model.generation_config.pad_token_id, tokenizer.pad_token_id, first_eos):
        if token is not None:
            return int(token)
    return 0
