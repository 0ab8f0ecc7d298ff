"""`dma-attn eval`, `ablate` and `report`: what configurations cost on a user's model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

_CONFIG_HELP = (
    "What to compare with the model as it is (repeatable): attention, as in 'default,diag=512', or "
    "'cache' and 'cache:default,high=none,low=int4,v_low=nvfp4', a KV cache that 16-bit attention "
    "reads."
)


def evaluate(
    model: Annotated[
        str | None,
        typer.Argument(help="A Hub id, a local folder or a .gguf file; by default SmolLM2-135M."),
    ] = None,
    config: Annotated[list[str] | None, typer.Option("--config", help=_CONFIG_HELP)] = None,
    dtype: Annotated[
        str, typer.Option(help="Of weights and arithmetic: float32, bfloat16 or float16. The "
                               "Hopper kernels take 16 bits only.")
    ] = "float32",
    metric: Annotated[
        list[str] | None,
        typer.Option(help="perplexity, needles, layers, maps, agreement or tasks (repeatable); by "
                          "default all."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Length of a window of text.")] = 1024,
    windows: Annotated[int, typer.Option(min=1, help="Number of windows.")] = 6,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a text with passkeys (repeatable).")
    ] = None,
    depth: Annotated[
        list[float] | None,
        typer.Option(min=0.0, max=1.0, help="Where the passkey is, 0 to 1 (repeatable)."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Of each length and depth.")] = 4,
    needles: Annotated[int, typer.Option(min=1, max=8, help="Passkeys in a text.")] = 1,
    prompts: Annotated[int, typer.Option(min=1, help="Greedy generations.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a generation's prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a generation.")] = 16,
    tasks: Annotated[
        list[str] | None,
        typer.Option(help="A task of lm-evaluation-harness, which must be installed "
                          "(repeatable). A cache is "
                          "read by answers that are generated, not by the scores of choices."),
    ] = None,
    task_folder: Annotated[
        Path | None, typer.Option(help="A folder with task files (YAML) of your own.")
    ] = None,
    task_limit: Annotated[
        int | None, typer.Option(min=1, help="Documents of each task, at most.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file, instead of Python's own help texts.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="File of JSON lines; one that is there is continued.")
    ] = Path("dma-eval/eval.jsonl"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Perplexity, passkey retrieval, attention error by layer and head, and agreement of greedy
    generations, each against the model as it is. A run that was stopped goes on where it was.

    Example: dma-attn eval HuggingFaceTB/SmolLM2-135M --config default --config cache --windows 12
    """
    from rich.console import Console

    from .evaluation.evaluate import METRICS, EvalSettings, checked_subjects, run_eval
    from .evaluation.models import BUILT_IN
    from .evaluation.quiet import quiet_imports
    from .evaluation.summary import summarise
    from .report.console import progress_stages
    from .report.eval_tables import eval_tables
    from .report.results import write_json

    usual = EvalSettings()
    settings = EvalSettings(
        model=model or BUILT_IN,
        dtype=dtype,
        text=None if text is None else str(text),
        tokens=tokens,
        windows=windows,
        lengths=tuple(length or usual.lengths),
        depths=tuple(depth or usual.depths),
        trials=trials,
        needles=needles,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        tasks=tuple(tasks or ()),
        task_folder=None if task_folder is None else str(task_folder),
        task_limit=task_limit,
        subjects=checked_subjects(config or usual.subjects),
        metrics=tuple(metric or METRICS),
        device=_place(device),
    )
    quiet_imports()
    with progress_stages() as stage:
        records = run_eval(settings, out, stage)
    summary = summarise(records)
    tables = out.with_suffix(".summary.json")
    write_json(tables, asdict(summary))
    console = Console()
    for table in eval_tables(summary):
        console.print(table)
    console.print(f"{out}, {tables}", soft_wrap=True, highlight=False)


