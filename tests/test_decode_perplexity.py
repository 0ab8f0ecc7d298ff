"""Perplexity through the decode path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from dma_attn import DMAConfig
from dma_attn.evaluation.attention import using_config
from dma_attn.evaluation.decode_perplexity import evaluate_decode_perplexity
from dma_attn.evaluation.perplexity import evaluate_perplexity
from dma_attn.integrations.transformers import DMACache
from tests.tiny_model import tiny_model

OFF = DMAConfig.preset("off")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(max_position_embeddings=512).eval()


def random_ids(n: int) -> torch.Tensor:
    return torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("step", [1, 16])
def test_16_bit_caches_equal_one_pass(model: Any, step: int) -> None:
    ids = random_ids(80)
    whole = evaluate_perplexity(model, ids, 40, 2)
    none = DMAConfig(high="none", low="none")
    with using_config(model, OFF):
        for make in (lambda: DynamicCache(config=model.config),
                     lambda: DMACache(model.config, none, v_low="none")):
            found = evaluate_decode_perplexity(model, ids, 40, 2, make, step=step)
            assert found.value == pytest.approx(whole.value, rel=1e-4)
            assert found.window_nll == pytest.approx(whole.window_nll, rel=1e-4)
            assert found.tokens == whole.tokens == 78


def test_low_tokens_change_it(model: Any) -> None:
    """Of a window longer than the high tiles, and hardly."""
    ids = random_ids(400)
    seen = []
    with using_config(model, OFF):
        whole = evaluate_perplexity(model, ids, 400, 1)
        found = evaluate_decode_perplexity(model, ids, 400, 1, lambda: DMACache(model.config),
                                           step=16, progress=lambda *a: seen.append(a))
    assert 1e-7 < abs(found.value / whole.value - 1) < 0.05
    assert seen[-1] == (399, 399)


def test_bad_settings(model: Any) -> None:
    with pytest.raises(ValueError, match="step"):
        evaluate_decode_perplexity(model, random_ids(40), 40, 1, dict, step=17)
    with pytest.raises(ValueError, match="512 positions"):
        evaluate_decode_perplexity(model, random_ids(600), 600, 1, dict)
