"""Perplexity, per-layer error, heat map and answers, on tiny random models."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from dma_attn import DMAConfig
from dma_attn.evaluation.attention import using_config
from dma_attn.evaluation.capture import AttentionCall, visit_attention
from dma_attn.evaluation.errors import SettingError
from dma_attn.evaluation.generate import generate_answer, shared_prefix
from dma_attn.evaluation.layer_error import attention_map, measure_layer_error
from dma_attn.evaluation.perplexity import evaluate_perplexity
from dma_attn.evaluation.text import python_topics, read_text, token_ids, windows
from tests.tiny_model import byte_tokenizer, save_tiny_model, tiny_model

ROOT = Path(__file__).resolve().parent.parent
PLAIN = DMAConfig(smooth_k=False, rotate=False)
OFF = DMAConfig.preset("off")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def random_ids(count: int) -> torch.Tensor:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def direct_perplexity(model: Any, ids: torch.Tensor, window: int, count: int) -> float:
    """Token by token from the model's own logits, in float64."""
    total = 0.0
    for w in range(count):
        part = ids[w * window : (w + 1) * window]
        log_p = model(part[None]).logits[0].double().log_softmax(-1)
        total -= sum(float(log_p[i - 1, part[i]]) for i in range(1, window))
    return math.exp(total / (count * (window - 1)))


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_perplexity_equals_a_direct_computation(model: Any, batch_size: int) -> None:
    ids = random_ids(200)
    steps: list[tuple[int, int]] = []
    result = evaluate_perplexity(
        model, ids, 37, 5, batch_size=batch_size, progress=lambda *step: steps.append(step)
    )
    assert result.value == pytest.approx(direct_perplexity(model, ids, 37, 5), rel=1e-5)
    assert result.value == pytest.approx(math.exp(sum(result.window_nll) / 5))
    assert (len(result.window_nll), result.tokens) == (5, 5 * 36)
    assert steps[-1] == (5, 5) and steps == sorted(steps)


def test_perplexity_of_a_model_that_scales_its_logits() -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        logits_scaling=7.0,
        initializer_range=1.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model, ids = GraniteForCausalLM(config).eval(), random_ids(80)
    result = evaluate_perplexity(model, ids, 40, 2, batch_size=2)
    assert result.value == pytest.approx(direct_perplexity(model, ids, 40, 2), rel=1e-5)


def test_logits_are_made_a_few_rows_at_a_time() -> None:
    model = tiny_model(max_position_embeddings=4096, num_hidden_layers=1)
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda _m, _args, out: rows.append(out[..., 0].numel()))
    evaluate_perplexity(model, random_ids(2500), 2500, 1)
    assert max(rows) <= 1024 and sum(rows) >= 2499


def test_every_configuration_sees_the_same_windows(model: Any) -> None:
    seen: dict[str, list[torch.Tensor]] = {}
    for label in ("native", "default", "paper"):
        seen[label] = []
        hook = model.model.embed_tokens.register_forward_pre_hook(
            lambda _m, args, label=label: seen[label].append(args[0].clone())
        )
        config = None if label == "native" else DMAConfig.preset(label)
        with using_config(model, config):
            evaluate_perplexity(model, random_ids(600), 150, 3)
        hook.remove()
    lengths = {label: len(calls) for label, calls in seen.items()}
    assert len(set(lengths.values())) == 1
    for label in ("default", "paper"):
        pairs = zip(seen["native"], seen[label], strict=True)
        assert all(torch.equal(native, ours) for native, ours in pairs)


def test_configurations_change_the_perplexity_in_order(model: Any) -> None:
    ids = random_ids(1200)
    values = {}
    for label in ("native", "off", "default", "nvfp4"):
        with using_config(model, None if label == "native" else DMAConfig.preset(label)):
            values[label] = evaluate_perplexity(model, ids, 400, 3).window_nll
    difference = {
        label: sum(abs(a - b) for a, b in zip(values[label], values["native"], strict=True))
        for label in ("off", "default", "nvfp4")
    }
    assert difference["off"] < 1e-4 < difference["default"]
    assert difference["off"] < 1e-4 < difference["nvfp4"]


