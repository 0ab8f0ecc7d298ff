"""`dma-attn eval`: what configurations cost on a model, unit by unit, resumable.

    perplexity    a window of text; over a cache 16 tokens a step, from the first on, so that K's
                  mean is that of 16 tokens and not of a prompt
    needles       trials of passkey retrieval at a length and a depth
    layers        attention error of every layer and head on one window
    maps          |P_quantised - P| of one head on it
    agreement     one greedy generation
    tasks         a task of lm-evaluation-harness

Every subject gets the same windows, prompts and seeds, so that differences are paired.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .agreement import greedy
from .decode_perplexity import evaluate_decode_perplexity
from .environment import environment
from .errors import SettingError
from .harness import run_tasks
from .head_error import measure_error_map, measure_head_errors
from .models import BUILT_IN, load_model
from .passkey import evaluate_passkey, passkey_prompts
from .perplexity import check_window, evaluate_perplexity
from .records import Records
from .subjects import NATIVE, Subject
from .text import read_text, token_ids, windows

METRICS = ("perplexity", "needles", "layers", "maps", "agreement", "tasks")
DTYPES = ("float32", "bfloat16", "float16")
CACHE_STEP = 16  # tokens of a forward pass over a cache

Report = Callable[[int, int], None]
Stage = Callable[[str, int], Report]


@dataclass(frozen=True)
class EvalSettings:
    """What is measured; all but `subjects`, `metrics`, `tasks` and `device` decide the numbers.

    Attributes:
        dtype: Of weights and arithmetic, one of `DTYPES`.
        tokens, windows: Length and number of windows of text.
        lengths, depths, trials, needles: Of passkey retrieval: tokens of a text, places of the
            passkey from 0 to 1, trials of each pair, passkeys in a text.
        prompt_tokens, new_tokens, prompts: Of greedy generation.
        tasks, task_folder, task_limit: Of lm-evaluation-harness, as `harness.run_tasks` takes them.
    """

    model: str = BUILT_IN
    dtype: str = "float32"
    text: str | None = None
    tokens: int = 1024
    windows: int = 6
    lengths: tuple[int, ...] = (512, 1024)
    depths: tuple[float, ...] = (0.0, 0.5, 1.0)
    trials: int = 4
    needles: int = 1
    prompts: int = 4
    prompt_tokens: int = 512
    new_tokens: int = 16
    tasks: tuple[str, ...] = ()
    task_folder: str | None = None
    task_limit: int | None = None
    subjects: tuple[str, ...] = ("default", "cache")
    metrics: tuple[str, ...] = METRICS
    device: str = "cpu"

    def decisive(self) -> dict[str, Any]:
        """Those that the numbers depend on."""
        free = ("subjects", "metrics", "tasks", "device")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in free}


def run_eval(settings: EvalSettings, path: Path, stage: Stage) -> Records:
    """Measure what `path` does not have yet; returns all of it.

    Args:
        path: A file of JSON lines.
        stage: Called with a title and a number of units; reports (done, all) to what it returns.

    Raises:
        SettingError: a setting that cannot work, or a file of other settings.
    """
    _check(settings)
    subjects = [Subject.parse(x) for x in dict.fromkeys((NATIVE, *settings.subjects))]
    loaded = load_model(settings.model, device=settings.device,
                        dtype=getattr(torch, settings.dtype))
    facts = environment(settings.device) | {"head_dim": str(head_dim(loaded.model.config))}
    ids = token_ids(loaded.tokenizer, read_text(settings.text))
    _check_lengths(settings, loaded.model, loaded.tokenizer, ids)
    decisive = settings.decisive() | {
        "text_sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
        "model_sha256": fingerprint(loaded.model), "gpu": facts.get("gpu")}
    records = Records(path, decisive, facts)
    run = _Run(settings, records, loaded.model, loaded.tokenizer, ids, stage)
    for metric in settings.metrics:
        for subject in subjects:
            getattr(run, metric)(subject)
    return records


def fingerprint(model: Any) -> str:
    """SHA-256 of a model's config and of the beginning of each of its tensors."""
    found = hashlib.sha256(model.config.to_json_string().encode())
    for name, x in model.state_dict().items():
        found.update(name.encode() + x.flatten()[:256].float().cpu().numpy().tobytes())
    return found.hexdigest()


def _check_lengths(
    settings: EvalSettings, model: Any, tokenizer: Any, ids: torch.Tensor
) -> None:
    """Raise SettingError, with the names of what would help, before anything is measured."""

    def named(names: tuple[str, ...], check: Callable[[], object]) -> None:
        try:
            check()
        except SettingError as error:
            raise SettingError(error.problem, *names) from error

    s = settings
    wanted = set(s.metrics)
    if wanted & {"perplexity", "layers", "maps"}:
        check_window(model, s.tokens)
        windows(ids, s.tokens, s.windows if "perplexity" in wanted else 1)
    if "needles" in wanted:
        for n in s.lengths:
            named(("length",), partial(check_window, model, n + 32))
            named(("length",),
                  partial(passkey_prompts, tokenizer, n, 1, needles=s.needles))
    if "agreement" in wanted:
        names = "prompt_tokens", "new_tokens", "prompts"
        named(names, lambda: check_window(model, s.prompt_tokens + s.new_tokens))
        named(names, lambda: windows(ids, s.prompt_tokens, s.prompts))


