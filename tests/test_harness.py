"""Local tasks of lm-evaluation-harness: the same scores through `eval` and through it directly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

from dma_attn.evaluation.errors import SettingError
from dma_attn.evaluation.evaluate import EvalSettings, run_eval
from dma_attn.evaluation.harness import run_tasks
from dma_attn.evaluation.subjects import Subject
from dma_attn.evaluation.summary import summarise
from dma_attn.integrations.transformers import DMACache, enable_dma
from tests.tiny_model import byte_tokenizer, save_tiny_model, tiny_model


def tokenizer_with_an_end() -> Any:
    """The harness needs a token that ends a text: here byte 0."""
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = chr(256)
    return tokenizer


COMMON = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
TASKS = {
    "local_choice": """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
""",
    "local_generate": """
output_type: generate_until
doc_to_target: "{{expected}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 3, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten long questions, so that low tiles matter; the expected texts are what the model writes to
    half of them."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    model, tokenizer = tiny_model(), tokenizer_with_an_end()
    lines = []
    for i in range(10):
        question = f"{i} " + "the quick brown fox jumps over the lazy dog " * 8
        ids = tokenizer(question, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        written = tokenizer.decode(out[0, ids.shape[1]:]).split("\n")[0]
        lines.append({"question": question, "choices": [" a", " b", " c"], "answer": i % 3,
                      "expected": written if i % 2 else "nothing"})
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    data = tasks / "data.json"
    data.write_text("\n".join(map(json.dumps, lines)))
    for task, own in TASKS.items():
        (tasks / f"{task}.yaml").write_text(COMMON.format(task=task, data=data) + own)
    return tasks


def directly(model: Any, folder: Path, task: str) -> dict[str, Any]:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer_with_an_end(), batch_size=1), tasks=[task],
        task_manager=TaskManager(include_path=str(folder)), bootstrap_iters=0)
    return dict(found["results"][task])


@pytest.mark.parametrize("task, metric", [("local_choice", "acc,none"),
                                          ("local_generate", "exact_match,none")])
def test_same_scores(folder: Path, tmp_path: Path, task: str, metric: str) -> None:
    saved = save_tiny_model(tmp_path / "model")
    tokenizer_with_an_end().save_pretrained(saved)
    settings = EvalSettings(
        model=str(saved), tasks=(task,), metrics=("tasks",),
        task_folder=str(folder), tokens=100, windows=1, subjects=("mxfp4", "cache"))
    made = mock.Mock(wraps=DMACache)
    with mock.patch("dma_attn.integrations.transformers.DMACache", made):
        records = run_eval(settings, tmp_path / "eval.jsonl", lambda *_: lambda *_: None)
    rows = {r.subject: r for r in summarise(records).tasks if r.metric == metric.split(",")[0]}
    assert set(rows) == {"native", "mxfp4", "cache"}
    model = tiny_model()
    assert rows["native"].value == directly(model, folder, task)[metric]
    assert rows["mxfp4"].native == rows["native"].value
    enable_dma(model, "mxfp4")
    assert rows["mxfp4"].value == directly(model, folder, task)[metric]
    assert all(r.standard_error is not None for r in rows.values())
    if task == "local_generate":
        assert rows["native"].value >= 0.5
        assert made.call_count == 10  # one a question; choices need none


def test_limits_and_mistakes(folder: Path, tmp_path: Path) -> None:
    model = tiny_model()
    subject = Subject.parse("native")
    one = run_tasks(model, tokenizer_with_an_end(), subject, ["local_choice"], folder=folder,
                    limit=1)
    assert one["local_choice"]["acc,none"] in (0.0, 1.0)
    with pytest.raises(SettingError, match="no_such_task"):
        run_tasks(model, tokenizer_with_an_end(), subject, ["no_such_task"], folder=folder)
    assert replace(EvalSettings(), tasks=("x",)).decisive() == EvalSettings().decisive()
