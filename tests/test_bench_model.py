"""The cost model: by hand, against given times, against those of the H200."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cost_model import kernel_rows, main
from dma_attn import DMAConfig
from dma_attn.bench.model import (
    B200,
    H200,
    RTX5090,
    calibrate,
    milliseconds,
    over_shares,
    tile,
    tiles,
)
from dma_attn.bench.prefill import Workload

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "h200"
FILES = [RESULTS / name for name in ("prefill.csv", "prefill_d64.csv", "prefill_full.csv")]


def test_a_tile_by_hand() -> None:
    flop = 2 * 128**3
    high, low = (tile(B200, DMAConfig(), h, 128) for h in (True, False))
    assert (high.scores, low.scores, high.values) == (flop / 16384, flop / 32768, flop / 8192)
    assert high.exp2 == low.exp2 == 1024
    assert high.bytes == 128 * (128 + 4 + 256) and low.bytes == 128 * (64 + 8 + 256)
    assert high.cycles(100.0) == 256 + 512 + 1024 + 100 and low.cycles(None) == 1024
    assert tile(H200, DMAConfig(), False, 64).scores == tile(H200, DMAConfig(), True, 64).scores
    raw = tile(RTX5090, DMAConfig(high="none", pv="fp8"), True, 64)
    assert raw.scores == flop / 2 / 512 and raw.values == flop / 2 / 1024
    assert raw.bytes == 128 * (128 + 64)


def test_times_by_hand() -> None:
    assert tiles(2, 3, 1024, True) == 6 * 36 and tiles(1, 1, 1024, False) == 64
    config = DMAConfig()
    all_high = milliseconds(B200, config, 128, 148 * 1850, 1.0, 0.0)
    assert all_high == pytest.approx((256 + 512 + 1024) / 1e3)
    (turn, overlapped), half = over_shares(B200, ["default"], 0.0), (1792 + 1664) / 2
    assert float(turn[5]) == pytest.approx(half * 32 * 64 * 65 / 2 / 148 / 1850e3, abs=5e-4)
    assert len(set(overlapped[3:])) == 1, "exp2 hides all products"


def test_calibration_sees_what_it_is_given() -> None:
    def row(length: int, dim: int, cycles: float) -> tuple[Workload, str, float, float]:
        number = tiles(1, 32, length, True)
        return (Workload(1, 32, 8, length, dim, True), "hopper", cycles * number / 132 / 1500e3,
                1500.0)

    rows = [row(8192, 128, 2300), row(16384, 128, 2200), row(32768, 128, 2500), row(8192, 64, 900)]
    rest, found = calibrate(rows, "hopper")
    assert rest == pytest.approx(202)
    assert [p.fitted for p in found] == [True, True, False, False]
    assert [p.error for p in found] == pytest.approx(
        [100 * (m / c - 1) for m, c in ((2250, 2300), (2250, 2200), (2250, 2500), (1738, 900))])
    # 16-bit P V passes under exp2 and the rest, or they under it
    sixteen = [(work, "default", ms, mhz) for work, _, ms, mhz in rows]
    rest, found = calibrate(sixteen, "default")
    assert rest == pytest.approx(2250 - 1024) and found[3].modelled == pytest.approx(2250)
    assert tile(H200, DMAConfig(), False, 128).cycles(100.0, under=True) == 512 + 1024
    with pytest.raises(ValueError, match="nvfp4"):
        calibrate(rows, "nvfp4")


@pytest.mark.parametrize("config", ["default,pv=fp8", "hopper", "default"])
def test_the_h200_within_a_fifth(config: str) -> None:
    """Fitted at 8k and 16k: 32k, 64k, full attention and the other head dim."""
    _, found = calibrate([row for file in FILES for row in kernel_rows(file)], config)
    others = [p for p in found if not p.fitted]
    seen = " ".join(p.workload for p in others)
    assert all(part in seen for part in ("S32768", "S65536", "D64"))
    assert all(abs(p.error) <= 20 for p in others)


def test_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["cost_model.py", *arguments, "--out", str(tmp_path)])
        return main()

    assert run(*map(str, FILES)) == 0
    assert {x.name for x in tmp_path.iterdir()} == {"model.csv", "model_tiles.csv",
                                                    "model_shares.csv"}
    assert run(*map(str, FILES), "--tolerance", "1") == 1
    assert "off by" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        run(str(RESULTS / "decode.csv"))
    assert stop.value.code == 2 and "prefill CSV" in capsys.readouterr().err