def test_perplexity_errors(model: Any) -> None:
    ids = random_ids(100)
    with pytest.raises(ValueError, match=r"3 windows x 40 tokens = 120 tokens, got one of 100"):
        evaluate_perplexity(model, ids, 40, 3)
    with pytest.raises(ValueError, match=r"at most the model's 1024 positions, got 2000"):
        evaluate_perplexity(model, random_ids(2000), 2000, 1)
    with pytest.raises(ValueError, match="batch_size"):
        evaluate_perplexity(model, ids, 10, 1, batch_size=0)
    with pytest.raises(ValueError, match="length >= 2"):
        windows(ids, 1, 1)
    with pytest.raises(ValueError, match="one dimension"):
        windows(ids[None], 10, 1)


def test_windows_are_consecutive() -> None:
    assert windows(torch.arange(11), 3, 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_text(tmp_path: Path) -> None:
    from pydoc_data.topics import topics

    text = python_topics()
    assert text.startswith(topics[min(topics)]) and len(text) > 300_000
    (tmp_path / "words.txt").write_text("naïve", encoding="utf-8")
    assert read_text(tmp_path / "words.txt") == "naïve"
    assert token_ids(byte_tokenizer(), "naïve").numel() == 6
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(SettingError, match=r"text: .*empty"):
        read_text(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"na\xefve")
    with pytest.raises(SettingError, match=r"latin\.txt, whose byte 2 is not UTF-8"):
        read_text(tmp_path / "latin.txt")


def test_using_config_restores_the_models_attention(model: Any) -> None:
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="inside"), using_config(model, DMAConfig()):
        assert model.config._attn_implementation == "dma"
        raise RuntimeError("inside")
    assert model.config._attn_implementation == before


def test_visitor_sees_every_layer_exactly(model: Any) -> None:
    calls: list[AttentionCall] = []
    ids = random_ids(70)
    visit_attention(model, ids, calls.append)
    assert [call.layer for call in calls] == [0, 1, 2]
    assert {call.q.shape for call in calls} == {(1, 4, 70, 16)}
    assert {call.k.shape for call in calls} == {(1, 2, 70, 16)}
    assert model.config._attn_implementation != "dma_recorder"
    for call in calls:
        k, v = (x.double().repeat_interleave(2, 1) for x in (call.k, call.v))
        logits = call.q.double() @ k.transpose(-1, -2) * 16**-0.5
        hidden = torch.ones(70, 70, dtype=torch.bool).triu(1)
        expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        torch.testing.assert_close(call.exact.double(), expected, rtol=1e-4, atol=1e-5)


def test_layer_error_of_a_sliding_window_model() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(**{**tiny_model().config.to_diff_dict(), "sliding_window": 50})
    result = measure_layer_error(MistralForCausalLM(config).eval(), random_ids(300), {"off": OFF})
    assert all(row.rel_l2 < 1e-5 for row in result.layers["off"])


def test_layer_error_finds_the_layer_with_an_outlier_channel() -> None:
    """A large constant key channel ruins FP4 keys in its layer alone; smoothing removes it."""
    model = tiny_model(attention_bias=True)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[7] += (
            60.0  # turned least by the rotary embedding
        )
    low = {"plain": PLAIN.replace(diag=0, sink=0), "smooth": DMAConfig(diag=0, sink=0)}
    steps: list[tuple[int, int]] = []
    result = measure_layer_error(
        model, random_ids(300), {**low, "off": OFF}, progress=lambda *step: steps.append(step)
    )
    assert steps == [(1, 3), (2, 3), (3, 3)]
    plain = [row.rel_l2 for row in result.layers["plain"]]
    smooth = [row.rel_l2 for row in result.layers["smooth"]]
    assert [row.layer for row in result.layers["plain"]] == [0, 1, 2]
    assert max(plain) == plain[1] and plain[1] > 2 * smooth[1]
    assert all(row.rel_l2 < 1e-5 for row in result.layers["off"])
    assert all(
        0 < row.cosine < 1 and row.worst_row >= row.rel_l2 for row in result.layers["smooth"]
    )


