"""`dma-attn bench decode`: what is judged and written, and (on a GPU) a small run."""

from __future__ import annotations

from pathlib import Path

import pytest

from dma_attn.bench.decode import (
    BF16,
    CACHES,
    FA3_FP8,
    DecodeRow,
    DecodeWorkload,
    judge_decode,
    measure_decode,
)
from dma_attn.bench.results import (
    DECODE_CLAIM_COLUMNS,
    DECODE_COLUMNS,
    decode_cells,
    decode_claim_cells,
)
from dma_attn.bench.timing import Timing
from dma_attn.cli import main
from tests.impls import needs_gpu

LARGE = DecodeWorkload(16, 32768)


def rows(workload: DecodeWorkload = LARGE, **us: float) -> list[DecodeRow]:
    names = {"sdpa": BF16[0], "fa3": BF16[1], "fp8": FA3_FP8[0]}
    return [DecodeRow(workload, names.get(name, name), Timing(value / 1000, 0.01, None), 10**9, 0.1)
            for name, value in us.items()]


def test_aims() -> None:
    """Against the faster of the two in 16 bits; a peer or a cache that is missing fails."""
    held = rows(sdpa=510, fa3=500, fp8=390, mxfp8=333, default=294, nvfp4=410)
    verdicts = {(v.candidate, v.against): v for v in judge_decode(held)}
    assert {k: round(v.ratio or 0, 3) for k, v in verdicts.items()} == {
        ("mxfp8", BF16): 1.502, ("default", BF16): 1.701, ("nvfp4", BF16): 1.22,
        ("default", FA3_FP8): 1.327,
    }
    assert all(v.holds for v in verdicts.values())
    slow = rows(sdpa=510, fa3=500, fp8=390, mxfp8=334, default=301, nvfp4=417)
    assert not any(v.holds for v in judge_decode(slow))
    for missing in ("sdpa", "fa3", "fp8", "default"):
        times = {"sdpa": 510, "fa3": 500, "fp8": 390, "mxfp8": 333, "default": 294, "nvfp4": 410}
        del times[missing]
        lost = [v for v in judge_decode(rows(**times)) if not v.holds]
        assert lost and all(v.ratio is None for v in lost)


def test_few_queries_and_small_caches() -> None:
    four = DecodeWorkload(16, 32768, 4)
    for us, holds in ((389, True), (391, False)):
        verdict, *_ = judge_decode(rows(four, default=us) + rows(default=300))
        assert verdict.candidate == "default" and verdict.holds is holds
    assert judge_decode(rows(four, default=300))[0].ratio is None
    assert judge_decode(rows(DecodeWorkload(1, 4096), sdpa=10, fa3=10)) == []


def test_cells() -> None:
    measured = rows(default=250)
    line = dict(zip(DECODE_COLUMNS, decode_cells(measured)[0], strict=True))
    assert line == {"workload": "B16 H32/8 S32768 D128 q1", "candidate": "default", "us": "250.0",
                    "spread_percent": "1.0", "mb": "1000", "gb_per_s": "4000", "error": "0.1000"}
    (claim, *_) = decode_claim_cells(judge_decode(measured))
    assert dict(zip(DECODE_CLAIM_COLUMNS, claim, strict=True))["ratio"] == "not measured"
    assert LARGE.kv_bytes == 16 * 32768 * 4096


@pytest.mark.parametrize("arguments, message", [
    (["--shape", "16"], "16x32768"), (["--cache", "none"], "--cache"), (["--peer", "x"], "--peer"),
    (["--queries", "17"], "--queries"),
])
def test_bad_options(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dma_attn.cli_bench._facts", dict)
    assert main(["bench", "decode", *arguments]) != 0
    assert message in capsys.readouterr().err


@needs_gpu
def test_a_small_run(tmp_path: Path) -> None:
    measured = measure_decode(DecodeWorkload(2, 1000, 2), peers=(), seconds=0.002)
    assert [row.candidate for row in measured] == list(CACHES)
    assert all(0 < row.error < 0.5 and row.timing.ms > 0 for row in measured)
