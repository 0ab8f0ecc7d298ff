"""`dma-attn eval`: units, resumption, subjects, planted faults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dma_attn import DMAConfig, quantize
from dma_attn.cli import main
from dma_attn.evaluation import evaluate
from dma_attn.evaluation.capture import AttentionCall, visit_attention
from dma_attn.evaluation.errors import SettingError
from dma_attn.evaluation.evaluate import EvalSettings, run_eval
from dma_attn.evaluation.head_error import (
    measure_error_map,
    measure_head_errors,
    outlying_layers,
)
from dma_attn.evaluation.passkey import passkey_prompts
from dma_attn.evaluation.perplexity import evaluate_perplexity
from dma_attn.evaluation.records import Records
from dma_attn.evaluation.subjects import Subject
from dma_attn.evaluation.summary import summarise
from tests.tiny_model import byte_tokenizer, save_tiny_model, tiny_model

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EvalSettings:
    folder = tmp_path_factory.mktemp("model")
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    return EvalSettings(
        model=str(save_tiny_model(folder)), text=str(text), tokens=300, windows=3,
        lengths=(320, 400), depths=(0.0, 1.0), trials=2, prompts=2, prompt_tokens=150,
        new_tokens=4, subjects=("nvfp4", "cache"))


def quiet(_title: str, _steps: int) -> Any:
    return lambda _done, _all: None


def test_every_unit_once(settings: EvalSettings, tmp_path: Path) -> None:
    records = run_eval(settings, tmp_path / "a" / "eval.jsonl", quiet)
    counts: dict[tuple[str, str], int] = {}
    for line in records.lines:
        key = (line["task"], line["subject"])
        counts[key] = counts.get(key, 0) + 1
    each = {"perplexity": 3, "needles": 4, "agreement": 2}
    assert counts == {**{(t, s): n for t, n in each.items() for s in ("native", "nvfp4", "cache")},
                      ("layers", "nvfp4"): 1, ("maps", "nvfp4"): 1}
    summary = summarise(records)
    native, low, cached = summary.perplexity
    assert (native.subject, native.change) == ("native", None) and native.windows == 3
    assert low.change is not None and cached.change is not None
    assert low.change.low <= low.change.estimate <= low.change.high
    expected = 100 * (low.perplexity.estimate / native.perplexity.estimate - 1)
    assert low.change.estimate == pytest.approx(expected)
    assert len(summary.layers[0].by_layer) == 3 and summary.layers[0].mean > 0
    assert [r.trials for r in summary.needles] == [4] * 6
    assert all(a.new_tokens == 4 and 0 <= a.shared.estimate <= 4 for a in summary.agreement)


def test_native_is_what_perplexity_says(settings: EvalSettings, tmp_path: Path) -> None:
    some = replace(settings, metrics=("perplexity",), subjects=())
    records = run_eval(some, tmp_path / "eval.jsonl", quiet)
    text = Path(str(settings.text)).read_text()
    ids = torch.tensor(byte_tokenizer()(text, add_special_tokens=False).input_ids)
    found = evaluate_perplexity(tiny_model(), ids, 300, 3)
    assert summarise(records).perplexity[0].perplexity.estimate == pytest.approx(found.value)


def test_interrupted_and_resumed(settings: EvalSettings, tmp_path: Path) -> None:
    """A run that is killed after every few units, once within a line, gives the same lines."""
    some = replace(settings, metrics=("perplexity", "needles"), subjects=("nvfp4",))
    whole = run_eval(some, tmp_path / "whole.jsonl", quiet)
    path = tmp_path / "pieces.jsonl"
    add = Records.add
    for kept in (2, 3, 4):
        left = kept

        def stop(self: Records, *arguments: Any, **values: Any) -> None:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            add(self, *arguments, **values)

        with mock.patch.object(Records, "add", stop), pytest.raises(KeyboardInterrupt):
            run_eval(some, path, quiet)
        with path.open("ab") as file:
            file.write(b'{"task": "perplexity", "subj')
    measured = mock.Mock(wraps=evaluate.evaluate_perplexity)
    with mock.patch.object(evaluate, "evaluate_perplexity", measured):
        resumed = run_eval(some, path, quiet)
    assert measured.call_count == 0  # all six were done

    def values(records: Records) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if k != "seconds"} for line in records.lines]

    assert values(resumed) == values(whole)
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert again[1:] == resumed.lines


def test_other_settings_are_refused(settings: EvalSettings, tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    some = replace(settings, metrics=("perplexity",), subjects=(), windows=1)
    run_eval(some, path, quiet)
    run_eval(replace(some, subjects=("nvfp4",)), path, quiet)  # one more subject may join
    with pytest.raises(SettingError, match="tokens 300 instead of 200"):
        run_eval(replace(some, tokens=200), path, quiet)
    text = Path(str(some.text))
    before = text.read_text()
    text.write_text(before.replace("fox", "dog"))
    with pytest.raises(SettingError, match="text_sha256"):
        run_eval(some, path, quiet)
    text.write_text(before)
    run_eval(some, path, quiet)
    path.write_text('{"header": {"sett')  # a kill in the first line
    assert len(run_eval(some, path, quiet).lines) == 1
    path.write_text("something else\n")
    with pytest.raises(SettingError, match="expected results"):
        run_eval(some, path, quiet)


def test_subjects() -> None:
    assert Subject.parse("native") == Subject("native")
    assert Subject.parse("default,diag=512").config == DMAConfig(diag=512)
    cached = Subject.parse("cache:default,high=none,low=nvfp4,v_low=fp4,rotate_v=false")
    assert cached.k_config == DMAConfig(high="none", low="nvfp4")
    assert cached.v_options == {"v_low": "fp4", "rotate_v": False} and cached.cached
    cache = cached.make_cache(tiny_model(), 100)
    assert type(cache).__name__ == "DMACache"
    for bad in ("nonsense", "cache:default,rotate_v=1", "cache:what", "", "cache:default,v_low=x",
                "cache:default,pv=fp8", "cache:default,v_low=int4,v_low=fp4",
                "cache:default,granularity=tile"):
        with pytest.raises(ValueError):
            Subject.parse(bad)


@pytest.mark.parametrize("broken", [0, 2])
def test_a_planted_fault_is_named(broken: int) -> None:
    """Of eight layers in MXFP8, one in MXFP4 by the authors' rules."""
    model = tiny_model(num_hidden_layers=8)
    ids = torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(0))
    good = DMAConfig.preset("mxfp8")
    bad = DMAConfig(high="mxfp4", low="mxfp4", scale_rule="floor", smooth_k=False, rotate=False)
    assert outlying_layers(measure_head_errors(model, ids, good)) == []
    errors = measure_head_errors(model, ids, good)
    errors[5] = replace(errors[5], rel_l2=(0.1, float("nan"), 0.1, 0.1))
    assert outlying_layers(errors) == [5]
    errors = measure_head_errors(model, ids, good, layer_configs={broken: bad})
    assert outlying_layers(errors) == [broken]
    assert len(errors[0].rel_l2) == 4 and all(0 < x < 1 for e in errors for x in e.rel_l2)


