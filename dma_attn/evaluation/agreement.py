"""Agreement of greedy generations: how far a subject writes what the model writes by itself."""

from __future__ import annotations

from typing import Any

import torch

from .generate import pad_token
from .subjects import Subject


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, prompt: torch.Tensor, subject: Subject, new: int
           ) -> list[int]:
    """`new` greedy tokens (an end does not stop it) after a prompt, int64 (S,)."""
    ids = prompt[None].to(model.device)
    with subject.using(model):
        out = model.generate(
            ids, past_key_values=subject.make_cache(model, ids.shape[1] + new),
            attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new,
            do_sample=False, pad_token_id=pad_token(model, tokenizer),
        )
    return list(out[0, ids.shape[1]:].tolist())


def shared(first: list[int], second: list[int]) -> int:
    """Tokens before the first difference."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
