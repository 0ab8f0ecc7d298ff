"""The report: strict JSON, figures that show the schedule, one self-contained page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
pytest.importorskip("transformers")

from dma_attn import DMAConfig
from dma_attn.evaluation.demo import DemoResults, DemoSettings, standard_configs
from dma_attn.evaluation.generate import Answer
from dma_attn.evaluation.layer_error import AttentionMap, LayerError, LayerErrorResult
from dma_attn.evaluation.perplexity import PerplexityResult
from dma_attn.integrations.transformers import DECODE_MAX_QUERIES
from dma_attn.report import figures
from dma_attn.report.results import change_percent, results_dict, signed_percent, write_json
from dma_attn.report.writer import write_report

PNG = b"\x89PNG\r\n\x1a\n"
FILES = ["layer_error.png", "perplexity.png", "precision_map.png", "report.html", "results.json"]


def perplexity(*nll: float) -> PerplexityResult:
    return PerplexityResult(math.exp(sum(nll) / len(nll)), nll, 100 * len(nll), 1.5)


def sample(**changes: object) -> DemoResults:
    """Made-up results of the right shape."""
    configs = {**standard_configs(), "default,diag=512": DMAConfig(diag=512)}
    dma = [label for label, config in configs.items() if config is not None]
    layers = {
        label: tuple(
            LayerError(layer, 0.99, 0.1, 0.01 * (index + 1) + 0.001 * layer, 0.1, 40.0, 1.0, 0.5)
            for layer in range(4)
        )
        for index, label in enumerate(dma)
    }
    weights = torch.full((128, 128), 1 / 512).tril()
    results = DemoResults(
        settings=DemoSettings(model="some/model", tokens=512, windows=2),
        configs=configs,
        perplexity={
            label: perplexity(2.0 + 0.01 * i, 2.2 + 0.02 * i) for i, label in enumerate(configs)
        },
        layer_error=LayerErrorResult(layers, AttentionMap(2, 1, 512, 4, weights), 512),
        prompt="What is <b>this</b>?",
        answers={
            "native": Answer("Plain & simple", (1, 2, 3), 30, 1.0, 100),
            "default": Answer("<script>alert(1)</script>", (1, 2, 4), 30, 1.0, 100),
            "default, mixed cache": Answer("Plain", (1, 3, 4), 30, 2.5, 31_000),
        },
        environment={"dma_attn": "0.1.0", "python": "3.12.3", "torch": "2.13.0"},
        seconds={"load": 0.5, "total": 12.0},
    )
    return replace(results, **changes)


def strict_json(path: Path) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_report_folder(tmp_path: Path) -> None:
    page = write_report(sample(), tmp_path / "new" / "dma-report")
    assert page == tmp_path / "new" / "dma-report" / "report.html"
    assert sorted(path.name for path in page.parent.iterdir()) == FILES
    for path in page.parent.glob("*.png"):
        assert path.read_bytes().startswith(PNG)
    write_report(sample(), page.parent)  # a second run replaces the first


def test_page_is_self_contained_and_shows_the_figures(tmp_path: Path) -> None:
    text = write_report(sample(), tmp_path).read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == 3
    sources = re.findall(r'(?:src|href|srcset)\s*=\s*"([^"]{0,30})', text)
    assert len(sources) == 3 and all(source.startswith("data:") for source in sources)
    assert not re.search(r"https?://|@import|url\(|<script|<link|<iframe", text)
    assert 'name="viewport"' in text and "@media print" in text
    assert text.count("alt=") == 3


def test_page_escapes_what_a_model_says(tmp_path: Path) -> None:
    text = write_report(sample(), tmp_path).read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "Plain &amp; simple" in text and "What is &lt;b&gt;this" in text


def test_page_states_the_measured_numbers(tmp_path: Path) -> None:
    results = sample()
    text = write_report(results, tmp_path).read_text(encoding="utf-8")
    for label, result in results.perplexity.items():
        assert label in text and f"{result.value:.3f}" in text
    change, error = change_percent(results.perplexity["default"], results.perplexity["native"])
    assert text.count(f"{change:+.2f}% ± {error:.2f}%") == 1
    assert "the first 2 tokens are native" in text and "2.5 s; KV cache 0.03 MB" in text
    assert "70% of the tiles are precise in a window of\n512 tokens" in text
    assert "6.1% at 8192 tokens" in text and "longer than 256 tokens" in text
    assert "The question is 30 tokens long, and 100% of its tiles are precise" in text
    assert f"up to {DECODE_MAX_QUERIES} queries" in text


def test_results_json(tmp_path: Path) -> None:
    write_report(sample(), tmp_path)
    found = strict_json(tmp_path / "results.json")
    labels = ["native", "paper", "default", "default,high=none", "nvfp4", "mxfp8", "hopper"]
    assert list(found["perplexity"])[:7] == labels
    assert found["perplexity"]["native"]["value"] == pytest.approx(math.exp(2.1))
    assert (
        found["configs"]["default,diag=512"]["diag"] == 512 and found["configs"]["native"] is None
    )
    assert [row["layer"] for row in found["per_layer"]["layers"]["paper"]] == [0, 1, 2, 3]
    assert found["chat"]["shared_prefix_tokens"] == {"default": 2, "default, mixed cache": 1}
    assert found["chat"]["answers"]["default, mixed cache"]["cache_bytes"] == 31_000
    assert found["chat"]["answers"]["native"]["text"] == "Plain & simple"
    assert found["settings"]["tokens"] == 512 and found["seconds"]["total"] == 12.0
    assert found["environment"]["torch"] == "2.13.0"


def test_what_is_not_finite_becomes_null_everywhere(tmp_path: Path) -> None:
    nan = math.nan
    results = sample()
    broken = LayerError(0, nan, nan, nan, nan, nan, math.inf, nan)
    layers = {**results.layer_error.layers, "paper": (broken,) * 4}
    results = sample(
        perplexity={**results.perplexity, "paper": PerplexityResult(nan, (nan, nan), 200, 1.0)},
        layer_error=replace(results.layer_error, layers=layers),
    )
    text = write_report(results, tmp_path).read_text(encoding="utf-8")
    found = strict_json(tmp_path / "results.json")
    assert found["perplexity"]["paper"]["value"] is None
    assert found["per_layer"]["layers"]["paper"][0]["max_abs"] is None
    assert "not finite" in text and "nan" not in re.sub(r"base64,[^\"]*", "", text).lower()


def test_write_json_is_strict(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": [math.inf, -math.inf, math.nan, 1.5], 3: ("é", None)})
    assert strict_json(tmp_path / "x.json") == {"a": [None, None, None, 1.5], "3": ["é", None]}


def test_change_and_its_standard_error() -> None:
    """Differences 0.01 and 0.03: mean 0.02, standard error 0.01 (0.02 / sqrt 2 / sqrt 2)."""
    change, error = change_percent(perplexity(1.01, 2.03), perplexity(1.0, 2.0))
    assert change == pytest.approx(100 * (math.exp(0.02) - 1))
    assert error == pytest.approx(100 * math.exp(0.02) * 0.01)
    assert change_percent(perplexity(1.0), perplexity(1.0)) == (0.0, None)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (1.234, 0.5, "+1.23% ± 0.50%"),
        (-0.126, None, "\N{MINUS SIGN}0.13%"),
        (-0.001, 0.04, "0.00% ± 0.04%"),
        (0.0, None, "0.00%"),
        (math.nan, math.nan, "not finite"),
        (None, None, "not finite"),
    ],
)
def test_changes_as_text(change: float | None, error: float | None, text: str) -> None:
    assert signed_percent(change, error) == text


def test_whiskers_are_inside_the_axes() -> None:
    changes = {"a": (-0.5, 0.4), "b": (0.05, 0.6), "c": (1.0, 0.2)}
    values = dict.fromkeys([*changes, "native"], 10.0)
    colours = figures.config_colours(changes)
    axes = figures._perplexity_figure(changes, values, "native", colours).axes[0]
    low, high = axes.get_xlim()
    assert low < -0.9 and high > 1.2
    assert "10.000  (\N{MINUS SIGN}0.50% ± 0.40%)" in [text.get_text() for text in axes.texts]


def test_a_configuration_keeps_its_colour() -> None:
    some = figures.config_colours(["paper", "default", "nvfp4"])
    more = figures.config_colours(["default", "nvfp4", "paper", *map(str, range(9))])
    assert some == {label: more[label] for label in some} and len(set(some.values())) == 3


def test_one_window_has_no_error(tmp_path: Path) -> None:
    results = sample()
    single = {label: perplexity(2.0) for label in results.perplexity}
    settings = replace(results.settings, windows=1)
    text = write_report(sample(perplexity=single, settings=settings), tmp_path).read_text("utf-8")
    assert "One window only" in text
    assert results_dict(sample(perplexity=single))["perplexity"]["paper"]["change_percent"] == 0


@pytest.mark.parametrize("tokens", [1, 128, 129, 700, 1024])
@pytest.mark.parametrize("diag", [0, 128, 256, "full"])
@pytest.mark.parametrize("sink", [0, 128, 256])
def test_precision_map_shows_the_schedule(tokens: int, diag: int | str, sink: int) -> None:
    """Against the definition, written out: near the diagonal, else within the sink, else low."""
    tiles = math.ceil(tokens / 128)
    expected = []
    for a in range(tiles):
        for b in range(a + 1):
            near = diag == "full" or (a - b) * 128 < diag
            expected.append((a, b, "diagonal" if near else "sink" if b * 128 < sink else "low"))
    assert figures.tile_kinds(tokens, DMAConfig(diag=diag, sink=sink)) == expected


def test_high_shares() -> None:
    """512 tokens: 4 diagonal and 3 sink tiles of 10; all weight of the last query row is far."""
    weights = torch.zeros(128, 128)
    weights[:, 0] = 1.0  # everyone looks at the first keys
    config = DMAConfig()
    assert figures.high_shares(AttentionMap(0, 0, 512, 4, weights), config) == (0.7, 1.0)
    weights = torch.zeros(128, 128)
    weights[127, 40] = 1.0  # query tile 3 looks at key tile 1
    assert figures.high_shares(AttentionMap(0, 0, 512, 4, weights), config) == (0.7, 0.0)


def test_figures_take_odd_values() -> None:
    zero = (LayerError(0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),)
    assert figures.layer_error_lines({"off": zero}, {"off": "#009E73"}).startswith(PNG)
    changes = {"better": (-3.0, None), "huge": (1e6, 10.0), "broken": (math.nan, math.nan)}
    values = {"native": 10.0, "better": 9.7, "huge": 1e5, "broken": math.nan}
    colours = figures.config_colours(changes)
    assert figures.perplexity_bars(changes, values, "native", colours).startswith(PNG)
    small = AttentionMap(0, 0, 5, 1, torch.eye(5))
    assert figures.precision_map(small, DMAConfig(diag="full")).startswith(PNG)
