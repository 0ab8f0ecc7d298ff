"""Passkey retrieval: five digits somewhere in a long text, asked for at its end.

The text goes in as a prompt, in one step of the model's attention; the question and the digits
follow as one decode step, which reads the cache. A trial succeeds when each digit is the likeliest
token after those before it, so exactly when greedy decoding would answer with all five. (Mohtashami
and Jaggi, arXiv 2305.16300, with digits at a random depth.)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from .errors import SettingError

FILLER = ("The grass is green. The sky is blue. The sun is yellow. Here we go. "
          "There and back again. ")
THINGS = ("apple", "river", "stone", "cloud", "tiger", "lemon", "piano", "robot")
DIGITS = 5


def passkey_prompts(
    tokenizer: Any,
    tokens: int,
    trials: int,
    seed: int = 0,
    *,
    depth: float | None = None,
    needles: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts (trials, tokens), and questions with their answers (trials, question + 5), int64.

    Args:
        depth: Where the passkey is, 0 at the text's begin to 1 at its end; None: anywhere.
        needles: Passkeys in the text, each of a thing; with several, others are anywhere and the
            question is about one of them.

    Raises:
        SettingError: fewer tokens than the passkeys and some filler need, no trials, a depth or a
            number of needles out of range.
    """
    if trials < 1:
        raise SettingError(f"expected at least 1, got {trials}", "trials")
    if depth is not None and not 0 <= depth <= 1:
        raise SettingError(f"expected 0 to 1, got {depth}", "depth")
    if not 1 <= needles <= len(THINGS):
        raise SettingError(f"expected 1 to {len(THINGS)}, got {needles}", "needles")
    random_ = random.Random(seed)
    start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    start += _ids(tokenizer, "There is a pass key hidden in this text. Remember it. ")
    filler = _ids(tokenizer, FILLER)
    texts, questions = [], []
    for _ in range(trials):
        of = [f" of the {x}" for x in random_.sample(THINGS, needles)] if needles > 1 else [""]
        keys = ["".join(random_.choice("0123456789") for _ in range(DIGITS)) for _ in of]
        hidden = [_ids(tokenizer, f"The pass key{thing} is {key}. Remember it. {key} is the pass "
                                  f"key{thing}. ") for thing, key in zip(of, keys, strict=True)]
        room = tokens - len(start) - sum(map(len, hidden))
        if room < len(filler):
            raise SettingError(f"expected at least {tokens - room + len(filler)}, got {tokens}",
                               "tokens")
        around = (filler * (room // len(filler) + 1))[:room]
        places = room // len(filler) + 1
        at = [random_.randrange(places) for _ in of]
        if depth is not None:
            at[0] = round(depth * (places - 1))
        text = list(start)
        for place in range(places):
            for needle in (x for x, p in zip(hidden, at, strict=True) if p == place):
                text += needle
            text += around[place * len(filler) : (place + 1) * len(filler)]
        texts.append(text)
        questions.append(_ids(tokenizer, f"\nThe pass key{of[0]} is {keys[0]}"))
        answer = questions[-1][-DIGITS:]
        if tokenizer.decode(answer, clean_up_tokenization_spaces=False).strip() != keys[0]:
            raise SettingError("expected a tokenizer that takes digits one by one", "model")
    longest = max(map(len, questions))
    if min(map(len, questions)) != longest:
        raise SettingError("expected a tokenizer that takes each of the things as one word",
                           "model")
    return torch.tensor(texts), torch.tensor(questions)


@torch.no_grad()
def evaluate_passkey(
    model: Any,
    prompts: tuple[torch.Tensor, torch.Tensor],
    make_cache: Callable[[], Any],
    *,
    batch: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> list[bool]:
    """Whether the model finds the digits, trial by trial, over caches of `batch` trials each.

    Args:
        prompts: Of `passkey_prompts`.
        make_cache: An empty transformers cache for the model.
        progress: Called with (trials done, trials in all).
    """
    texts, questions = prompts
    found: list[bool] = []
    for begin in range(0, len(texts), batch):
        cache = make_cache()
        rows = slice(begin, begin + batch)
        text, asked = (x[rows].to(model.device) for x in (texts, questions))
        model(input_ids=text, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = model(input_ids=asked[:, :-1], past_key_values=cache, use_cache=True).logits
        right = logits[:, -DIGITS:].argmax(-1) == asked[:, -DIGITS:]
        found += right.all(1).tolist()
        if progress:
            progress(len(found), len(texts))
    return found


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
