"""Benchmarks: what is judged and written, and (on a GPU) a small run of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dma_attn.bench import error as error_module
from dma_attn.bench import peers as peers_module
from dma_attn.bench.compile import CompileRow, first_calls
from dma_attn.bench.error import (
    ALL_LAYERS,
    ErrorRow,
    error_ratio,
    exact_causal,
    load_capture,
    measure_errors,
)
from dma_attn.bench.peers import PEERS, Peer, PeerMissing, find_peers
from dma_attn.bench.prefill import (
    BF16,
    CLAIMS,
    END_TO_END,
    ERROR,
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
    COMPILE_COLUMNS,
    ERROR_COLUMNS,
    PREFILL_COLUMNS,
    claim_cells,
    compile_cells,
    error_cells,
    prefill_cells,
    read_csv,
    write_csv,
)
from dma_attn.bench.timing import Timing
from dma_attn.cli import main
from dma_attn.evaluation.models import load_model
from dma_attn.evaluation.text import read_text, token_ids
from dma_attn.report.markdown import markdown
from dma_attn.testing import assert_rel_l2, random_qkv
from tests.impls import needs_gpu
from tests.tiny_model import save_tiny_model

ROOT = Path(__file__).resolve().parent.parent
WORK = Workload(1, 32, 8, 8192, 128, True)


def row(
    candidate: str, ms: float, kind: str = KERNEL, workload: Workload = WORK, error: float = 0.01
) -> Row:
    return Row(workload, candidate, kind, Timing(ms, 0.02, 1700, 0.3), error)


def test_flop_and_rate() -> None:
    assert WORK.flop == 4 * 32 * 8192**2 * 128 / 2
    assert row("x", 1.0).tflops == pytest.approx(549.8, abs=0.1)
    assert str(WORK) == "B1 H32/8 S8192 D128 causal"


def test_workload_reads_what_it_writes() -> None:
    for workload in (WORK, Workload(2, 8, 1, 77, 64, False)):
        assert Workload.parse(str(workload)) == workload
    with pytest.raises(ValueError, match="got 'B1 H32 S8192'"):
        Workload.parse("B1 H32 S8192")


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


def test_a_claim_about_errors_reads_those_of_the_kernel() -> None:
    claim = Claim("hopper", ERROR, FA3_FP8, 1 / 0.78, 1 / 0.7)
    theirs = row(FA3_FP8[0], 1.0, error=0.1)
    rows = [row("hopper", 9.0, error=0.08), row("hopper", 9.0, END_TO_END, error=0.01), theirs]
    (verdict,) = judge(rows, [claim])
    assert verdict.ratio == pytest.approx(1.25) and not verdict.holds
    (verdict,) = judge([row("hopper", 9.0, error=0.077), theirs], [claim])
    assert verdict.holds and claim_cells([verdict])[0][2] == "error"
    (verdict,) = judge(rows[1:], [claim])
    assert verdict.ratio is None


def test_claims_concern_their_workloads_only() -> None:
    short = Workload(1, 32, 8, 512, 128, True)
    assert not any(claim.applies(short) for claim in CLAIMS)
    full = Workload(2, 32, 8, 8192, 128, False)
    assert {c.candidate for c in CLAIMS if c.applies(full)} == {"default", "default,pv=fp8"}
    mixed = [c for c in CLAIMS if c.candidate == "default,high=none,pv=fp8"]
    assert [[c.applies(Workload(1, 32, 8, n, 128, True)) for c in mixed] for n in (8192, 16384)] \
        == [[False], [True]]
    narrow = Workload(1, 32, 8, 8192, 64, True)
    assert {c.against for c in CLAIMS if c.applies(narrow)} == {("fa3-bf16",), FA3_FP8}
    end_to_end = [c for c in CLAIMS if c.kind == END_TO_END]
    assert judge([row("default,pv=fp8", 1.0)], end_to_end)[0].ratio is None


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
    assert lines == [[str(WORK), "default", "kernel", "0.5000", "2.0", "1100", "0.0100", "1700",
                      "300"]]
    text = markdown(path)
    assert text.startswith("## prefill\n") and "| default | kernel |" in text
    path.write_text("# nothing: here\n")
    with pytest.raises(ValueError, match="CSV table"):
        read_csv(path)
    assert len(claim_cells(judge([row("default", 1.0)]))[0]) == len(CLAIM_COLUMNS)
    assert len(error_cells([ErrorRow("0", "hopper", 0.1)])[0]) == len(ERROR_COLUMNS)


def test_table_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for path in paths:
        write_csv(path, {"gpu": "fast"}, ERROR_COLUMNS, [["0", "hopper", "0.1"]])
    out = tmp_path / "docs" / "results.md"
    assert main(["bench", "table", *map(str, paths), "--out", str(out)]) == 0
    assert capsys.readouterr().out == ""
    title, _, made, *rest = out.read_text().splitlines()
    assert title == "# Results" and made.startswith("Made by `dma-attn bench table ")
    assert [line for line in rest if line.startswith("#")] == ["## a", "## b"]
    assert rest.count("| 0 | hopper | 0.1 |") == 2
    twin = tmp_path / "other" / "a.csv"  # of one name: told apart by their folders
    write_csv(twin, {}, ERROR_COLUMNS, [])
    assert main(["bench", "table", str(paths[0]), str(twin)]) == 0
    text = capsys.readouterr().out
    assert f"## a ({tmp_path.name})" in text and "## a (other)" in text
    paths[0].write_text("# gpu: fast\n")
    assert main(["bench", "table", *map(str, paths)]) == 2
    assert "CSV table" in capsys.readouterr().err


Layers = dict[str, peers_module.Inputs]


@pytest.fixture
def layers() -> Layers:
    """Two layers; the second with values that are ten times as large."""
    q, k, v = random_qkv(1, (4, 2), (150, 150), 32)
    return {"3": (q, k, v), "11": (k.repeat(1, 2, 1, 1), q[:, :2], 10 * v)}


def test_errors_by_layer_and_over_all(layers: Layers) -> None:
    notes: list[str] = []
    rows = measure_errors(
        layers, ["off", "default"], ["flash2-bf16", "fa3-bf16"], "cpu", notes.append
    )
    errors = {(r.layer, r.candidate): r.error for r in rows}
    assert [r.layer for r in rows] == ["3"] * 3 + ["11"] * 3 + [ALL_LAYERS] * 3
    assert all(0 < errors[layer, "off"] < 0.01 < errors[layer, "default"] < 0.3
               for layer in (*layers, ALL_LAYERS))
    assert errors["3", "flash2-bf16"] < 0.01
    # the larger values outweigh the others
    assert errors[ALL_LAYERS, "default"] == pytest.approx(errors["11", "default"], rel=0.02)
    assert sum("fa3-bf16 is missing" in note for note in notes) == 1
    assert sum("not on the Hopper kernel" in note for note in notes) == 2


def test_exact_attention_agrees_with_torch(layers: Layers) -> None:
    q, k, v = (x.double() for x in layers["3"])
    ref = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(exact_causal(q, k, v), ref)


def test_a_candidate_that_misses_a_layer_has_no_sum(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(inputs: peers_module.Inputs, causal: bool, names: object) -> object:
        small = inputs[2].abs().max() < 10
        return ({"some": lambda: inputs[0]}, {}) if small else ({}, {"some": "too large"})

    monkeypatch.setattr(error_module, "find_peers", once)
    rows = measure_errors(layers, [], ["some"], "cpu", lambda _: None)
    assert [(r.layer, r.candidate) for r in rows] == [("3", "some")]


def test_ratio_of_errors_over_all_layers() -> None:
    rows = [ErrorRow("0", "hopper", 9.0), ErrorRow(ALL_LAYERS, "hopper", 0.02)]
    assert error_ratio(rows) is None
    assert error_ratio([*rows, ErrorRow(ALL_LAYERS, FA3_FP8[0], 0.05)]) == pytest.approx(0.4)


def test_captured_model(tmp_path: Path) -> None:
    """The script's file holds what attention gets: its exact result is the model's own."""
    pytest.importorskip("transformers")
    model, path = save_tiny_model(tmp_path / "model", head_dim=32), tmp_path / "new" / "qkv"
    command = [sys.executable, str(ROOT / "benchmarks/capture_qkv.py"), str(model), str(path)]
    done = subprocess.run(
        [*command, "--tokens", "70", "--layers", "2"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    captured = load_capture(path)
    assert list(captured) == ["0", "2"]
    assert [tuple(x.shape) for x in captured["2"]] == [(1, 4, 70, 32), *[(1, 2, 70, 32)] * 2]
    loaded = load_model(str(model))
    outputs: list[torch.Tensor] = []
    for layer in loaded.model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    with torch.no_grad():
        loaded.model(token_ids(loaded.tokenizer, read_text())[None, :70])
    for layer, qkv in captured.items():
        assert_rel_l2(exact_causal(*qkv).transpose(1, 2).flatten(2), outputs[int(layer)], 0.03)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"q.0": (1, 2, 4, 8), "k.0": (1, 2, 4, 8)}, "with k.0, q.0"),
        ({"weight": (1, 2, 4, 8)}, "with weight"),
        ({f"{part}.0": (2, 2, 4, 8) for part in "qkv"}, r"\(2, 2, 4, 8\)"),
        ({}, "with nothing"),
    ],
    ids=["no v", "other names", "batch", "empty"],
)
def test_other_files_are_no_capture(
    tensors: dict[str, tuple[int, ...]], words: str, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "file.safetensors"
    save_file({name: torch.zeros(shape).bfloat16() for name, shape in tensors.items()}, path)
    with pytest.raises(ValueError, match=words):
        load_capture(path)
    path.write_text("nothing")
    with pytest.raises(ValueError, match="expected a safetensors file"):
        load_capture(path)


@pytest.mark.parametrize(
    ("arguments", "error", "code"),
    [
        ([], 0.02, 0),
        ([], 0.03, 1),
        (["--peer", "fa3-bf16"], 0.02, 1),
        (["--peer", "none"], 0.03, 0),
        (["--config", "default"], 0.03, 0),
    ],
    ids=["reached", "missed", "not measured", "no peers", "no hopper"],
)
def test_error_command_judges(
    arguments: list[str],
    error: float,
    code: int,
    layers: Layers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from safetensors.torch import save_file

    from dma_attn import cli_bench

    def made_up(
        layers: Layers, configs: list[str], peers: list[str], **_: object
    ) -> list[ErrorRow]:
        values = {"hopper": error, FA3_FP8[0]: 0.05}
        return [ErrorRow(ALL_LAYERS, n, values.get(n, 0.1)) for n in [*configs, *peers]]

    monkeypatch.setattr(cli_bench, "_facts", lambda: {"gpu": "made up"})
    monkeypatch.setattr(error_module, "measure_errors", made_up)
    path = tmp_path / "qkv.safetensors"
    save_file(
        {f"{name}.{layer}": x.clone(memory_format=torch.contiguous_format)
         for layer, qkv in layers.items() for name, x in zip("qkv", qkv, strict=True)},
        path,
    )
    assert main(["bench", "error", str(path), "--out", str(tmp_path), *arguments]) == code
    facts, columns, lines = read_csv(tmp_path / "error.csv")
    assert facts == {"gpu": "made up", "capture": "qkv.safetensors"}
    assert columns == list(ERROR_COLUMNS) and lines


@pytest.mark.parametrize("command", ["prefill", "quant", "error", "compile", "table", "figures"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", command, "--help"]) == 0
    assert f"Example: dma-attn bench {command}" in " ".join(capsys.readouterr().out.split())


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


def test_first_calls_are_bounded() -> None:
    assert CompileRow(128, "default", 20.0, 5, 11).holds
    assert not CompileRow(128, "default", 61.0, 5, 11).holds
    assert not CompileRow(128, "default", 20.0, 5, 13).holds
    assert len(compile_cells([CompileRow(64, "hopper", 1.0, 4, 9)])[0]) == len(COMPILE_COLUMNS)


def test_first_calls_of_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = first_calls(16, "default", device="cpu")
    assert found["seconds"] > 0 and found["kernels"] == 0  # PyTorch does it on a CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    "command", [["prefill"], ["quant"], ["compile"], ["error", "qkv.safetensors"]], ids=str
)
def test_a_benchmark_needs_a_gpu(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *command]) == 2
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
