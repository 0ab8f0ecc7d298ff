"""The paper's ablations: variants, orders, and that a wrong one is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from dma_attn.bench.results import read_csv
from dma_attn.bench.timing import Candidate, Timing
from dma_attn.cli import main
from dma_attn.evaluation.ablation import TABLES, findings, run_ablation, run_fusion, spread
from dma_attn.quant.stages import STAGES
from tests.tiny_model import save_tiny_model, tiny_model


def test_rows_and_findings() -> None:
    model = tiny_model()
    ids = torch.randint(0, 256, (700,), generator=torch.Generator().manual_seed(0))
    done: list[int] = []
    rows = run_ablation(model, ids, list(TABLES), layers=2,
                        progress=lambda i, _n: done.append(i))
    assert done == [1, 2] and len(rows) == 2 * (5 + 5 + 3)
    at = {(r.table, r.numerics, r.variant): r for r in rows}
    assert all(r.ms is None and 0 < r.cosine <= 1 and r.rel_l1 > 0 for r in rows)
    for numerics in ("paper", "ours"):
        ordered = [at["formats", numerics, f].rel_l1 for f in ("mxfp4", "mxfp8")]
        assert ordered[0] > ordered[1]
        shares = [at["tiles", numerics, f"{n}/{n}"].high_percent for n in (128, 256, 512, 1024)]
        assert shares[0] < shares[1] < shares[2] and shares[3] == 100
        dma = at["formats", numerics, "DMA 128/128"]
        assert replace(at["tiles", numerics, "128/128"], table="", variant="", reported={}) == (
            replace(dma, table="", variant="", reported={}))
        assert at["formats", numerics, "nvfp4"].high_percent == 0
    assert at["tiles", "ours", "128/128"].reported["cosine"] == 0.822
    found = findings(rows)
    assert len(found) == 6  # no times
    bands = [f for f in found if "band" in f.claim]
    assert len(bands) == 2 and all(f.agrees for f in bands)
    turned = [replace(r, rel_l1=-r.rel_l1) for r in rows]
    assert not any(f.agrees for f in findings(turned) if "band" in f.claim)


def test_spread() -> None:
    assert spread(30, 4) == [0, 10, 19, 29] and spread(2, 10) == [0, 1] and spread(5, 1) == [0]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_tiny_model(tmp_path / "model"))
    arguments = ["ablate", model, "--tokens", "300", "--layers", "2", "--table", "granularity",
                 "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "Ablation: granularity" in shown and "by tensor to by token" in shown
    facts, columns, lines = read_csv(tmp_path / "out" / "ablation_granularity.csv")
    assert facts["tokens"] == "300" and columns[:2] == ["variant", "numerics"] and len(lines) == 6
    for extra, option in ((["--table", "what"], "--table"), (["--table", "fusion"], "--table"),
                          (["--tokens", "4000"], "--tokens"),
                          (["--device", "tpu"], "--device")):
        assert main([*arguments, *extra]) == 2
        assert option in capsys.readouterr().err


def test_fusion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                capsys: pytest.CaptureFixture[str]) -> None:
    """Rows and command, with times that are given: no GPU is here."""
    from functools import partial

    from dma_attn.evaluation import ablation

    def timed(candidates: list[Candidate]) -> dict[str, Timing]:
        return {c.name: Timing(2.0 + i, 0.0, None, 0.5) for i, c in enumerate(candidates)}

    monkeypatch.setattr("dma_attn.bench.timing.time_candidates", timed)
    monkeypatch.setattr(torch, "randn", lambda *shape, device: torch.zeros(shape))
    done: list[tuple[int, int]] = []
    rows = run_fusion((2048, 512), progress=lambda i, n: done.append((i, n)))
    assert done == [(i, 4) for i in (1, 2, 3, 4)] and len(rows) == 4 * len(STAGES)
    assert [r.stage for r in rows[:5]] == list(STAGES)
    assert (rows[0].us, rows[0].host_us, rows[0].reported_us) == (2000.0, 500.0, 7262.0)
    assert rows[-1].us == 6000.0 and rows[-1].reported_us is None

    monkeypatch.setattr("dma_attn.cli_eval._place", lambda device: "cuda")
    monkeypatch.setattr(ablation, "run_fusion", partial(run_fusion, (2048, 512)))
    monkeypatch.setattr("dma_attn.evaluation.environment.environment", lambda place: {"gpu": "G"})
    assert main(["ablate", "--table", "fusion", "--out", str(tmp_path)]) == 0
    assert "scale conversion" in capsys.readouterr().out
    facts, columns, lines = read_csv(tmp_path / "ablation_fusion.csv")
    assert facts["gpu"] == "G" and columns[-1] == "paper_us" and len(lines) == 4 * len(STAGES)
    assert [file.name for file in tmp_path.iterdir()] == ["ablation_fusion.csv"]
