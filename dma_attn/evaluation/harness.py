"""Tasks of lm-evaluation-harness (LongBench, RULER, local YAML files, ...) by its Python API.

Scores of choices come from one forward pass, so that they see a subject's attention; generated
answers go over its KV cache, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import SettingError
from .subjects import Subject

_NEEDS = "lm-evaluation-harness, which is not installed: run `pip install lm_eval`"


def run_tasks(
    model: Any,
    tokenizer: Any,
    subject: Subject,
    tasks: Sequence[str],
    *,
    folder: str | Path | None = None,
    limit: int | None = None,
) -> dict[str, dict[str, float]]:
    """Task name to its metrics, standard errors among them, by the harness's names.

    Args:
        tasks: Names of tasks or groups that the harness knows, or that lie in `folder`.
        folder: One with task files (YAML).
        limit: Documents of each task, at most.

    Raises:
        SettingError: a task that is not known, or the harness is not installed.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise SettingError(f"expected {_NEEDS}", "tasks") from error
    manager = TaskManager(include_path=None if folder is None else str(folder))
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        raise SettingError(f"expected tasks that lm-evaluation-harness knows, got {unknown}",
                           "tasks")

    class OverCache(HFLM):
        """Generates over a subject's cache."""

        def _model_generate(
            self, context: Any, max_length: int, stop: list[str], **options: Any
        ) -> Any:
            if subject.cached:
                options["past_key_values"] = subject.make_cache(self.model, max_length)
            return super()._model_generate(context, max_length, stop, **options)

    with subject.using(model):
        found = lm_eval.simple_evaluate(
            model=OverCache(pretrained=model, tokenizer=tokenizer, batch_size=1),
            tasks=list(tasks), task_manager=manager, limit=limit, bootstrap_iters=1000,
            log_samples=False,
        )
    assert found is not None  # this is the only process
    return {task: {name: float(value) for name, value in metrics.items()
                   if isinstance(value, (int, float)) and not isinstance(value, bool)}
            for task, metrics in found["results"].items()}
