"""The main job: every configuration's quality on one model, measured on the same real text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import DMAConfig
from .attention import using_config
from .environment import environment
from .generate import Answer, generate_answer
from .layer_error import LayerErrorResult, measure_layer_error
from .models import BUILT_IN, load_model
from .perplexity import PerplexityResult, evaluate_perplexity
from .text import python_topics, read_text, token_ids, windows

NATIVE = "native"
_STANDARD = ("paper", "default", "default,high=none", "nvfp4", "mxfp8", "hopper")
_CHAT = "default"
MIXED = "default, mixed cache"
_LAYER_TOKENS = 1024

Report = Callable[[int, int], None]
Stage = Callable[[str, int], Report]


def standard_configs() -> dict[str, DMAConfig | None]:
    """What the demo always measures, by a label that `DMAConfig.parse` reads.

    None, labelled "native", is the model's own attention.
    """
    return {
        NATIVE: None,
        **{label: DMAConfig.parse(label) for label in _STANDARD},
    }


def default_prompt() -> str:
    """A question after a page of real text, long enough to reach low-precision tiles."""
    page = python_topics()[:2400].rpartition("\n\n")[0]
    return f"{page}\n\nIn two sentences: what is this text about, and what is it used for?"


@dataclass(frozen=True)
class DemoSettings:
    """What `run_demo` measures; `tokens` is the length of a window.

    `extra` adds configurations under the label `str(config)`; one that is standard is left out.
    """

    model: str = BUILT_IN
    tokens: int = 1024
    windows: int = 6
    device: str = "cpu"
    text: str | None = None
    prompt: str | None = None
    max_new_tokens: int = 64
    extra: Sequence[DMAConfig] = ()


@dataclass(frozen=True)
class DemoResults:
    """Everything that the report shows. `answers` holds "native", the DMA answer, "default", and
    the same over a `DMACache`, `MIXED`."""

    settings: DemoSettings
    configs: dict[str, DMAConfig | None]
    perplexity: dict[str, PerplexityResult]
    layer_error: LayerErrorResult
    prompt: str
    answers: dict[str, Answer]
    environment: dict[str, str]
    seconds: dict[str, float]


def run_demo(settings: DemoSettings, stage: Stage) -> DemoResults:
    """Measure perplexity, per-layer error and a chat answer.

    Args:
        stage: Called as stage(title, steps) when a part begins; returns the function that the part
            calls with (steps done, steps in all).

    Raises:
        ModelError: the model cannot be loaded.
        SettingError: the text cannot be read or is too short, or a window or prompt is too long
            for the model.
    """
    start = time.perf_counter()
    seconds: dict[str, float] = {}
    begun: list[Report] = []
    text = read_text(settings.text)
    loaded = load_model(
        settings.model,
        device=settings.device,
        notify=lambda step: begun.append(stage(step, 1)),
    )
    model, tokenizer = loaded.model, loaded.tokenizer
    ids = token_ids(tokenizer, text)
    first = windows(ids, settings.tokens, settings.windows)[0]
    for report in begun:
        report(1, 1)
    seconds["load"] = time.perf_counter() - start

    configs = standard_configs()
    for extra in settings.extra:
        if extra not in configs.values():
            configs[str(extra)] = extra
    perplexity: dict[str, PerplexityResult] = {}
    for label, config in configs.items():
        report = stage(f"perplexity, {label}", settings.windows)
        perplexity[label] = _perplexity(model, ids, settings, config, report)
    seconds["perplexity"] = sum(result.seconds for result in perplexity.values())

    layers_start = time.perf_counter()
    report = stage("error by layer", int(model.config.num_hidden_layers))
    dma_configs = {label: config for label, config in configs.items() if config is not None}
    layer_error = measure_layer_error(model, first[:_LAYER_TOKENS], dma_configs, progress=report)
    seconds["layer_error"] = time.perf_counter() - layers_start

    prompt = settings.prompt or _prompt_that_fits(model, tokenizer, settings.max_new_tokens)
    answers: dict[str, Answer] = {}
    report = stage("chat answers", 3)
    for label in (NATIVE, _CHAT, MIXED):
        answers[label] = generate_answer(
            model,
            tokenizer,
            prompt,
            config=configs[_CHAT if label == MIXED else label],
            max_new_tokens=settings.max_new_tokens,
            mixed_cache=label == MIXED,
        )
        report(len(answers), 3)
    seconds["chat"] = sum(answer.seconds for answer in answers.values())
    seconds["total"] = time.perf_counter() - start
    return DemoResults(
        settings,
        configs,
        perplexity,
        layer_error,
        prompt,
        answers,
        environment(settings.device),
        seconds,
    )


def _prompt_that_fits(model: Any, tokenizer: Any, max_new_tokens: int) -> str:
    """The default prompt, cut to its question for a model with few positions."""
    prompt = default_prompt()
    limit = getattr(model.config, "max_position_embeddings", None)
    room = (limit or 1 << 30) - max_new_tokens - 64  # 64 for the chat template
    return prompt if token_ids(tokenizer, prompt).numel() <= room else prompt.rpartition("\n")[2]


def _perplexity(
    model: Any,
    ids: torch.Tensor,
    settings: DemoSettings,
    config: DMAConfig | None,
    report: Report,
) -> PerplexityResult:
    with using_config(model, config):
        return evaluate_perplexity(model, ids, settings.tokens, settings.windows, progress=report)