def ablate(
    model: Annotated[
        str | None,
        typer.Argument(help="A Hub id, a local folder or a .gguf file; by default SmolLM2-135M."),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(help="formats, tiles, granularity or fusion (repeatable); by default all, "
                          "without a GPU all but fusion, whose table is of times."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Length of the window of text.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Evenly spread layers, at most.")] = 4,
    text: Annotated[
        Path | None, typer.Option(help="A text file, instead of Python's own help texts.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the CSV files.")] = Path("dma-ablation"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """The paper's ablations on a model's own queries, keys and values, by the authors' numerics and
    by ours, beside the paper's numbers; times on a GPU only.

    Example: dma-attn ablate --table tiles --tokens 4096 --layers 8
    """
    from rich.console import Console

    from .bench.results import write_csv
    from .evaluation.ablation import FUSION, TABLES, findings, run_ablation, run_fusion
    from .evaluation.environment import environment
    from .evaluation.errors import SettingError
    from .evaluation.models import BUILT_IN, load_model
    from .evaluation.perplexity import check_window
    from .evaluation.quiet import quiet_imports
    from .evaluation.text import read_text, token_ids, windows
    from .report.console import progress_stages
    from .report.eval_tables import (
        ABLATION_COLUMNS,
        FUSION_COLUMNS,
        ablation_cells,
        ablation_table,
        fusion_cells,
        fusion_table,
    )

    place = _place(device)
    chosen = list(dict.fromkeys(table or [*TABLES, *([FUSION] if place == "cuda" else [])]))
    if unknown := sorted(set(chosen) - {*TABLES, FUSION}):
        raise SettingError(f"expected some of {', '.join([*TABLES, FUSION])}, got {unknown}",
                           "table")
    if FUSION in chosen and place != "cuda":
        raise SettingError(f"{FUSION} is a table of times on a CUDA device, and this runs on a CPU",
                           "table")
    out.mkdir(parents=True, exist_ok=True)  # one that cannot be made fails before the work
    console = Console()
    facts = environment(place)
    if from_model := [name for name in chosen if name != FUSION]:
        content = read_text(None if text is None else str(text))
        quiet_imports()
        loaded = load_model(model or BUILT_IN, device=place)
        check_window(loaded.model, tokens)
        ids = windows(token_ids(loaded.tokenizer, content), tokens, 1)[0]
        with progress_stages() as stage:
            rows = run_ablation(loaded.model, ids, from_model, layers=layers,
                                progress=stage("ablation, layers", layers))
        shape = {"model": model or BUILT_IN, "tokens": str(tokens),
                 "layers": str(min(layers, loaded.model.config.num_hidden_layers))}
        for name in from_model:
            own = [row for row in rows if row.table == name]
            write_csv(out / f"ablation_{name}.csv", {**facts, **shape}, ABLATION_COLUMNS,
                      ablation_cells(own))
            console.print(ablation_table(name, own))
        for found in findings(rows):
            console.print(f"{'agrees' if found.agrees else 'contradicts the paper'}: "
                          f"{found.claim} ({found.numerics}: {found.larger:.4g} to "
                          f"{found.smaller:.4g})", soft_wrap=True, highlight=False)
    if FUSION in chosen:
        with progress_stages() as stage:
            stages = run_fusion(progress=stage("fusion", 4))
        write_csv(out / f"ablation_{FUSION}.csv", {**facts, "data": "normal, 1 x 32 x S x 128"},
                  FUSION_COLUMNS, fusion_cells(stages))
        console.print(fusion_table(stages))
    console.print(f"{out} written", soft_wrap=True, highlight=False)


def report(
    results: Annotated[
        list[Path],
        typer.Argument(help="Files, or folders of them: .jsonl of eval, .csv of bench and ablate, "
                            "results.json of demo."),
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("dma-results.html"),
) -> None:
    """Merge results into one HTML page: figures inline, nothing loaded from elsewhere.

    Example: dma-attn report dma-eval/eval.jsonl dma-ablation --out results.html
    """
    from .evaluation.errors import SettingError
    from .report.merged import write_merged

    for path in results:
        if not path.exists():
            raise SettingError(f"expected a file or folder, got {path}", "results")
    write_merged(results, out)
    typer.echo(f"{out} written")


def _place(device: str) -> str:
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"expected auto, cpu or cuda, got {device!r}",
                                 param_hint="--device")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
