"""Passkey retrieval: five digits somewhere in a long text, asked for at its end, over a KV cache.

The text goes in as a prompt, in one step that attends in 16 bits; the question and the digits
follow as one decode step, which reads the cache. A trial succeeds when each digit is the likeliest
token after those before it, so exactly when greedy decoding would answer with all five. (Mohtashami
and Jaggi, arXiv 2305.16300, with digits at a random depth.)
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import SettingError

FILLER = ("The grass is green. The sky is blue. The sun is yellow. Here we go. "
          "There and back again. ")
QUESTION = "\nThe pass key is"
DIGITS = 5


@dataclass(frozen=True)
class Interval:
    """A paired difference of success rates, and its 95 % interval."""

    difference: float
    low: float
    high: float


def paired_interval(before: Sequence[bool], after: Sequence[bool]) -> Interval:
    """after - before over the same trials, with half a trial added to each of the four outcomes
    (Agresti and Min, Statistics in Medicine 24, 2005).

    Raises:
        ValueError: no trials, or not the same number.
    """
    if not before or len(before) != len(after):
        raise ValueError(f"expected as many trials of both, got {len(before)} and {len(after)}")
    gained = sum(not a and b for a, b in zip(before, after, strict=True)) + 0.5
    lost = sum(a and not b for a, b in zip(before, after, strict=True)) + 0.5
    n = len(before) + 2
    middle = (gained - lost) / n
    half = 1.959964 * math.sqrt(gained + lost - (gained - lost) ** 2 / n) / n
    return Interval((sum(after) - sum(before)) / len(before), middle - half, middle + half)


def passkey_prompts(
    tokenizer: Any, tokens: int, trials: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts (trials, tokens), and questions with their answers (trials, question + 5), int64.

    Raises:
        SettingError: fewer tokens than a passkey and some filler need, or no trials.
    """
    if trials < 1:
        raise SettingError(f"expected at least 1, got {trials}", "trials")
    random_ = random.Random(seed)
    start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    start += _ids(tokenizer, "There is a pass key hidden in this text. Remember it. ")
    filler = _ids(tokenizer, FILLER)
    texts, questions = [], []
    for _ in range(trials):
        key = "".join(random_.choice("0123456789") for _ in range(DIGITS))
        needle = _ids(tokenizer, f"The pass key is {key}. Remember it. {key} is the pass key. ")
        room = tokens - len(start) - len(needle)
        if room < len(filler):
            raise SettingError(f"expected at least {tokens - room + len(filler)}, got {tokens}",
                               "tokens")
        around = (filler * (room // len(filler) + 1))[:room]
        depth = random_.randrange(room // len(filler) + 1) * len(filler)
        texts.append(start + around[:depth] + needle + around[depth:])
        questions.append(_ids(tokenizer, f"{QUESTION} {key}"))
        answer = questions[-1][-DIGITS:]
        if tokenizer.decode(answer, clean_up_tokenization_spaces=False).strip() != key:
            raise SettingError("expected a tokenizer that takes digits one by one", "model")
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
