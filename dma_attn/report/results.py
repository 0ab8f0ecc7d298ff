"""Results as strict JSON: numbers, strings, lists and objects; what is not finite becomes null."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..evaluation.demo import NATIVE, DemoResults
from ..evaluation.generate import Answer, shared_prefix
from ..evaluation.perplexity import PerplexityResult


def results_dict(results: DemoResults) -> dict[str, Any]:
    """The content of `results.json`; `perplexity[label]["value"]` is a configuration's headline."""
    native = results.perplexity[NATIVE]
    layer_error = results.layer_error
    attention_map = layer_error.attention_map
    settings = results.settings
    content = {
        "perplexity": {
            label: {
                "value": result.value,
                "change_percent": change_percent(result, native)[0],
                "change_standard_error": change_percent(result, native)[1],
                "window_nll": list(result.window_nll),
                "predicted_tokens": result.tokens,
                "seconds": round(result.seconds, 2),
            }
            for label, result in results.perplexity.items()
        },
        "per_layer": {
            "tokens": layer_error.tokens,
            "layers": {
                label: [asdict(row) for row in rows] for label, rows in layer_error.layers.items()
            },
            "attention_map": {
                "layer": attention_map.layer,
                "head": attention_map.head,
                "tokens": attention_map.tokens,
            },
        },
        "chat": {
            "prompt": results.prompt,
            "answers": {label: _answer_dict(answer) for label, answer in results.answers.items()},
            "shared_prefix_tokens": {
                label: shared_prefix(results.answers[NATIVE], answer)
                for label, answer in results.answers.items() if label != NATIVE
            },
        },
        "configs": {
            label: None if config is None else config.to_dict()
            for label, config in results.configs.items()
        },
        "settings": {
            "model": settings.model,
            "tokens": settings.tokens,
            "windows": settings.windows,
            "device": settings.device,
            "dtype": "float32",
            "max_new_tokens": settings.max_new_tokens,
            "text": settings.text or "pydoc_data.topics",
        },
        "environment": results.environment,
        "seconds": {name: round(value, 2) for name, value in results.seconds.items()},
    }
    return finite(content)


def change_percent(
    result: PerplexityResult, native: PerplexityResult
) -> tuple[float, float | None]:
    """Change of perplexity against native in percent, and its standard error over the windows.

    Both ran on the same windows, so the error is that of the paired differences. It is None for a
    single window, and where a perplexity is not finite.
    """
    pairs = zip(result.window_nll, native.window_nll, strict=True)
    differences = [ours - theirs for ours, theirs in pairs]
    ratio = math.exp(min(statistics.fmean(differences), 700.0))
    if len(differences) < 2 or not math.isfinite(ratio):
        return 100 * (ratio - 1), None
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return 100 * (ratio - 1), 100 * ratio * error


def signed_percent(change: float | None, error: float | None = None) -> str:
    """A change as text, "+0.12% ± 0.05%", with a true minus sign; what rounds to zero has none."""
    if change is None or not math.isfinite(change):
        return "not finite"
    text = f"{change:+.2f}%".replace("-", "\N{MINUS SIGN}")
    if float(f"{change:.2f}") == 0:
        text = text[1:]
    return text if error is None or not math.isfinite(error) else f"{text} ± {error:.2f}%"


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON: NaN and infinities become null."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _answer_dict(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "tokens": len(answer.tokens),
        "prompt_tokens": answer.prompt_tokens,
        "seconds": round(answer.seconds, 2),
        "cache_bytes": answer.cache_bytes,
    }


def finite(value: Any) -> Any:
    """The same value for strict JSON: string keys, lists, and None for NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
