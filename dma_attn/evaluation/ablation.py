"""The paper's ablations (arXiv 2604.03950), on a model's own queries, keys and values.

    formats        one format everywhere, and two formats by tiles
    tiles          width of the high band and sink, 128 to 2048 tokens
    granularity    what NVFP4's second-level scale spans
    fusion         the quantiser of both formats, from separate operations to one kernel

Each by the authors' numerics (preset `paper`) and by ours (`default`), beside what the paper
reports. Errors are those of the attention output against float32, all heads together, averaged over
layers. The paper's are of Llama-3.1-8B, so that orders can be compared and not numbers. Fusion
changes no bit: its table is of times, on normal data of 32 heads of 128 dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch

from .. import DMAConfig, dma_attention, precision_metrics
from ..attention.explain import high_share
from .capture import AttentionCall, visit_attention

METRICS = ("cosine", "rel_l1", "rmse", "psnr")
NUMERICS = {"paper": DMAConfig.preset("paper"), "ours": DMAConfig()}
TABLES: dict[str, dict[str, dict[str, Any]]] = {
    "formats": {
        **{name: {"high": name, "low": name} for name in ("mxfp4", "nvfp4", "mxfp8")},
        "DMA 128/128": {"diag": 128, "sink": 128},
        "DMA 256/256": {"diag": 256, "sink": 256},
    },
    "tiles": {f"{n}/{n}": {"diag": n, "sink": n} for n in (128, 256, 512, 1024, 2048)},
    "granularity": {name: {"granularity": name} for name in ("tensor", "tile", "token")},
}
REPORTED: dict[tuple[str, str], dict[str, float]] = {
    ("formats", "mxfp4"): {"ms": 12.98},
    ("formats", "nvfp4"): {"ms": 13.40},
    ("formats", "mxfp8"): {"ms": 16.77},
    ("formats", "DMA 128/128"): {"ms": 7.776},
    ("formats", "DMA 256/256"): {"ms": 15.72},
    ("tiles", "128/128"): {"high_percent": 2.30, "cosine": 0.822, "rel_l1": 0.539, "rmse": 0.059,
                           "psnr": 44.66},
    ("tiles", "512/512"): {"high_percent": 9.22, "cosine": 0.826, "rel_l1": 0.542, "rmse": 0.058,
                           "psnr": 44.73},
    ("tiles", "2048/2048"): {"high_percent": 36.87, "cosine": 0.852, "rel_l1": 0.521,
                             "rmse": 0.054, "psnr": 45.35},
    ("granularity", "tensor"): {"cosine": 0.732, "ms": 6.276},
    ("granularity", "tile"): {"cosine": 0.736, "ms": 6.366},
    ("granularity", "token"): {"cosine": 0.822, "ms": 7.131},
}
"""What the paper reports, on one B200; its granularity "block" is our "tile"."""
FUSION = "fusion"
FUSION_REPORTED = {
    2048: {"unfused": 7262.0, "+ encode": 803.0, "+ pack": 741.0, "+ scale conversion": 180.0,
           "fused": 97.9},
    8192: {"unfused": 22629.0, "+ encode": 1114.0, "+ pack": 943.0, "+ scale conversion": 300.0,
           "fused": 282.0},
}
"""The paper's microseconds, by tokens and stage."""


@dataclass(frozen=True)
class AblationRow:
    """One variant.

    Attributes:
        numerics: "paper" or "ours".
        high_percent: Of the causally visible tiles; 0 or 100 with one format.
        cosine, rel_l1, rmse, psnr: As in `precision_metrics`, means over layers.
        ms: A call on one layer's tensors, quantisation included; None where it was not timed.
        reported: What the paper reports of this variant.
    """

    table: str
    numerics: str
    variant: str
    high_percent: float
    cosine: float
    rel_l1: float
    rmse: float
    psnr: float
    ms: float | None
    reported: dict[str, float]


@dataclass(frozen=True)
class FusionRow:
    """A stage of the quantiser's fusion.

    Attributes:
        us: A call, replayed from a CUDA graph: what the GPU needs. Unfused, it cannot be captured
            (its tables come from the host) and is timed as called.
        host_us: What the host needs to enqueue a call.
        reported_us: What the paper reports.
    """

    stage: str
    numerics: str
    tokens: int
    us: float
    host_us: float
    reported_us: float | None


