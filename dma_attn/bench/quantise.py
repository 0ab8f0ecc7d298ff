"""The quantisers: bandwidth of the fused passes, and fused against unfused.

Bytes are what the algorithm must move: every pass over K and V counted, whatever the caches save.
The yardstick is a device copy in the same run. Buffers rotate through more than the L2 holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import quantize_pair
from ..attention.prepare import class_spans
from ..config import DMAConfig
from .timing import L2_BYTES, Candidate, Timing, time_candidates

COPY = "device copy"
FOLD_CONFIGS = ("default,pv=fp8", "hopper")


@dataclass(frozen=True)
class QuantRow:
    """One measured pass over a length: bytes it must move, share of the copy's bandwidth, and its
    time in times of that copy."""

    length: int
    candidate: str
    timing: Timing
    bytes: int
    share: float
    copies: float

    @property
    def gbytes_per_s(self) -> float:
        """Bandwidth in GB/s."""
        return self.bytes / self.timing.ms / 1e6


@dataclass(frozen=True)
class QuantVerdict:
    """An aim at one length: the ratio reached and the least that counts."""

    length: int
    aim: str
    ratio: float
    must: float

    @property
    def holds(self) -> bool:
        """True when the must is reached."""
        return self.ratio >= self.must


def judge_fold(rows: Sequence[QuantRow]) -> list[QuantVerdict]:
    """The pre-pass of K and V, 64 MB and more, against a device copy."""
    copied = {row.length: row.bytes for row in rows if row.candidate == COPY}
    return [
        QuantVerdict(row.length, f"{row.candidate}: share of a copy's bandwidth", row.share, 0.75)
        for row in rows
        if row.candidate != COPY and copied[row.length] // 2 >= 64e6
    ]


def judge_fusion(rows: Sequence[QuantRow]) -> list[QuantVerdict]:
    """Fused against unfused quantisation."""
    verdicts = []
    for length in dict.fromkeys(row.length for row in rows):
        ms = {row.candidate: row.timing.ms for row in rows if row.length == length}
        for other, must in (("eager", 10.0), ("torch.compile", 2.0)):
            verdicts.append(QuantVerdict(length, f"fused: times as fast as {other}",
                                         ms[other] / ms["fused"], must))
    return verdicts


def measure_fold(
    length: int, config: str = "default,pv=fp8", heads: int = 8, head_dim: int = 128,
    rounds: int = 5, seconds: float = 0.05,
) -> list[QuantRow]:
    """The Hopper pre-pass of K and V (statistics, then folding) against a device copy of both."""
    from ..quant.folded import fold_kv

    parsed = DMAConfig.parse(config)
    spans = class_spans(parsed, query=False)
    classes = 1 if spans[0] is None else 2
    size = heads * length * head_dim
    count = max(2, -(-2 * L2_BYTES // (4 * size)))
    buffers = [_normal(2, heads, length, head_dim) for _ in range(count)]
    copies = [torch.empty_like(x) for x in buffers]
    fp8 = parsed.pv == "fp8"
    moved = {
        COPY: 8 * size,
        f"fold {config}": size * ((2 if parsed.smooth_k else 0) + 2 + classes
                                  + ((2 + 2 + 1) if fp8 else 0)),
    }

    kept: dict[int, object] = {}  # results, so that the next call writes elsewhere

    def fold(i: int) -> Callable[[], object]:
        k, v = buffers[i][:1], buffers[i][1:]
        return lambda: kept.update({i: fold_kv(k, v, *spans, None, parsed)})

    def copy(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        return lambda: target.copy_(source)

    candidates = [
        Candidate(COPY, [copy(a, b) for a, b in zip(buffers, copies, strict=True)]),
        Candidate(f"fold {config}", [fold(i) for i in range(count)]),
    ]
    return _rows(length, time_candidates(candidates, rounds, seconds), moved)


def measure_fusion(
    length: int, heads: int = 32, head_dim: int = 128, rounds: int = 5, seconds: float = 0.05
) -> list[QuantRow]:
    """The fused bit-exact quantiser (MXFP8 and NVFP4 copies, rotated) against the same in PyTorch,
    eager and compiled."""
    x = _normal(1, heads, length, head_dim)
    arguments = {"rotate": True}

    def eager() -> object:
        return quantize_pair(x, "mxfp8", "nvfp4", impl="reference", **arguments)  # type: ignore[arg-type]

    def fused() -> object:
        return quantize_pair(x, "mxfp8", "nvfp4", impl="triton", **arguments)  # type: ignore[arg-type]

    candidates = [
        Candidate("fused", [fused], graph=False),
        Candidate("eager", [eager], graph=False),
        Candidate("torch.compile", [torch.compile(eager)], graph=False),
        Candidate(COPY, [x.clone], graph=False),
    ]
    size = heads * length * head_dim
    both = round(size * (2 + 1 + 0.5 + 3 / 32 + 4 / head_dim))
    moved = dict.fromkeys(("fused", "eager", "torch.compile"), both)
    moved[COPY] = 4 * size
    return _rows(length, time_candidates(candidates, rounds, seconds), moved)


def _rows(length: int, timings: dict[str, Timing], moved: dict[str, int]) -> list[QuantRow]:
    speed = {name: moved[name] / timing.ms for name, timing in timings.items()}
    return [
        QuantRow(length, name, timing, moved[name], speed[name] / speed[COPY],
                 timing.ms / timings[COPY].ms)
        for name, timing in timings.items()
    ]


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()