def test_map_of_errors() -> None:
    """As from the logits of quantised Q and K, written out; nothing where nothing is quantised."""
    model = tiny_model()
    ids = torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(0))
    found = measure_error_map(model, ids, DMAConfig(high="none", low="int4", smooth_k=False,
                                                    rotate=False), layer=1)
    gaps: list[torch.Tensor] = []

    def expected(call: AttentionCall) -> None:
        if call.layer != 1:
            return
        q, k = call.q[0, found.head].float(), call.k[0, found.head // 2].float()
        seen = torch.ones(300, 300).tril().bool()

        def weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (q @ k.T * call.scale).masked_fill(~seen, -torch.inf)

        tile = torch.arange(300) // 128
        high = (tile[:, None] == tile) | (tile == 0)
        low = weights(*(quantize(x, "int4").dequantize(torch.float32) for x in (q, k)))
        exact = weights(q, k)
        gaps.append((torch.where(high, exact, low).softmax(-1) - exact.softmax(-1)).abs())

    visit_attention(model, ids, expected)
    pooled = torch.nn.functional.avg_pool2d(gaps[0][None, None], found.cell, ceil_mode=True)[0, 0]
    assert found.cell == 5 and found.weights.shape == (60, 60)
    torch.testing.assert_close(found.weights, pooled, rtol=1e-3, atol=1e-6)
    assert pooled[:25].max() == 0 < pooled[30:, 30:].max()
    assert not measure_error_map(model, ids, DMAConfig.preset("off")).weights.any()


@pytest.mark.parametrize("needles", [1, 4])
def test_needles_lie_where_asked(needles: int) -> None:
    tokenizer = byte_tokenizer()
    for depth in (0.0, 0.5, 1.0):
        texts, questions = passkey_prompts(tokenizer, 2000, 3, depth=depth, needles=needles)
        for text, question in zip(texts, questions, strict=True):
            asked = tokenizer.decode(question)
            at = tokenizer.decode(text).index(asked.strip())
            assert abs(at / 2000 - depth) < 0.2
            assert tokenizer.decode(text).count("Remember it. ") == needles + 1
    assert texts.shape == (3, 2000)
    for bad in ({"depth": 1.5}, {"needles": 9}):
        with pytest.raises(SettingError):
            passkey_prompts(tokenizer, 2000, 3, **bad)  # type: ignore[arg-type]


def test_command(
    settings: EvalSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "eval.jsonl"
    arguments = ["eval", settings.model, "--text", str(settings.text), "--tokens", "200",
                 "--windows", "2", "--metric", "perplexity", "--metric", "layers", "--config",
                 "mxfp4", "--out", str(out), "--device", "cpu"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "Perplexity" in shown and "Error of the attention" in shown and "mxfp4" in shown
    summary = json.loads((tmp_path / "eval.summary.json").read_text())
    assert [r["subject"] for r in summary["perplexity"]] == ["native", "mxfp4"]
    for extra, message in ((["--config", "what"], "--config"), (["--metric", "x"], "--metric"),
                           (["--tokens", "2000"], "--tokens"), (["--device", "x"], "--device"),
                           (["--dtype", "int8"], "--dtype"), (["--tasks", "x"], "--metric"),
                           (["--metric", "needles", "--length", "20"], "--length"),
                           (["--metric", "agreement", "--prompt-tokens", "1020"],
                            "--prompt-tokens")):
        assert main([*arguments[:-4], "--out", str(tmp_path / "other.jsonl"), *extra]) == 2
        assert message in capsys.readouterr().err