def test_layer_error_of_a_planted_worse_layer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer attends with everything in FP4; the measurement names that layer by index."""
    from dma_attn import dma_attention
    from dma_attn.evaluation import layer_error

    calls = iter(range(3))

    def planted(*args: torch.Tensor, config: DMAConfig, **options: Any) -> torch.Tensor:
        worse = PLAIN.replace(diag=0, sink=0) if next(calls) == 2 else config
        return dma_attention(*args, config=worse, **options)

    monkeypatch.setattr(layer_error, "dma_attention", planted)
    int8 = DMAConfig(high="int8", low="int8")
    rows = measure_layer_error(model, random_ids(300), {"int8": int8}).layers["int8"]
    assert max(rows, key=lambda row: row.rel_l2).layer == 2
    assert rows[2].rel_l2 > 3 * max(rows[0].rel_l2, rows[1].rel_l2)


@pytest.mark.parametrize("tokens", [100, 300])
def test_attention_map_holds_weights(model: Any, tokens: int) -> None:
    result = measure_layer_error(model, random_ids(tokens), {"off": OFF}, map_layer=2)
    found = result.attention_map
    assert (found.layer, found.tokens, found.cell) == (2, tokens, -(-tokens // 128))
    rows = -(-tokens // found.cell)
    assert found.weights.shape == (rows, rows)
    assert float(found.weights.triu(1).sum()) == 0
    torch.testing.assert_close(
        found.weights[:-1].sum(1) * found.cell, torch.ones(rows - 1), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(ValueError, match="a layer from 0 to 2, got 3"):
        measure_layer_error(model, random_ids(20), {}, map_layer=3)


def test_attention_map_takes_the_head_that_looks_far() -> None:
    q, k = torch.zeros(1, 2, 512, 16), torch.zeros(1, 2, 512, 16)
    q[0, 1], k[0, 1, 200] = 10.0, 10.0  # head 1 looks at key 200, far from sink and diagonal
    call = AttentionCall(0, q, k, k, 0.25, None, q)
    found = attention_map(call)
    assert (found.head, found.cell) == (1, 4)
    assert float(found.weights[100:, 50].min()) == pytest.approx(0.25, rel=1e-3)


def test_answers(model: Any) -> None:
    tokenizer = byte_tokenizer()
    prompt = python_topics()[:300]
    native = generate_answer(model, tokenizer, prompt, max_new_tokens=8)
    off = generate_answer(model, tokenizer, prompt, config=OFF, max_new_tokens=8)
    assert native.tokens == off.tokens and len(native.tokens) == 8
    assert native.prompt_tokens == 300 + len("<user><assistant>")
    assert shared_prefix(native, off) == 8
    dma = generate_answer(model, tokenizer, prompt, config=DMAConfig(), max_new_tokens=8)
    assert len(dma.tokens) == 8 and 0 <= shared_prefix(native, dma) <= 8
    tokens = native.prompt_tokens + 8 - 1  # the last one is not read again
    config = model.config
    kept = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens
    assert native.cache_bytes == dma.cache_bytes == 2 * kept * model.dtype.itemsize
    mixed = generate_answer(model, tokenizer, prompt, config=DMAConfig(), max_new_tokens=8,
                            mixed_cache=True)
    assert len(mixed.tokens) == 8 and mixed.cache_bytes != native.cache_bytes
    with pytest.raises(ValueError, match="DMA attention"):
        generate_answer(model, tokenizer, prompt, mixed_cache=True)
    with pytest.raises(ValueError, match="1024 tokens"):
        generate_answer(model, tokenizer, prompt * 4)
    with pytest.raises(ValueError, match="empty"):
        generate_answer(model, tokenizer, "  ")


def test_perplexity_table_script(tmp_path: Path) -> None:
    """The script measures, writes CSV with its circumstances, and fails on rows that are off."""
    folder = save_tiny_model(tmp_path / "tiny", max_position_embeddings=2048, num_hidden_layers=1)
    command = [sys.executable, str(ROOT / "benchmarks" / "perplexity_table.py")]
    command += ["--model", str(folder), "--device", "cpu", "--rows", "default", "--limit", "1"]
    command += ["--windows", "2048", "--out", str(tmp_path / "out" / "perplexity.csv")]
    command += ["--tolerance", "-1"]  # no row is that close
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1 and "default at 2048" in done.stdout, done.stderr
    lines = (tmp_path / "out" / "perplexity.csv").read_text().splitlines()
    facts = [line for line in lines if line.startswith("# ")]
    assert any(line.startswith("# torch: ") for line in facts)
    header, *rows = (line.split(",") for line in lines[len(facts) :])
    assert [row[:3] for row in rows] == [["native", "2048", "1"], ["default", "2048", "1"]]
    value, change = (
        float(rows[1][header.index(name)]) for name in ("perplexity", "change_percent")
    )
    assert value == pytest.approx(float(rows[0][3]) * (1 + change / 100), rel=1e-4)