class _Run:
    """One method a metric."""

    def __init__(
        self, settings: EvalSettings, records: Records, model: Any, tokenizer: Any,
        ids: torch.Tensor, stage: Stage,
    ) -> None:
        self.settings, self.records, self.ids = settings, records, ids
        self.model, self.tokenizer, self.stage = model, tokenizer, stage

    def window(self, index: int) -> torch.Tensor:
        n = self.settings.tokens
        return self.ids[index * n : (index + 1) * n]

    def perplexity(self, subject: Subject) -> None:
        units = [[i] for i in range(self.settings.windows)]

        def measure(unit: list[Any]) -> dict[str, Any]:
            window = self.window(unit[0])
            n = self.settings.tokens
            with subject.using(self.model):
                if subject.cached:
                    found = evaluate_decode_perplexity(
                        self.model, window, n, 1, lambda: subject.make_cache(self.model, n),
                        step=CACHE_STEP)
                else:
                    found = evaluate_perplexity(self.model, window, n, 1)
            return {"nll": found.window_nll[0], "seconds": round(found.seconds, 3)}

        self._each("perplexity", subject, units, measure)

    def needles(self, subject: Subject) -> None:
        s = self.settings
        units: list[list[Any]] = [[n, float(d)] for n in dict.fromkeys(s.lengths)
                                  for d in dict.fromkeys(s.depths)]

        def measure(unit: list[Any]) -> dict[str, Any]:
            n, depth = unit
            prompts = passkey_prompts(self.tokenizer, n, s.trials, units.index(unit), depth=depth,
                                      needles=s.needles)
            with subject.using(self.model):
                found = evaluate_passkey(
                    self.model, prompts, lambda: subject.make_cache(self.model, n + 32), batch=4)
            return {"found": found}

        self._each("needles", subject, units, measure)

    def layers(self, subject: Subject) -> None:
        config = subject.config
        if config is None or subject.cached:
            return  # attention as it is: no error

        def measure(_: list[Any]) -> dict[str, Any]:
            errors = measure_head_errors(self.model, self.window(0), config)
            return {"layers": [vars(x) for x in errors]}

        self._each("layers", subject, [[0]], measure)

    def maps(self, subject: Subject) -> None:
        config = subject.config
        if config is None or subject.cached:
            return

        def measure(_: list[Any]) -> dict[str, Any]:
            found = measure_error_map(self.model, self.window(0), config)
            weights = [[float(f"{x:.3g}") for x in row] for row in found.weights.tolist()]
            return {"layer": found.layer, "head": found.head, "tokens": found.tokens,
                    "cell": found.cell, "weights": weights}

        self._each("maps", subject, [[0]], measure)

    def agreement(self, subject: Subject) -> None:
        s = self.settings
        prompts = windows(self.ids, s.prompt_tokens, s.prompts)

        def measure(unit: list[Any]) -> dict[str, Any]:
            return {"tokens": greedy(self.model, self.tokenizer, prompts[unit[0]], subject,
                                     s.new_tokens)}

        self._each("agreement", subject, [[i] for i in range(s.prompts)], measure)

    def tasks(self, subject: Subject) -> None:
        s = self.settings

        def measure(unit: list[Any]) -> dict[str, Any]:
            return {"results": run_tasks(self.model, self.tokenizer, subject, unit,
                                         folder=s.task_folder, limit=s.task_limit)}

        self._each("tasks", subject, [[x] for x in s.tasks], measure)

    def _each(
        self, task: str, subject: Subject, units: list[list[Any]],
        measure: Callable[[list[Any]], dict[str, Any]],
    ) -> None:
        missing = [x for x in units if not self.records.has(task, subject.label, x)]
        if not missing:
            return
        report = self.stage(f"{task}: {subject.label}", len(missing))
        for i, unit in enumerate(missing):
            self.records.add(task, subject.label, unit, **measure(unit))
            report(i + 1, len(missing))


def head_dim(config: Any) -> int:
    """Of a transformers config's attention."""
    config = config.get_text_config()
    return int(getattr(config, "head_dim", None)
               or config.hidden_size // config.num_attention_heads)


def _check(settings: EvalSettings) -> None:
    least = {"tokens": 2, "windows": 1, "trials": 1, "prompts": 1, "prompt_tokens": 2,
             "new_tokens": 1}
    for name, size in least.items():
        if getattr(settings, name) < size:
            raise SettingError(f"expected at least {size}, got {getattr(settings, name)}", name)
    if settings.dtype not in DTYPES:
        raise SettingError(f"expected one of {', '.join(DTYPES)}, got {settings.dtype}", "dtype")
    unknown = [x for x in settings.metrics if x not in METRICS]
    if settings.tasks and "tasks" not in settings.metrics:
        raise SettingError("expected tasks among the metrics", "metric")
    if settings.metrics == ("tasks",) and not settings.tasks:
        raise SettingError("expected at least one", "tasks")
    if unknown or not settings.metrics:
        raise SettingError(f"expected some of {', '.join(METRICS)}, got {unknown}", "metric")


def checked_subjects(texts: Sequence[str]) -> tuple[str, ...]:
    """Labels that `Subject.parse` reads.

    Raises:
        SettingError: one is none.
    """
    for text in texts:
        try:
            Subject.parse(text)
        except ValueError as error:
            raise SettingError(str(error), "config") from None
    return tuple(texts)
