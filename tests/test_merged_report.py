"""One page of many results."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
pytest.importorskip("transformers")

from dma_attn.cli import main
from dma_attn.evaluation.subjects import Subject
from dma_attn.report.eval_figures import key_bits

RESULTS = Path("benchmarks/results/h200").resolve()
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def line(task: str, subject: str, unit: list[float], **values: object) -> str:
    return json.dumps({"task": task, "subject": subject, "unit": unit, **values})


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    """Two subjects in all metrics; 0.01 nats a token are 1.005 %."""
    lines = [json.dumps({"header": {"settings": {"tokens": 1024}, "environment": {
        "gpu": "<none & all>", "head_dim": "64"}}})]
    for subject, added in (("native", 0.0), ("default", 0.01), ("cache", 0.02)):
        lines += [line("perplexity", subject, [i], nll=2 + 0.1 * i + added) for i in range(3)]
        lines += [line("needles", subject, [n, d], found=[True, subject == "native"])
                  for n in (512, 1024) for d in (0.0, 1.0)]
        lines += [line("agreement", subject, [i], tokens=[1, 2, 3 + i * (added > 0)])
                  for i in range(2)]
    heads = [{"layer": i, "rel_l2": [0.1, 0.12], "cosine": [0.99, 0.98], "worst_row": [0.3, 0.4]}
             for i in range(4)]
    heads[2]["rel_l2"] = [0.9, 0.9]
    lines.append(line("layers", "default", [0], layers=heads))
    lines.append(line("maps", "default", [0], layer=1, head=2, tokens=512, cell=8,
                      weights=[[1e-6 * (i + j) for j in range(64)] for i in range(64)]))
    lines.append(line("maps", "off", [0], layer=1, head=2, tokens=512, cell=256,
                      weights=[[0.0, 0.0], [0.0, 0.0]]))
    lines.append(line("needles", "native", [2048, 1.0], found=[True]))  # and then it was killed
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_an_evaluation_as_markdown(
    evaluation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "table", str(evaluation)]) == 0
    text = capsys.readouterr().out
    titles = [x for x in text.splitlines() if x.startswith("## ")]
    assert titles == [f"## mine_{x}" for x in ("perplexity", "needles", "layers", "agreement")]
    assert "| default | 3 |" in text and "tokens 1024" in text
    empty = tmp_path / "empty.jsonl"
    empty.write_text(evaluation.read_text().splitlines()[0] + "\n")
    assert main(["bench", "table", str(empty)]) == 2
    assert "empty.jsonl: expected an evaluation" in capsys.readouterr().err


def test_a_page_of_everything(evaluation: Path, tmp_path: Path) -> None:
    page = tmp_path / "out" / "page.html"
    assert main(["report", str(evaluation), str(RESULTS), "--out", str(page)]) == 0
    text = page.read_text("utf-8")
    for part in ("+1.01 (+1.01 to +1.01)", "layer 2", "100 (51 to 100)", "prefill", "mine.jsonl",
                 "Speed over length", "Memory over length",
                 "Error of the attention weights", "not finite: off.", "<td>2048</td>",
                 "&lt;none &amp; all&gt;"):
        assert part in text, part
    assert "<script" not in text and not re.search(r"(src|href)=\"(?!data:)", text)
    assert text.count("data:image/png") >= 5 and "data:image/svg+xml" in text


def test_what_is_no_result_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"a.jsonl": "{}\n", "b.csv": "# only: facts\n", "results.json": "[]", "c.txt": "x"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        assert main(["report", str(tmp_path / name), "--out", str(tmp_path / "x.html")]) == 2
        assert "RESULTS" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    for missing in ("none", "empty"):
        assert main(["report", str(tmp_path / missing)]) == 2
        assert "RESULTS" in capsys.readouterr().err


@pytest.mark.parametrize("subject, expected", [
    ("native", 16.0), ("mxfp8", 8.25), ("nvfp4", 4.5 + 32 / 128),
    ("default,high=none,low=none", 16.0),
    ("cache:default,low=int4,diag=0,sink=0", 4 + 32 / 128),
    ("cache:default,high=none,low=int4", 4 + 32 / 128 + 16 * (128 + 128 + 129 + 128) / 1024),
])
def test_bits_of_a_key(subject: str, expected: float) -> None:
    assert key_bits(Subject.parse(subject), 1024, 128) == pytest.approx(expected)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [1280, 400])
def test_in_a_browser(evaluation: Path, tmp_path: Path, width: int) -> None:
    """No console message, no page wider than the window, figures as wide as they can be."""
    page, shot = tmp_path / "page.html", tmp_path / "shot.png"
    assert main(["report", str(evaluation), str(RESULTS), "--out", str(page)]) == 0
    probe = tmp_path / "probe.html"
    probe.write_text(page.read_text("utf-8").replace("</body>", (
        "<script>addEventListener('load', () => { const w = [...document.images].map(x =>"
        " [x.complete && x.naturalWidth > 0, x.getBoundingClientRect().width]);"
        " document.title = JSON.stringify([document.documentElement.scrollWidth, innerWidth, w]);"
        " });</script></body>")))
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               "--enable-logging=stderr", f"--window-size={width},3000"]
    done = subprocess.run([*command, f"--screenshot={shot}", page.as_uri()], capture_output=True,
                          text=True, timeout=120, check=False)
    assert done.returncode == 0 and shot.stat().st_size > 20000
    assert "CONSOLE" not in done.stderr
    done = subprocess.run([*command, "--virtual-time-budget=5000", "--dump-dom", probe.as_uri()],
                          capture_output=True, text=True, timeout=120, check=False)
    title = re.search(r"<title>(\[.*?)</title>", done.stdout)
    assert title is not None
    content, inner, images = json.loads(title[1])
    assert content <= inner and len(images) >= 6
    least = min(inner - 40, 560)
    assert all(loaded and least <= size <= inner for loaded, size in images)
