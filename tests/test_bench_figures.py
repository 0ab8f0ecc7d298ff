"""Figures of prefill benchmarks: what is read, what is drawn, what the limits are."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from dma_attn.bench.prefill import END_TO_END, KERNEL, Row, Workload
from dma_attn.bench.results import PREFILL_COLUMNS, prefill_cells, write_csv
from dma_attn.bench.timing import Timing
from dma_attn.cli import main
from dma_attn.report.bench_figures import draw, limits, read_rates

CANDIDATES = {"hopper": 900.0, "default,pv=fp8": 850.0, "fa3-bf16": 700.0}


def workload(length: int, head_dim: int = 128, causal: bool = True) -> Workload:
    return Workload(1, 32, 8, length, head_dim, causal)


def prefill_csv(path: Path, *workloads: Workload, kind: str = KERNEL, speed: float = 1.0) -> Path:
    """A made-up run of every candidate."""
    rows = [
        Row(work, name, kind, Timing(work.flop / (tflops * speed) / 1e9, 0.01, 1700), 0.01)
        for work in workloads
        for name, tflops in CANDIDATES.items()
    ]
    write_csv(path, {"gpu": "made up"}, PREFILL_COLUMNS, prefill_cells(rows))
    return path


def texts(svg: bytes) -> set[str]:
    """All text of an SVG image; raises when it is not well-formed."""
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("}svg")
    return {" ".join(node.itertext()).strip() for node in root.iter() if node.tag.endswith("}text")}


def test_command_draws_each_head_dim_and_mask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = (8192, 16384, 65536)
    one = prefill_csv(tmp_path / "a.csv", *map(workload, lengths))
    two = prefill_csv(tmp_path / "b.csv", *(workload(n, 64, causal=False) for n in lengths))
    out = tmp_path / "new" / "figures"
    assert main(["bench", "figures", str(one), str(two), "--out", str(out)]) == 0
    names = ["limits_d128.svg", "prefill_d128_causal.svg", "prefill_d64_full.svg"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert all(name in capsys.readouterr().out.replace("\n", "") for name in names[:1])
    for name in names[1:]:
        shown = texts((out / name).read_bytes())
        assert {*CANDIDATES, "8k", "16k", "64k", "TFLOP/s"} <= shown
    shown = texts((out / names[0]).read_bytes())
    assert {*CANDIDATES, "900", "850", "700"} <= shown
    assert {"989  bf16", "1319  FP8 QK, bf16 PV", "1979  FP8 and exp"} <= shown
    assert any("S65536" in text for text in shown)


def test_limits_come_from_the_hardware() -> None:
    tflops = 132 * 1.83e9 / 1e12
    rates = {label: rate for rate, label in limits(96).items()}
    assert rates["bf16"] == round(tflops * 4096)
    assert rates["FP8"] == round(tflops * 8192)
    # half of the FLOP at each rate: the times add up
    assert rates["FP8 QK, bf16 PV"] == round(1 / (0.5 / (tflops * 4096) + 0.5 / (tflops * 8192)))
    assert rates["exp"] == round(tflops * 16 * 4 * 96)
    assert "bf16 and exp" in limits(64).values()


def test_last_file_counts_and_images_are_reproducible(tmp_path: Path) -> None:
    old = prefill_csv(tmp_path / "old.csv", workload(8192), workload(16384))
    new = prefill_csv(tmp_path / "new.csv", workload(8192), speed=0.5)
    rates = read_rates([old, new])
    assert rates[workload(8192), "hopper"] == pytest.approx(450)
    assert rates[workload(16384), "hopper"] == pytest.approx(900)
    assert draw(rates) == draw(rates)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("layer,candidate,error\n0,hopper,0.1\n", "columns layer, candidate, error"),
        ("", "CSV table"),
        (",".join(PREFILL_COLUMNS) + "\nnothing,hopper,kernel,1,1,1,1,1,1\n", "got 'nothing'"),
        (",".join(PREFILL_COLUMNS) + "\nB1 H32/8 S8192 D128 causal,hopper,kernel\n", "argument"),
    ],
    ids=["another table", "empty", "workload", "short line"],
)
def test_other_files_are_refused_in_one_line(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.csv"
    path.write_text(content)
    assert main(["bench", "figures", str(path), "--out", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line for line in lines if "expected a prefill CSV, got" in line and words in line]
    assert sum("error:" in line for line in lines) == 1
    assert not list(tmp_path.glob("*.svg"))


def test_a_file_without_kernels_is_refused(tmp_path: Path) -> None:
    path = prefill_csv(tmp_path / "a.csv", workload(8192), kind=END_TO_END)
    with pytest.raises(ValueError, match="kernel"):
        read_rates([path])


def test_the_committed_results_are_what_the_command_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    committed = Path("docs/results.md").read_text("utf-8")
    command = shlex.split(committed.split("`")[1])
    assert command[:3] == ["dma-attn", "bench", "table"] and command[-2:] == ["--out",
                                                                             "docs/results.md"]
    if Path("docs/figures").is_dir():
        shutil.copytree("docs/figures", tmp_path / "figures")
    assert main([*command[1:-1], str(tmp_path / "results.md")]) == 0
    made = (tmp_path / "results.md").read_text("utf-8")
    assert made.split("\n", 3)[3] == committed.split("\n", 3)[3]


def test_written_results_show_the_figures_beside_them(tmp_path: Path) -> None:
    results = tmp_path / "prefill.csv"
    row = Row(workload(8192), "hopper", KERNEL, Timing(1.0, 0.0, None), 0.01)
    write_csv(results, {}, PREFILL_COLUMNS, prefill_cells([row]))
    assert main(["bench", "figures", str(results), "--out", str(tmp_path / "figures")]) == 0
    assert main(["bench", "table", str(results), "--out", str(tmp_path / "results.md")]) == 0
    text = (tmp_path / "results.md").read_text("utf-8")
    assert "![limits_d128](figures/limits_d128.svg)" in text
