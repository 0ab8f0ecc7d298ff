"""The paper's ablations: variants, orders, and that a wrong one is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from dma_attn.bench.results import read_csv
from dma_attn.cli import main
from dma_attn.evaluation.ablation import TABLES, findings, run_ablation, spread
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
    for extra, option in ((["--table", "what"], "--table"), (["--tokens", "4000"], "--tokens"),
                          (["--device", "tpu"], "--device")):
        assert main([*arguments, *extra]) == 2
        assert option in capsys.readouterr().err
