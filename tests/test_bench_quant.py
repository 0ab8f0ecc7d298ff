"""`dma-attn bench quant`: rows, aims, tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from dma_attn.bench.quantise import COPY, QuantRow, _rows, judge_fold, judge_fusion
from dma_attn.bench.results import (
    QUANT_CLAIM_COLUMNS,
    QUANT_COLUMNS,
    quant_cells,
    quant_claim_cells,
)
from dma_attn.bench.timing import Timing
from dma_attn.cli import main


def test_quantiser_aims() -> None:
    def row(length: int, candidate: str, ms: float, size: int = 1, share: float = 1.0) -> QuantRow:
        return QuantRow(length, candidate, Timing(ms, 0.0, None), size, share, ms)

    fold = [row(8192, COPY, 1.0, 67_000_000), row(8192, "fold hopper", 1.0, share=0.9),
            row(16384, COPY, 1.0, 134_000_000), row(16384, "fold hopper", 1.0, share=0.7)]
    fusion = [row(2048, name, ms) for name, ms in (("fused", 1.0), ("eager", 12.0),
                                                   ("torch.compile", 1.9), (COPY, 0.1))]
    verdicts = judge_fold(fold) + judge_fusion(fusion)
    assert [(v.length, v.holds) for v in verdicts] == [(16384, False), (2048, True), (2048, False)]
    assert len(quant_claim_cells(verdicts)[0]) == len(QUANT_CLAIM_COLUMNS)
    assert len(quant_cells(fold)[0]) == len(QUANT_COLUMNS)


@pytest.mark.parametrize("share, code", [(0.8, 0), (0.7, 1)])
def test_one_table_of_the_quantisers(
    share: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timing = Timing(1.0, 0.0, None)
    rows = [QuantRow(16384, COPY, timing, 134_000_000, 1.0, 1.0),
            QuantRow(16384, "fold", timing, 1, share, 1.0)]
    monkeypatch.setattr("dma_attn.cli_bench._facts", dict)
    monkeypatch.setattr("dma_attn.bench.quantise.measure_fold", lambda *args, **more: rows)
    arguments = ["--table", "fold", "--length", "16384", "--out", str(tmp_path)]
    assert main(["bench", "quant", *arguments]) == code
    assert {file.name for file in tmp_path.iterdir()} == {"quant_fold.csv", "quant_fold_claims.csv"}
    assert (tmp_path / "quant_fold_claims.csv").read_text().endswith(["no\n", "yes\n"][code == 0])


def test_quantiser_rows_against_the_copy() -> None:
    timings = {COPY: Timing(2.0, 0.0, None), "fold": Timing(5.0, 0.0, None)}
    fold = _rows(8192, timings, {COPY: 8_000_000, "fold": 16_000_000})[1]
    assert (fold.share, fold.copies) == (0.8, 2.5)
    assert fold.gbytes_per_s == pytest.approx(3.2)
