"""The command line: help, errors of one line, and whole runs on a tiny model in a folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

import dma_attn.evaluation.demo  # noqa: F401 - binds load_model before a test replaces it
from dma_attn import DMAConfig, __version__
from dma_attn.cli import main
from tests.tiny_model import save_tiny_model

ROOT = Path(__file__).resolve().parent.parent
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fail(capsys: Capture, *arguments: str) -> tuple[int, str]:
    """Exit code and the one line on stderr of a command that must fail."""
    code = main(arguments)
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("dma-attn: error: ")]
    assert code != 0 and len(errors) == 1, captured.err
    assert "Traceback" not in captured.err and captured.out == ""
    return code, errors[0].removeprefix("dma-attn: error: ")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help(capsys: Capture, arguments: list[str]) -> None:
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("info", "demo", "generate"))


@pytest.mark.parametrize("command", ["info", "demo", "generate"])
def test_help_has_an_example(capsys: Capture, command: str) -> None:
    assert main([command, "--help"]) == 0
    assert f"Example: dma-attn {command}" in " ".join(capsys.readouterr().out.split())


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dma-attn {__version__}\n"


def test_info(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("COLUMNS", "160")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for word in ("python", "triton", "transformers", torch.__version__, "cpu", "reference"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], ["nonsense"]),
        (["demo", "--nonsense"], ["--nonsense"]),
        (["demo", "--tokens", "1"], ["--tokens", "2"]),
        (["demo", "--tokens", "many"], ["--tokens", "valid int"]),
        (["demo", "--windows", "0"], ["--windows", "1"]),
        (["demo", "--config", "nonsense"], ["--config", *DMAConfig.PRESETS]),
        (["demo", "--config", "default,diag=100"], ["--config", "diag", "128", "100"]),
        (["demo", "--config", "default,select=3"], ["--config", "select", "3"]),
        (["demo", "--device", "tpu"], ["--device", "auto", "cpu", "cuda"]),
        (["generate"], ["prompt"]),
        (["generate", "hi", "--config", "default,colour=red"], ["--config", "colour", "diag"]),
        (["generate", "hi", "--max-new-tokens", "0"], ["--max-new-tokens", "1"]),
        (["generate", "hi", "--config", "off", "--config", "paper"], ["--config", "one", "2"]),
        (["generate", "  "], ["PROMPT", "empty"]),
        (["demo", "--text", "no.txt"], ["--text", "no.txt"]),
    ],
    ids=lambda value: "-".join(value[:3]) if value and value[0] in ("demo", "generate") else None,
)
def test_wrong_command_line(capsys: Capture, arguments: list[str], words: list[str]) -> None:
    code, line = fail(capsys, *arguments)
    assert code == 2
    assert all(word.lower() in line.lower() for word in words), line


def test_missing_model(capsys: Capture, tmp_path: Path) -> None:
    name = str(tmp_path / "nothing")
    code, line = fail(capsys, "generate", "hi", "--model", name)
    assert code == 1 and name in line
    code, line = fail(capsys, "generate", "hi", "--model", "./nodir")
    assert code == 1 and "no such folder: ./nodir" in line
    Path("empty").mkdir()
    code, line = fail(capsys, "generate", "hi", "--model", "./empty")
    assert code == 1 and "'./empty'" in line and "config.json" in line


def test_bad_text_fails_before_the_model_loads(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dma_attn.evaluation.demo.load_model", lambda *_a, **_o: pytest.fail("loaded")
    )
    Path("bad.txt").write_bytes(b"abc\xff")
    Path("empty.txt").write_text(" ")
    for name, word in (("bad.txt", "UTF-8"), ("empty.txt", "empty"), ("no.txt", "No such file")):
        code, line = fail(capsys, "demo", "--text", name)
        assert code == 2 and "--text" in line and name in line and word in line


def test_text_too_short(capsys: Capture, folder: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    out = str(tmp_path / "report")
    code, line = fail(
        capsys, "demo", "--model", folder, "--text", str(tmp_path / "short.txt"), "--out", out
    )
    assert code == 2 and "got one of 9" in line
    assert all(option in line for option in ("--tokens", "--windows", "--text"))


def test_window_longer_than_the_model(capsys: Capture, folder: str, tmp_path: Path) -> None:
    out = str(tmp_path / "report")
    code, line = fail(capsys, "demo", "--model", folder, "--tokens", "4096", "--out", out)
    assert code == 2 and "--tokens" in line and "1024 positions, got 4096" in line


def test_answer_longer_than_the_model(capsys: Capture, folder: str) -> None:
    code, line = fail(capsys, "generate", "hi", "--model", folder, "--max-new-tokens", "1024")
    assert code == 2 and "--max-new-tokens" in line and "1024 tokens" in line


def test_report_folder_that_is_a_file(capsys: Capture, folder: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    code, line = fail(capsys, "demo", "--model", folder, "--out", str(tmp_path / "taken"))
    assert code == 2 and "--out" in line and "taken" in line


def test_cuda_without_a_gpu(capsys: Capture, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, line = fail(capsys, "generate", "hi", "--model", folder, "--device", "cuda")
    assert code == 2 and "--device" in line and "CUDA" in line


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="nothing"):
        main(["generate", "hi", "--model", str(tmp_path / "nothing"), "--debug"])


def test_interrupt_is_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dma_attn.evaluation.models.load_model", interrupt)
    code, line = fail(capsys, "generate", "hi")
    assert (code, line) == (130, "interrupted")


def test_interrupt_that_an_import_swallows(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swallow(*_args: object, **_options: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise RuntimeError("half imported")

    monkeypatch.setattr("dma_attn.evaluation.models.load_model", swallow)
    # A background job of a shell starts with interrupts ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, line = fail(capsys, "generate", "hi")
        assert (code, line) == (130, "interrupted")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_demo_on_a_tiny_model(
    capsys: Capture, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    out = tmp_path / "dma-report"
    size = ["--tokens", "300", "--windows", "2"]
    extra = ["--config", "default,diag=256,rotate=false", "--config", "off", "--config", "off"]
    extra += ["--config", "default,high=none", "--config", "default,diag=128"]  # both standard
    assert main(["demo", "--model", folder, *size, *extra, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "report.html" in captured.out and "Traceback" not in captured.err
    found = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert list(found["perplexity"]) == [
        "native",
        "paper",
        "default",
        "default,high=none",
        "nvfp4",
        "mxfp8",
        "hopper",
        "default,diag=256,rotate=false",
        "off",
    ]
    assert all(DMAConfig.parse(label) for label in list(found["perplexity"])[1:])
    assert not any(word in captured.err for word in ("torchao", "_pytree"))
    values = {label: row["value"] for label, row in found["perplexity"].items()}
    assert values["off"] == pytest.approx(values["native"], rel=1e-4)
    assert all(value > 1 for value in values.values())
    assert len(found["per_layer"]["layers"]["default"]) == 3
    answers = found["chat"]["answers"]
    assert set(answers) == {"native", "default", "default, mixed cache"}
    assert answers["default, mixed cache"]["cache_bytes"] > 0
    assert (out / "report.html").stat().st_size > 50_000


def test_generate_compares(capsys: Capture, folder: str) -> None:
    command = ["generate", "What is [this]?", "--model", folder, "--max-new-tokens", "5"]
    assert main([*command, "--compare", "--config", "off"]) == 0
    text = capsys.readouterr().out
    assert "[native]" in text and "[DMA, off]" in text and "first 5 tokens agree" in text
    assert main(command) == 0
    assert "[native]" not in capsys.readouterr().out


def test_generate_with_a_mixed_cache(capsys: Capture, folder: str) -> None:
    command = ["generate", "What is [this]?", "--model", folder, "--max-new-tokens", "5"]
    assert main([*command, "--kv-cache", "mixed", "--compare"]) == 0
    text = capsys.readouterr().out
    sizes = re.search(r"KV cache: ([\d.]+) MiB, ([\d.]+) MiB", text)
    assert sizes is not None and "tokens agree" in text
    code, line = fail(capsys, *command, "--kv-cache", "tiny")
    assert code == 2 and "--kv-cache" in line


def test_help_of_generate_says_what_dma_reads(capsys: Capture) -> None:
    from dma_attn.integrations.transformers import DECODE_MAX_QUERIES
    from dma_attn.report.figures import high_share

    assert main(["generate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"up to {DECODE_MAX_QUERIES} queries" in text and "longer than 256 tokens" in text
    assert high_share(256, DMAConfig()) == 1 > high_share(257, DMAConfig())


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=120
    )


def test_import_is_lazy() -> None:
    code = (
        "import sys, dma_attn.cli; print({'transformers', 'matplotlib', 'rich'} & {*sys.modules})"
    )
    assert run_python("-c", code).stdout == "set()\n"


def test_module_runs_as_a_program() -> None:
    done = run_python("-m", "dma_attn.cli", "demo", "--tokens", "1")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("dma-attn: error: ")


def test_without_typer_the_program_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; import dma_attn.cli"
    done = run_python("-c", code)
    assert done.returncode == 1 and "pip install" in done.stderr and done.stderr.count("\n") == 1