def run_fusion(
    lengths: Sequence[int] = tuple(FUSION_REPORTED),
    progress: Callable[[int, int], None] | None = None,
) -> list[FusionRow]:
    """Times of the quantiser's stages (`quant.stages`) on the current CUDA device.

    Args:
        lengths: Numbers of tokens.
        progress: Called with (tables of stages done, such tables in all).
    """
    from ..bench.timing import Candidate, time_candidates
    from ..quant.stages import STAGES, quantize_pair_stage

    rows = []
    total = len(lengths) * len(NUMERICS)
    for tokens in lengths:
        x = torch.randn(1, 32, tokens, 128, device="cuda").bfloat16()
        for numerics, config in NUMERICS.items():
            call = partial(quantize_pair_stage, x, config.high, config.low, rotate=config.rotate,
                           scale_rule=config.scale_rule)
            timings = time_candidates(
                [Candidate(s, [partial(call, stage=s)], graph=s != STAGES[0]) for s in STAGES]
            )
            rows += [
                FusionRow(stage, numerics, tokens, 1000 * timing.ms, 1000 * (timing.host or 0.0),
                          FUSION_REPORTED.get(tokens, {}).get(stage))
                for stage, timing in timings.items()
            ]
            if progress:
                progress(len(rows) // len(STAGES), total)
    return rows


def spread(layers: int, count: int) -> list[int]:
    """At most `count` of the layers 0 to `layers` - 1, the first and the last among them."""
    steps = max(1, min(count, layers) - 1)
    return sorted({round(i * (layers - 1) / steps) for i in range(min(count, layers))})


def run_ablation(
    model: Any,
    token_ids: torch.Tensor,
    tables: Sequence[str],
    *,
    layers: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> list[AblationRow]:
    """Rows of the tables, on one window, int64 (S,), of a transformers model.

    Args:
        layers: Evenly spread ones, at most.
        progress: Called with (layers done, layers in all).
    """
    variants = {(table, numerics, name): base.replace(**changes)
                for table in tables for name, changes in TABLES[table].items()
                for numerics, base in NUMERICS.items()}
    wanted = spread(int(model.config.num_hidden_layers), layers)
    found: dict[DMAConfig, list[Any]] = {config: [] for config in variants.values()}
    times: dict[DMAConfig, float] = {}

    def compare(call: AttentionCall) -> None:
        if call.layer not in wanted:
            return
        for config in found:
            found[config].append(precision_metrics(_attend(call, config).float(), call.exact))
        if call.q.is_cuda and not times:
            times.update(_times(call, list(found)))
        if progress:
            progress(wanted.index(call.layer) + 1, len(wanted))

    visit_attention(model, token_ids, compare)
    return [
        AblationRow(
            table=table,
            numerics=numerics,
            variant=name,
            high_percent=_high_percent(token_ids.numel(), config),
            **{x: fmean(float(getattr(m, x)) for m in found[config]) for x in METRICS},
            ms=times.get(config),
            reported=REPORTED.get((table, name), {}),
        )
        for (table, numerics, name), config in variants.items()
    ]


@dataclass(frozen=True)
class Finding:
    """What the paper says, and the two numbers of the rows that it is about."""

    claim: str
    numerics: str
    smaller: float
    larger: float

    @property
    def agrees(self) -> bool:
        """True when the rows have the paper's order."""
        return self.smaller < self.larger


def findings(rows: Sequence[AblationRow]) -> list[Finding]:
    """The paper's orders: errors fall with the band, scales by token are best, two formats by tiles
    are better than the low one and quicker than either."""
    at = {(r.table, r.numerics, r.variant): r for r in rows}
    out = []
    for numerics in NUMERICS:
        for claim, table, worse, better, metric in (
            ("rel-L1 falls from a band of 128 to 2048", "tiles", "128/128", "2048/2048", "rel_l1"),
            ("rel-L1 falls from scales by tensor to by token", "granularity", "tensor", "token",
             "rel_l1"),
            ("rel-L1 falls from NVFP4 to DMA 128/128", "formats", "nvfp4", "DMA 128/128",
             "rel_l1"),
            ("time falls from NVFP4 to DMA 128/128", "formats", "nvfp4", "DMA 128/128", "ms"),
        ):
            low, high = (at.get((table, numerics, name)) for name in (better, worse))
            if low and high and None not in (pair := (getattr(low, metric), getattr(high, metric))):
                out.append(Finding(claim, numerics, *pair))
    return out


def _attend(call: AttentionCall, config: DMAConfig) -> torch.Tensor:
    out = dma_attention(call.q, call.k, call.v, is_causal=True, scale=call.scale,
                        window_size=call.window, config=config)
    assert isinstance(out, torch.Tensor)  # no LSE was asked for
    return out


def _times(call: AttentionCall, configs: Sequence[DMAConfig]) -> dict[DMAConfig, float]:
    """Milliseconds a call, replayed from a CUDA graph, in 16 bits."""
    from ..bench.timing import Candidate, time_candidates

    q, k, v = (x.bfloat16() for x in (call.q, call.k, call.v))
    short = AttentionCall(call.layer, q, k, v, call.scale, call.window, call.exact)
    timings = time_candidates([Candidate(str(c), [partial(_attend, short, c)]) for c in configs])
    return {c: timings[str(c)].ms for c in configs}


def _high_percent(tokens: int, config: DMAConfig) -> float:
    if config.high == config.low:
        return 100.0 if config.high_format.bits > 4 else 0.0
    return 100 * high_share(tokens, tokens, 0, config.canonical(), True)
