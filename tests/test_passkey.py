"""Passkey retrieval: prompts, scoring and the interval."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dma_attn import DMAConfig
from dma_attn.evaluation.attention import using_config
from dma_attn.evaluation.errors import SettingError
from dma_attn.evaluation.passkey import evaluate_passkey, passkey_prompts
from dma_attn.integrations.transformers import DMACache
from tests.tiny_model import tiny_model


class Characters:
    """A tokenizer of characters; `pairs` makes two digits one token."""

    bos_token_id = 1

    def __init__(self, pairs: bool = False) -> None:
        self.pattern = r"\d\d|[\s\S]" if pairs else r"[\s\S]"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [sum(ord(c) << 8 * i for i, c in enumerate(x))
                              for x in re.findall(self.pattern, text)]}

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        return "".join(chr(x & 255) + (chr(x >> 8) if x >> 8 else "") for x in ids)


class Reader:
    """A model that answers from the text that it was given, but for `wrong` of its digits."""

    device = torch.device("cpu")

    def __init__(self, wrong: int | None = None) -> None:
        self.wrong = wrong

    def __call__(self, input_ids: torch.Tensor, past_key_values: list[Any], use_cache: bool,
                 logits_to_keep: int = 0) -> Any:
        if not past_key_values:
            assert logits_to_keep == 1
            past_key_values.append(input_ids)
            return None
        logits = torch.zeros(*input_ids.shape, 256)
        for row, text in enumerate(past_key_values[0].tolist()):
            found = re.search(r"The pass key is (\d{5})\.", "".join(map(chr, text)))
            assert found
            for i, digit in enumerate(found[1]):
                logits[row, i - 5, ord(digit) + (i == self.wrong)] = 1.0
        return SimpleNamespace(logits=logits)


def test_prompts() -> None:
    texts, questions = passkey_prompts(Characters(), 400, 30)
    assert texts.shape == (30, 400) and (texts[:, 0] == 1).all()
    depths = set()
    for text, question in zip(texts.tolist(), questions.tolist(), strict=True):
        words, asked = "".join(map(chr, text)), "".join(map(chr, question))
        key = asked[-5:]
        assert asked == f"\nThe pass key is {key}"
        needle = f"The pass key is {key}. Remember it. {key} is the pass key. "
        assert words.count(needle) == 1 and words.count(key) == 2
        depths.add(words.index(needle))
    assert len(depths) == 4  # all that there are
    again = passkey_prompts(Characters(), 400, 30)
    other = passkey_prompts(Characters(), 400, 30, seed=1)
    assert torch.equal(texts, again[0]) and not torch.equal(texts, other[0])


def test_bad_prompts() -> None:
    with pytest.raises(SettingError, match="at least 2"):
        passkey_prompts(Characters(), 100, 1)
    with pytest.raises(SettingError, match="at least 1"):
        passkey_prompts(Characters(), 400, 0)
    with pytest.raises(SettingError, match="one by one"):
        passkey_prompts(Characters(pairs=True), 400, 1)


@pytest.mark.parametrize("wrong", [None, 0, 4], ids=str)
def test_scores(wrong: int | None) -> None:
    prompts = passkey_prompts(Characters(), 300, 5)
    seen = []
    found = evaluate_passkey(Reader(wrong), prompts, list, batch=2,
                             progress=lambda *done: seen.append(done))
    assert found == [wrong is None] * 5
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_over_a_mixed_cache() -> None:
    """A model that knows nothing finds nothing; the question reads low tokens."""
    model = tiny_model(max_position_embeddings=600, vocab_size=128).eval()
    prompts = passkey_prompts(Characters(), 500, 2)
    caches: list[Any] = []

    def make() -> Any:
        caches.append(DMACache(model.config))
        return caches[-1]

    with using_config(model, DMAConfig.preset("off")):
        assert evaluate_passkey(model, prompts, make) == [False, False]
    assert [c.get_seq_length() for c in caches] == [500 + prompts[1].shape[1] - 1]
