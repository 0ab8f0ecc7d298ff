"""Benchmarks: what is judged and written, and (on a GPU) a small run of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dma_attn.bench import peers as peers_module
from dma_attn.bench.peers import PEERS, Peer, PeerMissing, find_peers
from dma_attn.bench.prefill import (
    BF16,
    CLAIMS,
    END_TO_END,
    FA3_FP8,
    KERNEL,
    Claim,
    Row,
    Workload,
    judge,
    measure,
)
from dma_attn.bench.quantise import measure_fold
from dma_attn.bench.results import (
    CLAIM_COLUMNS,
    PREFILL_COLUMNS,
    claim_cells,
    markdown,
    prefill_cells,
    read_csv,
    write_csv,
)
from dma_attn.bench.timing import Candidate, Timing, summarise, time_candidates
from dma_attn.cli import main
from tests.impls import needs_gpu

WORK = Workload(1, 32, 8, 8192, 128, True)


def row(candidate: str, ms: float, kind: str = KERNEL, workload: Workload = WORK) -> Row:
    return Row(workload, candidate, kind, Timing(ms, 0.02, 1700), 0.01)


def test_flop_and_rate() -> None:
    assert WORK.flop == 4 * 32 * 8192**2 * 128 / 2
    assert row("x", 1.0).tflops == pytest.approx(549.8, abs=0.1)
    assert str(WORK) == "B1 H32/8 S8192 D128 causal"


def test_a_claim_takes_the_fastest_of_its_peers() -> None:
    claim = Claim("default", KERNEL, BF16, 1.05, 1.25)
    rows = [row("default", 1.0), row("cudnn-bf16", 2.0), row("fa3-bf16", 1.1)]
    (verdict,) = judge(rows, [claim])
    assert verdict.ratio == pytest.approx(1.1) and verdict.holds
    (verdict,) = judge([row("default", 1.06), *rows[1:]], [claim])
    assert not verdict.holds


@pytest.mark.parametrize("absent", ["default", "fa3-bf16", "cudnn-bf16"])
def test_a_claim_fails_without_what_it_needs(absent: str) -> None:
    rows = [row(name, 1.0) for name in ("default", *BF16) if name != absent]
    (verdict,) = judge(rows, [Claim("default", KERNEL, BF16, 0.5, 1.0)])
    assert verdict.ratio is None and not verdict.holds
    assert "not measured" in claim_cells([verdict])[0]


def test_claims_concern_their_workloads_only() -> None:
    short = Workload(1, 32, 8, 512, 128, True)
    assert not any(claim.applies(short) for claim in CLAIMS)
    full = Workload(2, 32, 8, 8192, 128, False)
    assert {c.candidate for c in CLAIMS if c.applies(full)} == {"default", "default,pv=fp8"}
    narrow = Workload(1, 32, 8, 8192, 64, True)
    assert {c.against for c in CLAIMS if c.applies(narrow)} == {("fa3-bf16",), FA3_FP8}
    end_to_end = [c for c in CLAIMS if c.kind == END_TO_END]
    assert judge([row("default,pv=fp8", 1.0)], end_to_end)[0].ratio is None


def test_summary() -> None:
    assert summarise([3.0, 1.0, 2.0], [1700, 1800]) == Timing(2.0, 1.0, 1750)
    assert summarise([2.0], []).clock is None


def test_timing_refuses_too_few_rounds_and_twins() -> None:
    with pytest.raises(ValueError, match="rounds"):
        time_candidates([], rounds=4)
    twin = Candidate("a", [lambda: None])
    with pytest.raises(ValueError, match="one each"):
        time_candidates([twin, twin])


def test_missing_peers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> object:
        raise PeerMissing("not installed")

    def broken(*_: object) -> object:
        return lambda: 1 / 0

    def works(inputs: peers_module.Inputs, causal: bool) -> object:
        return lambda: inputs[0]

    fakes = {name: Peer(name, make)  # type: ignore[arg-type]
             for name, make in (("absent", absent), ("broken", broken), ("works", works))}
    monkeypatch.setattr(peers_module, "PEERS", fakes)
    x = torch.zeros(1, 1, 4, 8)
    calls, missing = find_peers((x, x, x), True, tuple(fakes))
    assert list(calls) == ["works"]
    assert missing["absent"] == "not installed" and "division by zero" in missing["broken"]


def test_peers_agree_with_each_other_on_the_cpu() -> None:
    """The ones that run here: the layout and the causal rule of the adapters."""
    x = torch.randn(1, 2, 16, 8)
    calls, _ = find_peers((x, x[:, :1], x[:, :1]), True, ("flash2-bf16", "flex-bf16"))
    assert "flash2-bf16" in calls
    for call in calls.values():
        ref = torch.nn.functional.scaled_dot_product_attention(
            x, x[:, :1], x[:, :1], is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(call(), ref, rtol=1e-2, atol=1e-2)


def test_csv_round_trip_and_markdown(tmp_path: Path) -> None:
    path = tmp_path / "new" / "prefill.csv"
    write_csv(path, {"gpu": "a GPU: fast"}, PREFILL_COLUMNS, prefill_cells([row("default", 0.5)]))
    facts, columns, lines = read_csv(path)
    assert facts == {"gpu": "a GPU: fast"} and columns == list(PREFILL_COLUMNS)
    assert lines == [[str(WORK), "default", "kernel", "0.5000", "2.0", "1100", "0.0100", "1700"]]
    text = markdown(path)
    assert text.startswith("## prefill\n") and "| default | kernel |" in text
    path.write_text("# nothing: here\n")
    with pytest.raises(ValueError, match="CSV table"):
        read_csv(path)
    assert len(claim_cells(judge([row("default", 1.0)]))[0]) == len(CLAIM_COLUMNS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["table", "nowhere.csv"], "expected a file"),
        (["prefill", "--rounds", "2"], "rounds"),
        (["prefill", "--length", "0"], "length"),
    ],
    ids=str,
)
def test_bad_command_lines(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("command", ["prefill", "quant"])
def test_a_benchmark_needs_a_gpu(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", command]) == 2
    assert "CUDA device" in capsys.readouterr().err


@needs_gpu
def test_small_runs() -> None:
    rows = measure(Workload(1, 4, 2, 1024, 128, True), ["default"], ["flash2-bf16"], seconds=0.01)
    assert {r.candidate for r in rows} == {"default", "flash2-bf16"}
    assert all(0 < r.timing.ms < 100 and r.error < 0.2 for r in rows)
    fold = {r.candidate: r for r in measure_fold(1024, seconds=0.01)}
    assert fold["device copy"].share == 1.0 and len(fold) == 2


def test_every_peer_has_a_name_of_its_own() -> None:
    assert all(name == peer.name for name, peer in PEERS.items())
